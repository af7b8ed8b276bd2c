"""The requests of an HTTP/2 connection: what `Http2` reads becomes exchanges, many at a time.

Answers of all streams that finish in one turn of the event loop are written together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wire.answer import Answer
from wire.asgi import AsgiExchange
from wire.errors import STOPPING, BodyTimeout, Unavailable
from wire.exchange import Exchange, FastExchange, Start
from wire.grpc import GrpcStream
from wire.http2 import ErrorCode, Http2, Stream
from wire.http2_fields import Fields, lines_block, literals, status_field
from wire.http2_head import Http2Head
from wire.streams import too_many_open

if TYPE_CHECKING:
    from wire.connection import Connection

_log = logging.getLogger(__name__)

_UNSENT_BYTES = 64 * 1024
"""Output that waits for the client's windows is not counted up to so many bytes."""

_LAST_CALLS_S = 0.1
"""Seconds between the two GOAWAYs: requests sent before the client read the first arrive."""

_PING_AFTER_S = 60.0
_PING_S = 20.0

_RUNS = 4
"""Requests of a connection that the application answers at a time."""


class Http2Exchanges:
    """Serves what `http2` reads on a connection, and writes the answers."""

    linger_s = 0.5
    linger_bytes = 2 * 1024 * 1024
    """How long, and how much of, what a client still sends is read and dropped at the end. Its
    windows have room for 1 MiB."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.loop = connection, connection.loop
        self.service = service = connection.service
        self.places = service.places
        self._write_planned = False
        self.http2 = Http2(self, service.block_cache)
        self._waiting: list[Exchange] = []
        """Opened or continued by what was read, and not complete."""
        self._more = False
        """Whether something that came is not parsed."""
        self.is_idle = True
        """Whether all was used when something last came."""
        self._planned = False
        """Whether to go on with it is."""
        self._pending: dict[Exchange, Start] = {}
        """Requests that the application has not begun to answer."""
        self._runs = 0
        self._run_planned = False
        self._opened_s = self.active_s = self._asked_s = self.loop.time()
        """When the connection began, when anything came, and when a request was last open."""
        self._unfinished: int | None = None
        self._unfinished_s = 0.0
        """The header block or frame that has come in part, and when it began."""
        self._pinged_s = 0.0
        self._pings = 0

    # Called by the connection.

    @property
    def open(self) -> Sequence[Exchange]:
        """The requests that are not answered."""
        return [stream.exchange for stream in self.http2.streams.values()]

    @property
    def is_broken(self) -> bool:
        """Whether the client broke the rules."""
        return self.http2.failed is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of answers that wait for the client's windows."""
        unsent = self.http2.unsent_bytes
        return unsent if unsent > _UNSENT_BYTES else 0

    @property
    def received_bytes(self) -> int:
        """Bytes that came and are not used."""
        return self.http2.received_bytes

    @property
    def wants_data(self) -> bool:
        """Whether more is to be read."""
        return not self._more

    def go_on(self) -> None:
        """Serve what came before."""
        if self._more and not self._planned:
            self.receive(b"")

    def receive(self, data: bytes) -> None:
        """Serve what came."""
        connection, http2 = self.connection, self.http2
        if data:
            self.active_s = self.loop.time()
        self._more = http2.receive(data)
        waiting, self._waiting = self._waiting, []
        for exchange in waiting:
            if exchange.stream.receiving:
                try:
                    exchange.wait()
                except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
                    self.crash(exchange)
        if http2.failed is not None:
            self.cancel_all()
            connection.finish()
            return
        if self._more and not self._planned:
            self._planned = True
            self.service.turns.add(self._go_on_once)
        was_idle, self.is_idle = (
            self.is_idle,
            not (self._more or http2.received_bytes or http2.in_block),
        )
        if self.is_idle and was_idle:
            return
        if (unfinished := http2.unfinished) != self._unfinished:
            if self._unfinished is None or not http2.in_block:
                self._unfinished_s = self.active_s
            self._unfinished = unfinished
        connection.hold()
        connection.set_reading()

    def _go_on_once(self) -> bool:
        self._planned = False
        if self.connection.may_parse and self.connection.is_there():
            self.go_on()
        return False

    def body_arrived(self, size: int) -> None:
        """Bodies are received frame by frame."""
        raise AssertionError("bug: a body without its frames")

    def eof(self) -> bool:
        """A client that sends no more may still read: what its windows have room for is due."""
        for stream in tuple(self.http2.streams.values()):
            if stream.receiving and not stream.exchange.cut_off():
                self.http2.reset(stream, ErrorCode.CANCEL)
        self._drop_blocked()
        return bool(self.http2.streams or self.http2.out)

    def _drop_blocked(self) -> None:
        for stream in tuple(self.http2.blocked.values()):
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        stream.exchange.cancel()
        self.http2.reset(stream, ErrorCode.CANCEL)

    def stop(self) -> None:
        """Let the client open its requests elsewhere, and answer what has come."""
        self.http2.announce_end()
        self.loop.call_later(_LAST_CALLS_S, self._end_requests)

    def retire(self) -> None:
        """Likewise, but calls that stream go on."""
        self.stop()

    def _end_requests(self) -> None:
        if self._more or self.connection.waits:  # requests that came before
            self.loop.call_later(_LAST_CALLS_S, self._end_requests)
            return
        self.http2.end()
        for exchange in () if self.connection.is_old else self.open:
            exchange.stop(Unavailable(STOPPING, retry_after_s=1))
        self.look_for_end()

    def look_for_end(self) -> None:
        """End the connection, if all is answered and nothing more will be."""
        done = not self.http2.streams and not self.http2.out
        if done and (self.http2.ending or self.connection.ended):
            self.connection.finish()

    def end(self) -> None:
        """Nothing more is read or answered; what is written goes out."""
        out = self.http2.out
        if out and not self.connection.transport.is_closing():
            self.connection.transport.write(b"".join(out))
        out.clear()
        self.cancel_all()
        # Soon, because this may be called by what is being parsed.
        self.loop.call_soon(self.http2.forget)

    def cancel_all(self) -> None:
        """Nothing is answered any more."""
        streams = tuple(self.http2.streams.values())
        self.http2.streams.clear()
        self.http2.blocked.clear()
        self.http2.unsent_bytes = 0
        self._pending.clear()
        for stream in streams:
            stream.sending = False
            stream.exchange.cancel()
            self.places.streams.pop(stream.exchange, None)

    def check_time(self, now_s: float, header_s: float, write_s: float) -> None:
        """Close the connection, or a stream, if it waited too long for its client."""
        http2 = self.http2
        http2.refill()
        if not self.connection.reading:
            self._unfinished_s = now_s
        waits = http2.opening or (self._unfinished is not None and not self._more)
        since_s = self._opened_s if http2.opening else self._unfinished_s
        if waits and now_s - since_s > header_s:
            self.connection.transport.abort()
            return
        for stream in tuple(http2.streams.values()):
            exchange: Exchange = stream.exchange
            waits = stream.receiving and not exchange.buffered_bytes
            if waits and now_s - exchange.since_s > exchange.body_timeout_s():
                exchange.fail(BodyTimeout("body: it did not arrive in time", field="body"))
            elif stream.number in http2.blocked:
                unsent = stream.unsent_bytes
                if unsent != exchange.unsent_bytes or not exchange.blocked_since_s:
                    exchange.unsent_bytes, exchange.blocked_since_s = unsent, now_s
                elif now_s - exchange.blocked_since_s > write_s:
                    self._drop(stream)
            else:
                exchange.blocked_since_s = 0.0
        self._check_client(now_s)

    def _check_client(self, now_s: float) -> None:
        """Close a connection without requests, and find out whether a silent client is there."""
        if self.http2.streams:
            self._asked_s = now_s
        if self.connection.ended:  # it cannot answer, but if it has closed, what is sent fails
            self.http2.ping()
        elif now_s - self._asked_s > self.service.keep_alive_s:
            self.http2.end()
        elif self._pinged_s:
            if self.http2.pings != self._pings:
                self._pinged_s = 0.0
            elif now_s - self._pinged_s > _PING_S:
                self.connection.transport.abort()
        elif now_s - self.active_s > _PING_AFTER_S:
            self._pinged_s, self._pings = now_s, self.http2.pings
            self.http2.ping()

    # Called by `Http2`.

    def read(self, fields: Fields) -> Http2Head:
        """Check the fields of a request. Raises: Malformed."""
        service = self.service
        head = Http2Head(fields, service.routes, service.methods, service.gate)
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
        exchange.since_s = self._asked_s = self.active_s
        streams = self.places.streams
        streams[exchange] = None
        has_room = len(streams) <= streams.most or streams.make_room(exchange)
        try:
            exchange.open()
            if not has_room and exchange.is_limited:
                exchange.fail(too_many_open())
            if end:
                exchange.data(b"", True)
            else:
                self._waiting.append(exchange)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self.crash(exchange)

    def received(self, stream: Stream, data: bytes, end: bool) -> None:
        """Hand on a piece of its body."""
        exchange: Exchange = stream.exchange
        try:
            exchange.data(data, end)
            if not end and exchange not in self._waiting[-1:]:
                self._waiting.append(exchange)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self.crash(exchange)

    def crash(self, exchange: Exchange) -> None:
        """Give a request up for a fault of our own."""
        _log.exception("a request failed")
        exchange.cancel()
        self.http2.reset(exchange.stream, ErrorCode.INTERNAL_ERROR)

    def cancelled(self, stream: Stream) -> None:
        """The client does not want the answer."""
        stream.exchange.cancel()
        self.look_for_end()

    def sent(self, stream: Stream) -> None:
        """The client's windows have taken the answer."""
        stream.exchange.sent()
        self._run_next()

    def closed(self, stream: Stream) -> None:
        """The stream is over."""
        self.places.streams.pop(stream.exchange, None)
        if self._pending:
            self._pending.pop(stream.exchange, None)
            self._run_next()

    def output(self) -> None:
        """Write in the next turn of the event loop, with what else is answered in this one."""
        if not self._write_planned:
            self._write_planned = True
            self.loop.call_soon(self._write)

    def _write(self) -> None:
        self._write_planned = False
        out, connection = self.http2.out, self.connection
        if connection.ended and self.http2.blocked:  # by windows that will not grow
            self._drop_blocked()
        if not out or connection.closing or connection.transport.is_closing():
            out.clear()
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        connection.write(data)
        if self.http2.unsent_bytes > _UNSENT_BYTES:
            connection.hold()
        if connection.ended or self.http2.ending:
            self.look_for_end()

    # The application: few requests at a time, and none while much of an answer is not sent.

    def run(self, exchange: Exchange, start: Start) -> None:
        """Have a request answered when those before it are."""
        self._pending[exchange] = start
        self._run_next()

    def _run_next(self) -> None:
        """Begin with another request in the next turn of the event loop, if one may begin."""
        if self._pending and not self._run_planned and self._may_run():
            self._run_planned = True
            self.loop.call_soon(self._run_one)

    def _may_run(self) -> bool:
        return self._runs < _RUNS and self.http2.unsent_bytes <= _UNSENT_BYTES

    def _run_one(self) -> None:
        self._run_planned = False
        if self._pending and self._may_run() and not self.connection.closing:
            exchange = next(iter(self._pending))
            start = self._pending.pop(exchange)
            self._runs += 1
            start(self._run_ended)
            self._run_next()

    def _run_ended(self) -> None:
        self._runs -= 1
        self._run_next()

    # Called by exchanges, see `exchange.Writer`; by calls also `http2`.

    def is_open(self, exchange: Exchange) -> bool:
        """Whether its stream is."""
        return bool(exchange.stream.sending)

    def ask_for_body(self, exchange: Exchange) -> None:
        """Tell a client that waits for it to send the body."""
        if exchange.stream.receiving and exchange.stream.sending:
            self.http2.headers(exchange.stream, status_field(100))

    def taken(self, exchange: Exchange, size: int) -> None:
        """The client may send more."""
        self.http2.taken(exchange.stream, size)

    def answer(self, exchange: Exchange, answer: Answer) -> None:
        """Write a whole answer, or all but its `rest`."""
        stream, head, body, rest = exchange.stream, exchange.head, answer.body, answer.rest
        if not stream.sending:
            return
        length = sum(map(len, rest), len(body))
        block = self.service.answer_block(answer.status, answer.media_type, length)
        if answer.headers:
            block += lines_block(answer.headers)
        block += head.extra
        if head.method == b"HEAD":
            self.http2.headers(stream, block, end=not rest)
        elif rest:
            self.http2.headers(stream, block)
            self.http2.write(stream, body)
        else:
            self.http2.answer(stream, block, body, None)

    def start(
        self,
        exchange: Exchange,
        status: int,
        headers: list[tuple[bytes, bytes]],
        length: int | None,
    ) -> None:
        """Write the beginning of an answer."""
        if exchange.stream.sending:
            named = any(name == b"content-length" for name, _ in headers)
            if length is not None and not named and status not in (204, 304):
                headers.append((b"content-length", b"%d" % length))
            block = status_field(status) + self.service.common_block + literals(headers)
            self.http2.headers(exchange.stream, block + exchange.head.extra)

    def write(self, exchange: Exchange, data: bytes) -> None:
        """Write the next piece of an answer."""
        if exchange.head.method != b"HEAD":
            self.http2.write(exchange.stream, data)

    def finish(self, exchange: Exchange) -> None:
        """End an answer."""
        self.http2.finish(exchange.stream)

    def reset(self, exchange: Exchange, fault: bool = False) -> None:
        """Give the stream up."""
        code = ErrorCode.INTERNAL_ERROR if fault else ErrorCode.CANCEL
        self.http2.reset(exchange.stream, code)

    def is_read(self, exchange: Exchange) -> bool:
        """Whether the client reads what is written."""
        return not (exchange.stream.unsent or self.connection.blocked_since_s)

    def waits(self, exchange: Exchange) -> bool:
        """Whether a request waits for its client, or for others of the connection."""
        stream = exchange.stream
        return stream.receiving or bool(stream.unsent) or exchange.may_give_way

    def give_way(self, exchange: Exchange) -> None:
        """End a request that waits: others need its place."""
        if exchange.stream.number in self.http2.blocked:  # in the middle of its answer
            self._drop(exchange.stream)
        else:
            exchange.fail(too_many_open())

    async def drained(self, exchange: Exchange) -> None:
        """Wait until the client's windows, and its connection, have taken what is written."""
        if exchange.stream.unsent:
            await exchange.wait_until_sent()
        await self.connection.drained()
