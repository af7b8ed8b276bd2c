"""One HTTP/1.1 connection, on httptools' parser, run by uvicorn through its setting `http`.

Requests of a connection are parsed as they arrive, work at the same time, and are answered in their
order. A request on a fast route is handled by plain calls and written in one piece; every other
request goes to the ASGI application in a task: one of a connection at a time, and none while the
client does not read.

    bytes -> parser -> exchange 1 (being answered) -> exchange 2 -> ... exchange n (body arriving)
                             |
                             first in the line and complete: written, then the next

Clients send the same header section again and again. Between two requests, one that was parsed
before leads to its exchange without the parser, see `Connection._receive`. What has not come yet of
a large body behind it is then received where it belongs, see `http.receiver`.

What ends a connection:

    idle ------- keep-alive time over, client gone, stop -------> closed
    headers ---- too slow -> closed; malformed, too long -> 400, 431, 501, 505, then lingering
    TLS -------- a request in the clear -> 400, then lingering; anything else -> closed
    answering -- "Connection: close", HTTP/1.0, stop -> answered, then lingering
    any -------- client gone -> exchanges cancelled; client does not read -> aborted
    lingering -- our side is shut, what the client still sends is read and dropped, for a while:
                 closed with unread bytes in it, a socket resets, and the client loses the answer

The rules are RFC 9112's: one Host (3.2), Transfer-Encoding only `chunked` (6.1), trailers dropped
(7.1.2), though the parser itself obeys `Connection: close` in one: what follows it gets 400.
Requests for an upgrade are answered as if they did not ask.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from socket import SO_ERROR, SOL_SOCKET
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.server import ServerState

from service.budget import Budget
from service.errors import ServiceError, shown
from service.observe.access_log import AccessLog
from service.process.tls import ServedCertificate
from service.transport.answer import INTERNAL_ERROR, STATUS, Answer, refusal, status_line
from service.transport.exchange import BUFFERED_BYTES, AsgiExchange, Exchange
from service.transport.gate import Gate
from service.transport.handshake import Handshake
from service.transport.head import FastCall, FastRoutes, Head, Refused
from service.transport.http2 import PREFACE, literals, status_field
from service.transport.http2_connection import (
    MAX_ENDLESS_CALLS,
    MAX_OPEN_STREAMS,
    Http2Connection,
    OpenStreams,
)
from service.transport.http2_head import Http2Head, Methods
from service.transport.receiver import BodyReceiver
from service.transport.turns import Turns

_log = logging.getLogger(__name__)

_LINGER_BYTES = 64 << 20
_LINGER_S = 5.0
_IDLE_GRACE_S = 0.2
"""At a stop, how long a connection that was just used may still send a request."""
_PROBE_S = 0.02
"""After a client's end of data, when to find out whether it still reads."""

_READ_AHEAD = 64
"""Requests of one connection that may wait for their answers before reading and parsing pause."""
_FRAMING_BYTES = 64 * 1024
"""Bytes of chunk sizes and extensions in a body beyond as many as its own, and of either or of a
trailer without any byte of the body."""
_SLICE_BYTES = 16 * 1024
"""What is parsed in one turn of the event loop. A read brings up to 256 KiB, which may be thousands
of requests; other connections come in between."""
_LARGE_READ_BYTES = 128 * 1024
"""After such a read others come first. libuv would read up to 32 times in a row, 8 MB, which takes
up to 7 ms (H200 machine, 2026-11-22)."""
_STOP_S = 1.0
"""At a stop, the most that a client may take for headers, or to read its answers."""
_COPIED_BYTES = 16 * 1024
"""A body of fewer bytes is copied out of what was read: for it, a view costs more."""
_UNREAD_BYTES = 64 * 1024
"""Over TLS, what a client has not read is neither counted nor timed up to so many bytes; in the
clear that is uvloop's mark."""
_UNREAD_LOOK_S = 0.01
_FAILURES = (STATUS["internal"], STATUS["unavailable"])
"""Logged with the ids that the client sent. Late answers are not: any client can cause them."""
_LOGGED_CHARACTERS = 200
_KNOWN_HEADS = 512
_KNOWN_HEAD_BYTES = 2048
_KNOWN_STARTS = 512


class FrontDoor:
    """What the connections of one server share; calling it makes one, as uvicorn does.

    Times are in seconds: for the headers of a request, between requests, and for a client to read.
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
        methods: Methods | None = None,
    ) -> None:
        self.routes = routes
        self.methods = methods or {}
        """Methods of gRPC by path."""
        self.budget = budget
        self.gate = gate or Gate()
        self.access = access
        self.certificate = certificate
        self.scheme = b"http" if certificate is None else b"https"
        self.max_connections = max_connections
        self.max_header_bytes = max_header_bytes
        self.header_timeout_s = header_timeout_s
        self.keep_alive_s = keep_alive_s
        self.write_timeout_s = write_timeout_s
        self.known: dict[bytes, Head] = {}
        """By header section, as it came: clients send the same one again and again."""
        self.known_blocks: dict[bytes, Http2Head] = {}
        """Heads of HTTP/2 requests by header block."""
        self.open_streams = OpenStreams(MAX_OPEN_STREAMS)
        self.endless_calls = OpenStreams(MAX_ENDLESS_CALLS)
        self.head_turns = Turns()
        self.turns = Turns()
        self.connections: set[Connection | Http2Connection] = set()
        self.removed: Callable[[], None] = lambda: None
        self.handshakes: set[asyncio.Task[None]] = set()
        self.stopping = False
        self._sweeping = False
        self._sweep_s = max(0.01, min(1.0, header_timeout_s / 4, keep_alive_s / 4))
        self._common: list[tuple[bytes, bytes]] = []
        self._common_lines = b""
        self._starts: dict[tuple[int, bytes, int], bytes] = {}
        self._common_block = b""
        self._blocks: dict[tuple[int, bytes, int], bytes] = {}

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        """A connection of uvicorn's server."""
        loop = _loop or asyncio.get_running_loop()
        return Connection(self, config, server_state, app_state, loop)

    def add(self, connection: Connection) -> None:
        """Watch the time of a connection that was made."""
        self.connections.add(connection)
        if not self._sweeping:
            self._sweeping = True
            connection.loop.call_later(self._sweep_s, self._sweep, connection.loop)

    def remove(self, connection: Connection | Http2Connection) -> None:
        """Forget a connection that was lost."""
        self.connections.discard(connection)
        self.removed()

    def common_headers(self, state: ServerState) -> bytes:
        """Date and whatever else uvicorn sends, which it renews every second."""
        if self._common is not state.default_headers:
            self._common = state.default_headers
            self._common_lines = b"".join(b"%s: %s\r\n" % header for header in self._common)
            self._common_block = literals((name.lower(), value) for name, value in self._common)
            self._starts.clear()
            self._blocks.clear()
        return self._common_lines

    def answer_start(
        self, state: ServerState, status: int, media_type: bytes, length: int
    ) -> bytes:
        """The head of an answer up to the headers of its own. Kept while the second lasts."""
        common = self.common_headers(state)
        key = status, media_type, length
        start = self._starts.get(key)
        if start is None:
            if len(self._starts) >= _KNOWN_STARTS:
                self._starts.clear()
            start = self._starts[key] = b"%s%scontent-type: %s\r\ncontent-length: %d\r\n" % (
                status_line(status),
                common,
                media_type,
                length,
            )
        return start

    def common_block(self, state: ServerState) -> bytes:
        """Date and the other common headers as a header block of HTTP/2."""
        self.common_headers(state)
        return self._common_block

    def answer_block(
        self, state: ServerState, status: int, media_type: bytes, length: int
    ) -> bytes:
        """The header block of an HTTP/2 answer up to its own headers, kept for a second."""
        common = self.common_block(state)
        key = status, media_type, length
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= _KNOWN_STARTS:
                self._blocks.clear()
            fields = ((b"content-type", media_type), (b"content-length", b"%d" % length))
            block = self._blocks[key] = status_field(status) + common + literals(fields)
        return block

    def stop(self) -> None:
        """Connections made from now on answer one request, too."""
        self.stopping = True

    def give_up(self, error: ServiceError) -> None:
        """Answer the fast requests that are not answered yet with `error`."""
        for connection in tuple(self.connections):
            connection.give_up(error)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that waited too long, all at one timer."""
        now = loop.time()
        for connection in tuple(self.connections):
            connection.check_time(now)
        self._sweeping = bool(self.connections)
        if self._sweeping:
            loop.call_later(self._sweep_s, self._sweep, loop)


class Connection(asyncio.Protocol):
    """See the module."""

    def __init__(
        self,
        door: FrontDoor,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.door, self.app, self.state, self.app_state = (
            door,
            config.loaded_app,
            server_state,
            app_state,
        )
        self.loop = loop
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.plain: asyncio.Transport | None = None  # what TLS writes to
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._line: deque[Exchange] = deque()  # in the order of their requests
        self._arriving: Exchange | None = None  # whose body is not complete
        self._url = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._in_headers = False
        self._used = False
        self._preface = b""  # of HTTP/2, as far as it has come
        self._began_now = self._completed_now = False  # a message, in the latest data
        self._opened: Head | None = None  # the first in the latest data
        self._body_left = 0  # of a body that bypasses the parser
        self._receiver: BodyReceiver | None = None  # in this one's place at the transport
        self._last_read = False  # what follows is not to be read as a request
        self._header_bytes = 0
        self._framing_bytes = self._silent_bytes = self._body_bytes = 0
        self._unparsed = b""  # from `_parsed_bytes` on
        self._parsed_bytes = 0
        self._parsing_waits = False  # for the client to read, or for answers
        self._ended = False  # the client sends no more
        self._closing = False  # no further request is read
        self._stopping = door.stopping
        self._lingering_until_s = 0.0
        self._lingered_bytes = 0
        self._reading = True
        self._resting = False  # from reading, for a turn of the event loop
        self._since_s = loop.time()  # of being idle, or of the headers that arrive
        self._blocked_since_s = self._closed_since_s = 0.0
        self._unread_bytes = 0  # when the client's reading was last looked at
        self._held_bytes = (
            0  # of the budget, for `_waiting_bytes` and what the client does not read
        )
        self._waiting_bytes = 0  # of answers behind one that is not made yet
        self._written_bytes = 0  # since the client reads too slowly
        self._drained: asyncio.Event | None = None

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if len(self.door.connections) >= self.door.max_connections:
            self._closing = True
            self.transport.abort()
            return
        self.client, self.server = (
            _address(self.transport, name) for name in ("peername", "sockname")
        )
        self.door.add(self)
        self._stopping = self.door.stopping
        self.state.connections.add(self)  # type: ignore[arg-type]
        if self.door.certificate is not None:
            context = self.door.certificate.context
            shaking = Handshake(self).run(context, self.door.header_timeout_s)
            task = self.loop.create_task(shaking)
            self.door.handshakes.add(task)
            task.add_done_callback(self.door.handshakes.discard)

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.remove(self)
        self.state.connections.discard(self)
        self._closing = True
        self.stop_receiving()
        line, self._arriving = tuple(self._line), None
        self._line.clear()
        for exchange in line:
            exchange.cancel()
        self._waiting_bytes = 0
        self._unparsed, self._parsing_waits = b"", False
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._used and self._becomes_http2(data):
            return
        if self._preface:
            data, self._preface = self._preface + data, b""
        if len(data) > _LARGE_READ_BYTES:
            self._rest()
        arriving = self._arriving
        if arriving is None and not (self._in_headers or self._unparsed or self._closing):
            end = data.find(b"\r\n\r\n") + 4
            head = self.door.known.get(data[:end])
            if head is not None and len(data) - end <= head.known_length and not self._last_read:
                self._receive(head, data, end)
                return
        elif self._closing:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        elif self._body_left:
            self._receive_more(data)
            return
        length = None if arriving is None or arriving.head is None else arriving.head.length
        if self._unparsed:
            self._unparsed = self._unparsed[self._parsed_bytes :] + data
            self._parsed_bytes = 0
        elif len(data) <= _SLICE_BYTES or (length or 0) - self._body_bytes >= len(data):
            self._parse(data)  # little, or a piece of a body and nothing else
        else:
            self._unparsed, self._parsed_bytes = data, 0
            self._parse_slice()

    def _becomes_http2(self, data: bytes) -> bool:
        """Whether the connection's first bytes are the preface of HTTP/2, or may become it."""
        begun = self._preface + data
        if begun.startswith(PREFACE):
            self.door.connections.discard(self)
            self.state.connections.discard(self)
            self._closing = True
            connection = Http2Connection(self)
            self.door.connections.add(connection)
            self.state.connections.add(connection)  # type: ignore[arg-type]
            self.transport.set_protocol(connection)
            connection.data_received(begun)
            if self._stopping:
                connection.shutdown()
            return True
        if PREFACE.startswith(begun):
            self._preface = begun
            return True
        return False

    def _receive(self, head: Head, data: bytes, start: int) -> None:
        """A request whose header section is one that was parsed before; its body is in `data`.

        It begins at `start`. The parser sees nothing of it: it is between two messages, and stays
        there.
        """
        self._used = True
        exchange = FastExchange(self, head)
        self._line.append(exchange)
        size = len(data) - start
        # Taking a slice copies it.
        body = data[start:] if size < _COPIED_BYTES else memoryview(data)[start:]
        try:
            if size == head.length:
                exchange.receive(body)
                if len(self._line) > _READ_AHEAD:
                    self._set_reading()
                return
            self._since_s = self.loop.time()
            exchange.open()
            self._arriving = exchange
            self._body_left = head.known_length - size
            room = None
            if self._body_left > _LARGE_READ_BYTES and self.plain is None:
                room = exchange.room()
            if room is not None:
                room[:size] = body
                exchange.arrived(size)
            elif body:
                exchange.data(bytes(body))
            exchange.wait_for_body()
            if room is not None and exchange.answer is None and not self._closing:
                self._receiver = BodyReceiver(self, room[size:])
                self._switch(self._receiver)
            self._set_reading()
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash(exchange)

    def body_arrived(self, size: int) -> None:
        """The next `size` bytes of that request's body are where they belong."""
        exchange = self._arriving
        assert isinstance(exchange, FastExchange), "bug: a body without its request"
        if size > _LARGE_READ_BYTES:
            self._rest()
        self._body_left -= size
        try:
            exchange.arrived(size)
            if self._body_left:
                exchange.wait_for_body()
                return
            self.stop_receiving()
            self._arriving = None
            exchange.end()
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash(exchange)

    def stop_receiving(self) -> None:
        """End a `BodyReceiver`: nobody waits for its body any more, or it is complete."""
        if self._receiver is not None:
            self._receiver.release()
            self._receiver = None
            self._switch(self)

    def _switch(self, protocol: asyncio.BaseProtocol) -> None:
        transport = self.transport
        if transport.is_closing():
            return
        reading = transport.is_reading()
        if reading:  # uvloop looks at the protocol's kind when it begins to read
            transport.pause_reading()
        transport.set_protocol(protocol)
        if reading:
            transport.resume_reading()

    def _receive_more(self, data: bytes) -> None:
        """The next piece of that request's body, and what comes behind it."""
        exchange, left = self._arriving, self._body_left
        assert exchange is not None, "bug: a body without its request"
        try:
            exchange.data(data if len(data) <= left else data[:left])
            if len(data) < left:
                self._body_left = left - len(data)
                exchange.wait_for_body()
                return
            self._body_left, self._arriving = 0, None
            exchange.end()
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            self._crash(exchange)
        if len(data) > left:
            self.data_received(data[left:])

    def _crash(self, exchange: Exchange) -> None:
        """A request that the parser did not see failed by a fault of our own."""
        _log.exception("a request failed")
        if exchange in self._line:
            self._arriving = exchange
            self._end_with(INTERNAL_ERROR)
        else:
            self.transport.abort()

    def _remember(self, head: Head, data: bytes) -> None:
        """Remember the header section of the first request in `data`, which has `head`.

        The same bytes will make the same head. `data` came between two messages and may hold
        nothing behind this request. The section must begin with the method and hold no lone LF, so
        that its beginning and its end are certain.
        """
        if not head.known_length:
            return
        section = data[: data.find(b"\r\n\r\n") + 4]
        lines_end_in_crlf = section.count(b"\n") == section.count(b"\r\n")
        if (
            len(section) <= _KNOWN_HEAD_BYTES
            and section.startswith(head.method)
            and lines_end_in_crlf
            and len(data) - len(section) <= head.known_length
        ):
            known = self.door.known
            if len(known) >= _KNOWN_HEADS:
                known.clear()
            known[section] = head

    def _parse_slice(self) -> None:
        if self._is_ahead() and not self._closing:
            self._parsing_waits = True
            self._hold_answers()
            self._set_reading()
            return
        start = self._parsed_bytes
        data = self._unparsed[start : start + _SLICE_BYTES]
        self._parsed_bytes = start + len(data)
        if self._parsed_bytes >= len(self._unparsed) or self._closing:
            self._unparsed = b""
        else:
            self.loop.call_soon(self._parse_slice)
        if not self._closing:
            self._parse(data)
        self._set_reading()
        if self._ended and not self._unparsed and not self._line and not self._closing:
            self._finish()

    def _parse(self, data: bytes) -> None:
        self._began_now = self._completed_now = False
        between = self._arriving is None and not self._in_headers
        body_before = self._body_bytes
        self._opened = None
        self._feed(data)
        if self._closing:
            return
        if between and self._opened is not None:
            self._remember(self._opened, data)
        if self._in_headers:
            # How much of data that ends another message are headers of the next is not known.
            self._header_bytes += 0 if self._completed_now else len(data)
            if self._header_bytes > self.door.max_header_bytes:
                self._headers_too_long()
        elif (arriving := self._arriving) is not None:
            if not self._began_now and arriving.head is not None and arriving.head.chunked:
                body = self._body_bytes - body_before
                self._framing_bytes += len(data) - body
                self._silent_bytes = 0 if body else self._silent_bytes + len(data)
                most = 8 * min(self._body_bytes, _FRAMING_BYTES) + self._body_bytes
                if max(self._silent_bytes, self._framing_bytes - most) > _FRAMING_BYTES:
                    self._refuse(
                        400, f"chunks: got more than {_FRAMING_BYTES} bytes beside the body"
                    )
                    return
            arriving.wait_for_body()
        self._set_reading()

    def _feed(self, data: bytes) -> None:
        while not self._closing:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as exc:
                data = self._without_upgrade(data[exc.args[0] :])
            except httptools.HttpParserCallbackError:
                _log.exception("a request failed")
                self._end_with(INTERNAL_ERROR)
            except httptools.HttpParserError:
                in_clear = ", in the clear" if self.door.certificate is None else ""
                self._refuse(400, f"malformed HTTP request; expected HTTP/1.1{in_clear}")

    def _without_upgrade(self, rest: bytes) -> bytes:
        """The request that asked for an upgrade as if it did not, and `rest`, for a new parser."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        if method == b"CONNECT":
            self._refuse(501, "method: got CONNECT, expected another; see /docs")
        kept = [pair for pair in self._pairs if pair[0].lower() != b"upgrade"]
        lines = [b"%s %s HTTP/%s" % (method, self._url, version.encode())]
        lines += [b"%s: %s" % pair for pair in kept]
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"\r\n"]) + rest

    def eof_received(self) -> bool:
        # Over TLS the transport closes in any case: asyncio has no half-closed one.
        return self._answers_after_end() and self.door.certificate is None

    def _answers_after_end(self) -> bool:
        """The client sends no more; whether something is left to be answered."""
        self._ended = True
        if self._unparsed:
            return True
        if self._arriving is not None and self._arriving.answer is None:  # cannot become whole
            self._line.pop().cancel()
            self._arriving = None
            self.stop_receiving()
        if not self._line:
            return False  # nothing to answer: closes
        if (head := self._line[0].head) is not None and head.version == "1.1":
            self.loop.call_later(_PROBE_S, self._probe, _PROBE_S)
        return True

    def pause_writing(self) -> None:
        self._blocked_since_s = self.loop.time()
        self._drained = asyncio.Event()
        self._written_bytes = self._unread()
        self._hold_answers()
        self.door.budget.watch(self)
        self._set_reading()

    def resume_writing(self) -> None:
        if self._blocked_since_s:
            self._blocked_since_s = 0.0
            self.door.budget.unwatch(self)
        if self._held_bytes:
            self._hold_answers()
        if self._drained is not None:
            self._drained.set()
            self._drained = None
        if not self.transport.is_closing():
            if self._line:
                self._line[0].start()
            self._set_reading()

    def shutdown(self) -> None:
        """Uvicorn stops: answer what has begun, with `Connection: close`, and close."""
        self._stopping = True
        if not self._line and not self._in_headers and not self._closing:
            idle_s = self.loop.time() - self._since_s
            if idle_s >= _IDLE_GRACE_S:
                self.transport.close()
            else:  # its next request may be on the way
                self.loop.call_later(_IDLE_GRACE_S - idle_s, self._close_if_idle)

    def give_up(self, error: ServiceError) -> None:
        """The stop takes too long."""
        for exchange in tuple(self._line):
            exchange.give_up(error)

    def check_time(self, now_s: float) -> None:
        """Close the connection if it waited too long for its client."""
        door, transport = self.door, self.transport
        unread_bytes, before = self._unread(), self._unread_bytes
        self._unread_bytes = unread_bytes
        write_s = min(door.write_timeout_s, _STOP_S if self._stopping else door.write_timeout_s)
        header_s = min(door.header_timeout_s, _STOP_S if self._stopping else door.header_timeout_s)
        waited_s = now_s - self._since_s
        if self._blocked_since_s:
            self._hold_answers()
        if transport.is_closing():  # once all is written, which a client may prevent
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
            if unread_bytes < before:
                self._lingering_until_s = max(self._lingering_until_s, now_s + _IDLE_GRACE_S)
            if self._lingering_until_s and now_s > self._lingering_until_s:
                transport.abort()
        elif self._line or self._unparsed:
            arriving = self._arriving
            if arriving is not None and self._reading and waited_s > arriving.patience_s(door):
                transport.abort()
        elif self._in_headers or not self._used:
            if waited_s > header_s:
                transport.abort()
        elif waited_s > door.keep_alive_s:
            transport.close()

    # The parser's calls.

    def on_message_begin(self) -> None:
        self._url = b""
        self._pairs = []
        self._in_headers = self._began_now = self._used = True
        self._header_bytes = 0
        self._since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else a trailer, which is bounded and dropped
            self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if self._closing:
            return
        if self._parser.should_upgrade():
            return  # the parser would take the body for another protocol
        self._open(self._parser)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._arriving is not None:
            self._arriving.data(body)

    def on_message_complete(self) -> None:
        self._completed_now = True
        self._last_read = not self._parser.should_keep_alive()
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.end()

    # Exchanges.

    def _open(self, parser: httptools.HttpRequestParser) -> None:
        door = self.door
        method, version = parser.get_method(), parser.get_http_version()
        size = len(method) + len(self._url) + len("  HTTP/1.1\r\n\r\n")
        size += sum(len(name) + len(value) + len(": \r\n") for name, value in self._pairs)
        if size > door.max_header_bytes:
            self._headers_too_long()
            return
        keep_alive = parser.should_keep_alive()
        try:
            head = Head(
                *(method, self._url, version, self._pairs, keep_alive),
                door.routes,
                door.gate,
                door.scheme,
            )
        except Refused as exc:
            self._end_with(exc.answer)
            return
        except httptools.HttpParserError:
            self._refuse(400, f"target: got {shown(self._url.decode('latin-1'))}, expected a path")
            return
        self._opened = self._opened or head
        self._framing_bytes = self._silent_bytes = self._body_bytes = 0
        kind = AsgiExchange if head.route is None and head.answer is None else FastExchange
        exchange: Exchange = kind(self, head)
        self._arriving = exchange
        self._line.append(exchange)
        exchange.open()

    def refuse_clear(self) -> None:
        """Answer a request in the clear where TLS is expected, without reading it."""
        self._refuse(400, "scheme: got a request in the clear, expected TLS; use https://")

    def _headers_too_long(self) -> None:
        self._refuse(431, f"headers: got more than {self.door.max_header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        self._end_with(refusal(status, "invalid_input", message))

    def _end_with(self, answer: Answer) -> None:
        """Answer what cannot be read, after the answers to the requests before, and close."""
        if self._closing:
            return  # the parser goes on with data that is refused already
        self._closing = True
        self.stop_receiving()
        arriving, self._arriving = self._arriving, None
        if (
            arriving is not None and arriving.begun
        ):  # an answer within an answer would be read as one
            self.transport.abort()
            return
        if arriving is not None and arriving.answer is None:
            arriving.end_with(answer)
        elif arriving is None:
            exchange = RefusedExchange(self, answer)
            self._line.append(exchange)
        self.flush()

    def flush(self) -> None:
        """Write the answers that are complete, in order."""
        line = self._line
        ready, more = b"", []
        close = False
        while line and not close:
            exchange = line[0]
            if exchange.answer is None:
                break
            # A request whose body is not read to its end cannot be followed by another.
            close = exchange.close or exchange is self._arriving
            if ready:
                more.append(exchange.answer)
            else:
                ready = exchange.answer
            line.popleft()
        if ready:
            self.transport.write(b"".join((ready, *more)) if more else ready)
            if self._held_bytes:
                waited = sum(map(len, more))
                self._waiting_bytes = max(0, self._waiting_bytes - waited) if line else 0
                self._written_bytes += waited + len(ready)
                self._hold_answers()
            self.look_at_unread()
        if close:
            self._finish()
        elif line:
            line[0].start()
        else:
            if not self._in_headers:
                self._since_s = self.loop.time()
            if (self._ended and not self._unparsed) or (
                self._closing and not self._lingering_until_s
            ):
                self._finish()
            elif self._stopping:  # the answer was made before the stop, and does not say so
                self.loop.call_later(_IDLE_GRACE_S, self._close_if_idle)
        if not self._reading:
            self._set_reading()

    def write(self, piece: bytes) -> None:
        """Write a piece of an answer that is not complete."""
        self.transport.write(piece)
        if self._held_bytes:
            self._written_bytes += len(piece)
            self._hold_answers()
        self.look_at_unread()

    def keep(self, answer: bytes) -> None:
        """An answer waits for those before it."""
        self._waiting_bytes += len(answer)
        self._hold_answers()

    def _unread(self) -> int:
        """Bytes that are written and that the client has not taken."""
        unread = self.transport.get_write_buffer_size()
        return unread if self.plain is None else unread + self.plain.get_write_buffer_size()

    def look_at_unread(self) -> None:
        """Over TLS, pause and resume writing.

        Its transport would do so by what is not encrypted yet, and it encrypts all at once.
        """
        if self.plain is None or self.transport.is_closing():
            return
        much = self._unread() > _UNREAD_BYTES
        if much and not self._blocked_since_s:
            self.pause_writing()
            self.loop.call_later(_UNREAD_LOOK_S, self._look_again)
        elif not much and self._blocked_since_s:
            self.resume_writing()

    def _look_again(self) -> None:
        self.look_at_unread()
        if self._blocked_since_s:
            self.loop.call_later(_UNREAD_LOOK_S, self._look_again)

    def _hold_answers(self) -> None:
        """Hold in the budget what was answered and is not sent, and requests that wait unparsed.

        Up to the transport's mark for `pause_writing`, 64 KiB, answers are not counted.
        """
        unread = self._unread() if self._blocked_since_s else 0
        unparsed = len(self._unparsed) if self._parsing_waits else 0
        held, self._held_bytes = self._held_bytes, unread + self._waiting_bytes + unparsed
        self.door.budget.add(self._held_bytes - held)

    @property
    def moved_bytes(self) -> int:
        """What the client has read since it reads too slowly."""
        return self._written_bytes - self._unread()

    def evict(self) -> None:
        """The client reads slowly, and others need the memory of its answers."""
        self._blocked_since_s, self._waiting_bytes = 0.0, 0
        self._unparsed, self._parsing_waits = b"", False
        self._hold_answers()
        self.transport.abort()

    def will_close(self, exchange: Exchange) -> bool:
        """Whether the connection closes after the answer to `exchange`.

        At a stop after the last one: those that were read behind it are answered, too.
        """
        head = exchange.head
        last = self._stopping and self._line[-1] is exchange and not self._unparsed
        return head is None or not head.keep_alive or not exchange.whole or last

    def encode(self, head: Head | None, answer: Answer, close: bool) -> bytes:
        """The bytes of `answer` up to its `rest`."""
        connection, body, length = b"", answer.body, len(answer.body)
        if answer.rest:
            length += sum(map(len, answer.rest))
        start = self.door.answer_start(self.state, answer.status, answer.media_type, length)
        if close:
            connection = b"connection: close\r\n"
        elif head is not None and head.version == "1.0":
            connection = b"connection: keep-alive\r\n"
        extra = b""
        if head is not None:
            extra = head.extra
            if head.method == b"HEAD":
                body = b""
        return b"%s%s%s%s\r\n%s" % (start, answer.headers, extra, connection, body)

    def _finish(self) -> None:
        """Shut our side, and linger."""
        self._closing = True
        self.stop_receiving()
        if self.transport.is_closing():
            return
        for exchange in self._line:
            exchange.cancel()
        self._line.clear()
        self._arriving = None
        self._waiting_bytes = 0
        self._hold_answers()
        if self._ended or not self.transport.can_write_eof():
            self.transport.close()
            return
        linger_s = _LINGER_S if not self._stopping else _IDLE_GRACE_S
        self._lingering_until_s = self.loop.time() + linger_s
        self._set_reading()
        self.transport.write_eof()

    def _probe(self, wait_s: float) -> None:
        """Has a client that ended its data also closed its socket? Then this makes it reset.

        An interim answer may come at any time (RFC 9110, 15.2), and a client that only shut its
        side skips it. A connection whose reading has ended does not report the reset by itself.
        """
        if not self._line or self._line[0].begun or self.transport.is_closing():
            return
        head = self._line[0].head
        if wait_s == _PROBE_S and head is not None and head.version == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self.transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
            self.transport.abort()
            return
        self.loop.call_later(2 * wait_s, self._probe, 2 * wait_s)

    def _close_if_idle(self) -> None:
        if not self._line and not self._in_headers and not self._closing:
            self.transport.close()

    def _is_ahead(self) -> bool:
        """Whether the client does not read, or has sent many requests without waiting."""
        return bool(self._blocked_since_s) or len(self._line) > _READ_AHEAD

    def _set_reading(self) -> None:
        """Pause while the client does not read, runs ahead, or sends faster than it is read."""
        if self._parsing_waits and (self._closing or not self._is_ahead()):
            self._parsing_waits = False
            self._hold_answers()
            self.loop.call_soon(self._parse_slice)
        arriving = self._arriving
        wanted = not self._resting and (
            self._closing
            or not (
                self._unparsed
                or self._is_ahead()
                or (arriving is not None and arriving.buffered_bytes > BUFFERED_BYTES)
            )
        )
        if wanted != self._reading and not self.transport.is_closing():
            self._reading = wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _rest(self) -> None:
        """Read no more in this turn of the event loop."""
        if not self._resting:
            self._resting = True
            self.loop.call_soon(self._read_on)
            self._set_reading()

    def _read_on(self) -> None:
        self._resting = False
        self._set_reading()

    def is_read(self) -> bool:
        """Whether the client reads its answers: unread ones are below the transport's mark."""
        return not self._blocked_since_s

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        if self._drained is not None:
            await self._drained.wait()

    def body_was_taken(self) -> None:
        """An exchange has taken what was buffered for it."""
        if not self._reading:
            self._set_reading()

    def touch(self) -> None:
        """The body makes progress."""
        self._since_s = self.loop.time()

    def is_first(self, exchange: Exchange) -> bool:
        """Whether `exchange` is the next to be answered."""
        return self._line[0] is exchange


class RefusedExchange(Exchange):
    """What could not be read as a request."""

    def __init__(self, connection: Connection, answer: Answer) -> None:
        super().__init__(connection, None)
        self.close = True
        self.answer = connection.encode(None, answer, close=True)
        self.log(answer.status, len(answer.body))


class FastExchange(Exchange):
    """A request on a fast route, or one that the gate has answered."""

    head: Head
    _call: FastCall | None = None
    _refusal: Answer | None = None

    def open(self) -> None:
        head = self.head
        route, answer = head.route, head.answer
        self.note_beginning()
        if answer is None:
            assert route is not None, "bug: not a fast route"
            answer = None if head.error is None else route.refuse(head.error)
        if answer is not None:
            unwanted = head.expects_continue or head.chunked or (head.length or 0) > BUFFERED_BYTES
            if unwanted or answer.status in (200, STATUS["too_large"]):  # 200: to a preflight
                self._reply(answer)
            else:  # a small body is read and dropped, so that the connection can be kept
                self._refusal = answer
            return
        assert route is not None, "bug: not a fast route"
        self._call = route.open(head.wanted, self._reply)
        if head.expects_continue:
            self.ask_for_body()

    def receive(self, body: bytes | memoryview) -> None:
        """The whole body has arrived with the headers, which are without error."""
        route = self.head.route
        assert route is not None, "bug: not a fast route"
        self.note_beginning()
        self.whole = True
        self._call = call = route.open(self.head.wanted, self._reply)
        call.end(body)

    def data(self, data: bytes) -> None:
        if self._call is not None:
            try:
                self._call.data(data)
            except ServiceError as exc:
                self._call.fail(exc)

    def room(self) -> memoryview | None:
        """See `FastCall.room`; None if the body is not wanted, either."""
        return None if self._call is None else self._call.room()

    def arrived(self, size: int) -> None:
        """See `FastCall.arrived`."""
        if self._call is not None:
            try:
                self._call.arrived(size)
            except ServiceError as exc:
                self._call.fail(exc)

    def wait_for_body(self) -> None:
        if self._call is not None:
            try:
                self._call.wait_for_body()
            except ServiceError as exc:
                self._call.fail(exc)

    def end(self) -> None:
        self.whole = True
        if self._call is not None:
            self._call.end()
        elif self._refusal is not None:
            self._reply(self._refusal)

    def cancel(self) -> None:
        if self._call is not None:
            call, self._call = self._call, None
            call.cancel()

    def give_up(self, error: ServiceError) -> None:
        if self._call is not None:
            self._call.fail(error)
        elif self._refusal is not None and self.answer is None:
            self._reply(self._refusal)

    def patience_s(self, door: FrontDoor) -> float:
        # A call has its own deadline; what is refused is only read to be dropped.
        return door.header_timeout_s if self._call is None else math.inf

    def _reply(self, answer: Answer) -> None:
        self._call = None
        connection, head = self.connection, self.head
        if not self.whole:
            connection.stop_receiving()
        self.close = connection.will_close(self)
        first = connection.encode(head, answer, self.close)
        if answer.status in _FAILURES and head.ids:
            request = self.request[:_LOGGED_CHARACTERS]
            _log.error("%s was answered with %d: %s", request, answer.status, head.ids)
        if connection.door.access is not None:
            self.log(answer.status, sum(map(len, answer.rest), len(answer.body)))
        if not connection.is_first(self):
            self.answer = b"".join((first, *answer.rest))
            connection.keep(self.answer)
        elif answer.rest:
            self.begun = True
            connection.write(first)
            connection.loop.call_soon(self._write_next, deque(answer.rest))
        else:
            self.answer = first
            connection.flush()

    def _write_next(self, rest: deque[bytes]) -> None:
        """Write the next piece of a large answer, and go on in the next turn of the event loop."""
        connection = self.connection
        if connection.transport.is_closing():
            return
        piece = rest.popleft()
        if rest:
            connection.write(piece)
            connection.loop.call_soon(self._write_next, rest)
        else:
            self.answer = piece
            connection.flush()


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(name)
    return (str(address[0]), int(address[1])) if isinstance(address, (tuple, list)) else None
