from __future__ import annotations

import asyncio

from service.engine.deadlines import TICKS_PER_S, Deadlines


def test_each_is_called_back_once_at_its_deadline_in_order(run_virtually):
    async def test(loop):
        deadlines, called = Deadlines(), []

        def expire(name):
            called.append((name, loop.time()))

        start = loop.time()
        for name, seconds in (("late", 3.0), ("soon", 0.25), ("same", 0.25), ("gone", 1.0)):
            tick = deadlines.add(start + seconds, name, expire)
        deadlines.remove(tick, "gone")
        deadlines.remove(tick, "gone")
        deadlines.add(start - 1.0, "past", expire)
        await asyncio.sleep(10)
        names, times = zip(*called, strict=True)
        assert names == ("past", "soon", "same", "late")
        for time_s, due_s in zip(times, (0.0, 0.25, 0.25, 3.0), strict=True):
            assert 0 <= time_s - start - due_s <= 1 / TICKS_PER_S

    run_virtually(test)


def test_one_timer_waits_for_any_number(run_virtually):
    async def test(loop):
        deadlines, before = Deadlines(), len(loop.pending_timers())
        for number in range(1000):
            deadlines.add(loop.time() + 1 + number / 100, number, lambda _: None)
        assert len(loop.pending_timers()) == before + 1
        deadlines.close()
        assert len(loop.pending_timers()) == before

    run_virtually(test)


def test_what_a_callback_adds_or_removes_is_kept(run_virtually):
    async def test(loop):
        deadlines, called = Deadlines(), []

        def expire(name):
            called.append(name)
            if name == "first":
                deadlines.add(loop.time() + 0.5, "added", expire)
                deadlines.remove(other, "other")

        deadlines.add(loop.time() + 0.25, "first", expire)
        other = deadlines.add(loop.time() + 0.375, "other", expire)
        await asyncio.sleep(5)
        assert called == ["first", "added"]

    run_virtually(test)


def test_a_callback_that_fails_keeps_no_other_from_being_called(run_virtually, caplog):
    async def test(loop):
        deadlines, called = Deadlines(), []

        def expire(name):
            called.append(name)
            if name == "fails":
                deadlines.remove(tick, "removed")
                raise RuntimeError("planted")

        for name in ("fails", "removed", "same"):
            tick = deadlines.add(loop.time() + 0.25, name, expire)
        deadlines.add(loop.time() + 0.5, "later", expire)
        await asyncio.sleep(5)
        assert called == ["fails", "same", "later"]
        assert "planted" in caplog.text

    run_virtually(test)
