"""One timer for the deadlines of many requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from service.engine.queue import Work

_log = logging.getLogger(__name__)

RESOLUTION_S = 0.002
"""Maximum delay with which a deadline is noticed; more while there are more than some thousand."""

_SHARE = 0.05
"""Maximum share of the loop's time for looking which are due."""

_NEVER = float("inf")


T = TypeVar("T", bound="Work")


class Deadlines(Generic[T]):
    """Calls `expire` with each of `waiting()` once the loop's time is past its deadline.

    A request that begins to wait calls `note` if its deadline is before `look_s`, and costs nothing
    else here, since most are answered in time. At `look_s` all waiting requests are looked at. With
    equal timeouts under steady load that happens once in a timeout.
    """

    def __init__(self, waiting: Callable[[], Iterable[T]], expire: Callable[[T], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting, self._expire = waiting, expire
        self.look_s = _NEVER
        """Time of the next look: the earliest deadline, or the end of the pause."""
        self._pause_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, deadline_s: float) -> None:
        """Look again when `deadline_s` has passed, unless that is done sooner."""
        look_s = max(deadline_s, self._pause_until_s)
        if look_s < self.look_s:
            self.close()
            self.look_s = look_s
            self._timer = self._loop.call_at(look_s, self._look)

    def close(self) -> None:
        """Look no more, until the next `note`."""
        if self._timer is not None:
            self._timer.cancel()
        self.look_s = _NEVER

    def _look(self) -> None:
        began_s, now_s = time.perf_counter(), self._loop.time()
        for one in [one for one in self._waiting() if one.deadline_s <= now_s]:
            try:
                self._expire(one)
            except Exception:  # noqa: BLE001 - the others must not wait for ever
                _log.exception("a deadline was not handled")
        earliest_s = min((one.deadline_s for one in self._waiting()), default=_NEVER)
        self.look_s = _NEVER
        pause_s = max(RESOLUTION_S, (time.perf_counter() - began_s) / _SHARE)
        self._pause_until_s = self._loop.time() + pause_s
        self.note(earliest_s)
