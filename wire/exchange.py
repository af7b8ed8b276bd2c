"""One request and its answer on a connection, over either version of HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from wire.answer import FAILURES, Answer, log_failure
from wire.errors import Refusal, StatusCode, TooLarge
from wire.head import FastCall, RequestHead
from wire.ids import Ids
from wire.listener import at

_log = logging.getLogger(__name__)

BUFFERED_BYTES = 64 * 1024
"""Bytes of a body that an application has not asked for before reading pauses; a larger body of a
refused request ends the connection, or its stream."""


Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""

if TYPE_CHECKING:
    from wire.http1_exchanges import Http1Exchanges
    from wire.http2_exchanges import Http2Exchanges

    Writer: TypeAlias = Http1Exchanges | Http2Exchanges
    """Writes answers. What is written for an exchange that has ended is dropped."""

Start: TypeAlias = Callable[[Callable[[], None]], None]
"""Begins something, and calls its argument at the end."""


@dataclass(eq=False)
class Exchange:
    """One request and its answer; the class itself is that of what cannot be read as a request.

    Initial values are attributes of the class, all immutable: setting each of them in every
    instance would take time.
    """

    writer: Writer
    stream: Any
    head: Any
    _began_s: float = field(init=False, default_factory=time.perf_counter)
    """Not by the loop's clock, which stands still during a turn."""
    since_s = 0.0
    """When its body last made progress."""
    buffered_bytes = 0
    """Bytes of its body that are not taken."""
    is_limited = True
    """Whether it is refused where too many are open."""
    may_give_way = False
    """Whether it gives way to others though its request is complete."""
    unsent_bytes = 0
    """Bytes of its answer that wait for the client's windows, when last looked at."""
    blocked_since_s = 0.0
    _sent: asyncio.Event | None = field(init=False, default=None)

    def open(self) -> None:
        """The headers are there."""

    def data(self, data: bytes, end: bool) -> None:
        """A piece of the body, perhaps empty; `end`: the last."""

    def wait(self) -> None:
        """The body is not complete; called after each read."""

    def cut_off(self) -> bool:
        """The client ends its data in the middle of the body; whether that is answered."""
        self.cancel()
        return False

    def stop(self, error: Refusal) -> None:
        """The service stops: what has begun is answered."""

    def fail(self, error: Refusal) -> None:
        """Answer with `error`."""

    def cancel(self) -> None:
        """Nobody waits for the answer."""

    def body_timeout_s(self) -> float:
        """How long the client may send nothing of the body."""
        return self.writer.service.keep_alive_s

    def sent(self) -> None:
        """The client takes what is written again."""
        if self._sent is not None:
            self._sent.set()
            self._sent = None

    async def wait_until_sent(self) -> None:
        """Wait for the next call of `sent`."""
        self._sent = sent = self._sent or asyncio.Event()
        await sent.wait()

    @property
    def request(self) -> str:
        """Method and target, for logs."""
        head = self.head
        if head is None:
            return "-"
        target = head.path + b"?" * bool(head.query) + head.query
        return f"{head.method.decode('latin-1')} {target.decode('latin-1')}"

    def log(self, status: int | str, size: int, request: str, protocol: str) -> None:
        """Add the answer to the access log, if there is one; `size` is its body's."""
        access, address = self.writer.service.access, self.writer.connection.client
        if access is not None:
            client = at(*address) if address else "-"
            ids = Ids() if self.head is None else self.head.ids
            seconds = time.perf_counter() - self._began_s
            access.add(protocol, client, request, status, size, seconds, ids)

    def log_http(self, status: int, size: int) -> None:
        """Log an answer with an HTTP status, and the ids of a request that failed on our side."""
        head = self.head
        if status in FAILURES and head is not None and head.ids:
            log_failure(self.request, status, head.ids)
        if self.writer.service.access is not None:
            if head is not None and head.method == b"HEAD":
                size = 0
            self.log(status, size, self.request, self.writer.service.scheme)

    def log_call(self, status: StatusCode, size: int) -> None:
        """Log how a call of gRPC ended, and the ids of one that failed on our side."""
        method, ids = self.head.path.rpartition(b"/")[2].decode("latin-1"), self.head.ids
        if status is StatusCode.INTERNAL and ids:
            found = method, status.name, ids
            _log.error("%s was answered with %s: %s", *found, extra=ids.fields)
        if self.writer.service.access is not None:
            self.log(status.name, size, method, "grpc")

    def answer(self, answer: Answer) -> None:
        """Log and write a whole answer."""
        self.log_http(answer.status, len(answer.body))
        self.writer.answer(self, answer)

    def refuse(self, error: Refusal) -> None:
        """Answer with `error` in the form of its path."""
        path = b"" if self.head is None else self.head.path
        self.answer(self.writer.service.gate.policy.answer(path, error))


class FastExchange(Exchange):
    """A request on a fast route, or one whose head was refused."""

    head: RequestHead
    _call: FastCall | None = None
    _refusal: Answer | None = None
    _received_bytes = 0

    def open(self) -> None:
        """Begin the call."""
        head, answer = self.head, self.head.answer
        if answer is None:
            assert head.route is not None, "bug: not a fast route"
            if head.error is None:
                self._call = head.route.open(head.wanted, self._reply)
                if head.expects_continue:
                    self.wait()  # what is refused needs no body
                    if self._call is not None:
                        self.writer.ask_for_body(self)
                return
            answer = head.route.refuse(head.error)
        most_bytes = 0 if answer.status == 200 else BUFFERED_BYTES  # 200: to a preflight
        unread = head.expects_continue or head.chunked or (head.length or 0) > most_bytes
        if unread or answer.status == TooLarge.status:
            self._reply(answer)
        else:  # a small body is read and dropped, so that the connection can be kept
            self._refusal = answer

    def receive(self, body: bytes | memoryview) -> None:
        """The whole body has come with the headers, which are without error."""
        route = self.head.route
        assert route is not None, "bug: not a fast route"
        self._call = call = route.open(self.head.wanted, self._reply)
        call.complete(body)

    def data(self, data: bytes, end: bool) -> None:
        """Hand it on."""
        call = self._call
        if data:
            self.writer.taken(self, len(data))
        # An announced length was checked with the headers; any other is by `call.data`.
        is_all = end and not self._received_bytes and self.head.length is not None
        self._received_bytes += len(data)
        if call is None:
            if self._refusal is not None and (end or self._received_bytes > BUFFERED_BYTES):
                self._reply(self._refusal)
            return
        try:
            if is_all:
                call.complete(data)
                return
            if data:
                call.data(data)
            if end:
                call.complete()
        except Refusal as exc:
            call.fail(exc)

    def room(self) -> memoryview | None:
        """Memory for the whole body; None if there is none, or the body is not wanted."""
        return None if self._call is None else self._call.room()

    def arrived(self, size: int) -> None:
        """The next `size` bytes of the body are in that memory."""
        self._received_bytes += size
        if self._call is not None:
            try:
                self._call.arrived(size)
            except Refusal as exc:
                self._call.fail(exc)

    def wait(self) -> None:
        """Limit its time and memory."""
        if self._call is not None:
            try:
                self._call.wait_for_body()
            except Refusal as exc:
                self._call.fail(exc)

    def cut_off(self) -> bool:
        """A refusal needs no body."""
        if self._refusal is None:
            return super().cut_off()
        self._reply(self._refusal)
        return True

    def fail(self, error: Refusal) -> None:
        """Answer with `error`, or with why the request may not pass."""
        if self._call is not None:
            self._call.fail(error)
        elif self._refusal is not None:
            self._reply(self._refusal)

    def cancel(self) -> None:
        """The client is gone."""
        call, self._call, self._refusal = self._call, None, None
        if call is not None:
            call.cancel()

    def body_timeout_s(self) -> float:
        """A call has its own deadline; what is refused is only read to be dropped."""
        if self._call is None:
            return self.writer.service.header_timeout_s
        return float(getattr(self._call, "body_timeout_s", math.inf))  # gRPC-Web has one

    def _reply(self, answer: Answer) -> None:
        self._call = self._refusal = None
        writer = self.writer
        if answer.call is not None:
            self.log_call(answer.call, len(answer.body))
        elif writer.service.access is not None or answer.status in FAILURES:
            self.log_http(answer.status, sum(map(len, answer.rest), len(answer.body)))
        writer.answer(self, answer)
        if answer.rest:
            writer.loop.call_soon(self._write_next, deque(answer.rest))

    def _write_next(self, rest: deque[bytes]) -> None:
        """Write the next piece of a large answer, and go on in the next turn of the event loop."""
        writer = self.writer
        if writer.is_open(self):
            writer.write(self, rest.popleft())
            if rest:
                writer.loop.call_soon(self._write_next, rest)
            else:
                writer.finish(self)
