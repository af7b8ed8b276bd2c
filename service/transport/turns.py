"""Long work of many requests, one after another and a step in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Step: TypeAlias = Callable[[], bool]
"""Works for less than a millisecond, and returns whether there is more to do."""


class Turns:
    """The work of all connections of an event loop. What comes first is done to its end first."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """Call `step` once in each turn, when its time has come, until it returns False."""
        self._steps.append(step)
        if len(self._steps) == 1:
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        more = False
        try:
            more = self._steps[0]()
        finally:
            if not more:
                self._steps.popleft()
            if self._steps:
                asyncio.get_running_loop().call_soon(self._run)
