from __future__ import annotations

import asyncio
import fcntl
import multiprocessing

import pytest

from service.process.heartbeat import BEAT_S, Heartbeat, Watch


@pytest.fixture
def pipe():
    """A worker's end and its supervisor's."""
    beats, heartbeat = multiprocessing.Pipe(duplex=False)
    with beats, heartbeat:
        yield Heartbeat(heartbeat), Watch(beats, hang_timeout_s=0.1), heartbeat


async def beat(heartbeat, times=1):
    for _ in range(times):
        heartbeat.start()
    heartbeat.serve()


def stuck_in(watch, checks):
    return [watch.is_stuck() for _ in range(checks)]


@pytest.mark.parametrize("beats", [0, 1], ids=["before its first beat", "in its start"])
async def test_a_worker_is_stuck_after_sixty_missed_beats_when_it_does_not_serve_yet(pipe, beats):
    heartbeat, watch, _ = pipe
    for _ in range(beats):
        assert not any(stuck_in(watch, 59))
        heartbeat.start()
        assert not watch.is_stuck()
    assert stuck_in(watch, 61) == [*[False] * 59, True, True]


async def test_a_worker_is_stuck_after_three_missed_beats_when_the_hang_timeout_is_short(pipe):
    heartbeat, watch, _ = pipe
    await beat(heartbeat)
    assert stuck_in(watch, 5) == [False, False, False, True, True]


async def test_missed_beats_are_forgiven_when_one_comes(pipe):
    heartbeat, watch, _ = pipe
    for _ in range(5):
        await beat(heartbeat)
        assert not any(stuck_in(watch, 3))


@pytest.mark.parametrize(("hang_timeout_s", "checks"), [(0.1, 3), (3.5, 4), (10, 10)])
def test_the_hang_timeout_says_how_many_may_be_missed(hang_timeout_s, checks):
    beats, heartbeat = multiprocessing.Pipe(duplex=False)
    with beats, heartbeat:
        watch = Watch(beats, hang_timeout_s)
        Heartbeat(heartbeat).serve()
        assert not watch.is_stuck()
        assert watch.allowed == checks


async def test_a_worker_is_not_held_up_when_its_supervisor_reads_nothing_for_days(pipe):
    heartbeat, watch, end = pipe
    fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    await beat(heartbeat, 5000)  # more than the pipe holds
    assert not watch.is_stuck()


async def test_a_beat_is_no_error_when_the_supervisor_is_gone(pipe):
    heartbeat, watch, _ = pipe
    watch.close()
    await beat(heartbeat)


async def test_a_dead_worker_s_closed_pipe_is_no_beat(pipe):
    heartbeat, watch, end = pipe
    await beat(heartbeat)
    end.close()
    assert stuck_in(watch, 4)[-1]


def test_the_beats_follow_each_other_on_the_event_loop(run_virtually):
    beats, end = multiprocessing.Pipe(duplex=False)
    with beats, end:
        watch = Watch(beats, hang_timeout_s=0.1)

        async def run(loop):
            heartbeat = Heartbeat(end)
            heartbeat.start()
            heartbeat.serve()
            for _ in range(10):
                await asyncio.sleep(1.01 * BEAT_S)
                assert not watch.is_stuck()

        run_virtually(run)
        assert stuck_in(watch, 4)[-1], "and end with the loop"
