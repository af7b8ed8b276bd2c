"""Deadlines on virtual time; what a look costs is virtual, too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from service.engine.deadlines import RESOLUTION_S, Deadlines

CLOCK_STEP_S = 1e-9
"""Resolution of the loop's clock: it calls a timer so much too early."""


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Stands in for `time`: `now_s` is the time that looking has taken."""
    clock = SimpleNamespace(now_s=0.0)
    clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr("service.engine.deadlines.time", clock)
    return clock


class Waiting:
    def __init__(self, deadline_s, name=""):
        self.deadline_s, self.name = deadline_s, name


class Costly:
    """Reading its deadline takes 5 us, of the loop's time and of `clock`."""

    def __init__(self, deadline_s, loop, clock):
        self._deadline_s, self._loop, self._clock = deadline_s, loop, clock

    @property
    def deadline_s(self):
        self._loop.advance(5e-6)
        self._clock.now_s += 5e-6
        return self._deadline_s


def test_each_is_called_back_once_and_at_most_so_late(run_virtually):
    async def test(loop):
        deadlines, called = Deadlines(), []
        start = loop.time()
        seconds = {
            "late": 3.0,
            "past": -1.0,
            "gone": 1.0,
            "soon": 0.25,
            "same": 0.25,
            "shortly after": 0.25 + RESOLUTION_S / 4,
            "before its timer": 2.0,
        }
        waiting = {name: Waiting(start + after_s, name) for name, after_s in seconds.items()}
        for one in waiting.values():
            deadlines.add(one, lambda one: called.append((one.name, loop.time())))
        for _ in range(2):
            deadlines.remove(waiting["gone"])
        # The loop also calls what is due within its clock's resolution: too early for the deadline.
        loop.call_at(start + 2.0 - CLOCK_STEP_S / 2, lambda: None)
        await asyncio.sleep(10)
        names = [name for name, _ in called]
        assert names == ["past", "soon", "same", "shortly after", "before its timer", "late"]
        for name, time_s in called:
            due_s = start + max(0.0, seconds[name])
            assert 0 <= time_s - due_s <= RESOLUTION_S + CLOCK_STEP_S, name

    run_virtually(test)


def test_looking_takes_a_bounded_share_of_the_time_however_many_there_are(run_virtually, clock):
    async def test(loop):
        deadlines, late_s = Deadlines(), []

        def expire(waiting):
            late_s.append(loop.time() - waiting._deadline_s)

        for number in range(2000):  # a look at all of them takes 20 ms
            deadlines.add(Costly(1 + number / 100, loop, clock), expire)
        clock.now_s, start = 0.0, loop.time()
        await asyncio.sleep(30)
        assert len(late_s) == 2000
        assert clock.now_s < 0.05 * (21 - start), "by the last deadline"
        assert max(late_s) < 0.5
        assert late_s[-1] < 2 * RESOLUTION_S, "hardly any were left"

    run_virtually(test)


def test_nothing_is_called_after_the_end(run_virtually):
    async def test(loop):
        deadlines, before = Deadlines(), len(loop.pending_timers())
        deadlines.close()
        for _ in range(2):
            deadlines.add(Waiting(1.0), lambda _: pytest.fail("it was closed"))
        deadlines.close()
        assert len(loop.pending_timers()) == before
        await asyncio.sleep(5)

    run_virtually(test)


def test_what_a_callback_adds_or_removes_is_kept(run_virtually):
    async def test(loop):
        deadlines, called, before = Deadlines(), [], len(loop.pending_timers())

        def expire(waiting):
            called.append((waiting.name, loop.time()))
            if waiting.name == "first":
                for after_s, name in ((0.5, "added"), (-1.0, "at once")):
                    deadlines.add(Waiting(loop.time() + after_s, name), expire)
                deadlines.remove(same)
                deadlines.remove(other)

        first, same, other = Waiting(0.25, "first"), Waiting(0.25), Waiting(0.375)
        for waiting in (first, same, other, Waiting(5.0, "last")):
            deadlines.add(waiting, expire)
        await asyncio.sleep(0.25 + RESOLUTION_S / 2)
        assert len(loop.pending_timers()) == before + 1
        await asyncio.sleep(10)
        names, times = zip(*called, strict=True)
        assert names == ("first", "at once", "added", "last")
        for time_s, due_s in zip(times, (0.25, 0.25, 0.75, 5.0), strict=True):
            assert 0 <= time_s - due_s <= RESOLUTION_S + CLOCK_STEP_S

    run_virtually(test)


def test_a_callback_that_fails_keeps_no_other_from_being_called(run_virtually, caplog):
    async def test(loop):
        deadlines, called = Deadlines(), []

        def expire(waiting):
            called.append(waiting.name)
            if waiting.name == "fails":
                raise RuntimeError("planted")

        for after_s, name in ((0.25, "fails"), (0.25, "same"), (0.5, "later")):
            deadlines.add(Waiting(after_s, name), expire)
        await asyncio.sleep(5)
        assert called == ["fails", "same", "later"]
        assert "planted" in caplog.text

    run_virtually(test)
