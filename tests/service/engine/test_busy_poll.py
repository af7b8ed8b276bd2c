from __future__ import annotations

import asyncio

import pytest

from service.engine import contexts as busy_poll
from service.engine.contexts import BusyPoll

TURN_S = 1e-5
STAY_S = 20.5 * TURN_S


class Clock:
    """Goes on by `TURN_S` whenever it is read, which `BusyPoll` does once a turn."""

    def __init__(self) -> None:
        self.reads = 0

    def perf_counter(self) -> float:
        self.reads += 1
        return 50.0 + self.reads * TURN_S


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(busy_poll, "time", clock)
    return clock


@pytest.mark.parametrize("answers", [1, 2, 5])
def test_the_loop_turns_until_the_time_after_the_last_answer_and_then_rests(
    run_virtually, clock, answers
):
    rests = []

    async def main(loop):
        loop.before_jump = lambda: rests.append(clock.reads)
        awake = BusyPoll(STAY_S)
        for _ in range(2):  # it wakes again
            for _ in range(answers):
                awake.extend()
                last = clock.reads
                for _ in range(3):
                    await asyncio.sleep(0)
            assert clock.reads == last + 3, "once a turn, however many answers"
            await asyncio.sleep(1)
            assert rests.pop() == last + 21, "the first read that is past the time"
            assert not rests

    run_virtually(main)


def test_the_loop_rests_at_once_where_it_is_not_to_stay_awake(run_virtually, clock):
    async def main(loop):
        awake = BusyPoll(0.0)
        awake.extend()
        before = clock.reads
        await asyncio.sleep(1)
        assert clock.reads == before

    run_virtually(main)
