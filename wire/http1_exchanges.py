"""The requests of an HTTP/1.1 connection: what `Http1` reads becomes exchanges, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wire.answer import Answer, error_answer, status_line
from wire.asgi import AsgiExchange
from wire.errors import INTERNAL, BodyTimeout, ProtocolError, Refusal
from wire.exchange import BUFFERED_BYTES, Exchange, FastExchange, Start
from wire.head import Head
from wire.http1 import Http1

if TYPE_CHECKING:
    from wire.connection import Connection

_log = logging.getLogger(__name__)

_PROBE_S = 0.02
"""After a client's end of data, when to find out whether it still reads."""

_IDLE_GRACE_S = 0.2
"""At a stop, how long a connection that was just used may still send a request."""

_WAITING_BYTES = 64 * 1024
"""Bytes received after an unanswered request before reading pauses."""

_LARGE_BYTES = 128 * 1024
"""A body with more to come may be received without a copy."""

_COUNTED_HEADER_BYTES = 8 * 1024
"""Headers that arrive are counted in the budget from so many bytes on."""


class Http1Exchanges:
    """Serves what `http1` reads on a connection, and writes the answers."""

    linger_s = 5.0
    linger_bytes = 64 << 20
    """How long, and how much of, what a client still sends is read and dropped at the end."""
    is_broken = False

    def __init__(self, connection: Connection) -> None:
        self.connection, self.loop = connection, connection.loop
        self.service = service = connection.service
        expected = "HTTP/1.1" if service.certificate else "HTTP/1.1, in the clear"
        self.http1 = Http1(service.heads, service.max_header_bytes, expected)
        self.exchange: Exchange | None = None
        """The request that is not answered."""
        self._begun = False
        """Whether a part of its answer is written."""
        self._probed: Exchange | None = None
        """The request whose client was last asked whether it still reads."""
        self._closes = self._chunked = self._asked = False

    # Called by the connection.

    @property
    def open(self) -> Sequence[Exchange]:
        """The requests that are not answered."""
        return () if self.exchange is None else (self.exchange,)

    held_bytes = 0
    """Answers wait at the transport alone."""

    @property
    def received_bytes(self) -> int:
        """Bytes of requests that are not parsed, and of headers."""
        http1, held_bytes = self.http1, 0
        if http1.header_bytes > _COUNTED_HEADER_BYTES:
            held_bytes = http1.header_bytes
        if http1.unparsed_bytes > _WAITING_BYTES:
            held_bytes += http1.unparsed_bytes
        return held_bytes

    @property
    def _is_idle(self) -> bool:
        return not (self.exchange or self.http1.in_headers or self.http1.has_more)

    @property
    def _can_go_on(self) -> bool:
        return self.http1.has_more and (self.http1.receiving or self.exchange is None)

    @property
    def wants_data(self) -> bool:
        """Whether more is to be read."""
        if self._can_go_on or self.http1.unparsed_bytes > _WAITING_BYTES:
            return False
        return self.exchange is None or self.exchange.buffered_bytes <= BUFFERED_BYTES

    def receive(self, data: bytes) -> None:
        """Serve what came."""
        whole = self.http1.whole(data) if self.exchange is None else None
        if whole is None:
            self.http1.receive(data)
            self._serve()
            return
        head, body = whole
        self.exchange = exchange = FastExchange(self, None, head)
        try:
            exchange.receive(body)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()

    def go_on(self) -> None:
        """Serve what came before."""
        if self._can_go_on:
            self._serve()

    def _serve(self) -> None:
        """Serve what came, up to the end of one request."""
        connection, http1 = self.connection, self.http1
        was_in_headers = http1.in_headers
        try:
            if self.exchange is None and (head := http1.next_head()) is not None:
                self._open(head)
            if (piece := http1.next_piece()) is not None:
                assert self.exchange is not None, "bug: a body without its request"
                self.exchange.data(*piece)
            if http1.receiving and self.exchange is not None:
                self.exchange.wait()
        except ProtocolError as exc:
            self.refuse(exc)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()
        if http1.in_headers and not was_in_headers:
            connection.since_s = self.loop.time()
        if connection.ended and not self._can_go_on and not self.eof():
            connection.finish()
            return
        if self._can_go_on:
            connection.turn()
        connection.hold()
        connection.set_reading()

    def _open(self, head: Head) -> None:
        """Begin the exchange of a request."""
        kind = AsgiExchange if head.route is None and head.answer is None else FastExchange
        self.exchange = exchange = kind(self, None, head)
        exchange.since_s = self.loop.time()
        exchange.open()
        left_bytes = self.http1.body_left - self.http1.unparsed_bytes
        if left_bytes > _LARGE_BYTES and isinstance(exchange, FastExchange):
            self._place(exchange)

    def _place(self, exchange: FastExchange) -> None:
        """Have the rest of a large body received where it belongs, in the clear."""
        if self.service.certificate is not None or (room := exchange.room()) is None:
            return
        data, _ = self.http1.next_piece() or (b"", False)
        room[: len(data)] = data
        exchange.arrived(len(data))
        if self.http1.receiving:
            self.connection.receive_into(room[len(data) :])

    def body_arrived(self, size: int) -> None:
        """`size` bytes of a large body were received into the request's buffer."""
        exchange = self.exchange
        assert isinstance(exchange, FastExchange), "bug: a body without its request"
        try:
            exchange.arrived(size)
            if self.exchange is not exchange:
                return
            if self.http1.took(size):
                self.connection.stop_receiving()
                exchange.data(b"", True)
            else:
                exchange.wait()
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash()

    def eof(self) -> bool:
        """The client sends no more; whether something is left to be answered."""
        exchange, http1 = self.exchange, self.http1
        if exchange is not None and http1.receiving:
            self.connection.stop_receiving()
            if exchange.cut_off() or self.exchange is not exchange:
                return True
            self.exchange = None
            http1.close()
        elif exchange is not None:
            is_probed, self._probed = self._probed is exchange, exchange
            if not is_probed and exchange.head is not None and exchange.head.version == "1.1":
                self.loop.call_later(_PROBE_S, self._probe, exchange, _PROBE_S)
            return True
        return self._can_go_on

    def _probe(self, exchange: Exchange, wait_s: float) -> None:
        """Provoke a reset from a half-closed client that has closed its socket.

        An interim answer may come at any time (RFC 9110, 15.2), and a client that only shut its
        side skips it. A connection whose reading has ended does not report the reset by itself.
        """
        if self.exchange is not exchange or self._begun or not self.connection.is_there():
            return
        if wait_s == _PROBE_S:
            self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(2 * wait_s, self._probe, exchange, 2 * wait_s)

    def stop(self) -> None:
        """Answer what has begun, with `Connection: close`."""
        if self._is_idle:
            # The next request of one that was just used may be on the way.
            idle_s = self.loop.time() - self.connection.since_s
            self.loop.call_later(max(0.0, _IDLE_GRACE_S - idle_s), self._close_if_idle)

    def retire(self) -> None:
        """The next answer says `Connection: close`: an idle client may be about to ask."""

    def _close_if_idle(self) -> None:
        if self.connection.waits:
            self.loop.call_later(_IDLE_GRACE_S, self._close_if_idle)
        elif self._is_idle:
            self.connection.transport.close()

    def end(self) -> None:
        """Nothing more is read or answered."""
        exchange, self.exchange = self.exchange, None
        self.http1.close()
        if exchange is not None:
            exchange.cancel()

    def check_time(self, now_s: float, header_s: float, _write_s: float) -> None:
        """Close the connection if it waited too long for its client."""
        http1, exchange, connection = self.http1, self.exchange, self.connection
        waited_s = now_s - connection.since_s
        if exchange is not None:
            waits = http1.receiving and connection.reading
            if waits and now_s - exchange.since_s > exchange.body_timeout_s():
                exchange.fail(BodyTimeout("body: it did not arrive in time", field="body"))
        elif http1.in_headers or not http1.used:
            if waited_s > header_s:
                connection.transport.abort()
        elif self._is_idle and waited_s > self.service.keep_alive_s:
            connection.transport.close()

    def refuse(self, error: ProtocolError) -> None:
        """Answer what cannot be read."""
        exchange = self.exchange
        if exchange is not None and self._begun:  # an answer within an answer would be read as one
            self.connection.transport.abort()
            return
        if exchange is None:
            self.exchange = exchange = Exchange(self, None, None)
        exchange.cancel()
        exchange.answer(error_answer(error))

    def _crash(self) -> None:
        """A bug of ours failed a request."""
        _log.exception("a request failed")
        exchange = self.exchange
        if exchange is None or self._begun:
            self.connection.transport.abort()
            return
        exchange.cancel()
        self._closes = True
        exchange.refuse(Refusal(INTERNAL))

    # Called by exchanges, see `exchange.Writer`.

    def is_open(self, exchange: Exchange) -> bool:
        """Whether it is the one that is answered."""
        return exchange is self.exchange and not self.connection.transport.is_closing()

    def run(self, exchange: Exchange, start: Start) -> None:
        """Have the application answer it: it is the only one."""
        start(lambda: None)

    def ask_for_body(self, exchange: Exchange) -> None:
        """Tell a client that waits for it to send the body."""
        if exchange is self.exchange and self.http1.receiving and not (self._asked or self._begun):
            self._asked = True
            self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def taken(self, exchange: Exchange, size: int) -> None:
        """Read on, if reading paused for it."""
        if not self.connection.reading:
            self.connection.set_reading()

    def answer(self, exchange: Exchange, answer: Answer) -> None:
        """Write a whole answer, or all but its `rest`."""
        if exchange is not self.exchange:
            return
        if self._begun:  # a fault of ours came behind bytes of an answer: no second one
            self.connection.transport.abort()
            return
        self._begun = True
        head, body, rest = exchange.head, answer.body, answer.rest
        length = sum(map(len, rest), len(body)) if rest else len(body)
        key, service = (answer.status, answer.media_type, length), self.service
        start = service.starts.get(key) or service.answer_start(*key)
        close = self._ends(head)
        connection = b""
        if head is None:
            extra = self.service.gate.cors_lines({})
        else:
            extra = head.extra
            if head.method == b"HEAD":
                body = b""
        if close:
            connection = b"connection: close\r\n"
        elif head.version == "1.0":
            connection = b"connection: keep-alive\r\n"
        self.connection.write(b"%s%s%s%s\r\n%s" % (start, answer.headers, extra, connection, body))
        if rest:
            self._begin(close)
        else:
            self._done(close)

    def start(
        self,
        exchange: Exchange,
        status: int,
        headers: list[tuple[bytes, bytes]],
        length: int | None,
    ) -> None:
        """Write the beginning of an answer."""
        if exchange is not self.exchange:
            return
        head = exchange.head
        close, named = self._ends(head), any(name == b"content-length" for name, _ in headers)
        if not named and status not in (204, 304):
            if length is not None:
                headers.append((b"content-length", b"%d" % length))
            elif head.version == "1.1":
                self._chunked = True
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                close = True
        if close:
            headers.append((b"connection", b"close"))
        elif head.version == "1.0":
            headers.append((b"connection", b"keep-alive"))
        lines = [b"%s: %s\r\n" % header for header in headers]
        common = self.service.common_lines
        self.connection.write(b"".join((status_line(status), common, *lines, head.extra, b"\r\n")))
        self._begin(close)

    def _begin(self, close: bool) -> None:
        self._begun, self._closes = True, close
        if self.http1.receiving:
            self.connection.stop_receiving()

    def write(self, exchange: Exchange, data: bytes) -> None:
        """Write the next piece of an answer."""
        if exchange is self.exchange and exchange.head.method != b"HEAD":
            self.connection.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)

    def finish(self, exchange: Exchange) -> None:
        """End an answer."""
        if exchange is self.exchange:
            if self._chunked and exchange.head.method != b"HEAD":
                self.connection.write(b"0\r\n\r\n")
            self._done(self._closes or self._ends(exchange.head))

    def reset(self, exchange: Exchange, fault: bool = False) -> None:
        """Give the answer up, which only the end of the connection can say."""
        if exchange is self.exchange:
            self.connection.transport.abort()

    def _ends(self, head: Head | None) -> bool:
        """Whether the connection ends after the answer that begins now.

        At a stop after the last one: what was read behind it is answered, too.
        """
        http1 = self.http1
        if self._closes or http1.receiving or http1.closed or head is None or not head.keep_alive:
            return True
        return self.connection.stopping and not http1.unparsed_bytes

    def _done(self, close: bool) -> None:
        """The answer is written."""
        connection, http1 = self.connection, self.http1
        self.exchange = None
        if close:
            connection.finish()
            return
        if self._begun or self._asked:
            self._begun = self._closes = self._chunked = self._asked = False
        if http1.buffer:
            connection.turn()
        elif connection.ended:
            connection.finish()
        else:
            connection.since_s = self.loop.time()
        if not connection.reading:
            connection.set_reading()

    async def drained(self, exchange: Exchange) -> None:
        """Wait until the client has read enough."""
        await self.connection.drained()
