"""The access log, off by default: a line for each answer, over HTTP and gRPC, on standard output.

A thread writes the lines. Where nobody reads them, they are dropped, and requests go on.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

import orjson

from wire.ids import Ids

Form: TypeAlias = Literal["off", "text", "json"]

_WAITING_LINES = 10_000
_LAST_LINES_S = 0.2
_TARGET_CHARACTERS = 200
_STANDARD_OUTPUT = 1

_SUCCESSES = (200, "OK", "CANCELLED")
"""CANCELLED: how clients end a stream that has no other end."""


class AccessLog:
    """Puts a line for each answer, in `form`, into `lines`; drops it if they are full.

    Those of `left_out`, as "GET /healthz" or a gRPC method's name, get none if they succeed.
    """

    def __init__(
        self, form: Form, lines: queue.Queue[str | None], left_out: Collection[str] = ()
    ) -> None:
        self._json, self._left_out = form == "json", left_out
        self._lines = lines
        self._pid = os.getpid()

    def add(
        self,
        protocol: str,
        client: str,
        request: str,
        status: int | str,
        size: int,
        seconds: float,
        ids: Ids,
    ) -> None:
        """`request` is the method and the target, `size` the bytes of the answer's body."""
        if request in self._left_out and status in _SUCCESSES:
            return
        now_s = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1e3):03}Z"
        milliseconds = round(1e3 * seconds, 3)
        request = request[:_TARGET_CHARACTERS]
        if self._json:
            fields: dict[str, object] = {
                "time": at,
                "level": "INFO",
                "pid": self._pid,
                "logger": "access",
                "protocol": protocol,
                "client": client,
                "request": request,
                "status": status,
                "bytes": size,
                "ms": milliseconds,
            }
            line = orjson.dumps(fields | ids.fields).decode()
        else:
            # Quoted, so that no client can begin a line of its own.
            shown = request.encode("unicode_escape").decode().replace('"', "%22")
            line = f'{at} {protocol} {client} "{shown}" {status} {size} {milliseconds}ms'
            line = f"{line} {ids}" if ids else line
        with suppress(queue.Full):
            self._lines.put_nowait(line)


@contextmanager
def access_log(form: Form, left_out: Collection[str] = ()) -> Iterator[AccessLog | None]:
    """The access log while the block runs, see `AccessLog`; None if it is off."""
    if form == "off":
        yield None
        return
    lines: queue.Queue[str | None] = queue.Queue(_WAITING_LINES)
    writer = threading.Thread(target=_write, args=(lines,), name="access-log", daemon=True)
    writer.start()
    try:
        yield AccessLog(form, lines, left_out)
    finally:
        with suppress(queue.Full):
            lines.put_nowait(None)
            writer.join(_LAST_LINES_S)


def _write(lines: queue.Queue[str | None]) -> None:
    """Write lines until None, by system calls.

    At its end the interpreter would wait for a thread that holds the lock of `sys.stdout`, and
    abort.
    """
    while (line := lines.get()) is not None:
        data = memoryview(f"{line}\n".encode(errors="replace"))
        with suppress(OSError):  # closed: nobody wants them
            while data:
                data = data[os.write(_STANDARD_OUTPUT, data) :]
