"""All deadlines of one event loop, with one timer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import ceil
from typing import Any

_log = logging.getLogger(__name__)

TICKS_PER_S = 512
"""A deadline is noticed at the end of its tick, at most 2 ms late."""

_NEVER = 1 << 62


class Deadlines:
    """Calls back those that are still there when their deadline passes.

    A timer for each request would be set and cancelled with each; here adding and removing is one
    entry in a dictionary, and one timer waits for the earliest tick that has any.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ticks: dict[int, dict[Any, Callable[[Any], None]]] = {}
        self._due = _NEVER
        self._timer: asyncio.TimerHandle | None = None

    def add(self, deadline_s: float, waiting: Any, expire: Callable[[Any], None]) -> int:
        """Call `expire(waiting)` once the loop's time is past `deadline_s`.

        `waiting` is hashed by identity. Returns: the tick to pass to `remove`.
        """
        tick = ceil(deadline_s * TICKS_PER_S)
        entries = self._ticks.get(tick)
        if entries is None:
            entries = self._ticks[tick] = {}
            if tick < self._due:
                self._wait_for(tick)
        entries[waiting] = expire
        return tick

    def remove(self, tick: int, waiting: Any) -> None:
        """Forget `waiting`, if it is still there."""
        entries = self._ticks.get(tick)
        if entries is not None:
            entries.pop(waiting, None)
            if not entries:
                del self._ticks[tick]

    def close(self) -> None:
        """Forget all."""
        self._ticks.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _wait_for(self, tick: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = tick
        self._timer = self._loop.call_at(tick / TICKS_PER_S, self._turn)

    def _turn(self) -> None:
        self._due = _NEVER
        now = self._loop.time() * TICKS_PER_S
        for tick in sorted(tick for tick in self._ticks if tick <= now):
            entries = self._ticks[tick]
            while entries:  # what is called may remove others
                waiting = next(iter(entries))
                expire = entries.pop(waiting)
                try:
                    expire(waiting)
                except Exception:  # noqa: BLE001 - the others of this tick must not wait for ever
                    _log.exception("a deadline was not handled")
            self._ticks.pop(tick, None)
        if self._ticks and (tick := min(self._ticks)) < self._due:
            self._wait_for(tick)
