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


class Line:
    """Those that wait, and the names and times of those that were called back."""

    def __init__(self, loop, then=lambda line, one: None):
        self.waiting, self.called, self._loop, self._then = [], [], loop, then
        self.deadlines = Deadlines(self.waiting.copy, self._expire)

    def add(self, deadline_s, name=""):
        self.waiting.append(one := Waiting(deadline_s, name))
        self.deadlines.note(deadline_s)
        return one

    def _expire(self, one):
        self.waiting.remove(one)
        self.called.append((one.name, self._loop.time()))
        self._then(self, one)


def test_each_is_called_back_once_and_at_most_so_late(run_virtually):
    async def test(loop):
        def add(line, one):
            if one.name == "soon":
                line.add(loop.time() - 1, "at once")
                line.add(loop.time() + 0.5, "added")

        line, start, timers = Line(loop, add), loop.time(), len(loop.pending_timers())
        seconds = {
            "late": 3.0,
            "past": -1.0,
            "gone": 1.0,
            "soon": 0.25,
            "same": 0.25,
            "shortly after": 0.25 + RESOLUTION_S / 4,
            "before its timer": 2.0,
        }
        ones = {name: line.add(start + after_s, name) for name, after_s in seconds.items()}
        line.waiting.remove(ones["gone"])
        # The loop also calls what is due within its clock's resolution: too early for the deadline.
        loop.call_at(start + 2.0 - CLOCK_STEP_S / 2, lambda: None)
        await asyncio.sleep(0.25 + RESOLUTION_S / 2)
        assert len(loop.pending_timers()) == timers + 2, "one timer, and that of the clock"
        await asyncio.sleep(10)
        names = [name for name, _ in line.called]
        order = ["past", "soon", "same", "shortly after", "at once", "added"]
        assert names == [*order, "before its timer", "late"]
        seconds |= {"at once": 0.25, "added": 0.75}
        for name, time_s in line.called:
            due_s = start + max(0.0, seconds[name])
            assert 0 <= time_s - due_s <= 2 * (RESOLUTION_S + CLOCK_STEP_S), name
        line.deadlines.close()
        line.add(loop.time() + 1)
        line.deadlines.close()
        assert len(loop.pending_timers()) == timers, "closed"

    run_virtually(test)


def test_looking_takes_a_bounded_share_of_the_time_however_many_there_are(run_virtually, clock):
    async def test(loop):
        late_s = {}

        def expire(one):
            waiting.remove(one)
            late_s[one] = loop.time() - one._deadline_s

        waiting = [Costly(1 + number / 100, loop, clock) for number in range(2000)]
        deadlines = Deadlines(waiting.copy, expire)  # a look at all of them takes 20 ms
        deadlines.note(1.0)
        clock.now_s, start = 0.0, loop.time()
        await asyncio.sleep(30)
        assert len(late_s) == 2000
        assert clock.now_s < 0.05 * (21 - start), "by the last deadline"
        assert max(late_s.values()) < 0.5
        assert list(late_s.values())[-1] < 2 * RESOLUTION_S, "hardly any were left"

    run_virtually(test)


def test_a_callback_that_fails_keeps_no_other_from_being_called(run_virtually, caplog):
    async def test(loop):
        def fail(line, one):
            if one.name == "fails":
                raise RuntimeError("planted")

        line = Line(loop, fail)
        for after_s, name in ((0.25, "fails"), (0.25, "same"), (0.5, "later")):
            line.add(after_s, name)
        await asyncio.sleep(5)
        assert [name for name, _ in line.called] == ["fails", "same", "later"]
        assert "planted" in caplog.text

    run_virtually(test)
