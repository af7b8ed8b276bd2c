"""Turns: what an event loop may work for its connections before it looks for others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

TURN_S = 0.005
"""Maximum seconds of work in one iteration of the event loop, but for the step that passes it, and
as long again for small requests."""

SMALL_BYTES = 4096
"""What a client sends at once, with nothing before it, is small up to this size."""

Step: TypeAlias = Callable[[], bool]
"""Works for less than a millisecond, and returns whether there is more to do."""


class Turns:
    """The work of all connections of an event loop, in the order in which it came.

    An event loop calls every connection that has received something before it does anything else:
    thousands of them would keep it for seconds. So each asks `has_time` first, and waits by `add`
    if there is none left.

    Args:
        began: called at the beginning of a turn, with the time of `clock`.
        clock: in seconds, monotonic.
    """

    def __init__(
        self,
        began: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._began, self._clock = began, clock
        self._steps: deque[Step] = deque()
        self._open = False
        self._ends_s = 0.0

    def has_time(self, small: bool = False) -> bool:
        """Whether work may be done now: this turn is not over, or not yet for `small` requests."""
        if self._open:
            return self._clock() < self._ends_s + TURN_S * small
        self._begin()
        return True

    def add(self, step: Step) -> None:
        """Call `step` when those before it have been called, again behind them if it has more."""
        self._steps.append(step)
        if not self._open:
            self._begin()

    def _begin(self) -> None:
        now_s = self._clock()
        self._open, self._ends_s = True, now_s + TURN_S
        asyncio.get_running_loop().call_soon(self._next)
        self._began(now_s)

    def _next(self) -> None:
        """The loop's next iteration."""
        self._open = False
        steps = self._steps
        if not steps:
            return
        self._begin()
        while steps:
            step = steps.popleft()
            if step():
                steps.append(step)
            if self._clock() >= self._ends_s:
                return


class SingleSteps:
    """Steps of which each iteration of the event loop takes one, in the order in which they came.

    They are for work that cannot be divided and takes so long that two at once would be too much.
    """

    def __init__(self) -> None:
        self._steps: deque[Callable[[], object]] = deque()

    def add(self, step: Callable[[], object]) -> None:
        """Call `step` in an iteration of its own, when those before it have been called."""
        self._steps.append(step)
        if len(self._steps) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        try:
            self._steps[0]()
        finally:
            self._steps.popleft()
            if self._steps:
                asyncio.get_running_loop().call_soon(self._next)


class Series:
    """Steps of which the first is done to its end before the second begins.

    All of them together are one step of `turns`.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """Call `step` until it returns False, when those before it have done so."""
        self._steps.append(step)
        if len(self._steps) == 1:
            self._turns.add(self._next)

    def _next(self) -> bool:
        more = False
        try:
            more = self._steps[0]()
        finally:
            if not more:
                self._steps.popleft()
                if self._steps:
                    self._turns.add(self._next)
        return more
