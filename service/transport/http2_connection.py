"""One HTTP/2 connection: an asyncio protocol around `Http2`, and the exchanges of its streams.

Takes the place of the protocol that read the preface. Answers of all streams that finish in one
turn of the event loop are written together.

What ends a connection:

    preface ---- settings do not come in time -> closed
    any -------- broken rules, floods -> GOAWAY with a code, then closed
    any -------- client gone -> exchanges cancelled; client does not read -> aborted
    idle ------- a PING is not acknowledged -> aborted
    stop ------- GOAWAY for later, what comes meanwhile is answered, GOAWAY for good; closed once
                 all is answered
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from service.errors import BodyTimeout, Overloaded, ServiceError, stopping
from service.process.listener import at
from service.transport.answer import INTERNAL_ERROR, STATUS, Answer, error_answer
from service.transport.asgi import AsgiRequest
from service.transport.grpc import GrpcExchange, Status, StatusCode, status_of
from service.transport.head import FastCall
from service.transport.http2 import (
    ErrorCode,
    Fields,
    Http2,
    Stream,
    lines_block,
    literals,
    status_field,
)
from service.transport.http2_head import Http2Head

if TYPE_CHECKING:
    from service.transport.connection import Connection

_log = logging.getLogger(__name__)

_UNREAD_BYTES = 64 * 1024
"""What a client has not read is neither counted nor timed up to so many bytes."""

_UNREAD_LOOK_S = 0.01
_STOP_S = 1.0
"""At a stop, the most that a client may take to read its answers."""
_LAST_CALLS_S = 0.1
"""From the first GOAWAY to the second: what a client sends before it reads of the stop comes."""
_LINGER_S = 0.5
_LINGER_BYTES = 2 * 1024 * 1024
"""How long, and how much of, what a client still sends is read and dropped after the last answer.
Its windows have room for 1 MiB."""
_REST_S = 0.01
"""After a request with many header fields, others come first for so long."""
_LARGE_READ_BYTES = 128 * 1024
"""After such a read others come first, as over HTTP/1.1."""
_PING_AFTER_S = 60.0
_PING_S = 20.0
_FAILURES = (STATUS["internal"], STATUS["unavailable"])
_LOGGED_CHARACTERS = 200
_REFUSED_BODY_BYTES = 64 * 1024

MAX_OPEN_STREAMS = 8192
"""Requests that are open at a time on all connections of the process."""

MAX_ENDLESS_CALLS = 1024
"""Open calls that watch the health or use reflection: each has a task of its own, 10 KB."""

_RUNS = 4
"""Requests of a connection that the application answers at a time; over HTTP/1.1 it is one."""


class OpenStreams:
    """The requests of all connections: how many, and which may give way to others.

    Beyond `most` the one gives way that waits longest for its client, or for others of its
    connection; a new one is refused if none does. Requests that are worked on are not ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0
        self._waiting: dict[Exchange, None] = {}

    def wait(self, exchange: Exchange) -> None:
        """It waits from now on."""
        self._waiting.pop(exchange, None)
        self._waiting[exchange] = None

    def go_on(self, exchange: Exchange) -> None:
        """It does not wait any more."""
        self._waiting.pop(exchange, None)

    def close(self, exchange: Exchange) -> None:
        """It is over."""
        self.count -= 1
        self._waiting.pop(exchange, None)

    def open(self) -> bool:
        """Count another one. Returns: whether there is room for it."""
        self.count += 1
        if self.count <= self._most:
            return True
        if not self._waiting:
            return False
        first = next(iter(self._waiting))
        del self._waiting[first]
        first.give_way(too_many_open())
        return True


def too_many_open() -> Overloaded:
    """The error of a request that is one too many."""
    message = "requests: too many are open over HTTP/2; try again later"
    return Overloaded(message, retry_after_s=1)


class Http2Connection(asyncio.Protocol):
    """Serves the requests of one connection. `origin` is the protocol whose place it takes."""

    def __init__(self, origin: Connection) -> None:
        self.door, self.state, self.loop = origin.door, origin.state, origin.loop
        self.app, self.app_state = origin.app, origin.app_state
        self.transport, self.plain = origin.transport, origin.plain
        self.client, self.server = origin.client, origin.server
        self._flush_planned = False
        self.http2 = Http2(self, self.door.known_blocks)
        self._waiting: list[Exchange] = []
        """Opened or continued by what was read, and not complete."""
        self._reading = True
        self._parsing_waits = False
        self._pending: dict[AsgiExchange, None] = {}
        """Requests that the application has not begun to answer."""
        self._runs = 0
        self._run_planned = False
        self._ended = False
        self._stopping = False
        self._closing = False
        now_s = self.loop.time()
        self._since_s = now_s
        self._active_s = now_s
        self._pinged_s = 0.0
        self._pings = 0
        self._blocked_since_s = 0.0
        self._unread_bytes = 0
        self._held_bytes = 0
        self._written_bytes = 0
        self._drained: asyncio.Event | None = None
        self._closed_since_s = 0.0
        self._linger_until_s = 0.0
        self._lingered_bytes = 0

    # The transport's calls.

    def data_received(self, data: bytes) -> None:
        """Serve what came."""
        self._active_s = self.loop.time()
        if self._closing:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        more = self.http2.receive(data)
        self._after_reading(more or self.http2.rests or len(data) > _LARGE_READ_BYTES)

    def _after_reading(self, more: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for exchange in waiting:
            if exchange.stream.receiving:
                self.door.open_streams.wait(exchange)
                exchange.wait()
        if self.http2.failed is not None:
            self._fail()
            return
        self._parsing_waits = more
        if more and self.http2.rests:
            # Not more than one such request in a turn of the event loop, over all connections.
            self.loop.call_later(_REST_S, self.door.head_turns.add, self._go_on_once)
        elif more:
            self.loop.call_soon(self._go_on)
        self._set_reading()

    def _go_on_once(self) -> bool:
        self._go_on()
        return False

    def _go_on(self) -> None:
        if not self._closing and self._parsing_waits and not self._blocked_since_s:
            more = self.http2.receive(b"")
            self._after_reading(more or self.http2.rests)
        elif self._blocked_since_s:
            self._set_reading()

    def eof_received(self) -> bool:
        """A client that sends no more may still read: what its windows have room for is due."""
        self._ended = True
        if self.door.certificate is not None:
            return False
        for stream in tuple(self.http2.streams.values()):
            if stream.receiving:
                self._drop(stream)
        self._drop_blocked()
        return bool(self.http2.streams)

    def _drop(self, stream: Stream) -> None:
        stream.exchange.cancel()
        self.http2.reset(stream, ErrorCode.CANCEL)

    def _drop_blocked(self) -> None:
        for stream in tuple(self.http2.blocked.values()):
            self._drop(stream)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.door.remove(self)
        self.state.connections.discard(self)
        self._closing = True
        self._cancel_all()
        self._hold()
        self.resume_writing()

    def _cancel_all(self) -> None:
        streams = tuple(self.http2.streams.values())
        self.http2.streams.clear()
        for stream in streams:
            stream.exchange.cancel()
            stream.exchange.closed()

    def pause_writing(self) -> None:
        """The client does not read."""
        self._blocked_since_s = self.loop.time()
        self._drained = asyncio.Event()
        self._hold()
        self._set_reading()

    def resume_writing(self) -> None:
        """It has read."""
        self._blocked_since_s = 0.0
        if self._held_bytes:
            self._hold()
        if self._drained is not None:
            self._drained.set()
            self._drained = None
        if not self._closing:
            for stream in tuple(self.http2.streams.values()):
                stream.exchange.sent()
            if self._parsing_waits:
                self.loop.call_soon(self._go_on)
            self._set_reading()

    # What `Http2` calls.

    def read(self, fields: Fields) -> Http2Head:
        """Check the fields of a request. Raises: Malformed."""
        door = self.door
        head = Http2Head(fields, door.routes, door.methods, door.gate)
        if head.is_grpc or head.route is not None or head.answer is not None:
            head.headers = []  # only the application reads them: up to 40 KB of a silent call
        return head

    def opened(self, stream: Stream, head: Http2Head, end: bool) -> None:
        """Begin the exchange of a request."""
        kind: type[Exchange] = AsgiExchange
        if head.is_grpc:
            kind = GrpcStream
        elif head.route is not None or head.answer is not None:
            kind = FastExchange
        stream.exchange = exchange = kind(self, stream, head)
        has_room = self.door.open_streams.open()
        try:
            exchange.open()
            if not has_room and exchange.is_limited:
                exchange.fail(too_many_open())
            if end:
                exchange.data(b"", True)
            else:
                self._waiting.append(exchange)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash(exchange)

    def received(self, stream: Stream, data: bytes, end: bool) -> None:
        """Hand on a piece of its body."""
        exchange: Exchange = stream.exchange
        try:
            if end and not exchange.may_give_way:
                self.door.open_streams.go_on(exchange)
            exchange.data(data, end)
            if not end:
                exchange.since_s = self._active_s
                self._waiting.append(exchange)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash(exchange)

    def _crash(self, exchange: Exchange) -> None:
        _log.exception("a request failed")
        exchange.cancel()
        self.http2.reset(exchange.stream, ErrorCode.INTERNAL_ERROR)

    def cancelled(self, stream: Stream) -> None:
        """The client does not want the answer."""
        stream.exchange.cancel()
        self._look_for_end()

    def blocked(self, stream: Stream) -> None:
        """What is answered waits for the client's windows."""
        self.door.open_streams.wait(stream.exchange)
        if self._ended:  # which will not grow
            self.loop.call_soon(self._drop_blocked)

    def sent(self, stream: Stream) -> None:
        """What waited for its windows is written."""
        exchange: Exchange = stream.exchange
        if not exchange.may_give_way:
            self.door.open_streams.go_on(exchange)
        exchange.sent()
        self.run_next()

    def closed(self, stream: Stream) -> None:
        """The stream is over."""
        stream.exchange.closed()
        if self._pending:
            self._pending.pop(stream.exchange, None)
            self.run_next()

    # The application: few requests at a time, and none while much of an answer is not sent.

    def run(self, exchange: AsgiExchange) -> None:
        """Have a request answered when those before it are."""
        self._pending[exchange] = None
        self.door.open_streams.wait(exchange)
        self.run_next()

    def run_next(self) -> None:
        """Begin with another request in the next turn of the event loop, if one may begin."""
        if self._pending and not self._run_planned and self._may_run():
            self._run_planned = True
            self.loop.call_soon(self._run_one)

    def _may_run(self) -> bool:
        return self._runs < _RUNS and self.http2.unsent_bytes <= _UNREAD_BYTES

    def _run_one(self) -> None:
        self._run_planned = False
        if self._pending and self._may_run() and not self._closing:
            exchange = next(iter(self._pending))
            del self._pending[exchange]
            self._runs += 1
            exchange.start()
            if not exchange.stream.receiving:
                self.door.open_streams.go_on(exchange)
            self.run_next()

    def run_ended(self) -> None:
        """The application has answered one of them."""
        self._runs -= 1
        self.run_next()

    def output(self) -> None:
        """Write in the next turn of the event loop, with what else is answered in this one."""
        if not self._flush_planned:
            self._flush_planned = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        out = self.http2.out
        if not out or self.transport.is_closing():
            out.clear()
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self.transport.write(data)
        if self._held_bytes or self.http2.unsent_bytes > _UNREAD_BYTES:
            self._written_bytes += len(data)
            self._hold()
        self._look_at_unread()
        self._look_for_end()

    # Reading and writing.

    def _unread(self) -> int:
        """Bytes that are written and that the client has not taken."""
        unread = self.transport.get_write_buffer_size()
        return unread if self.plain is None else unread + self.plain.get_write_buffer_size()

    def _look_at_unread(self) -> None:
        """Over TLS, pause and resume writing; its transport encrypts all at once."""
        if self.plain is None or self.transport.is_closing():
            return
        much = self._unread() > _UNREAD_BYTES
        if much and not self._blocked_since_s:
            self.pause_writing()
            self.loop.call_later(_UNREAD_LOOK_S, self._look_again)
        elif not much and self._blocked_since_s:
            self.resume_writing()

    def _look_again(self) -> None:
        self._look_at_unread()
        if self._blocked_since_s:
            self.loop.call_later(_UNREAD_LOOK_S, self._look_again)

    def _hold(self) -> None:
        """Hold in the budget what was answered and is not sent, beyond `_UNREAD_BYTES`."""
        unread = 0
        if not self._closing:
            unread = self._unread() if self._blocked_since_s else 0
            if self.http2.unsent_bytes > _UNREAD_BYTES:
                unread += self.http2.unsent_bytes
        held, self._held_bytes = self._held_bytes, unread
        budget = self.door.budget
        budget.add(unread - held)
        if unread and not held:
            self._written_bytes = self._unread()
            budget.watch(self)
        elif held and not unread:
            budget.unwatch(self)

    @property
    def moved_bytes(self) -> int:
        """What the client has read since it reads too slowly."""
        return self._written_bytes - self._unread()

    def evict(self) -> None:
        """The client reads slowly, and others need the memory of its answers."""
        self._blocked_since_s = 0.0
        self._closing = True
        self._hold()
        self.transport.abort()

    def is_read(self) -> bool:
        """Whether the client takes what is written."""
        return not self._blocked_since_s

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        if self._drained is not None:
            await self._drained.wait()

    def _set_reading(self) -> None:
        wanted = not (self._parsing_waits or self._blocked_since_s)
        if wanted != self._reading and not self.transport.is_closing():
            self._reading = wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # The end.

    def _fail(self) -> None:
        """The client broke the rules: GOAWAY is written, nothing more is read."""
        self._cancel_all()
        self._finish()

    def _finish(self) -> None:
        """Shut our side, and linger: closed with unread bytes, a socket resets the answers."""
        if self._closing:
            return
        self._closing = True
        self._hold()
        out = self.http2.out
        if self.transport.is_closing():
            return
        if out:
            self.transport.write(b"".join(out))
            out.clear()
        if self.plain is not None and self.http2.failed is not None:
            # To close it would mean to decrypt what the client sends until it says goodbye.
            self.plain.pause_reading()
            self.loop.call_later(_LINGER_S, self.plain.abort)
            return
        if self._ended or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._linger_until_s = self.loop.time() + _LINGER_S
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        self.transport.write_eof()

    def shutdown(self) -> None:
        """Uvicorn stops: let the client open its requests elsewhere, and answer what has come."""
        if self._stopping or self._closing:
            return
        self._stopping = True
        self.http2.announce_end()
        self.loop.call_later(_LAST_CALLS_S, self._end)

    def _end(self) -> None:
        self.http2.end()
        for stream in tuple(self.http2.streams.values()):
            stream.exchange.stop(stopping())
        self._look_for_end()

    def _look_for_end(self) -> None:
        done = not self.http2.streams and not self.http2.out
        if done and (self.http2.ending or self._ended):
            self._finish()

    def give_up(self, error: ServiceError) -> None:
        """The stop takes too long."""
        for stream in tuple(self.http2.streams.values()):
            stream.exchange.fail(error)

    def check_time(self, now_s: float) -> None:
        """Close the connection, or a stream, if it waited too long for its client."""
        door, transport = self.door, self.transport
        self.http2.refill()
        unread_bytes, before = self._unread(), self._unread_bytes
        self._unread_bytes = unread_bytes
        write_s = min(door.write_timeout_s, _STOP_S if self._stopping else door.write_timeout_s)
        if self._held_bytes or self._blocked_since_s:
            self._hold()
        if transport.is_closing():
            self._closed_since_s = self._closed_since_s or now_s
            if unread_bytes < before:
                self._closed_since_s = now_s
            if now_s - self._closed_since_s > write_s:
                transport.abort()
        elif self._blocked_since_s:
            if unread_bytes < before:
                self._blocked_since_s = now_s
            if now_s - self._blocked_since_s > write_s:
                transport.abort()
        elif self._closing:
            if self._linger_until_s and now_s > self._linger_until_s:
                transport.abort()
        elif self.http2.opening or self.http2.in_block:
            if now_s - self._active_s > door.header_timeout_s or (
                self.http2.opening and now_s - self._since_s > door.header_timeout_s
            ):
                transport.abort()
        else:
            self._check_streams(now_s, write_s)
            self._check_client(now_s)

    def _check_streams(self, now_s: float, write_s: float) -> None:
        for stream in tuple(self.http2.streams.values()):
            exchange: Exchange = stream.exchange
            if stream.receiving and now_s - exchange.since_s > exchange.patience_s():
                exchange.fail(BodyTimeout("body: it did not arrive in time", field="body"))
            elif stream.number in self.http2.blocked:
                unsent = stream.unsent_bytes
                if unsent != exchange.unsent_bytes or not exchange.blocked_since_s:
                    exchange.unsent_bytes, exchange.blocked_since_s = unsent, now_s
                elif now_s - exchange.blocked_since_s > write_s:
                    self._drop(stream)
            else:
                exchange.blocked_since_s = 0.0

    def _check_client(self, now_s: float) -> None:
        """Find out whether a client that says nothing is there."""
        if self._ended:  # it cannot answer, but if it has closed, what is sent to it fails
            self.http2.ping()
        elif self._pinged_s:
            if self.http2.pings != self._pings:
                self._pinged_s = 0.0
            elif now_s - self._pinged_s > _PING_S:
                self.transport.abort()
        elif now_s - self._active_s > _PING_AFTER_S:
            self._pinged_s, self._pings = now_s, self.http2.pings
            self.http2.ping()


class Exchange:
    """One request and its answer."""

    blocked_since_s = 0.0
    unsent_bytes = 0
    is_limited = True
    """Whether it is refused where too many are open."""
    may_give_way = False
    """Whether it gives way to others though its request is complete."""
    _sent: asyncio.Event | None = None

    def __init__(self, connection: Http2Connection, stream: Stream, head: Http2Head) -> None:
        self.connection, self.stream, self.head = connection, stream, head
        self.http2 = connection.http2
        self.began_s = self.since_s = connection.loop.time()
        if connection.door.access is not None:
            self._began_s = time.perf_counter()

    def open(self) -> None:
        """The headers are there."""

    def data(self, data: bytes, end: bool) -> None:
        """A piece of the body, perhaps empty; `end`: the last."""

    def wait(self) -> None:
        """The body is not complete; called after each read."""

    def sent(self) -> None:
        """The client takes what is written again."""
        if self._sent is not None:
            self._sent.set()
            self._sent = None

    def closed(self) -> None:
        """The stream is over."""
        self.connection.door.open_streams.close(self)

    async def drained(self) -> None:
        """Wait until the client's windows, and its connection, have taken what is written."""
        if self.stream.unsent:
            self._sent = self._sent or asyncio.Event()
            await self._sent.wait()
        await self.connection.drained()

    def give_way(self, error: ServiceError) -> None:
        """It waits, and others need its place."""
        if self.stream.number in self.http2.blocked:  # in the middle of its answer
            self.cancel()
            self.http2.reset(self.stream, ErrorCode.CANCEL)
        else:
            self.fail(error)

    def stop(self, error: ServiceError) -> None:
        """The service stops: what has begun is answered."""

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`."""

    def cancel(self) -> None:
        """The client is gone."""

    def patience_s(self) -> float:
        """How long the client may send nothing of a body."""
        return self.connection.door.keep_alive_s

    @property
    def request(self) -> str:
        """Method and target, for logs."""
        head = self.head
        target = head.path + b"?" * bool(head.query) + head.query
        return f"{head.method.decode('latin-1')} {target.decode('latin-1')}"

    def log(self, status: int | str, size: int, request: str, protocol: str) -> None:
        """Add the answer to the access log, if there is one."""
        connection = self.connection
        if connection.door.access is not None:
            client = at(*connection.client) if connection.client else "-"
            seconds = time.perf_counter() - self._began_s
            connection.door.access.add(
                protocol, client, request, status, size, seconds, self.head.ids
            )

    def log_http(self, status: int, size: int) -> None:
        """Log an answer with an HTTP status, and the ids of a request that failed on our side."""
        if status in _FAILURES and self.head.ids:
            request = self.request[:_LOGGED_CHARACTERS]
            _log.error("%s was answered with %d: %s", request, status, self.head.ids)
        self.log(status, size, self.request, self.connection.door.scheme.decode())


class FastExchange(Exchange):
    """A request on a fast route, or one that may not pass."""

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
                    self.http2.headers(self.stream, status_field(100))
                return
            answer = head.route.refuse(head.error)
        if head.expects_continue or (head.length or 0) > _REFUSED_BODY_BYTES:
            self._reply(answer)
        else:  # a small body is read and dropped
            self._refusal = answer

    def data(self, data: bytes, end: bool) -> None:
        """Hand it on."""
        call = self._call
        if call is None:
            self._received_bytes += len(data)
            self.http2.taken(self.stream, len(data))
            if self._refusal is not None and (end or self._received_bytes > _REFUSED_BODY_BYTES):
                self._reply(self._refusal)
            return
        try:
            if end and not self._received_bytes:
                if data:
                    self.http2.taken(self.stream, len(data))
                call.end(data)
                return
            self._received_bytes += len(data)
            if data:
                self.http2.taken(self.stream, len(data))
                call.data(data)
            if end:
                call.end()
        except ServiceError as exc:
            call.fail(exc)

    def wait(self) -> None:
        """Limit its time and memory."""
        if self._call is not None:
            try:
                self._call.wait_for_body()
            except ServiceError as exc:
                self._call.fail(exc)

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`."""
        if self._call is not None:
            self._call.fail(error)
        elif self._refusal is not None:
            self._reply(self._refusal)

    def cancel(self) -> None:
        """The client is gone."""
        call, self._call = self._call, None
        self._refusal = None
        if call is not None:
            call.cancel()

    def patience_s(self) -> float:
        """A call has its own deadline; what is refused is only read to be dropped."""
        return self.connection.door.header_timeout_s if self._call is None else math.inf

    def _reply(self, answer: Answer) -> None:
        self._call = self._refusal = None
        door, head = self.connection.door, self.head
        length = len(answer.body) + sum(map(len, answer.rest))
        block = door.answer_block(self.connection.state, answer.status, answer.media_type, length)
        block += lines_block(answer.headers) + head.extra
        self.log_http(answer.status, length)
        if answer.rest:
            self.http2.headers(self.stream, block)
            self.http2.write(self.stream, (answer.body, *answer.rest))
            self.http2.finish(self.stream)
        else:
            self.http2.answer(self.stream, block, answer.body, None)


class AsgiExchange(Exchange):
    """A request for the ASGI application."""

    is_limited = False  # a probe may be one
    may_give_way = True

    def open(self) -> None:
        """Have it answered when its time has come."""
        self._request = AsgiRequest(self, self.connection.app)
        self._is_head = self.head.method == b"HEAD"
        self._sent_bytes = self._status = 0
        self.connection.run(self)

    def start(self) -> None:
        """Run the application."""
        connection, self.may_give_way = self.connection, False
        self._request.start(connection.loop, connection.state.tasks, connection.run_ended)

    def data(self, data: bytes, end: bool) -> None:
        """Hand it on. The stream's window limits what the application has not taken."""
        if data:
            self._request.data(data)
        if end:
            self._request.end()

    def cancel(self) -> None:
        """The client is gone."""
        self._request.cancel()
        self.sent()

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`, or give the stream up in the middle of its answer."""
        begun = self._request.begun
        self.cancel()
        if begun:
            self.http2.reset(self.stream, ErrorCode.CANCEL)
        else:
            self._answer(error_answer(error))

    # What the application's run calls.

    def scope(self) -> dict[str, Any]:
        """The ASGI scope."""
        connection, head = self.connection, self.head
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "2",
            "method": "GET" if self._is_head else head.method.decode("ascii"),
            "scheme": connection.door.scheme.decode(),
            "path": unquote(head.path.decode("latin-1")),
            "raw_path": head.path,
            "query_string": head.query,
            "root_path": "",
            "headers": list(head.headers),
            "client": connection.client,
            "server": connection.server,
            "state": connection.app_state.copy(),
        }

    def name(self) -> str:
        """The request, for logs."""
        return f"{self.request}: {self.head.ids}" if self.head.ids else self.request

    def ask_for_body(self) -> None:
        """Tell a client that waits for it to send the body."""
        if self.head.expects_continue:
            self.http2.headers(self.stream, status_field(100))

    def took(self, size: int) -> None:
        """The client may send more."""
        if self.stream.sending:
            self.http2.taken(self.stream, size)

    def begin(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None) -> None:
        """Write the headers of the answer."""
        names = {name for name, _ in headers}
        if length is not None and b"content-length" not in names and status not in (204, 304):
            headers.append((b"content-length", b"%d" % length))
        self._status = status
        if self.stream.sending:
            door = self.connection.door
            block = status_field(status) + door.common_block(self.connection.state)
            self.http2.headers(self.stream, block + literals(headers) + self.head.extra)

    def write(self, body: bytes, more: bool) -> None:
        """Write a piece of the answer."""
        self._sent_bytes += len(body)
        if not more:
            self.log_http(self._status, 0 if self._is_head else self._sent_bytes)
        if self.stream.sending:
            if not self._is_head:
                self.http2.write(self.stream, (body,))
            if not more:
                self.http2.finish(self.stream)

    def failed(self, begun: bool) -> None:
        """Answer with an error, or give the stream up in the middle of its answer."""
        if not self.stream.sending:
            return
        if begun:
            self.http2.reset(self.stream, ErrorCode.INTERNAL_ERROR)
        else:
            self._answer(INTERNAL_ERROR)

    def _answer(self, answer: Answer) -> None:
        self.begin(answer.status, [(b"content-type", answer.media_type)], len(answer.body))
        self.write(answer.body, False)

    def aborted(self) -> None:
        """The stop takes too long."""
        self.http2.reset(self.stream, ErrorCode.CANCEL)


class GrpcStream(Exchange):
    """A call of gRPC."""

    _call: GrpcExchange | None = None

    @property
    def is_limited(self) -> bool:  # type: ignore[override]
        """Probes are not."""
        method = self.head.method_of_grpc
        return method is not None and method.is_limited

    def open(self) -> None:
        """Begin the call."""
        head = self.head
        if head.error is not None:
            if head.method_of_grpc is not None:
                head.method_of_grpc.refused(head.error)
            GrpcExchange(self).end(status_of(head.error))
            return
        assert head.method_of_grpc is not None, "bug: neither a method nor an error"
        self._call = GrpcExchange(self, head.encoding)
        self._call.open(head.method_of_grpc, head.wanted)
        if head.method_of_grpc.is_endless:
            self.may_give_way = True
            door = self.connection.door
            door.endless_calls.open()
            for places in (door.endless_calls, door.open_streams):
                places.wait(self)

    def closed(self) -> None:
        """The stream is over."""
        super().closed()
        if self.may_give_way:
            self.connection.door.endless_calls.close(self)

    def data(self, data: bytes, end: bool) -> None:
        """Hand it on."""
        if self._call is not None:
            self._call.data(data, end)
        else:
            self.http2.taken(self.stream, len(data))

    def wait(self) -> None:
        """Limit its time and memory."""
        if self._call is not None:
            self._call.wait()

    def sent(self) -> None:
        """The client takes what is written again."""
        super().sent()
        if self._call is not None:
            self._call.sent()

    def stop(self, error: ServiceError) -> None:
        """What has begun is answered."""
        if self._call is not None:
            self._call.stop(error)

    def fail(self, error: ServiceError) -> None:
        """End the call with `error`."""
        if self._call is not None:
            self._call.fail(error)

    def cancel(self) -> None:
        """The client is gone."""
        call, self._call = self._call, None
        super().sent()
        if call is not None:
            call.cancel()
            self.log("CANCELLED", 0, self._method, "grpc")

    def patience_s(self) -> float:
        """See `GrpcExchange.patience_s`."""
        return math.inf if self._call is None else self._call.patience_s()

    @property
    def _method(self) -> str:
        return self.head.path.rpartition(b"/")[2].decode("latin-1")

    # What the call writes.

    def begin(self, block: bytes, end: bool) -> None:
        """See `grpc.Answers`, as the following."""
        if self.stream.sending:
            self.http2.headers(self.stream, block, end)

    def whole(self, block: bytes, body: bytes, trailers: bytes) -> None:
        """A whole answer."""
        if self.stream.sending:
            self.http2.answer(self.stream, block, body, trailers)

    def write(self, *pieces: bytes) -> None:
        """The next bytes."""
        if self.stream.sending:
            self.http2.write(self.stream, pieces)

    def finish(self, trailers: bytes) -> None:
        """The end of the answer."""
        if self.stream.sending:
            self.http2.finish(self.stream, trailers)

    def took(self, size: int) -> None:
        """Bytes of the request are used."""
        if size and self.stream.buffered:
            self.http2.taken(self.stream, size)

    def is_read(self) -> bool:
        """Whether the client takes what is written."""
        return not self.stream.unsent and self.connection.is_read()

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the next turn of the event loop."""
        self.connection.loop.call_soon(self._run, call)

    def _run(self, call: Callable[[], None]) -> None:
        if self._call is not None:
            call()

    def in_turn(self, step: Callable[[], bool]) -> None:
        """Call once in each turn of the event loop, when the work before it is done."""
        self.connection.door.turns.add(lambda: self._call is not None and step())

    def ended(self, status: Status, size: int) -> None:
        """The answer is complete."""
        self._call = None
        if status.code is StatusCode.INTERNAL and self.head.ids:
            found = status.code.name
            _log.error("%s was answered with %s: %s", self._method, found, self.head.ids)
        self.log(status.code.name, size, self._method, "grpc")
