"""An event loop that does not sleep at once: the next request often follows the last answer.

A core that goes to sleep takes tens of microseconds to wake. It refuses to run for longer than it
is told, so an idle service sleeps.
"""

from __future__ import annotations

import asyncio
import time


class BusyPoll:
    """Keeps the running event loop turning until `seconds` after the last `extend`."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._until_s = 0.0
        self._turning = False

    def extend(self) -> None:
        """Something was answered: more may follow."""
        self._until_s = time.perf_counter() + self._seconds
        if not self._turning and self._seconds:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if time.perf_counter() < self._until_s:
            self._loop.call_soon(self._turn)
        else:
            self._turning = False
