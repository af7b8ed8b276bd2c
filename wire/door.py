"""The front door: makes the protocol of each connection, and holds what all of them share."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any

from wire.access_log import AccessLog
from wire.answer import status_line
from wire.budget import Budget
from wire.connection import Connection
from wire.exchange import Application
from wire.gate import Gate
from wire.head import FastRoutes, Heads
from wire.http2_fields import literals, status_field
from wire.http2_head import Http2Head, Methods
from wire.streams import Places
from wire.tls import ServedCertificate
from wire.turns import SingleSteps, Turns
from wire.web import WebRoute

_log = logging.getLogger(__name__)

_KNOWN_STARTS = 512

_RETURNED_BYTES = 8 * 1024 * 1024
"""Clients hold so much less than before when free memory is returned to the system: 200 MB take 20
ms."""

_COLLECTED_CONNECTIONS = 1000
"""Maximum connections with which the garbage collector runs before: it looks at all of them."""


async def _nothing(scope: object, receive: object, send: object) -> None:
    """No application."""


class HttpService:
    """Makes the protocol of each connection when called; what connections are served with.

    `app` answers what no route takes; each of its requests gets a copy of `state`, what its
    lifespan left there. Times are in seconds: for the headers of a request, between
    requests, and for a client to read; those of `clock`, for the date, since the epoch. A
    connection that reaches its maximum age, up to a tenth more or less, ends after the requests
    that have begun: GOAWAY, or `Connection: close` with the next answer.
    """

    def __init__(
        self,
        routes: FastRoutes,
        budget: Budget,
        *,
        gate: Gate | None = None,
        access: AccessLog | None = None,
        certificate: ServedCertificate | None = None,
        max_connections: int = 1 << 16,
        max_header_bytes: int = 64 * 1024,
        header_timeout_s: float = 10.0,
        keep_alive_s: float = 75.0,
        write_timeout_s: float = 30.0,
        max_connection_age_s: float = math.inf,
        methods: Methods | None = None,
        turns: Turns | None = None,
        app: Application = _nothing,
        state: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        return_memory: Callable[[], None] = lambda: None,
    ) -> None:
        self.methods = methods or {}
        """Methods of gRPC by path."""
        self.budget = budget
        self.gate = gate or Gate()
        web = {
            (b"POST", path): WebRoute(method, self.gate, budget)
            for path, method in self.methods.items()
        }
        self.gate.methods = web.keys()
        self.routes: FastRoutes = {**web, **routes}
        self.access = access
        self.certificate = certificate
        self.scheme = "http" if certificate is None else "https"
        self.max_connections = max_connections
        self.max_header_bytes = max_header_bytes
        self.header_timeout_s = header_timeout_s
        self.keep_alive_s = keep_alive_s
        self.write_timeout_s = write_timeout_s
        self.max_connection_age_s = max_connection_age_s
        self.heads = Heads(self.routes, self.gate, self.scheme.encode(), max_header_bytes)
        """Known heads of requests over HTTP/1.1."""
        self.block_cache: dict[bytes, Http2Head] = {}
        """Heads of HTTP/2 requests by header block."""
        self.turns = turns or Turns()
        self.places = Places(self.turns)
        self.handshake_steps = SingleSteps()
        """Steps of TLS handshakes. The one that signs takes 1 ms."""
        self.connections: set[Connection] = set()
        self.removed: Callable[[], None] = lambda: None
        self.refused: Callable[[], None] = lambda: None
        """Called for each connection beyond the limit."""
        self.app, self.state = app, {} if state is None else state
        self.tasks: set[asyncio.Task[None]] = set()
        """Runs of the application."""
        self.stopping = False
        self._sweeping = False
        self._sweep_s = max(0.01, min(1.0, header_timeout_s / 4, keep_alive_s / 4))
        self._clock, self._return_memory = clock, return_memory
        self.common_lines = b""
        """Headers of all answers over HTTP/1.1."""
        self.common_block = b""
        """A header block of all answers over HTTP/2."""
        self.starts: dict[tuple[int, bytes, int], bytes] = {}
        """Beginnings of HTTP/1.1 answers, by the arguments of `answer_start`."""
        self._blocks: dict[tuple[int, bytes, int], bytes] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop | None = None) -> Connection:
        """The protocol of a new connection."""
        return Connection(self, loop or asyncio.get_running_loop())

    def add(self, connection: Connection) -> None:
        """Watch the time of a connection that was made."""
        self.connections.add(connection)
        if not self._sweeping:
            self._sweeping = True
            self._renew_date()
            connection.loop.call_later(self._sweep_s, self._sweep, connection.loop)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that was lost."""
        self.connections.discard(connection)
        self.removed()

    def _renew_date(self) -> None:
        """Once a second; without connections there is nobody to tell."""
        date = formatdate(self._clock(), usegmt=True).encode()
        line = b"date: %s\r\n" % date
        if line != self.common_lines:
            self.common_lines, self.common_block = line, literals(((b"date", date),))
            self.starts.clear()
            self._blocks.clear()

    def answer_start(self, status: int, media_type: bytes, length: int) -> bytes:
        """The head of an HTTP/1.1 answer up to the headers of its own, kept for a second."""
        if len(self.starts) >= _KNOWN_STARTS:
            del self.starts[next(iter(self.starts))]
        start = self.starts[status, media_type, length] = (
            b"%s%scontent-type: %s\r\ncontent-length: %d\r\n"
            % (status_line(status), self.common_lines, media_type, length)
        )
        return start

    def answer_block(self, status: int, media_type: bytes, length: int) -> bytes:
        """The header block of an HTTP/2 answer up to its own headers, kept for a second."""
        key = status, media_type, length
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= _KNOWN_STARTS:
                del self._blocks[next(iter(self._blocks))]
            fields = ((b"content-type", media_type), (b"content-length", b"%d" % length))
            start = status_field(status) + self.common_block
            block = self._blocks[key] = start + literals(fields)
        return block

    def stop(self) -> None:
        """Connections made from now on answer one request, too."""
        self.stopping = True

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that waited too long, all at one timer."""
        self._renew_date()
        now = loop.time()
        for connection in tuple(self.connections):
            try:
                connection.check_time(now)
            except Exception:  # noqa: BLE001 - the others must not wait for ever
                _log.exception("a connection failed")
                connection.transport.abort()
        if self.budget.has_shrunk(_RETURNED_BYTES):
            if len(self.connections) <= _COLLECTED_CONNECTIONS:
                gc.collect()  # connections that have ended keep pages in use until then
            self._return_memory()
        self._sweeping = bool(self.connections)
        if self._sweeping:
            loop.call_later(self._sweep_s, self._sweep, loop)
