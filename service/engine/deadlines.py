"""All deadlines of one event loop, with one timer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.engine.queue import Work

_log = logging.getLogger(__name__)

RESOLUTION_S = 0.002
"""How late a deadline may be noticed; later while there are more than some thousand."""

_SHARE = 0.05
"""The most of the loop's time that may go into looking for those that are due."""

_NEVER = float("inf")


class Deadlines:
    """Calls back those that are still there when their deadline passes.

    Adding and removing must be cheap, since nearly every request is answered in time. So nothing is
    kept in order: when the earliest deadline that was seen has passed, all that are left are looked
    at. With equal timeouts under steady load that happens once in a timeout.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Work, Callable[[Any], None]] = {}
        self._look_s = _NEVER
        """Time of the next check: the earliest deadline, or the end of the pause."""
        self._pause_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Work, expire: Callable[[Any], None]) -> None:
        """Call `expire(waiting)` once the loop's time is past its deadline."""
        self._waiting[waiting] = expire
        if waiting.deadline_s < self._look_s:
            look_s = max(waiting.deadline_s, self._pause_until_s)
            if look_s < self._look_s:
                self._look_at(look_s)

    def remove(self, waiting: Work) -> None:
        """Forget `waiting`, if it is still there."""
        self._waiting.pop(waiting, None)

    def close(self) -> None:
        """Forget all."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, time_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_s = time_s
        self._timer = self._loop.call_at(time_s, self._look)

    def _look(self) -> None:
        began_s, now_s = time.perf_counter(), self._loop.time()
        due = [waiting for waiting in self._waiting if waiting.deadline_s <= now_s]
        for waiting in due:
            expire = self._waiting.pop(waiting, None)
            if expire is None:
                continue  # what was called for another has removed it
            try:
                expire(waiting)
            except Exception:  # noqa: BLE001 - the others must not wait for ever
                _log.exception("a deadline was not handled")
        earliest_s = min((waiting.deadline_s for waiting in self._waiting), default=_NEVER)
        if self._timer is not None:
            self._timer.cancel()  # of one that was added meanwhile
        self._look_s, self._timer = _NEVER, None
        pause_s = max(RESOLUTION_S, (time.perf_counter() - began_s) / _SHARE)
        self._pause_until_s = self._loop.time() + pause_s
        if earliest_s < _NEVER:
            self._look_at(max(earliest_s, self._pause_until_s))
