"""The memory of bodies and answers: what is refused, and who gives way."""

from __future__ import annotations

import asyncio

import pytest

from tests.documented import documented
from wire.budget import SMALL_BYTES, Budget
from wire.errors import Overloaded

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


@pytest.mark.states(
    "limits",
    "bytes of all bodies being received or decoded and of answers waiting to be sent",
    found="bodies of three quarters, and of a byte more",
)
def test_large_bodies_leave_a_quarter_to_small_ones():
    budget = Budget(4 * MIB)
    budget.hold(3 * MIB, 3 * MIB)
    with pytest.raises(Overloaded, match="3145728 bytes of requests"):
        budget.hold(1, SMALL_BYTES + 1)
    budget.hold(SMALL_BYTES, SMALL_BYTES)
    assert budget.held_bytes == 3 * MIB + SMALL_BYTES


@pytest.mark.states(
    "limits",
    "bytes of all bodies being received or decoded and of answers waiting to be sent",
    found="bodies that bring nothing in a second beside others, on virtual time",
)
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


class Keeper:
    """A connection that has received bytes and not used them."""

    moved_bytes = 0

    def __init__(self, budget):
        self.budget, self.ended = budget, False

    def evict(self):
        self.ended = True
        self.budget.keep(self, 0)


@pytest.mark.states(
    "limits",
    "bytes that are received and not used, of all connections of a worker",
    found="three connections that keep all of them together, and a byte more",
)
def test_those_that_keep_most_end_when_all_together_keep_too_much():
    budget = Budget(4 * MIB)
    (most,) = map(int, documented("bytes that are received and not used, of all connections"))
    large, largest, small = (Keeper(budget) for _ in range(3))
    budget.keep(large, most // 4)
    budget.keep(largest, most // 2)
    budget.keep(small, most // 4)
    assert not any((large.ended, largest.ended, small.ended)), "it is not too much"
    budget.keep(small, most // 4 + 1)
    assert (large.ended, largest.ended, small.ended) == (False, True, False)
    budget.keep(small, most)
    assert (large.ended, small.ended) == (False, True)


def test_held_bytes_have_shrunk_once_since_their_peak():
    budget = Budget(4 * MIB)
    budget.hold(3 * MIB, MIB)
    budget.release(MIB)
    assert not budget.has_shrunk(2 * MIB)
    budget.release(MIB)
    assert [budget.has_shrunk(2 * MIB) for _ in range(2)] == [True, False]
