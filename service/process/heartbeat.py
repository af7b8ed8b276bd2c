"""The heartbeat of a worker's event loop, through a pipe to the supervisor.

A worker that is stopped, or whose event loop is stuck, misses its beats. They are counted in the
supervisor's own checks and not by a clock: after a suspend, or after the supervisor itself was
stopped, no worker is late.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from multiprocessing.connection import Connection

BEAT_S = 1.0
"""Between two beats, and between two checks."""

_LEAST_MISSED = 3
_MISSED_AT_START = 60
"""Before a worker serves: its event loop runs while contexts are opened in threads, for minutes on
a GPU, but reading weights and opening a device block it for seconds."""

_READ_BYTES = 65_536
_STARTING, _SERVING = b"s", b"\0"


class Heartbeat:
    """Beats into `pipe`, on the running event loop, from `start` to the end of the process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._beat = _STARTING
        self._due_s = 0.0
        os.set_blocking(pipe.fileno(), False)

    def start(self) -> None:
        """Beat now and every `BEAT_S`."""
        self._write()
        asyncio.get_running_loop().call_later(BEAT_S, self.start)

    def serve(self) -> None:
        """The start is over: report that, and miss few beats from now on."""
        self._beat = _SERVING
        self._write()

    def turn(self, now_s: float) -> None:
        """A turn of work for connections begins: beat, if the last one is long ago.

        The event loop may have so many connections to look at that its timers are late.
        """
        if now_s >= self._due_s:
            self._due_s = now_s + BEAT_S
            self._write()

    def _write(self) -> None:
        # Full: the supervisor is stopped. Broken: it was killed, and the worker is about to stop.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe.fileno(), self._beat)


class Watch:
    """The supervisor's view of one worker, to be asked every `BEAT_S`.

    `allowed`: how many beats may be missed in a row; more before the worker serves.
    """

    def __init__(self, pipe: Connection, hang_timeout_s: float) -> None:
        self._allowed_serving = max(_LEAST_MISSED, math.ceil(hang_timeout_s / BEAT_S))
        self.allowed = max(_MISSED_AT_START, self._allowed_serving)
        self._pipe = pipe
        self._missed = 0
        os.set_blocking(pipe.fileno(), False)

    def is_stuck(self) -> bool:
        """Count a check; whether the worker has missed too many."""
        try:
            beats = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            beats = b""
        if _SERVING in beats:
            self.allowed = self._allowed_serving
        self._missed = 0 if beats else self._missed + 1
        return self._missed >= self.allowed

    def close(self) -> None:
        """Close the supervisor's end."""
        self._pipe.close()
