"""The server's side of an HTTP/2 connection (RFC 9113): bytes in, calls of a handler and bytes out.

No socket, clock or event loop. `Http2.receive` parses what a client sent and calls its handler,
`Http2Exchanges`; what is to be sent collects in `Http2.out`.

Our own header blocks hold literals alone and need no table. A client that lowers the limit of
4,096 bytes gets a table size update to 0 with our next header block.

    client                          server
    HEADERS (+ CONTINUATION) --->   read(fields) -> head; opened(stream, head, end)
    DATA ... DATA            --->   received(stream, data, end)            taken() opens its window
    RST_STREAM, a wrong one  --->   cancelled(stream)
    WINDOW_UPDATE            --->   sent(stream): the windows have taken all output
                             <---   answer(), or headers(), write() and finish(); or reset()
                                    closed(stream): the stream is over
                                    output(): `out` was empty, and is not any more

What is wrong with a stream resets the stream. What is wrong with the connection ends it: GOAWAY is
written, and `failed` is set. What costs the server work without a request that gets its answer
(PING, SETTINGS, resets, empty frames, large new header blocks) takes `_credit`, which answers and
`refill` give back; without credit the connection ends with ENHANCE_YOUR_CALM. After `_WORK_AT_ONCE`
other connections come first.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any

from hpack import HPACKError, OversizedHeaderListError

from wire.http2_blocks import MAX_HEADER_BYTES, MOST_BLOCK_BYTES, HeaderBlocks
from wire.http2_fields import Fields, Malformed, is_field, list_bytes

if TYPE_CHECKING:
    from wire.http2_exchanges import Http2Exchanges

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of a client."""

MAX_STREAMS = 200
"""Requests of a connection that are open at a time. Clients wait with further ones."""

FRAME_BYTES = 256 * 1024
"""The largest frame that is received. A DATA frame is handed on as it arrives."""

STREAM_WINDOW = 64 * 1024 - 1
"""The initial window of a stream."""

GROWN_WINDOW = 1024 * 1024
"""The window of a stream once a part of its request is taken: what a round trip may bring."""

CONNECTION_WINDOW = 1024 * 1024
"""The window of a connection, shared by its streams."""

_CONTROL_BYTES = 16 * 1024
"""The largest frame of settings."""

_CREDIT = 1000
_REFILL = 50
_FREE_LIST_BYTES = 4096
"""New header lists up to this size, counted as `MAX_HEADER_BYTES`, cost no credit; others one for
each so many bytes, and one for each `_FIELDS_OF_A_CREDIT`: 480 small fields take 2 ms."""
_FIELDS_OF_A_CREDIT = 16
_USELESS_HEADERS_CREDIT = 16
"""Credit for a malformed request, or headers on a stream that was reset: 10 us for 10 bytes."""
_TINY_BYTES = 16
"""DATA frames below this size cost credit if they are empty or nobody waits for them. Others are
free: some clients send a body value by value."""

_WORK_AT_ONCE = 128
"""Frames in one call of `receive`, about 0.5 ms of work. Other connections run in between."""
_WORK_OF_A_REQUEST = 4
_BYTES_OF_WORK = 16
"""A request counts as further frames, and so do each so many bytes of new header lists."""

_UPDATES_PER_FRAME = 4
"""Windows that a client may open for each DATA frame and each request without credit."""

_RESET_STREAMS = 256
"""How many streams that were reset are remembered: frames for them may be on their way."""

_MOST_WINDOW = 2**31 - 1

_DEFAULT_TABLE_BYTES = 4096
_EMPTY_TABLE = b"\x20"
"""Sets the size of the table to 0 at the beginning of a header block: RFC 7541, 6.3."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20
_ENDS = END_HEADERS | END_STREAM
TABLE_SIZE, ENABLE_PUSH, STREAMS, INITIAL_WINDOW, FRAME_SIZE, HEADER_LIST = range(1, 7)

_FRAME = Struct(">HBBBI")  # length in two parts, type, flags, stream
_SETTING = Struct(">HI")
_WORD = Struct(">I")


class ErrorCode(IntEnum):
    """RFC 9113, 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """A protocol error that ends the connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Stream:
    """One request and its answer. `exchange` is the handler's."""

    __slots__ = (
        "buffered",
        "end",
        "exchange",
        "held_bytes",
        "left",
        "number",
        "receive_window",
        "receiving",
        "send_window",
        "sending",
        "taken",
        "unsent",
        "window",
    )

    def __init__(self, number: int, send_window: int, left: int | None) -> None:
        self.number = number
        self.exchange: Any = None
        self.receiving = self.sending = True
        self.left = left
        """Bytes of content-length that no DATA frame has announced yet."""
        self.receive_window = self.window = STREAM_WINDOW
        self.buffered = 0
        """Announced by DATA frames, and not taken."""
        self.held_bytes = 0
        """Handed to the handler, and not taken."""
        self.taken = 0
        """Taken, and not given back to the client's window."""
        self.send_window = send_window
        self.unsent: deque[memoryview] = deque()
        """Output that exceeds the client's windows."""
        self.end: bytes | None = None
        """The trailers after `unsent`, b"" without; None if more may follow."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the answer that wait for the client's windows."""
        return sum(map(len, self.unsent))


class Http2:
    """The state of one connection.

    Args:
        handler: gets requests. What it does for a stream that is over has no effect.
        known_heads: shared by connections, see `HeaderBlocks`.
    """

    def __init__(self, handler: Http2Exchanges, known_heads: dict[Any, Any]) -> None:
        self._handler = handler
        self.blocks = HeaderBlocks(handler.read, self._decoded, known_heads)
        self.out: list[bytes] = []
        self.streams: dict[int, Stream] = {}
        self.failed: ConnectionFault | None = None
        self.opening = True
        """Whether the client's preface and first SETTINGS are not complete."""
        self.in_block = False
        """Whether a header block is not complete."""
        self.pings = 0
        """Acknowledged by the client."""
        self.blocked: dict[int, Stream] = {}
        """Streams that wait for the client's windows, the one that waits longest first."""
        self.unsent_bytes = 0
        """Bytes of all answers that wait for the client's windows."""
        self._held_bytes = 0
        """Sum over all streams."""
        self._all_bytes = 0
        """Received on this connection."""
        self._last = 0
        """The highest number of a stream that the client opened."""
        self.ending = False
        """Whether no further requests are answered."""
        self._final: int | None = None
        """The last stream that is answered, once the second GOAWAY is written."""
        self._buffer = b""
        self._position = 0
        self._skip = 0
        self._data: tuple[Stream | None, int, int, bool] | None = None
        """The DATA frame that is arriving: stream, bytes left, padding behind, whether it ends."""
        self._block: list[bytes] = []
        self._block_bytes = self._block_stream = self._block_mark = 0
        self._block_ends = False
        self._work = 0
        """What this call of `receive` may still do."""
        self._updates = 0
        """Windows that the client may open without credit."""
        self._receive_window = CONNECTION_WINDOW
        self._taken = 0
        self._send_window = 65_535
        self._initial_window = 65_535
        self._frame_bytes = 16_384
        self._table_update = b""
        """Begins our next header block."""
        self._credit = _CREDIT
        self._reset: dict[int, bool] = {}
        """Streams that were reset lately; whether by the client."""
        self._settings_acknowledged = False
        settings = (
            (TABLE_SIZE, 0),
            (STREAMS, MAX_STREAMS),
            (INITIAL_WINDOW, STREAM_WINDOW),
            (FRAME_SIZE, FRAME_BYTES),
            (HEADER_LIST, MAX_HEADER_BYTES),
        )
        self._write(_frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings)))
        self._write(_window_update(0, CONNECTION_WINDOW - 65_535))

    # Bytes of the client.

    @property
    def received_bytes(self) -> int:
        """Bytes of the client that are kept: unused parts of bodies, incomplete frames, blocks."""
        block = self._block_bytes if self.in_block else 0
        return self._held_bytes + len(self._buffer) - self._position + block

    def forget(self) -> None:
        """Drop what came; nothing more will be received. Not to be called within `receive`."""
        self._buffer, self._position, self._block = b"", 0, []
        self.in_block, self._held_bytes = False, 0

    @property
    def unfinished(self) -> int | None:
        """A number of the header block or frame that has come in part, None if there is none."""
        if self.in_block:
            return self._block_mark
        rest = len(self._buffer) - self._position
        return self._all_bytes - rest if rest else None

    def receive(self, data: bytes) -> bool:
        """Parse `data`; whether to call again with nothing, before more is read."""
        self._all_bytes += len(data)
        if self._position < len(self._buffer):
            data = self._buffer[self._position :] + data
        self._buffer, self._position = data, 0
        if self.failed is not None:
            return False
        self._work = _WORK_AT_ONCE
        try:
            return self._parse()
        except ConnectionFault as exc:
            self._fail(exc)
        except OversizedHeaderListError as exc:
            self._fail(_too_much(str(exc)))
        except HPACKError:  # its text may quote the whole block
            reason = "a header block that cannot be decoded"
            self._fail(ConnectionFault(ErrorCode.COMPRESSION_ERROR, reason))
        return False

    def _fail(self, fault: ConnectionFault) -> None:
        fault.__context__ = fault.__cause__ = None
        self.failed = fault.with_traceback(None)  # its frames hold what was read
        self._buffer, self._position, self._block = b"", 0, []
        reason = fault.reason.encode("ascii", "replace")
        last = self._last if self._final is None else self._final
        payload = _WORD.pack(last) + _WORD.pack(fault.code) + reason
        self._write(_frame(GOAWAY, 0, 0, payload))

    def _parse(self) -> bool:
        if self.opening and not self._greet():
            return False
        data, size = self._buffer, len(self._buffer)
        position = self._position
        while True:
            if self._data is not None:
                position = self._receive_data(data, position)
            if self._skip:
                skipped = min(self._skip, size - position)
                self._skip -= skipped
                position += skipped
            if size - position < 9:
                break
            self._work -= 1
            if self._work <= 0:
                self._position = position
                return True
            high, low, kind, flags, number = _FRAME.unpack_from(data, position)
            length, number = high << 8 | low, number & _MOST_WINDOW
            if length > FRAME_BYTES:
                expected = f"at most {FRAME_BYTES}"
                raise _size_error(f"a frame of {length} bytes, expected {expected}")
            if self.in_block and (kind != CONTINUATION or number != self._block_stream):
                raise _protocol_error("a frame within a header block")
            if kind == DATA:
                if length and flags & PADDED and size - position < 10:
                    break
                position = self._begin_data(data, position + 9, flags, number, length)
                continue
            if kind > CONTINUATION or kind in (PRIORITY, GOAWAY):
                self._ignore(kind, number, length)
                self._skip, position = length, position + 9
                continue
            if length > (most := _MOST_BYTES.get(kind, MOST_BLOCK_BYTES)):
                if kind in (HEADERS, CONTINUATION):
                    raise _too_much(f"a header block of {length} bytes, expected at most {most}")
                raise _size_error(f"a frame of {length} bytes, expected at most {most}")
            end = position + 9 + length
            if end > size:
                break
            payload = data[position + 9 : end]
            position = end
            if kind == HEADERS:
                self._headers(flags, number, payload)
            elif kind == WINDOW_UPDATE:
                self._window_update(number, payload)
            elif kind == RST_STREAM:
                self._client_reset(number, payload)
            elif kind == CONTINUATION:
                self._continuation(flags, number, payload)
            elif kind == SETTINGS:
                self._settings(flags, number, payload)
            elif kind == PING:
                self._ping(flags, number, payload)
            else:
                raise _protocol_error("PUSH_PROMISE from a client")
        self._position = position
        if position == size:
            self._buffer, self._position = b"", 0
        return False

    def _greet(self) -> bool:
        """Whether the preface and the head of a SETTINGS frame are there."""
        data = self._buffer
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise _protocol_error("expected the preface of HTTP/2")
        start = len(PREFACE)
        if len(data) < start + 9:
            return False
        *_, kind, flags, _ = _FRAME.unpack_from(data, start)
        if kind != SETTINGS or flags & ACK:
            raise _protocol_error("expected SETTINGS as the first frame")
        self.opening = False
        self._position = start
        return True

    def _spend(self, credit: int = 1) -> None:
        self._credit -= credit
        if self._credit < 0:
            raise _too_much("more frames without a request than a client needs")

    def refill(self) -> None:
        """Call about once a second."""
        self._credit = min(_CREDIT, self._credit + _REFILL)

    def _ignore(self, kind: int, number: int, length: int) -> None:
        self._spend()
        if kind == PRIORITY and not number:
            raise _protocol_error("PRIORITY on stream 0")
        if kind == PRIORITY and length != 5:
            if number not in self.streams:
                raise _size_error("a PRIORITY frame without 5 bytes")
            self._break(self.streams[number], ErrorCode.FRAME_SIZE_ERROR)
        if kind == GOAWAY and number:
            raise _protocol_error("GOAWAY on a stream")
        if kind == GOAWAY and length < 8:
            raise _size_error("GOAWAY of less than 8 bytes")

    # DATA

    def _begin_data(self, data: bytes, start: int, flags: int, number: int, length: int) -> int:
        if not number:
            raise _protocol_error("DATA on stream 0")
        self._receive_window -= length
        if self._receive_window < 0:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window"
            )
        padding, size = 0, length
        if flags & PADDED:
            if not length:
                raise _size_error("padded DATA without the length of its padding")
            if data[start] >= length:
                raise _protocol_error("padding as long as its frame")
            padding = data[start]
            size, start = length - 1 - padding, start + 1
            self._spend()
        end = bool(flags & END_STREAM)
        stream = self.streams.get(number)
        if stream is None or not stream.receiving:
            self._check_closed(number)  # reset here: what is on its way is dropped
            stream = None
        elif length > stream.receive_window:
            self._break(stream, ErrorCode.FLOW_CONTROL_ERROR)
            stream = None
        elif stream.left is not None:
            stream.left -= size
            if stream.left < 0 or (stream.left and end):
                self._break(stream, ErrorCode.PROTOCOL_ERROR)
                stream = None
        if stream is not None:
            stream.receive_window -= length
            stream.buffered += size
            if length > size:
                self._reopen(stream, length - size)
        if not (size or end) if stream is not None else size < _TINY_BYTES:
            self._spend()
        self._give_back(length - size if stream is not None else length)
        self._data = stream, size, padding, end
        return start

    def _receive_data(self, data: bytes, start: int) -> int:
        assert self._data is not None, "bug: no DATA frame"
        stream, left, padding, end = self._data
        size = min(left, len(data) - start)
        left -= size
        if left:
            self._data = stream, left, padding, end
        else:
            self._data, self._skip = None, padding
        if stream is None or not stream.receiving:
            return start + size
        last = end and not left
        if last:
            stream.receiving = False
        if size or last:
            piece = data if size == len(data) else data[start : start + size]
            stream.held_bytes += size
            self._held_bytes += size
            self._handler.received(stream, piece, last)
        return start + size

    def taken(self, stream: Stream, size: int) -> None:
        """The handler has no more use for `size` bytes of the body."""
        if not (size and stream.sending):
            return
        stream.buffered -= size
        stream.held_bytes -= size
        self._held_bytes -= size
        self._give_back(size)
        if not stream.receiving:
            return
        if stream.window < GROWN_WINDOW:
            size += GROWN_WINDOW - stream.window
            stream.window = GROWN_WINDOW
        self._reopen(stream, size)

    def _reopen(self, stream: Stream, size: int) -> None:
        """Give `size` bytes back to the window of a stream, many at a time."""
        stream.taken += size
        if 2 * stream.taken >= stream.window or stream.receive_window < STREAM_WINDOW // 2:
            self._write(_window_update(stream.number, stream.taken))
            stream.receive_window += stream.taken
            stream.taken = 0

    def _give_back(self, size: int) -> None:
        self._taken += size
        if 2 * self._taken >= CONNECTION_WINDOW:
            self._write(_window_update(0, self._taken))
            self._receive_window += self._taken
            self._taken = 0

    # HEADERS

    def _headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number:
            raise _protocol_error("HEADERS on stream 0")
        if flags & (PADDED | PRIORITIZED):
            start = (1 if flags & PADDED else 0) + (5 if flags & PRIORITIZED else 0)
            if len(payload) < start:
                raise _size_error("HEADERS shorter than its fields")
            padding = payload[0] if flags & PADDED else 0
            if start + padding > len(payload):
                raise _protocol_error("padding as long as its frame")
            payload = payload[start : len(payload) - padding]
        ends = bool(flags & END_STREAM)
        if flags & END_HEADERS:
            self._request(number, ends, payload)
            return
        self.in_block, self._block_stream, self._block_ends = True, number, ends
        self._block_mark = self._all_bytes
        self._block, self._block_bytes = [payload], len(payload)

    def _continuation(self, flags: int, number: int, payload: bytes) -> None:
        if not self.in_block:
            raise _protocol_error("CONTINUATION without HEADERS")
        self._spend()
        self._block.append(payload)
        self._block_bytes += len(payload)
        if self._block_bytes > MOST_BLOCK_BYTES:
            raise _too_much(f"a header block of more than {MOST_BLOCK_BYTES} bytes")
        if flags & END_HEADERS:
            self.in_block = False
            block, self._block = b"".join(self._block), []
            self._request(number, self._block_ends, block)

    def _request(self, number: int, ends: bool, block: bytes) -> None:
        self._work -= _WORK_OF_A_REQUEST
        stream = self.streams.get(number)
        if stream is not None or number <= self._last or not number & 1:
            self._other_headers(stream, number, ends, block)
            return
        try:
            known = self.blocks.known.get(block) if self.blocks.table_is_empty else None
            head = known or self.blocks.new_head(block)
        except Malformed:
            self._last = number
            self._spend(_USELESS_HEADERS_CREDIT)
            self._write_reset(number, ErrorCode.PROTOCOL_ERROR)
            return
        self._last = number
        if self._final is not None:
            self._spend()
            return  # the client has not read of it yet, and asks elsewhere
        if len(self.streams) >= MAX_STREAMS:
            self._spend()
            self._write_reset(number, ErrorCode.REFUSED_STREAM)
            return
        if ends and head.length:
            self._spend()
            self._write_reset(number, ErrorCode.PROTOCOL_ERROR)
            return
        stream = self.streams[number] = Stream(number, self._initial_window, head.length)
        stream.receiving = not ends
        self._updates += _UPDATES_PER_FRAME
        self._handler.opened(stream, head, ends)

    def _other_headers(self, stream: Stream | None, number: int, ends: bool, block: bytes) -> None:
        """Trailers, or headers where none may be."""
        if not number & 1:
            raise _protocol_error("an even stream, which only a server opens")
        if stream is None or not stream.receiving:
            self._check_closed(number)
            self._spend(_USELESS_HEADERS_CREDIT)
            self.blocks.decode(block)  # on its way when the stream was reset
            return
        fields = self.blocks.decode(block)
        if not ends or stream.left or not all(is_field(*field) for field in fields):
            self._break(stream, ErrorCode.PROTOCOL_ERROR)
            return
        stream.receiving = False
        self._handler.received(stream, b"", True)

    def _decoded(self, fields: Fields, block_bytes: int) -> None:
        """Count the work of decoding a header block."""
        size = list_bytes(fields)
        self._work -= (block_bytes + size) // _BYTES_OF_WORK
        if size > _FREE_LIST_BYTES:
            self._spend(size // _FREE_LIST_BYTES + len(fields) // _FIELDS_OF_A_CREDIT)

    def _check_closed(self, number: int) -> None:
        """Raises: ConnectionFault, unless the stream was reset here."""
        if number > self._last or not number & 1:
            raise _protocol_error(f"a frame on stream {number}, which is idle")
        by_client = self._reset.get(number)
        if by_client:
            self._spend()
            self._write_reset(number, ErrorCode.STREAM_CLOSED)
        elif by_client is None and (self._final is None or number <= self._final):
            raise ConnectionFault(
                ErrorCode.STREAM_CLOSED, f"a frame on stream {number}, which is closed"
            )

    # Other frames

    def _client_reset(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _size_error("RST_STREAM without 4 bytes")
        if number > self._last or not number & 1:
            raise _protocol_error(f"RST_STREAM on stream {number}, which is idle")
        self._spend()
        stream = self.streams.get(number)
        if stream is not None:
            self._forget(stream)
            self._remember_reset(number, True)
            self._handler.cancelled(stream)

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise _protocol_error("SETTINGS on a stream")
        if flags & ACK:
            if payload:
                raise _size_error("an acknowledgement with settings")
            if self._settings_acknowledged:
                self._spend()
            self._settings_acknowledged = True
            self.blocks.empty_table()
            return
        if len(payload) % 6:
            raise _size_error("SETTINGS of a length that 6 does not divide")
        self._spend(1 + len(payload) // 64)
        window = self._initial_window
        for name, value in _SETTING.iter_unpack(payload):
            if name == ENABLE_PUSH and value > 1:
                raise _protocol_error("ENABLE_PUSH is neither 0 nor 1")
            if name == FRAME_SIZE:
                if not 16_384 <= value < 1 << 24:
                    raise _protocol_error("MAX_FRAME_SIZE is not 16384 to 16777215")
                self._frame_bytes = min(value, FRAME_BYTES)
            elif name == INITIAL_WINDOW:
                if value > _MOST_WINDOW:
                    raise _window_error("INITIAL_WINDOW_SIZE over 2^31-1")
                window = value
            elif name == TABLE_SIZE and value < _DEFAULT_TABLE_BYTES:
                self._table_update = _EMPTY_TABLE  # RFC 9113, 4.3.1
        if window != self._initial_window:
            self._set_initial_window(window)  # once: it is a step for each stream
        self._write(_frame(SETTINGS, ACK, 0))
        self._send_more()

    def _set_initial_window(self, size: int) -> None:
        more, self._initial_window = size - self._initial_window, size
        for stream in self.streams.values():
            stream.send_window += more
            if stream.send_window > _MOST_WINDOW:
                raise _window_error("a window over 2^31-1")

    def _ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise _protocol_error("PING on a stream")
        if len(payload) != 8:
            raise _size_error("PING without 8 bytes")
        self._spend()
        if flags & ACK:
            self.pings += 1
        else:
            self._write(_frame(PING, ACK, 0, payload))

    def _window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _size_error("WINDOW_UPDATE without 4 bytes")
        if self._updates:  # an honest client gives back what it has read, C-core in several parts
            self._updates -= 1
        else:
            self._spend()
        more = _WORD.unpack(payload)[0] & _MOST_WINDOW
        if not number:
            if not more:
                raise _protocol_error("WINDOW_UPDATE by 0")
            was_closed = self._send_window <= 0
            self._send_window += more
            if self._send_window > _MOST_WINDOW:
                raise _window_error("a window over 2^31-1")
            if was_closed:
                self._send_more()
            return
        if number > self._last or not number & 1:
            raise _protocol_error(f"WINDOW_UPDATE on stream {number}, which is idle")
        stream = self.streams.get(number)
        if stream is None:
            return
        stream.send_window += more
        if not more or stream.send_window > _MOST_WINDOW:
            code = ErrorCode.FLOW_CONTROL_ERROR if more else ErrorCode.PROTOCOL_ERROR
            self._break(stream, code)
        elif stream.unsent:
            self.blocked.pop(number, None)
            self._go_on(stream)

    # Output.

    def headers(self, stream: Stream, block: bytes, end: bool = False) -> None:
        """Begin the answer with a header block; `end`: it is all of it."""
        if not stream.sending:
            return
        block, self._table_update = self._table_update + block, b""
        kind, flags, most = HEADERS, int(end), self._frame_bytes
        while len(block) > most:
            self._write(_frame(kind, flags, stream.number, block[:most]))
            kind, flags, block = CONTINUATION, 0, block[most:]
        self._write(_frame(kind, flags | END_HEADERS, stream.number, block))
        if end:
            self._close(stream)

    def answer(self, stream: Stream, block: bytes, body: bytes, trailers: bytes | None) -> None:
        """A whole answer: header block, body, and trailers unless None."""
        if not stream.sending:
            return
        number, size = stream.number, len(body)
        room = min(stream.send_window, self._send_window, self._frame_bytes)
        header_bytes = max(len(block), len(trailers or b""))
        if size > room or self._table_update or header_bytes > self._frame_bytes:
            self.headers(stream, block)
            self.write(stream, body)
            self.finish(stream, trailers)
            return
        self._send_window -= size
        self._updates += _UPDATES_PER_FRAME
        ends = END_STREAM if trailers is None else 0
        begin = _FRAME.pack(len(block) >> 8, len(block) & 255, HEADERS, END_HEADERS, number)
        middle = _FRAME.pack(size >> 8, size & 255, DATA, ends, number)
        frames = [begin, block, middle, body]
        if trailers is not None:
            size = len(trailers)
            frames += _FRAME.pack(size >> 8, size & 255, HEADERS, _ENDS, number), trailers
        self._write(b"".join(frames))
        self._close(stream)

    def write(self, stream: Stream, data: bytes) -> None:
        """The next piece of the answer's body. What the windows have no room for waits."""
        if not (data and stream.sending):
            return
        # Clients of gRPC may send a PING for each message that they get.
        self._credit = min(_CREDIT, self._credit + 1)
        stream.unsent.append(memoryview(data))
        self.unsent_bytes += len(data)
        if stream.number not in self.blocked:
            self._send(stream)

    def finish(self, stream: Stream, trailers: bytes | None = None) -> None:
        """End the answer, with a block of trailers unless None."""
        if not stream.sending:
            return
        stream.end = b"" if trailers is None else trailers
        if not stream.unsent:
            self._end(stream)

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """Give the stream up."""
        if stream.sending:
            self._write_reset(stream.number, code)
            self._forget(stream)

    def _send(self, stream: Stream) -> None:
        """Send what the windows have room for."""
        unsent = stream.unsent
        while unsent:
            piece = unsent[0]
            size = min(len(piece), stream.send_window, self._send_window, self._frame_bytes)
            if size <= 0:
                self.blocked[stream.number] = stream
                return
            ends = size == len(piece) and len(unsent) == 1 and stream.end == b""
            self._write(_frame(DATA, END_STREAM * ends, stream.number, bytes(piece[:size])))
            stream.send_window -= size
            self._send_window -= size
            if size >= _TINY_BYTES:
                self._updates += _UPDATES_PER_FRAME
            self.unsent_bytes -= size
            if size == len(piece):
                unsent.popleft()
            else:
                unsent[0] = piece[size:]
            if ends:
                self._close(stream)
                return
        if stream.end is not None:
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        if stream.end:
            self.headers(stream, stream.end, end=True)
        else:
            self._write(_frame(DATA, END_STREAM, stream.number))
            self._close(stream)

    def _send_more(self) -> None:
        """The client's windows have grown: go on with the streams that wait."""
        for number, stream in tuple(self.blocked.items()):
            if self._send_window <= 0:
                return
            if stream.send_window > 0 and self.blocked.pop(number, None) is not None:
                self._go_on(stream)

    def _go_on(self, stream: Stream) -> None:
        self._send(stream)
        if not stream.unsent:
            self._handler.sent(stream)

    def _close(self, stream: Stream) -> None:
        """The answer is complete."""
        self._credit = min(_CREDIT, self._credit + 1)
        if stream.receiving:  # the rest of the request is not wanted: RFC 9113, 8.1
            self._write_reset(stream.number, ErrorCode.NO_ERROR)
        self._forget(stream)

    def _break(self, stream: Stream, code: ErrorCode) -> None:
        """Reset a stream for a protocol error."""
        self._spend()
        self.reset(stream, code)
        self._handler.cancelled(stream)

    def _forget(self, stream: Stream) -> None:
        stream.receiving = stream.sending = False
        if self.streams.pop(stream.number, None) is None:
            return
        if stream.unsent:
            self.blocked.pop(stream.number, None)
            self.unsent_bytes -= stream.unsent_bytes
            stream.unsent.clear()
        self._handler.closed(stream)
        if stream.buffered:
            self._give_back(stream.buffered)
            self._held_bytes -= stream.held_bytes
            stream.buffered = stream.held_bytes = 0

    def _write_reset(self, number: int, code: ErrorCode) -> None:
        self._write(_frame(RST_STREAM, 0, number, _WORD.pack(code)))
        self._remember_reset(number, False)

    def _remember_reset(self, number: int, by_client: bool) -> None:
        if len(self._reset) >= _RESET_STREAMS:
            del self._reset[next(iter(self._reset))]
        self._reset[number] = by_client

    def ping(self) -> None:
        """Ask whether the client is there; `pings` counts its answers."""
        self._write(_frame(PING, 0, 0, bytes(8)))

    def announce_end(self) -> None:
        """Tell the client to open no more requests. Those on their way are answered."""
        if self._final is None:
            self._write(_frame(GOAWAY, 0, 0, _WORD.pack(_MOST_WINDOW) + _WORD.pack(0)))

    def end(self) -> None:
        """Answer no requests after those that have come."""
        if self._final is None and self.failed is None:
            self._final, self.ending = self._last, True
            self._write(_frame(GOAWAY, 0, 0, _WORD.pack(self._last) + _WORD.pack(0)))

    def _write(self, frame: bytes) -> None:
        self.out.append(frame)
        if len(self.out) == 1:
            self._handler.output()


_MOST_BYTES = {RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4, SETTINGS: _CONTROL_BYTES}
"""The largest payload by kind of frame; header blocks have a limit of their own."""


def _frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 255, kind, flags, number) + payload


def _window_update(number: int, more: int) -> bytes:
    return _frame(WINDOW_UPDATE, 0, number, _WORD.pack(more))


def _protocol_error(reason: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.PROTOCOL_ERROR, reason)


def _size_error(reason: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, reason)


def _window_error(reason: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, reason)


def _too_much(reason: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, reason)
