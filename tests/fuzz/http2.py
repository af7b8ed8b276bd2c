"""HTTP/2 connections and header blocks, beside the packages h2 and hpack as second readings.

Frames go to `Http2` and to h2 one by one. Up to the first frame that one of them refuses, both have
to have read the same complete requests; where one refuses what completes a request for the other,
`_EXPLAINED` says why. The same bytes are sent again in pieces to a connection that knows the header
blocks by then, with the same outcome. What is answered has to fit the client's windows.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import hpack
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from tests.fuzz.target import CORPUS, Finding, MutateBytes, Target, mutate_list, pick
from tests.wire.test_http2 import (
    ACK,
    ACKED,
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    ROWS,
    RST,
    SETTINGS,
    UPDATE,
    block,
    field,
    frame_bytes,
    headers,
    settings,
)
from wire.gate import Gate
from wire.grpc import Method
from wire.http2 import MAX_STREAMS, PREFACE, Http2, Stream
from wire.http2_fields import VARYING, Fields, Malformed
from wire.http2_head import Http2Head

_ANSWER_BYTES = 70_000
"""Size of an answer to `/large`: more than a client's initial windows."""


class Request(NamedTuple):
    """A complete request."""

    stream: int
    method: bytes
    path: bytes
    body: bytes


class Server:
    """Our connection. Answers what is complete, except below `/hold`; `/early` at its headers."""

    def __init__(self, known: dict[bytes, Any]) -> None:
        self.complete: list[Request] = []
        self.cancelled_streams: list[int] = []
        self.is_malformed = False
        """Whether the last new header section was."""
        self.written = b""
        self.http2 = Http2(self, known)

    def feed(self, data: bytes) -> None:
        """Parse all of `data`."""
        more = self.http2.receive(data)
        while more:
            more = self.http2.receive(b"")
        self.written += b"".join(self.http2.out)
        self.http2.out.clear()

    def read(self, fields: Fields) -> Http2Head:
        self.is_malformed = True
        head = Http2Head(fields, {}, {}, Gate())
        self.is_malformed = False
        return head

    def opened(self, stream: Stream, head: Http2Head, end: bool) -> None:
        path = head.path + b"?" * bool(head.query) + head.query
        stream.exchange = [head.method, path, b""]
        if path.startswith(b"/early"):
            self._answer(stream, path)
        if end:
            self._complete(stream)

    def received(self, stream: Stream, data: bytes, end: bool) -> None:
        stream.exchange[2] += data
        self.http2.taken(stream, len(data))
        if end:
            self._complete(stream)

    def _complete(self, stream: Stream) -> None:
        found = Request(stream.number, *stream.exchange)
        self.complete.append(found)
        if stream.sending and not found.path.startswith(b"/hold"):
            self._answer(stream, found.path)

    def _answer(self, stream: Stream, path: bytes) -> None:
        body = bytes(_ANSWER_BYTES) if path.startswith(b"/large") else b"#"
        trailers = b"\0\1a\1b" if path.startswith(b"/trailers") else None
        self.http2.answer(stream, b"\x88", body, trailers)

    def cancelled(self, stream: Stream) -> None:
        if stream.receiving or stream.sending:
            raise Finding("cancelled a stream that is open")
        self.cancelled_streams.append(stream.number)

    def closed(self, stream: Stream) -> None:
        if stream.receiving or stream.sending:
            raise Finding("closed a stream that is open")

    def sent(self, stream: Stream) -> None:
        if stream.unsent:
            raise Finding("not all is sent")

    def output(self) -> None:
        """Nothing to plan here."""


class Other:
    """The connection of h2, with the same settings."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        values = {
            SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingCodes.MAX_FRAME_SIZE: 256 * 1024,
            SettingCodes.MAX_HEADER_LIST_SIZE: 32 * 1024,
            SettingCodes.INITIAL_WINDOW_SIZE: 65_535,
        }
        self.h2.local_settings = Settings(client=False, initial_values=values)
        self.h2.max_inbound_frame_size = 256 * 1024
        self.h2.decoder.max_header_list_size = 32 * 1024
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 0})
        self._open: dict[int, list[bytes]] = {}
        self.complete: list[Request] = []
        self.has_reset = self.lies = False
        self._lengths: dict[int, int] = {}

    def feed(self, data: bytes) -> None:
        """Raises: ProtocolError."""
        for event in self.h2.receive_data(data):
            self._read(event)
        self.has_reset |= b"\0\0\4\3\0" in self.h2.data_to_send()

    def _read(self, event: Event) -> None:
        if isinstance(event, SettingsAcknowledged):
            self.h2.decoder.header_table_size = 0  # as here, where a client does not announce it
        elif isinstance(event, RequestReceived):
            fields = dict(event.headers)
            found = [fields[b":method"], fields.get(b":path", b"").partition(b"#")[0], b""]
            self._open[event.stream_id] = found
            self._lengths[event.stream_id] = int(fields.get(b"content-length", b"0"))
            if found[1].startswith(b"/early"):
                self._answer(event.stream_id)
        elif isinstance(event, DataReceived):
            if event.stream_id in self._open:
                self._open[event.stream_id][2] += event.data
        elif isinstance(event, StreamReset):
            self._open.pop(event.stream_id, None)
        elif isinstance(event, StreamEnded) and event.stream_id in self._open:
            found = self._open.pop(event.stream_id)
            self.complete.append(Request(event.stream_id, *found))
            self.lies = self._lengths[event.stream_id] not in (0, len(found[2]))
            if not found[1].startswith((b"/hold", b"/early")):
                self._answer(event.stream_id)

    def _answer(self, stream: int) -> None:
        with suppress(ProtocolError):  # reset in the same bytes
            self.h2.send_headers(stream, [(b":status", b"200")], end_stream=True)


class Windows:
    """Flow-control windows of the client, computed from its frames and ours."""

    def __init__(self) -> None:
        self.connection = self.initial = 65_535
        self.streams: dict[int, int] = {}

    def heard(self, frame: Frame) -> None:
        """The client sent `frame`, which was accepted."""
        if frame.kind == SETTINGS and not frame.flags & ACK:
            for name, value in struct.iter_unpack(">HI", frame.payload):
                if name == 4:
                    self.initial, before = value, self.initial
                    for stream in self.streams:
                        self.streams[stream] += value - before
        elif frame.kind == UPDATE:
            more = int.from_bytes(frame.payload, "big") & 0x7FFFFFFF
            if not frame.stream:
                self.connection += more
            elif frame.stream in self.streams:
                self.streams[frame.stream] += more
        elif frame.kind == HEADERS and frame.stream not in self.streams:
            self.streams[frame.stream] = self.initial

    def wrote(self, frame: Frame) -> None:
        """The server sent `frame`."""
        if frame.kind != DATA or not frame.payload:
            return
        self.connection -= len(frame.payload)
        self.streams[frame.stream] -= len(frame.payload)
        if min(self.connection, self.streams[frame.stream]) < 0:
            raise Finding("wrote more than the client's window")


class Frame(NamedTuple):
    """One frame; `payload` may be cut."""

    kind: int
    flags: int
    stream: int
    payload: bytes
    size: int | None = None

    def encoded(self) -> bytes:
        """The frame's bytes, with its true length unless `size` gives a wrong one."""
        size = len(self.payload) if self.size is None else self.size
        return struct.pack(">I", size % 2**24)[1:] + (
            struct.pack(">BBI", self.kind, self.flags, self.stream) + self.payload
        )


def frames(data: bytes) -> Iterator[Frame]:
    """The frames of `data`; the last may be cut, and is dropped if its head is."""
    at = 0
    while at + 9 <= len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        kind, flags, stream = struct.unpack(">BBI", data[at + 3 : at + 9])
        payload = data[at + 9 : at + 9 + size]
        cut = size if len(payload) < size else None
        yield Frame(kind, flags, stream & 0x7FFFFFFF, payload, cut)
        at += 9 + size


def _is_explained(frame: Frame, theirs: str) -> bool:
    """Whether it is known why h2 refuses what completes a request here."""
    return any(reason in theirs for reason in _EXPLAINED)


_EXPLAINED = (
    # A request may have no authority: RFC 9113, 8.3.1.
    "does not have an :authority or Host header",
    # RFC 9113, 5.3.2 has no use for priorities, which RFC 7540 checks.
    "depends on itself",
    # h2 reads content-length in trailers, too. In headers, the other target compares it.
    "content-length header",
    # Behind a client's GOAWAY, which is about streams of the server's: RFC 9113, 6.8.
    "in state ConnectionState.CLOSED",
)


class Http2Target(Target):
    """A client's bytes, from its preface on."""

    def run(self, data: bytes) -> None:
        known: dict[bytes, Any] = {}
        first = self._in_step(data, known)
        seed = zlib.crc32(data)
        rng = random.Random(seed)
        server = Server(known)
        server.feed(b"")
        at = 0
        while at < len(data):
            size = rng.choice((1, 2, 8, 9, 10, 30, 1000, 20_000))
            server.feed(data[at : at + size])
            at += size
        self._same(first, server, "in pieces")
        server = Server(known)
        server.feed(data)
        self._same(first, server, "in one piece")

    def _same(self, first: Server, other: Server, how: str) -> None:
        if first.complete != other.complete:
            raise Finding(f"{first.complete!r:.300} frame by frame, {other.complete!r:.300} {how}")
        if first.cancelled_streams != other.cancelled_streams:
            raise Finding(f"cancelled {first.cancelled_streams}, {other.cancelled_streams} {how}")
        a = [one for one in frames(first.written) if one.kind != UPDATE]
        b = [one for one in frames(other.written) if one.kind != UPDATE]
        if a != b:
            raise Finding(f"wrote {a!r:.500} frame by frame, {b!r:.500} {how}")

    def _in_step(self, data: bytes, known: dict[bytes, Any]) -> Server:
        server, other = Server(known), Other()
        windows = Windows()
        together = True
        at = min(len(data), len(PREFACE))
        server.feed(data[:at])
        try:
            other.feed(data[:at])
        except ProtocolError as exc:
            together = False
            if server.http2.failed is None:
                raise Finding("h2 refuses the preface") from exc
        read = 0
        for frame in frames(data[at:]):
            encoded, before = frame.encoded(), len(server.complete)
            server.is_malformed = False
            server.feed(encoded)
            if server.http2.failed is None and frame.size is None:
                windows.heard(frame)
            new = list(frames(server.written[read:]))
            read = len(server.written)
            for one in new:
                windows.wrote(one)
            if together and frame.size is None:  # the last may be cut
                refuses = any(one.kind in (RST, GOAWAY) for one in new)
                together = self._compare(server, other, frame, before, refuses)
        self._check_kept(server)
        tail = data[at + sum(len(one.encoded()) for one in frames(data[at:])) :]
        server.feed(tail)
        return server

    def _compare(
        self, server: Server, other: Other, frame: Frame, before: int, refuses: bool
    ) -> bool:
        """Whether both are in the same state behind `frame`."""
        theirs_before = len(other.complete)
        refused = ""
        try:
            other.feed(frame.encoded())
        except ProtocolError as exc:
            refused = str(exc) or type(exc).__name__
        new, theirs = server.complete[before:], other.complete[theirs_before:]
        if refused:
            if new and not _is_explained(frame, refused):
                raise Finding(f"h2 refuses what completes {new!r:.200}: {refused}")
            return False
        if refuses or server.http2.failed is not None:
            early = all(one.path.startswith(b"/early") for one in (*new, *theirs))
            if theirs and not early and not _is_stricter(server, other, frame):
                raise Finding(f"{theirs!r:.200} for h2, refused here: {server.http2.failed}")
            return False
        if new != theirs:
            raise Finding(f"{new!r:.200} here, {theirs!r:.200} for h2")
        return not other.has_reset

    def _check_kept(self, server: Server) -> None:
        http2 = server.http2
        if len(http2.streams) > MAX_STREAMS:
            raise Finding(f"{len(http2.streams)} streams are kept")
        if http2.unsent_bytes != sum(one.unsent_bytes for one in http2.streams.values()):
            raise Finding(f"{http2.unsent_bytes} bytes are said to wait")
        if not http2.blocked.keys() <= http2.streams.keys():
            raise Finding("a stream waits that is closed")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if not data.startswith(PREFACE) or rng.random() < 0.02:
            return mutate(data)
        if rng.random() < 0.1:
            other = pick(rng, (path.read_bytes() for path in (CORPUS / "http2").iterdir()))
            return data + other[len(PREFACE) :]
        items = [one.encoded() for one in frames(data[len(PREFACE) :])]

        def change(item: bytes) -> bytes:
            if rng.random() < 0.4 or len(item) < 9:
                return pick(rng, FRAMES)
            return changed(next(frames(item)), rng, mutate).encoded()

        for _ in range(rng.choice((1, 1, 2, 3))):
            items = mutate_list(items, rng, change)
        return PREFACE + b"".join(items)


def _is_stricter(server: Server, other: Other, frame: Frame) -> bool:
    """Whether it is known why the frame that completes a request for h2 is refused here."""
    failed = server.http2.failed
    if failed is not None:
        return any(reason in failed.reason for reason in _STRICTER)
    # h2 compares the body with its announced length only where DATA ends it.
    return server.is_malformed or (frame.kind != DATA and other.lies)


_STRICTER = (
    # h2 reads other frames before the first settings: RFC 9113, 3.4.
    "expected SETTINGS as the first frame",
    "more frames without a request",
    # It allows 32 KiB whatever the size of the block.
    "headers of more than",
)


def changed(frame: Frame, rng: random.Random, mutate: MutateBytes) -> Frame:
    """`frame` with one part changed."""
    match rng.randrange(6):
        case 0:
            return frame._replace(kind=rng.choice((*range(10), 0x16)))
        case 1:
            return frame._replace(flags=frame.flags ^ rng.choice((1, 4, 8, 32, 64)))
        case 2:
            return frame._replace(stream=rng.choice((0, 1, 2, 3, 5, 7, 9, 101, 2**31 - 1)))
        case 3 if frame.kind in (HEADERS, CONTINUATION):
            extra = pick(rng, FIELDS)
            payload = extra + frame.payload if rng.random() < 0.3 else frame.payload + extra
            return frame._replace(payload=payload)
        case 4 if rng.random() < 0.1:
            return frame._replace(size=rng.choice((0, 1, 4, 5, 8, 16_384, 2**18, 2**24 - 1)))
    return frame._replace(payload=mutate(frame.payload))


# Inputs


def held(*fields: bytes) -> bytes:
    """The header block of a request whose answer does not come."""
    return block(method=b"POST", path=b"/hold") + b"".join(fields)


FIELDS = (
    *(field(b"a", b"b"), field(b"x", b"y", b"\x40"), field(b"x", b"y", b"\x10"), b"\xbe", b"\xbf"),
    *(b"\x20", b"\x3f\xe1\x1f", b"\x3f\x45", b"\x82", b"\x83", b"\x84", b"\x86", b"\x88", b"\x80"),
    *(field(b"X", b"y"), field(b"", b"y"), field(b"a b", b""), field(b"a", b" b"), b"\0\x81\x1f\0"),
    *(field(b"a", b"b\n"), field(b"a", b"b\0"), field(b"a", b"\xff"), field(b"te", b"trailers")),
    *(field(b"te", b"gzip"), field(b"connection", b"close"), field(b"upgrade", b"h2c")),
    *(field(b"host", b"a"), field(b"host", b"b"), field(b":authority", b"b"), field(b":a", b"b")),
    *(field(b"content-length", b"%d" % size) for size in (0, 3, 6, 10**15)),
    *(field(b"content-length", text) for text in (b"+3", b"03", b"", b"3, 3", b"x")),
    *(field(b":path", path) for path in (b"*", b"", b"x", b"/\xff", b"/ ", b"/early", b"/large")),
    *(field(b":path", path) for path in (b"/trailers", b"/now")),
    *(field(b":method", method) for method in (b"CONNECT", b"OPTIONS", b"G T", b"")),
    *(field(b":scheme", b""), field(b":scheme", b"https"), field(b":protocol", b"websocket")),
    *(field(b"expect", b"100-continue"), field(b"x-request-id", b"1"), field(b"a", b"b" * 126)),
    *(b"\xff" * 12, b"\0\x84\xff\xff\xff\xff\0", b"\x7f\xff\xff\xff\x7f"),
    *(field(name, value) for name in VARYING for value in (b"1S", b"2S", b"", b" ")),
    *(field(b"a", field(name, b"1S", first)) for name in VARYING for first in (b"\0", b"@")),
    *(hpack.Encoder().encode([(name, b"x")]) for name in VARYING),
    field(b"content-type", b"application/grpc"),
)

FRAMES = tuple(
    {
        one
        for row in ROWS.values()
        for part in row
        if isinstance(part, bytes)
        for one in frame_bytes(part)
        if len(one) < 6000
    }
)
"""Those in the table of tests/wire/test_http2.py."""


# Header blocks


def head_of(fields: Fields) -> Http2Head | None:
    """The head of a request, which knows all its fields; None if they are malformed."""
    path = dict(fields).get(b":path", b"")
    method = Method(lambda headers: (path, headers), lambda *_: None)  # type: ignore[arg-type]
    try:
        head = Http2Head(fields, {}, {path.partition(b"#")[0].partition(b"?")[0]: method}, Gate())
    except Malformed:
        return None
    if head.wanted is None:
        head.wanted = path, head.headers
    return head


class HeaderBlocksTarget(Target):
    """Header blocks of one connection: each a byte of flags, a length of 2 bytes, and the block.

    The first flag says that our settings are acknowledged before it. Heads have to be those of the
    fields that hpack decodes. Which fields are malformed is compared with h2 by the other target.
    """

    # hpack takes most of the time: 0.4 s for 64 KiB, three times that under atheris.
    max_bytes = 1 << 14

    def run(self, data: bytes) -> None:
        known: dict[bytes, Any] = {}
        for _ in range(2):  # the second connection knows the blocks of the first
            self._run(data, known)

    def _run(self, data: bytes, known: dict[bytes, Any]) -> None:
        decoder = hpack.Decoder()
        server = _HeadServer(known)
        http2 = server.http2
        http2.receive(PREFACE + settings())
        stream = 1
        for flags, one in blocks(data):
            if flags & 1:
                http2.receive(ACKED)
                decoder.max_allowed_table_size = decoder.header_table_size = 0
            decoder.max_header_list_size = min(32 * 1024, 4096 + 2 * len(one))
            server.found = None
            http2.refill()
            again = http2.receive(headers(one, stream=stream))
            while again:
                again = http2.receive(b"")
            try:
                fields = list(decoder.decode(one, raw=True))
            except hpack.HPACKError:
                if http2.failed is None:
                    raise Finding("accepted a block that hpack refuses") from None
                return
            expected = head_of(fields)
            if http2.failed is not None:
                raise Finding(f"{http2.failed.reason}; {fields!r:.300}")
            if expected is not None and expected.length:
                expected = None  # the request has no body
            if server.found != (expected and (expected.method, expected.wanted)):
                raise Finding(f"got {server.found!r:.300}, expected that of {fields!r:.300}")
            stream += 2

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        def change(item: bytes) -> bytes:
            flags, one = next(blocks(item), (0, b""))
            match rng.randrange(5):
                case 0:
                    return framed(flags ^ 1, one)
                case 1:
                    return framed(flags, one + pick(rng, FIELDS))
                case 2:
                    return framed(flags, pick(rng, FIELDS) + one)
                case 3:
                    return framed(flags, held(*rng.choices(FIELDS, k=rng.randrange(3))))
            return framed(flags, mutate(one))

        return b"".join(mutate_list([framed(*one) for one in blocks(data)], rng, change))


class _HeadServer(Server):
    """A connection whose requests have no bodies."""

    found: Any = None

    def read(self, fields: Fields) -> Http2Head:
        if (head := head_of(fields)) is None:
            raise Malformed
        return head

    def opened(self, stream: Stream, head: Http2Head, end: bool) -> None:
        self.found = head.method, head.wanted
        self.http2.headers(stream, b"\x88", end=True)


def framed(flags: int, one: bytes) -> bytes:
    """A block of an input."""
    return struct.pack(">BH", flags & 255, len(one[:65_535])) + one[:65_535]


def blocks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The blocks of an input; the last may be cut."""
    at = 0
    while at + 3 <= len(data):
        flags, size = struct.unpack(">BH", data[at : at + 3])
        yield flags, data[at + 3 : at + 3 + size]
        at += 3 + size
