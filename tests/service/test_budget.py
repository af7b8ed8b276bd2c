"""The memory of bodies and answers: what is refused, and who gives way."""

from __future__ import annotations

import asyncio

import pytest

from service.budget import SMALL_BYTES, Budget
from service.errors import Overloaded

MIB = 1 << 20


class Body:
    """A large body of which 1 MiB is held."""

    def __init__(self, budget):
        self.budget, self.moved_bytes, self.evicted = budget, MIB, False
        budget.hold(MIB, MIB)
        budget.watch(self)

    def evict(self):
        self.evicted = True
        self.budget.release(MIB)


def test_large_bodies_leave_a_quarter_to_small_ones():
    budget = Budget(4 * MIB)
    budget.hold(3 * MIB, 3 * MIB)
    with pytest.raises(Overloaded, match="3145728 bytes of requests"):
        budget.hold(1, SMALL_BYTES + 1)
    budget.hold(SMALL_BYTES, SMALL_BYTES)
    assert budget.held_bytes == 3 * MIB + SMALL_BYTES


def test_small_bodies_are_refused_when_all_is_held():
    budget = Budget(4 * MIB)
    budget.add(4 * MIB)
    with pytest.raises(Overloaded):
        budget.hold(784, 784)
    budget.release(784)
    budget.hold(784, 784)


def test_a_slow_body_gives_way_when_others_need_its_memory(run_virtually):
    async def main(loop):
        budget = Budget(4 * MIB)
        slow, fast, third = (Body(budget) for _ in range(3))
        with pytest.raises(Overloaded):
            budget.hold(MIB, MIB)  # nobody had time to be slow
        await asyncio.sleep(0.9)
        fast.moved_bytes += MIB
        third.moved_bytes += MIB
        await asyncio.sleep(0.2)
        assert not slow.evicted, "nobody needs its memory"
        budget.hold(MIB, MIB)
        assert [body.evicted for body in (slow, fast, third)] == [True, False, False]
        for body in (fast, third):
            budget.unwatch(body)
        await asyncio.sleep(2)
        assert not loop.pending_timers(), "nothing is looked at without transfers"

    run_virtually(main)
