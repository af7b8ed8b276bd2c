"""SIGTERM, SIGINT and SIGHUP, received by a thread from the first line of `main` to the end.

The signals are blocked in every thread and wait until this one takes them. So none is lost and none
acts by its default, whatever is being imported, opened or closed, the end of the interpreter
included, and a stop is noticed while the event loop is stuck. Processes that are started inherit
the blocked signals.

Whatever stops a program often signals it twice: `timeout` signals the process and then its group, a
terminal the group, of which a wrapper passes the signal on. A stop that follows another at once is
the same request.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)

SAME_STOP_S = 0.25
"""A further signal to stop within this time is no second one: less than between two that a person
sends, more than a busy machine needs to deliver two that were sent at once."""

_PR_SET_PDEATHSIG = 1  # of prctl.h

Receiver: TypeAlias = Callable[[int], None]
"""Called with the number of a signal, on the thread that received it."""


class Signals:
    """Receives `numbers` once it is started, and keeps them until there is a receiver.

    `clock` is in seconds.
    """

    def __init__(
        self,
        numbers: Iterable[signal.Signals] = SIGNALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._numbers = tuple(numbers)
        self._clock = clock
        self._stop_s: float | None = None
        self._lock = threading.Lock()
        self._early: list[int] = []
        self._receiver: Receiver | None = None

    def start(self) -> None:
        """Block the signals for the rest of the process and start the thread.

        To be called on the main thread, before there are others.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        thread = threading.Thread(target=self._run, name="signals", daemon=True)
        thread.start()
        identity = thread.ident
        assert identity is not None, "bug: the thread did not start"

        # Where a library unblocks a signal for a moment, as multiprocessing does, it comes here.
        def pass_on(number: int, frame: object) -> None:
            signal.pthread_kill(identity, number)

        for number in self._numbers:
            signal.signal(number, pass_on)

    def deliver(self, receiver: Receiver) -> None:
        """Call `receiver` from now on, first with the signals that came before."""
        with self._lock:
            for number in self._early:
                receiver(number)
            self._early.clear()
            self._receiver = receiver

    def take(self, number: int) -> None:
        """Deliver a signal: the thread calls it."""
        with self._lock:
            if number in STOP_SIGNALS:
                now_s = self._clock()
                if self._stop_s is None:
                    self._stop_s = now_s
                elif now_s - self._stop_s < SAME_STOP_S:
                    return
            if self._receiver is None:
                self._early.append(number)
            else:
                self._receiver(number)

    def _run(self) -> None:
        while True:
            self.take(signal.sigwait(self._numbers))


def end_with_parent(wanted: bool) -> None:
    """Whether the kernel kills this process when the thread that started it has ended; Linux."""
    with contextlib.suppress(AttributeError):  # no prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0)
