"""The stop of one process: requested from any thread; a watchdog ends it if it takes too long.

A hung context, a stuck event loop or another thread may hold up every step of a stop. What is not
done in time is abandoned: a line names it, and the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from service.errors import ExitCode

_log = logging.getLogger(__name__)

STOP_LIMIT_S = 1.5
"""Seconds from the end of the drain to the end of the process, whatever still runs."""

_LOOP_ANSWERS_S = _LAST_LINE_S = 0.2


class Stop:
    """Passes requests to stop and to reload to the event loop, from whichever thread.

    From the first request to stop the process has `drain_s`, its grace and its drain, and
    `STOP_LIMIT_S` to end.
    """

    def __init__(self, drain_s: float) -> None:
        self.requested = False
        self._reload_requested = False
        self._limit_s = drain_s + STOP_LIMIT_S
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin_stop: Callable[[], None] = lambda: None
        self._reload: Callable[[], None] = lambda: None

    def on_stop(self, begin_stop: Callable[[], None]) -> None:
        """Call it on the running event loop, also for what was requested before."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._begin_stop = begin_stop
            if self.requested:
                self._loop.call_soon(begin_stop)

    def on_reload(self, reload: Callable[[], None]) -> None:
        """Call it on the running event loop, also for what was requested before."""
        with self._lock:
            self._reload = reload
            if self._reload_requested:
                self._post(reload)

    def take_signal(self, number: int) -> None:
        """The receiver of `Signals`."""
        if number == signal.SIGHUP:
            with self._lock:
                self._reload_requested = True
                self._post(self._reload)
        elif self.requested:
            # A context may hang in its library, so no step of the stop is sure to end.
            _end_with(128 + number, logging.WARNING, "second signal: exiting immediately")
        else:
            self.request()

    def wait_for_end(self, pipe: Connection) -> None:
        """Request a stop when the other end of `pipe` is closed; the top of a thread."""
        pipe.poll(None)
        self.request()

    def request(self) -> None:
        """Stop the service."""
        with self._lock:
            self.requested = True
            self._post(self._begin_stop)
        timer = threading.Timer(self._limit_s, self._abandon)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no thread
            timer.start()

    def _post(self, callback: Callable[[], None]) -> bool:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(callback)
                return True
        return False

    def _abandon(self) -> None:
        """End the process without what still runs."""
        turned = threading.Event()
        if self._post(turned.set) and not turned.wait(_LOOP_ANSWERS_S):
            running = ["the event loop, which is stuck"]
        else:
            running = [
                thread.name
                for thread in threading.enumerate()
                if thread.name.startswith("context-")
                or not (thread.daemon or thread is threading.main_thread())
            ]
        without = ", ".join(running) or "waiting longer"
        message = f"stop: not done {STOP_LIMIT_S:g} s after the drain; ending without {without}"
        _end_with(ExitCode.STOPPED, logging.ERROR, message)


def _end_with(code: int, level: int, message: str) -> NoReturn:
    """End the process at once after a last line, for which a stuck thread may hold the lock."""
    line = threading.Thread(target=_log.log, args=(level, "%s", message), daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no thread
        line.start()
        line.join(_LAST_LINE_S)
    os._exit(code)
