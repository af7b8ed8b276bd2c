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
_READ_BYTES = 65_536


class Heartbeat:
    """Beats into `pipe`, on the running event loop, from `start` to the end of the process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        os.set_blocking(pipe.fileno(), False)

    def start(self) -> None:
        """Beat now and every `BEAT_S`."""
        # Full: the supervisor is stopped. Broken: it was killed, and the worker is about to stop.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe.fileno(), b"\0")
        asyncio.get_running_loop().call_later(BEAT_S, self.start)


class Watch:
    """The supervisor's view of one worker, to be asked every `BEAT_S`.

    Nothing is expected before the first beat: a first start on a GPU takes minutes.
    """

    def __init__(self, pipe: Connection, hang_timeout_s: float) -> None:
        self.allowed = max(_LEAST_MISSED, math.ceil(hang_timeout_s / BEAT_S))
        self._pipe = pipe
        self._began = False
        self._missed = 0
        os.set_blocking(pipe.fileno(), False)

    def is_stuck(self) -> bool:
        """Count a check; whether the worker has missed too many."""
        try:
            beats = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            beats = b""
        if beats:
            self._began, self._missed = True, 0
        elif self._began:
            self._missed += 1
        return self._missed >= self.allowed

    def close(self) -> None:
        """Close the supervisor's end."""
        self._pipe.close()
