from __future__ import annotations

import fcntl
import multiprocessing
import os

import pytest

from service.process.heartbeat import Heartbeat, Watch


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


@pytest.mark.states(
    "times and counts in operations.md",
    "60 s between two signs of life of a worker that starts",
    found="59, 60 and 61 checks without one",
)
@pytest.mark.parametrize("beats", [0, 1], ids=["before its first beat", "in its start"])
async def test_a_worker_is_stuck_after_sixty_missed_beats_when_it_does_not_serve_yet(pipe, beats):
    heartbeat, watch, _ = pipe
    for _ in range(beats):
        assert not any(stuck_in(watch, 59))
        heartbeat.start()
        assert not watch.is_stuck()
    assert stuck_in(watch, 61) == [*[False] * 59, True, True]


@pytest.mark.states(
    "times and counts in operations.md",
    "--hang-timeout-s, at least 3 s, without a sign of life",
    found="settings of 0.1, 3.5 and 10 s",
)
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


async def test_a_dead_worker_s_closed_pipe_is_no_beat(pipe):
    heartbeat, watch, end = pipe
    await beat(heartbeat)
    end.close()
    assert stuck_in(watch, 4)[-1]


def test_a_turn_of_work_beats_once_a_second_though_the_timer_is_late():
    beats, heartbeat = multiprocessing.Pipe(duplex=False)
    with beats, heartbeat:
        heart = Heartbeat(heartbeat)
        for now_s in (100.0, 100.9, 101.0, 101.1):
            heart.turn(now_s)
        assert len(os.read(beats.fileno(), 10)) == 2
