"""The access log, off by default: a line for each answer, over HTTP and gRPC, on standard output.

The lines are written by a thread. Where nobody reads them, they are dropped, and requests go on.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler, QueueListener
from typing import Literal, TypeAlias

import orjson

from service.ids import Ids

Form: TypeAlias = Literal["off", "text", "json"]

_WAITING_LINES = 10_000
_TARGET_CHARACTERS = 200


class AccessLog:
    """Adds a line for each answer, in `form`."""

    def __init__(self, form: Form, logger: logging.Logger) -> None:
        self._json = form == "json"
        self._logger = logger

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
        now_s = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1e3):03}Z"
        milliseconds = round(1e3 * seconds, 3)
        request = request[:_TARGET_CHARACTERS]
        if self._json:
            fields: dict[str, object] = {
                "time": at,
                "protocol": protocol,
                "client": client,
                "request": request,
                "status": status,
                "bytes": size,
                "ms": milliseconds,
            }
            if ids:
                fields |= {"request_id": ids.request, "traceparent": ids.trace}
            self._logger.info("%s", orjson.dumps(fields).decode())
        else:
            # Quoted, so that no client can begin a line of its own.
            shown = request.encode("unicode_escape").decode().replace('"', "%22")
            line = f'{at} {protocol} {client} "{shown}" {status} {size} {milliseconds}ms'
            self._logger.info("%s", f"{line} {ids}" if ids else line)


class _Dropping(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


@contextmanager
def access_log(form: Form) -> Iterator[AccessLog | None]:
    """The access log while the block runs; None if it is off."""
    if form == "off":
        yield None
        return
    logger = logging.getLogger("lenet-serve.access")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING_LINES)
    handler = _Dropping(lines)
    listener = QueueListener(lines, logging.StreamHandler(sys.stdout))
    logger.addHandler(handler)
    listener.start()
    try:
        yield AccessLog(form, logger)
    finally:
        logger.removeHandler(handler)
        listener.stop()
