"""A table of frames and their effects: RFC 9113 and RFC 7541."""

from __future__ import annotations

import struct

import pytest

from wire.gate import Gate
from wire.http2 import Http2
from wire.http2_head import Http2Head

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, UPDATE, CONTINUATION = range(10)
END, ACK, WHOLE, PADDED, PRIORITIZED = 1, 1, 4, 8, 32
TABLE_SIZE, ENABLE_PUSH, STREAMS, WINDOW, FRAME_SIZE, LIST_SIZE = range(1, 7)
CODES = (
    *("NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT"),
    *("STREAM_CLOSED", "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR"),
    *("CONNECT_ERROR", "ENHANCE_YOUR_CALM"),
)
PROBE = 2**31 - 1
"""The highest stream: whatever a row did to others, the next request is answered."""


def frame(kind, flags=0, stream=0, payload=b"", size=None):
    head = struct.pack(">I", len(payload) if size is None else size)[1:]
    return head + struct.pack(">BBI", kind, flags, stream) + payload


def integer(value, prefix, flags=0):
    """RFC 7541, 5.1."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes((flags | value,))
    found, value = [flags | most], value - most
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def text(value):
    return integer(len(value), 7) + value


def field(name, value, first=b"\0"):
    """A literal; `first` says how it is indexed."""
    return first + text(name) + text(value)


def block(*more, method=b"GET", path=b"/", scheme=b"http", authority=b"a"):
    """The header block of a request; a pseudo-header that is None is left out."""
    pseudo = {b":method": method, b":scheme": scheme, b":path": path, b":authority": authority}
    fields = [(name, value) for name, value in pseudo.items() if value is not None]
    return b"".join(field(*one) for one in (*fields, *more))


def get(stream=1, *more, flags=0, path=b"/", **pseudo):
    return frame(HEADERS, WHOLE | END | flags, stream, block(*more, path=path, **pseudo))


def post(stream=1, *more, path=b"/", **pseudo):
    """A request whose body is to come."""
    return frame(HEADERS, WHOLE, stream, block(*more, path=path, method=b"POST", **pseudo))


def headers(payload, flags=WHOLE | END, stream=1):
    return frame(HEADERS, flags, stream, payload)


def more(payload=b"", flags=0, stream=1):
    return frame(CONTINUATION, flags, stream, payload)


def data(stream=1, payload=b"", flags=0, size=None):
    return frame(DATA, flags, stream, payload, size)


def reset(stream=1, code=8):
    return frame(RST, 0, stream, struct.pack(">I", code))


def update(stream=0, size=1000):
    return frame(UPDATE, 0, stream, struct.pack(">I", size))


def settings(*pairs, flags=0, stream=0):
    return frame(SETTINGS, flags, stream, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def ping(payload=b"12345678", flags=0, stream=0):
    return frame(PING, flags, stream, payload)


def trailers(*fields, stream=1, flags=WHOLE | END):
    return frame(HEADERS, flags, stream, b"".join(field(*one) for one in fields))


def length(size):
    return b"content-length", b"%d" % size


START = PREFACE + settings()
ACKED = settings(flags=ACK)
NO_TABLE = b"\x20"
"""The size of the table is 0 now."""


def frames(written):
    at = 0
    while at < len(written):
        size = int.from_bytes(written[at : at + 3], "big")
        assert size <= 16_384
        yield *struct.unpack(">BBI", written[at + 3 : at + 9]), written[at + 9 : at + 9 + size]
        at += 9 + size


def frame_bytes(written):
    at = 0
    while at < len(written):
        end = at + 9 + int.from_bytes(written[at : at + 3], "big")
        yield written[at:end]
        at = end


def word(payload):
    return int.from_bytes(payload[:4], "big")


class Client:
    """Feeds a connection, and notes what its handler is told and what is written.

    What becomes of a request is in its path: /take uses up each 100 bytes of its body, /echo is
    answered with what comes, /answer when it is complete, /early at once, /large with 100,000
    bytes, /trailers with some, /fields with a header block of 40,000 bytes.
    """

    def __init__(self):
        self.heard, self.written = [], []
        self.paths, self.used = {}, 0
        self.http2 = Http2(self, {})

    def feed(self, sent, step):
        for start in range(0, len(sent), step):
            again = self.http2.receive(sent[start : start + step])
            while again:
                again = self.http2.receive(b"")

    # Called by `Http2`.

    def read(self, fields):
        return Http2Head(fields, {}, {}, Gate())

    def opened(self, stream, head, end):
        self.heard.append(f"{stream.number} {head.method.decode()} {head.path.decode()}")
        self.paths[stream.number] = head.path
        stream.exchange = self
        if head.path == b"/echo":
            self.http2.headers(stream, b"\x88")
        if head.path == b"/early":
            self.http2.answer(stream, b"\x88", b"ok", None)
        self._complete(stream, end)

    def received(self, stream, data, end):
        found = f"{stream.number} data "
        if data and self.heard[-1].startswith(found):
            found += str(len(data) + int(self.heard.pop()[len(found) :]))
            self.heard.append(found)
        elif data:
            self.heard.append(found + str(len(data)))
        if self.paths[stream.number] == b"/take":
            self.used += len(data)
            while self.used >= 100:
                self.used -= 100
                self.http2.taken(stream, 100)
        elif self.paths[stream.number] == b"/echo":
            self.http2.write(stream, data)
        self._complete(stream, end)

    def _complete(self, stream, end):
        if not end:
            return
        self.heard.append(f"{stream.number} end")
        path = self.paths[stream.number]
        if path == b"/answer":
            self.http2.answer(stream, b"\x88", b"ok", None)
        elif path == b"/trailers":
            self.http2.answer(stream, b"\x88", b"ok", field(b"a", b"b"))
        elif path == b"/fields":
            self.http2.answer(stream, field(b"a", bytes(40_000)), b"ok", None)
        elif path == b"/echo":
            self.http2.finish(stream)
        elif path == b"/empty":
            self.http2.headers(stream, b"\x88", end=True)
        elif path == b"/large":
            self.http2.headers(stream, b"\x88")
            for _ in range(2):
                self.http2.write(stream, bytes(50_000))
            self.http2.finish(stream)

    def cancelled(self, stream):
        self.heard.append(f"{stream.number} cancelled")

    def sent(self, stream):
        self.heard.append(f"{stream.number} sent")

    def closed(self, stream):
        pass

    def output(self):
        pass

    # Output.

    def answers(self):
        """The frames that were written since the last call; those of equal kind are summed."""
        written, self.http2.out[:] = b"".join(self.http2.out), []
        found = []
        for kind, flags, stream, payload in frames(written):
            end = " end" if kind in (DATA, HEADERS) and flags & END else ""
            count = 1
            match kind:
                case 0:
                    name, count = f"body {stream}", len(payload)
                case 1:
                    name = f"headers {stream}" + (" begun" if not flags & WHOLE else "")
                case 3:
                    name = f"reset {stream} {CODES[word(payload)]}"
                case 4:
                    name = "ack" if flags & ACK else "settings"
                case 6:
                    name = "pong" if flags & ACK else "ping"
                case 7:
                    name = f"goaway {word(payload)} {CODES[word(payload[4:])]}"
                    assert payload[8:].isascii()
                    assert len(payload) < 200
                case 8:
                    name, count = f"window {stream}", word(payload)
                case 9:
                    name = f"more {stream}" + (" begun" if not flags & WHOLE else "")
            if found and found[-1][0] == name and not found[-1][2]:
                count += found.pop()[1]
            found.append((name, count, end))
        counted = ("body", "window")
        return [
            name + (f" {count}" if count != 1 or name.startswith(counted) else "") + end
            for name, count, end in found
        ]


def outcome(actions, step, begun=True):
    """The handler's calls and the output, one line each."""
    client = Client()
    if begun:
        client.feed(START, step)
        client.answers()
    for action in actions:
        if isinstance(action, bytes):
            client.feed(action, step)
        else:
            action(client)
    heard, written = ", ".join(client.heard), client.answers()
    http2 = client.http2
    failed = http2.failed is not None
    assert http2.blocked.keys() <= http2.streams.keys()
    assert http2.unsent_bytes == sum(stream.unsent_bytes for stream in http2.streams.values())
    assert failed == any("goaway" in one and "NO_ERROR" not in one for one in written)
    client.heard = []
    if failed or not (http2.opening or http2.in_block or http2.ending):
        client.feed(get(PROBE, path=b"/answer") + ping(), step)
        assert client.heard == ([] if failed else [f"{PROBE} GET /answer", f"{PROBE} end"])
        assert ("pong" in client.answers()) != failed
    return heard, ", ".join(written)


FIRST = "settings, window 0 983041"
"""The first output to every client."""

OPEN = "1 POST /"
GOT = "1 GET /, 1 end"
DONE = "1 GET /answer, 1 end"
ANSWERED = "headers 1, body 1 2 end"
GONE = "goaway 0 PROTOCOL_ERROR"

# Events of the handler, and frames that are written.
BAD = f"{OPEN}, 1 cancelled", "reset 1 PROTOCOL_ERROR"
LATE = f"{OPEN}, 1 cancelled", "reset 1 STREAM_CLOSED"
CLOSED = GOT, "goaway 1 STREAM_CLOSED"
SIZE, SIZE_1 = ("", "goaway 0 FRAME_SIZE_ERROR"), (OPEN, "goaway 1 FRAME_SIZE_ERROR")
REFUSED, GONE_5 = ("", GONE), ("5 GET /, 5 end", "goaway 5 PROTOCOL_ERROR")
ACCEPTED, WHOLE_3 = (GOT, ""), (f"{OPEN}, 1 data 3, 1 end", "")
FINE = DONE, ANSWERED

BEGINNINGS = {
    "3.4 nothing": ("", FIRST),
    "3.4 a request of HTTP/1.1": (b"GET / HTTP/1.1\r\n\r\n", "", f"{FIRST}, {GONE}"),
    "3.4 a preface that differs at its end": (PREFACE[:-1] + b"x", "", f"{FIRST}, {GONE}"),
    "3.4 PING as the first frame": (PREFACE + ping(), "", f"{FIRST}, {GONE}"),
    "3.4 HEADERS as the first frame": (PREFACE + get(), "", f"{FIRST}, {GONE}"),
    "3.4 an acknowledgement as the first frame": (PREFACE + ACKED, "", f"{FIRST}, {GONE}"),
    "3.4 first settings on a stream": (PREFACE + settings(stream=1), "", f"{FIRST}, {GONE}"),
    "3.4 the preface twice": (START + PREFACE, "", f"{FIRST}, ack, goaway 0 FRAME_SIZE_ERROR"),
    "3.4 a request behind the preface": (
        START + get(path=b"/answer"),
        *(DONE, f"{FIRST}, ack, {ANSWERED}"),
    ),
}

FRAMES = {
    "4.1 an unknown type": (frame(0x16, 255, 1, b"abc"), "", ""),
    "4.1 an unknown type of 200,000 bytes": (frame(0x16, 0, 0, bytes(200_000)), "", ""),
    "4.1 a payload that comes later": (frame(PING, size=8), b"12345678", "", "pong"),
    "4.1 the reserved bit is ignored": (get(1 | 1 << 31, path=b"/answer"), *FINE),
    "4.2 a frame over the limit": (frame(0x16, 0, 0, size=256 * 1024 + 1), *SIZE),
    "4.2 PING of 9 bytes": (ping(bytes(9)), *SIZE),
    "4.3 a block in three frames": (
        headers(block()[:5], END) + more(block()[5:20]) + more(block()[20:], WHOLE),
        *ACCEPTED,
    ),
    "4.3 an empty first part": (headers(b"", END) + more(block(), WHOLE), *ACCEPTED),
    "4.3 PING within a block": (headers(block(), END) + ping(), *REFUSED),
}

STATES = {
    "5.1 DATA on an idle stream": (data(), *REFUSED),
    "5.1 RST_STREAM on an idle stream": (reset(), *REFUSED),
    "5.1 WINDOW_UPDATE on an idle stream": (update(1), *REFUSED),
    "5.1 PRIORITY on an idle stream": (frame(PRIORITY, 0, 9, bytes(5)), "", ""),
    "5.1 CONTINUATION on an idle stream": (more(block(), WHOLE), *REFUSED),
    "5.1 RST_STREAM on an even stream": (
        get(5) + reset(2),
        "5 GET /, 5 end",
        "goaway 5 PROTOCOL_ERROR",
    ),
    "5.1 WINDOW_UPDATE on an even stream": (get(5) + update(2), *GONE_5),
    "5.1 DATA on an even stream": (get(5) + data(2, b"abc"), *GONE_5),
    "5.1 DATA behind the end of the request": (get() + data(1, bytes(20)), *CLOSED),
    "5.1 HEADERS behind the end of the request": (get() + trailers(), *CLOSED),
    "5.1 WINDOW_UPDATE behind the end of the request": (get() + update(1), *ACCEPTED),
    "5.1 RST_STREAM behind the end of the request": (get() + reset(), f"{GOT}, 1 cancelled", ""),
    "5.1 DATA on a closed stream": (
        get(path=b"/answer") + data(1, bytes(20)),
        *(DONE, f"{ANSWERED}, goaway 1 STREAM_CLOSED"),
    ),
    "5.1 HEADERS on a closed stream": (
        get(path=b"/answer") + get(),
        *(DONE, f"{ANSWERED}, goaway 1 STREAM_CLOSED"),
    ),
    "5.1 WINDOW_UPDATE on a closed stream": (get(path=b"/answer") + update(1), *FINE),
    "5.1 DATA behind the client's reset": (post() + reset() + data(1, bytes(20)), *LATE),
    "5.1 trailers behind the client's reset": (post() + reset() + trailers((b"a", b"b")), *LATE),
    "5.1 DATA on its way when the stream was reset": (
        post(1, length(3)) + data(1, b"abcd") + data(1, bytes(2000)) * 9,
        *BAD,
    ),
    "5.1 trailers on their way when the stream was reset": (
        post(1, length(3)) + data(1, b"abcd") + trailers((b"a", b"b")),
        *BAD,
    ),
    "5.1 answered before its body, which still comes": (
        post(path=b"/early") + data(1, bytes(100)) + data(1, b"", END),
        *("1 POST /early", f"{ANSWERED}, reset 1 NO_ERROR"),
    ),
    "5.1.1 an even stream": (get(2), *REFUSED),
    "5.1.1 stream 0": (get(0), *REFUSED),
    "5.1.1 a lower stream": (get(5) + get(3), "5 GET /, 5 end", "goaway 5 STREAM_CLOSED"),
    "5.1.1 streams in between are closed": (
        get(5) + data(3, bytes(20)),
        *("5 GET /, 5 end", "goaway 5 STREAM_CLOSED"),
    ),
    "5.1.1 RST_STREAM on a stream in between": (get(5) + reset(3), "5 GET /, 5 end", ""),
    "5.1.2 a stream more": (
        b"".join(get(number) for number in range(1, 402, 2)) + reset(1),
        *(
            ", ".join(f"{number} GET /, {number} end" for number in range(1, 400, 2))
            + ", 1 cancelled",
            "reset 401 REFUSED_STREAM",
        ),
    ),
    "5.4.1 nothing is read behind a failure": (data() + get(3), *REFUSED),
    "5.5 an unknown setting": (settings((0x4A4A, 7)), "", "ack"),
}

DATA_FRAMES = {
    "6.1 a body": (post() + data(1, b"abc", END), *WHOLE_3),
    "6.1 a body in frames": (
        post() + data(1, bytes(20)) * 3 + data(1, b"", END),
        *(f"{OPEN}, 1 data 60, 1 end", ""),
    ),
    "6.1 an answer to each piece of a body": (
        post(path=b"/echo") + data(1, bytes(20)) + data(1, b"abc", END),
        *("1 POST /echo, 1 data 23, 1 end", "headers 1, body 1 23 end"),
    ),
    "6.1 two bodies in turns": (
        post() + post(3) + data(1, b"a") + data(3, b"bc") + data(1, b"d", END) + data(3, b"", END),
        *("1 POST /, 3 POST /, 1 data 1, 3 data 2, 1 data 1, 1 end, 3 end", ""),
    ),
    "6.10 an answer with a block beyond the client's frames": (
        get(path=b"/fields"),
        *("1 GET /fields, 1 end", "headers 1 begun, more 1 begun, more 1, body 1 2 end"),
    ),
    "6.1 DATA on stream 0": (data(0, b"abc"), *REFUSED),
    "6.1 padding": (post() + data(1, b"\3abc\0\0\0", PADDED | END), *WHOLE_3),
    "6.1 nothing but padding": (post() + data(1, b"\3abc", PADDED | END), f"{OPEN}, 1 end", ""),
    "6.1 padding as long as its frame": (
        post() + data(1, b"\4abc", PADDED),
        *(OPEN, "goaway 1 PROTOCOL_ERROR"),
    ),
    "6.1 padding without its length": (post() + data(1, b"", PADDED), *SIZE_1),
    "6.1 padding on a stream that was reset": (
        post(1, length(0)) + data(1, b"abcd") + data(1, b"\3abc", PADDED),
        *BAD,
    ),
    "8.1.1 a body of the announced length": (post(1, length(3)) + data(1, b"abc", END), *WHOLE_3),
    "8.1.1 a longer body": (post(1, length(3)) + data(1, b"abcd", END), *BAD),
    "8.1.1 a shorter body": (post(1, length(3)) + data(1, b"ab", END), *BAD),
    "8.1.1 an empty end of a shorter body": (
        post(1, length(3)) + data(1, b"ab") + data(1, b"", END),
        *(f"{OPEN}, 1 data 2, 1 cancelled", "reset 1 PROTOCOL_ERROR"),
    ),
    "8.1.1 padding is not counted": (
        post(1, length(3)) + data(1, b"\3abc\0\0\0", PADDED | END),
        *WHOLE_3,
    ),
    "8.1.1 a length without a body": (get(1, length(3)), "", "reset 1 PROTOCOL_ERROR"),
    "8.1.1 a length of 0 without a body": (get(1, length(0)), *ACCEPTED),
    "8.1.1 trailers before the announced length": (
        post(1, length(3)) + data(1, b"ab") + trailers(),
        *(f"{OPEN}, 1 data 2, 1 cancelled", "reset 1 PROTOCOL_ERROR"),
    ),
    "8.1.1 trailers behind the announced length": (
        post(1, length(3)) + data(1, b"abc") + trailers(),
        *WHOLE_3,
    ),
    "8.1.1 a length with a sign": (
        post(1, (b"content-length", b"+3")),
        *("", "reset 1 PROTOCOL_ERROR"),
    ),
}

HEADER_FRAMES = {
    "6.2 padding": (headers(b"\2" + block() + b"\0\0", WHOLE | END | PADDED), *ACCEPTED),
    "6.2 more padding than the frame": (headers(b"\3\0\0", WHOLE | END | PADDED), *REFUSED),
    "6.2 padding without its length": (headers(b"", WHOLE | END | PADDED), *SIZE),
    "6.2 a priority": (headers(bytes(5) + block(), WHOLE | END | PRIORITIZED), *ACCEPTED),
    "6.2 padding and a priority": (
        headers(b"\1" + bytes(5) + block() + b"\0", WHOLE | END | PADDED | PRIORITIZED),
        *ACCEPTED,
    ),
    "6.2 a priority of 4 bytes": (headers(bytes(4), WHOLE | END | PRIORITIZED), *SIZE),
    "6.3 PRIORITY on stream 0": (frame(PRIORITY, 0, 0, bytes(5)), *REFUSED),
    "6.3 PRIORITY of 4 bytes": (frame(PRIORITY, 0, 1, bytes(4)), *SIZE),
    "6.3 PRIORITY of 4 bytes on an open stream": (
        post() + frame(PRIORITY, 0, 1, bytes(4)),
        *(f"{OPEN}, 1 cancelled", "reset 1 FRAME_SIZE_ERROR"),
    ),
    "6.4 RST_STREAM": (post() + reset(), f"{OPEN}, 1 cancelled", ""),
    "6.4 RST_STREAM on stream 0": (reset(0), *REFUSED),
    "6.4 RST_STREAM of 3 bytes": (post() + frame(RST, 0, 1, bytes(3)), *SIZE_1),
    "6.6 PUSH_PROMISE": (frame(PUSH, WHOLE, 1, bytes(4)), *REFUSED),
    "6.7 PING": (ping(), "", "pong"),
    "6.7 PING on a stream": (ping(stream=1), *REFUSED),
    "6.8 GOAWAY": (post() + frame(GOAWAY, 0, 0, bytes(8)) + data(1, b"abc", END), *WHOLE_3),
    "6.8 GOAWAY on a stream": (frame(GOAWAY, 0, 1, bytes(8)), *REFUSED),
    "6.8 GOAWAY of 7 bytes": (frame(GOAWAY, 0, 0, bytes(7)), *SIZE),
    "6.10 CONTINUATION of another stream": (headers(block(), END) + more(b"", WHOLE, 3), *REFUSED),
    "6.10 CONTINUATION of a complete block": (
        get() + more(b"", WHOLE),
        *(GOT, "goaway 1 PROTOCOL_ERROR"),
    ),
}

SETTING_FRAMES = {
    "6.5 settings": (settings((STREAMS, 1), (LIST_SIZE, 100)), "", "ack"),
    "6.5 an acknowledgement": (ACKED + headers(NO_TABLE + block()), *ACCEPTED),
    "6.5 an acknowledgement with settings": (settings((STREAMS, 1), flags=ACK), *SIZE),
    "6.5 settings on a stream": (settings(stream=1), *REFUSED),
    "6.5 settings of 7 bytes": (frame(SETTINGS, 0, 0, bytes(7)), *SIZE),
    "6.5 more than a frame of settings takes": (frame(SETTINGS, 0, 0, bytes(16_386)), *SIZE),
    "6.5.2 ENABLE_PUSH of 2": (settings((ENABLE_PUSH, 2)), *REFUSED),
    "6.5.2 INITIAL_WINDOW_SIZE of 2^31": (
        settings((WINDOW, 2**31)),
        *("", "goaway 0 FLOW_CONTROL_ERROR"),
    ),
    "6.5.2 MAX_FRAME_SIZE of 16,383": (settings((FRAME_SIZE, 16_383)), *REFUSED),
    "6.5.2 MAX_FRAME_SIZE of 2^24": (settings((FRAME_SIZE, 2**24)), *REFUSED),
    "6.5.2 MAX_FRAME_SIZE of 2^24 - 1": (settings((FRAME_SIZE, 2**24 - 1)), "", "ack"),
    "6.5.2 HEADER_TABLE_SIZE of 0": (
        settings((TABLE_SIZE, 0)) + get(path=b"/answer"),
        *(DONE, f"ack, {ANSWERED}"),
    ),
}

LARGE = "1 GET /large, 1 end"
FULL = "headers 1, body 1 65535"

WINDOWS = {
    "6.9 WINDOW_UPDATE of 3 bytes": (frame(UPDATE, 0, 0, bytes(3)), *SIZE),
    "6.9 WINDOW_UPDATE by 0": (update(0, 0), *REFUSED),
    "6.9 WINDOW_UPDATE by 0 on a stream": (post() + update(1, 0), *BAD),
    "6.9 WINDOW_UPDATE by 0 on a closed stream": (get(path=b"/answer") + update(1, 0), *FINE),
    "6.9 the reserved bit of WINDOW_UPDATE is ignored": (update(0, 1 << 31 | 100), "", ""),
    "6.9.1 the connection's window over 2^31 - 1": (
        update(0, 2**31 - 1),
        *("", "goaway 0 FLOW_CONTROL_ERROR"),
    ),
    "6.9.1 the connection's window of 2^31 - 1": (update(0, 2**31 - 1 - 65_535), "", ""),
    "6.9.1 a stream's window over 2^31 - 1": (
        post() + update(1, 2**31 - 1),
        *(f"{OPEN}, 1 cancelled", "reset 1 FLOW_CONTROL_ERROR"),
    ),
    "6.9.1 an answer waits for both windows": (get(path=b"/large"), LARGE, FULL),
    "6.9.1 both windows open": (
        get(path=b"/large") + update(0, 100_000) + update(1, 100_000),
        *(f"{LARGE}, 1 sent", "headers 1, body 1 100000 end"),
    ),
    "6.9.1 the connection's window serves the longest waiting first": (
        get(path=b"/large") + get(3, path=b"/large") + update(1, 100_000) + update(3, 100_000),
        update(0, 34_465 + 100),
        *(
            f"{LARGE}, 3 GET /large, 3 end, 1 sent",
            "headers 1, body 1 65535, headers 3, body 1 34465 end, body 3 100",
        ),
    ),
    "6.9.1 a waiting answer is not in another's way": (
        get(path=b"/large") + update(0, 100) + get(3, path=b"/answer"),
        *(f"{LARGE}, 3 GET /answer, 3 end", f"{FULL}, headers 3, body 3 2 end"),
    ),
    "6.9.1 a reset stream does not wait": (
        get(path=b"/large") + reset() + update(0, 100) + update(1, 100),
        *(f"{LARGE}, 1 cancelled", FULL),
    ),
    "6.9.1 an answer of no bytes needs no window": (
        settings((WINDOW, 0)) + get(path=b"/empty"),
        *("1 GET /empty, 1 end", "ack, headers 1 end"),
    ),
    "6.9.1 a short answer goes on": (
        settings((WINDOW, 0)) + get(path=b"/answer") + update(1, 100),
        *(f"{DONE}, 1 sent", f"ack, {ANSWERED}"),
    ),
    "6.9.1 trailers follow the body": (
        settings((WINDOW, 1)) + get(path=b"/trailers") + update(1, 100),
        *("1 GET /trailers, 1 end, 1 sent", "ack, headers 1, body 1 2, headers 1 end"),
    ),
    "6.9.1 DATA up to the stream's window": (
        post() + data(1, bytes(65_535)),
        *(f"{OPEN}, 1 data 65535", ""),
    ),
    "6.9.1 DATA beyond the stream's window": (
        post() + data(1, bytes(65_535)) + data(1, bytes(20)),
        *(f"{OPEN}, 1 data 65535, 1 cancelled", "reset 1 FLOW_CONTROL_ERROR"),
    ),
    "6.9.1 padding is part of the window": (
        post() + data(1, bytes(65_535)) + data(1, b"\0", PADDED),
        *(f"{OPEN}, 1 data 65535, 1 cancelled", "reset 1 FLOW_CONTROL_ERROR"),
    ),
    "6.9.1 padding is given back": (
        post() + data(1, b"\xff" + bytes(255), PADDED) * 300,
        *(OPEN, "window 1 65536"),
    ),
    "6.9.1 DATA beyond the connection's window": (
        b"".join(post(number) + data(number, bytes(65_000)) for number in range(1, 33, 2)),
        post(33) + data(33, bytes(10_000)),
        *(
            ", ".join(f"{number} POST /, {number} data 65000" for number in range(1, 33, 2))
            + ", 33 POST /",
            "goaway 33 FLOW_CONTROL_ERROR",
        ),
    ),
    "6.9.1 what is dropped is given back": (
        post(1, length(0)) + data(1, bytes(60_000)) * 9,
        *(f"{OPEN}, 1 cancelled", "reset 1 PROTOCOL_ERROR, window 0 540000"),
    ),
    "6.9.1 what waits on a reset stream is given back": (
        b"".join(
            post(number) + data(number, bytes(60_000)) + reset(number) for number in range(1, 19, 2)
        ),
        *(
            ", ".join(
                f"{number} POST /, {number} data 60000, {number} cancelled"
                for number in range(1, 19, 2)
            ),
            "window 0 540000",
        ),
    ),
    "6.9.1 the window grows once a part is taken": (
        post(path=b"/take") + data(1, bytes(100)),
        *("1 POST /take, 1 data 100", "window 1 983141"),
    ),
    "6.9.1 the window does not grow behind the end": (
        post(path=b"/take") + data(1, bytes(99)) + data(1, b"a", END),
        *("1 POST /take, 1 data 100, 1 end", ""),
    ),
    "6.9.1 what is taken is given back": (
        post(path=b"/take") + data(1, bytes(60_000)) * 9,
        *("1 POST /take, 1 data 540000", "window 1 983141, window 0 524300, window 1 524300"),
    ),
    "6.9.2 a larger initial window": (
        get(path=b"/large") + update(0, 100_000) + settings((WINDOW, 200_000)),
        *(f"{LARGE}, 1 sent", "headers 1, body 1 65535, ack, body 1 34465 end"),
    ),
    "6.9.2 a smaller initial window makes others negative": (
        get(path=b"/large") + update(0, 100_000) + settings((WINDOW, 0)) + update(1, 65_535),
        *(LARGE, f"{FULL}, ack"),
    ),
    "6.9.2 a stream's window over 2^31 - 1 by settings": (
        post() + update(1, 2**31 - 1 - 65_535) + settings((WINDOW, 65_536)),
        *(OPEN, "goaway 1 FLOW_CONTROL_ERROR"),
    ),
}

WRONG = ("", "reset 1 PROTOCOL_ERROR")

REQUESTS = {
    "8.1 trailers": (post() + data(1, b"abc") + trailers((b"a", b"b")), *WHOLE_3),
    "8.1 trailers in two frames": (
        post() + trailers((b"a", b"b"), flags=END) + more(b"", WHOLE),
        *(f"{OPEN}, 1 end", ""),
    ),
    "8.1 trailers that do not end the request": (
        post() + trailers((b"a", b"b"), flags=WHOLE),
        *BAD,
    ),
    "8.1 a pseudo-header in trailers": (post() + trailers((b":path", b"/")), *BAD),
    "8.1 DATA behind trailers": (
        post() + trailers() + data(1, bytes(20)),
        *(f"{OPEN}, 1 end", "goaway 1 STREAM_CLOSED"),
    ),
    "8.2.1 upper case in trailers": (post() + trailers((b"A", b"b")), *BAD),
    "8.2.1 upper case": (get(1, (b"X-A", b"b")), *WRONG),
    "8.2.1 an empty name": (get(1, (b"", b"b")), *WRONG),
    "8.2.1 a space in a name": (get(1, (b"a b", b"c")), *WRONG),
    "8.2.1 a colon in a name": (get(1, (b"a:b", b"c")), *WRONG),
    "8.2.1 a name beyond ASCII": (get(1, (b"\xe4", b"c")), *WRONG),
    "8.2.1 NUL in a value": (get(1, (b"a", b"b\0c")), *WRONG),
    "8.2.1 CR in a value": (get(1, (b"a", b"b\rc")), *WRONG),
    "8.2.1 LF in a value": (get(1, (b"a", b"b\nc")), *WRONG),
    "8.2.1 LF behind a value": (get(1, (b"a", b"b\n")), *WRONG),
    "8.2.1 a space before a value": (get(1, (b"a", b" b")), *WRONG),
    "8.2.1 a tab behind a value": (get(1, (b"a", b"b\t")), *WRONG),
    "8.2.1 a value of a space": (get(1, (b"a", b" ")), *WRONG),
    "8.2.1 an empty value": (get(1, (b"a", b"")), *ACCEPTED),
    "8.2.1 a tab in a value": (get(1, (b"a", b"b\tc")), *ACCEPTED),
    "8.2.1 bytes beyond ASCII in a value": (get(1, (b"a", b"\xff\x80")), *ACCEPTED),
    "8.2.2 connection": (get(1, (b"connection", b"close")), *WRONG),
    "8.2.2 keep-alive": (get(1, (b"keep-alive", b"5")), *WRONG),
    "8.2.2 proxy-connection": (get(1, (b"proxy-connection", b"close")), *WRONG),
    "8.2.2 transfer-encoding": (post(1, (b"transfer-encoding", b"chunked")), *WRONG),
    "8.2.2 upgrade": (get(1, (b"upgrade", b"websocket")), *WRONG),
    "8.2.2 te: trailers": (get(1, (b"te", b"trailers")), *ACCEPTED),
    "8.2.2 te: gzip": (get(1, (b"te", b"gzip")), *WRONG),
    "8.2.3 cookies in parts": (get(1, (b"cookie", b"a=b"), (b"cookie", b"c=d")), *ACCEPTED),
    "8.3 a pseudo-header behind others": (headers(field(b"a", b"b") + block()), *WRONG),
    "8.3 an unknown pseudo-header": (get(1, (b":status", b"200")), *WRONG),
    "8.3 a pseudo-header twice": (headers(field(b":path", b"/") + block()), *WRONG),
    "8.3 a pseudo-header in upper case": (
        headers(field(b":PATH", b"/") + block(path=None)),
        *WRONG,
    ),
    "8.3.1 no method": (get(method=None), *WRONG),
    "8.3.1 an empty method": (get(method=b""), *WRONG),
    "8.3.1 a method with a space": (get(method=b"G T"), *WRONG),
    "8.3.1 a method beyond ASCII": (get(method=b"G\xff"), *WRONG),
    "8.3.1 an unknown method": (get(method=b"BREW"), "1 BREW /, 1 end", ""),
    "8.3.1 no scheme": (get(scheme=None), *WRONG),
    "8.3.1 an empty scheme": (get(scheme=b""), *WRONG),
    "8.3.1 no path": (get(path=None), *WRONG),
    "8.3.1 an empty path": (get(path=b""), *WRONG),
    "8.3.1 a path without a slash": (get(path=b"a"), *WRONG),
    "8.3.1 a path that is a URL": (get(path=b"http://a/"), *WRONG),
    "8.3.1 a path with a space": (get(path=b"/a b"), *WRONG),
    "8.3.1 a path beyond ASCII": (get(path=b"/\xff"), *WRONG),
    "8.3.1 a path with an escape character": (get(path=b"/\x1b[2J"), *WRONG),
    "8.3.1 a query": (get(path=b"/a?b=c"), "1 GET /a, 1 end", ""),
    "8.3.1 OPTIONS of all": (get(method=b"OPTIONS", path=b"*"), "1 OPTIONS *, 1 end", ""),
    "8.3.1 GET of all": (get(path=b"*"), *WRONG),
    "8.3.1 no authority": (get(authority=None), *ACCEPTED),
    "8.3.1 host alone": (get(1, (b"host", b"a"), authority=None), *ACCEPTED),
    "8.3.1 host and authority": (get(1, (b"host", b"a")), *ACCEPTED),
    "8.3.1 host and another authority": (get(1, (b"host", b"b")), *WRONG),
    "8.3.1 two hosts": (get(1, (b"host", b"a"), (b"host", b"a")), *WRONG),
    "8.3.1 an authority with a user": (get(authority=b"u@a"), *WRONG),
    "8.3.1 an authority with a path": (get(authority=b"a/b"), *WRONG),
    "8.3.1 an authority with a port": (get(authority=b"[::1]:80"), *ACCEPTED),
    "8.5 CONNECT": (
        get(method=b"CONNECT", scheme=None, path=None, authority=b"a:1"),
        *("1 CONNECT , 1 end", ""),
    ),
    "8.5 CONNECT with a path": (get(method=b"CONNECT"), *WRONG),
    "8.5 CONNECT without an authority": (
        get(method=b"CONNECT", scheme=None, path=None, authority=None),
        *WRONG,
    ),
    "8.1 a malformed request takes its number": (
        get(1, (b"X", b"")) + get(1),
        *("", "reset 1 PROTOCOL_ERROR"),
    ),
    "8.1 the body of a malformed request is dropped": (
        post(1, (b"X", b"")) + data(1, bytes(200)) + data(1, b"", END),
        *WRONG,
    ),
}

INDEXED = field(b"x", b"y", b"\x40")
NEWEST = b"\xbe"
"""The newest entry of the dynamic table."""
NOT_DECODED = ("", "goaway 0 COMPRESSION_ERROR")

HPACK = {
    "7541 2.3.1 static fields": (headers(b"\x82\x86\x84" + field(b":authority", b"a")), *ACCEPTED),
    "7541 2.3.2 a table before settings are acknowledged": (
        headers(block() + INDEXED) + get(3, path=b"/answer") + headers(block() + NEWEST, stream=5),
        *(
            f"{GOT}, 3 GET /answer, 3 end, 5 GET /, 5 end",
            "headers 3, body 3 2 end",
        ),
    ),
    "7541 2.3.2 an entry of a malformed request stays": (
        headers(block((b"X", b"")) + INDEXED) + headers(block() + NEWEST, stream=3),
        *("3 GET /, 3 end", "reset 1 PROTOCOL_ERROR"),
    ),
    "7541 2.3.2 an entry of dropped trailers stays": (
        post(1, length(0))
        + data(1, b"abcd")
        + headers(INDEXED)
        + headers(block() + NEWEST, stream=3),
        *(f"{OPEN}, 1 cancelled, 3 GET /, 3 end", "reset 1 PROTOCOL_ERROR"),
    ),
    "7541 2.3.3 an index beyond the table": (headers(block() + NEWEST), *NOT_DECODED),
    "7541 4.2 a table of size 0, as asked for": (
        ACKED + headers(NO_TABLE + block()) + get(3) + get(5),
        *(f"{GOT}, 3 GET /, 3 end, 5 GET /, 5 end", ""),
    ),
    "7541 4.2 no entries in a table of size 0": (
        ACKED + headers(NO_TABLE + block() + INDEXED + NEWEST),
        *NOT_DECODED,
    ),
    "7541 4.2 an empty table that is not announced, as nginx's": (
        ACKED + headers(block() + INDEXED) + headers(block(), stream=3),
        *(f"{GOT}, 3 GET /, 3 end", ""),
    ),
    "7541 4.2 a table that stays as it was": (
        headers(block() + INDEXED) + ACKED + headers(block() + NEWEST, stream=3),
        *(GOT, "goaway 1 COMPRESSION_ERROR"),
    ),
    "7541 4.2 a larger table than allowed": (
        ACKED + headers(integer(100, 5, 0x20) + block()),
        *NOT_DECODED,
    ),
    "7541 4.2 a change behind a field": (headers(block() + NO_TABLE), *NOT_DECODED),
    "7541 4.2 three changes": (
        headers(integer(100, 5, 0x20) + NO_TABLE * 2 + block()),
        *NOT_DECODED,
    ),
    "7541 4.2 equal blocks with a table in between": (
        headers(NO_TABLE + block())
        + headers(integer(100, 5, 0x20) + block() + INDEXED, stream=3)
        + headers(block() + NEWEST, stream=5)
        + headers(NO_TABLE + block(), stream=7)
        + headers(block() + NEWEST, stream=9),
        *(
            f"{GOT}, 3 GET /, 3 end, 5 GET /, 5 end, 7 GET /, 7 end",
            "goaway 7 COMPRESSION_ERROR",
        ),
    ),
    "7541 5.1 a number without an end": (headers(block() + b"\xff" * 2000), *NOT_DECODED),
    "7541 5.2 Huffman's code": (headers(block() + b"\0\x81\x1f\x81\x1f"), *ACCEPTED),
    "7541 6.1 index 0": (headers(block() + b"\x80"), *NOT_DECODED),
    "7541 6.2.3 a field that is never indexed": (
        headers(block() + field(b"a", b"b", b"\x10")),
        *ACCEPTED,
    ),
    "4.3 an error in dropped trailers": (
        post(1, length(0)) + data(1, b"abcd") + headers(b"\x80"),
        *(f"{OPEN}, 1 cancelled", "reset 1 PROTOCOL_ERROR, goaway 1 COMPRESSION_ERROR"),
    ),
}

CALM = "goaway 0 ENHANCE_YOUR_CALM"
CALMED = "", CALM
CALM_1 = "goaway 1 ENHANCE_YOUR_CALM"
FAST = get(path=b"/answer")


def each(make):
    """The bytes of so many requests."""
    return lambda count: b"".join(make(number) for number in range(1, 2 * count, 2))


def lines(number):
    return headers(block((b"a", b"b" * 30_000)), stream=number)


BROKEN = post(1, length(0)) + data(1, b"abcd")
"""A stream that was reset here."""
LIMITED = {
    "SETTINGS": (b"", settings(), 999),
    "SETTINGS of many values": (b"", settings(*((STREAMS, 1),) * 100), 99),
    "PING": (b"", ping(), 999),
    "acknowledgements of PING": (b"", ping(flags=ACK), 999),
    "acknowledgements of SETTINGS": (ACKED, ACKED, 999),
    "PRIORITY": (b"", frame(PRIORITY, 0, 1, bytes(5)), 999),
    "unknown frames": (b"", frame(0x16), 999),
    "GOAWAY": (b"", frame(GOAWAY, 0, 0, bytes(8)), 999),
    "empty DATA": (post(), data(), 999),
    "padded DATA": (post(), data(1, b"\0" + bytes(16), PADDED), 999),
    "a body byte by byte on a reset stream": (BROKEN, data(1, b"a"), 997),
    "empty DATA on a reset stream": (BROKEN, data(), 997),
    "ends of a reset stream": (BROKEN, data(1, b"", END), 997),
    "trailers on a reset stream": (BROKEN, trailers((b"a", b"b")), 62),
    "WINDOW_UPDATE": (b"", update(0, 16), 999),
    "WINDOW_UPDATE of a closed stream": (FAST, update(1, 1), 1008),
    "requests that are reset": (b"", each(lambda n: post(n) + reset(n)), 999),
    "complete requests that are reset": (b"", each(lambda n: get(n) + reset(n)), 999),
    "requests without their bodies": (b"", each(lambda n: get(n, length(1))), 999),
    "malformed requests": (b"", each(lambda n: get(n, (b"A", b""))), 62),
    "streams beyond the limit": (b"", each(get), 200 + 999),
    "empty CONTINUATION": (headers(block(), END), more(), 999),
    "CONTINUATION without an end": (headers(block(), END), more(field(b"a", bytes(1000))), 32),
    "large new blocks": (b"", each(lines), 142),
    "PING, and answers between": (b"", each(lambda n: ping() + get(n, path=b"/answer")), None),
    "PING, and messages between": (post(path=b"/echo"), data(1, bytes(20)) + ping(), None),
    "a body byte by byte": (post(), data(1, b"a"), None),
    "resets, and answers between": (
        *(b"", each(lambda n: get(2 * n - 1) + reset(2 * n - 1) + get(2 * n + 1, path=b"/answer"))),
        None,
    ),
}
"""What is sent before, what is sent again and again, and how often it may be; None: without end."""


@pytest.mark.parametrize(("before", "again", "most"), LIMITED.values(), ids=LIMITED)
def test_what_costs_work_without_a_request_ends_the_connection_when_it_is_too_much(
    before, again, most
):
    for count in [2200] if most is None else [most + 1, most]:
        client = Client()
        client.feed(START + before + (again(count) if callable(again) else again * count), 1 << 20)
        failed = client.http2.failed
        assert (failed and CODES[failed.code]) == (
            "ENHANCE_YOUR_CALM" if count != most and most else None
        )
    if most and not client.http2.in_block:
        client.http2.refill()  # a second passes
        client.feed(ping() * 48, 1 << 20)
        assert client.http2.failed is None


HEADERS_LIMITED = {
    "10.5.1 HEADERS of 33,000 bytes": (headers(block((b"a", b"b" * 33_000))), *CALMED),
    "10.5.1 a list of 30,000 bytes is read": (
        headers(block((b"a", b"b" * 16_000)) + field(b"a", b"b" * 14_000)),
        *ACCEPTED,
    ),
    "10.5.1 a list of 60,000 bytes in a small block": (
        headers(block() + field(b"a", b"b" * 3000, b"\x40") + NEWEST * 20),
        *CALMED,
    ),
    "10.5.1 many small fields": (headers(block() + b"\x82" * 1000), *CALMED),
    "10.5.1 many empty fields": (headers(block() + b"\0\0\0" * 1100), *CALMED),
}


def end(client):
    client.http2.end()


STOPS = {
    "6.8 the first GOAWAY": (
        lambda client: client.http2.announce_end(),
        get(path=b"/answer"),
        *(DONE, f"goaway 2147483647 NO_ERROR, {ANSWERED}"),
    ),
    "6.8 requests behind the last GOAWAY are ignored": (
        FAST,
        end,
        get(3) + post(5) + data(5, bytes(100)) + trailers((b"a", b"b"), stream=5) + reset(3),
        *(DONE, f"{ANSWERED}, goaway 1 NO_ERROR"),
    ),
    "6.8 what has come before the last GOAWAY is answered": (
        post(path=b"/answer"),
        end,
        data(1, b"abc", END),
        *("1 POST /answer, 1 data 3, 1 end", f"goaway 1 NO_ERROR, {ANSWERED}"),
    ),
    "6.8 a failure behind the last GOAWAY does not raise its stream": (
        FAST,
        end,
        get(3) + data(7),
        *(DONE, f"{ANSWERED}, goaway 1 NO_ERROR, goaway 1 PROTOCOL_ERROR"),
    ),
    "6.8 header blocks behind the last GOAWAY change the table": (
        FAST + post(3),
        end,
        headers(block() + INDEXED, stream=5) + headers(NEWEST, stream=3),
        *(f"{DONE}, 3 POST /, 3 end", f"{ANSWERED}, goaway 3 NO_ERROR"),
    ),
    "10.5 a flood of requests behind the last GOAWAY": (
        post(),
        end,
        b"".join(get(number) for number in range(3, 2006, 2)),
        *(OPEN, "goaway 1 NO_ERROR, goaway 1 ENHANCE_YOUR_CALM"),
    ),
    "6.4 a stream is given up": (
        post(),
        lambda client: client.http2.reset(client.http2.streams[1], 2),
        data(1, bytes(100)) + trailers((b"a", b"b")),
        *(OPEN, "reset 1 INTERNAL_ERROR"),
    ),
    "6.7 a ping of ours": (lambda client: client.http2.ping(), ping(bytes(8), ACK), "", "ping"),
}

TABLES = (
    *(FRAMES, STATES, DATA_FRAMES, HEADER_FRAMES, SETTING_FRAMES),
    *(WINDOWS, REQUESTS, HPACK, HEADERS_LIMITED, STOPS),
)
ROWS = {name: row for table in TABLES for name, row in table.items()}


def of_rows(rows):
    return pytest.mark.parametrize(
        ("sent", "heard", "written"),
        [(sent, heard, written) for *sent, heard, written in rows.values()],
        ids=rows,
    )


@of_rows(BEGINNINGS)
def test_a_connection_begins_as_its_row_says(sent, heard, written):
    assert outcome(sent, 1 << 20, begun=False) == (heard, written)
    assert outcome(sent, 1, begun=False) == (heard, written)


@of_rows(ROWS)
def test_frames_do_what_their_row_says_in_one_piece_and_byte_by_byte(sent, heard, written):
    size = sum(len(one) for one in sent if isinstance(one, bytes))
    assert outcome(sent, 1 << 20) == (heard, written)
    assert outcome(sent, 1 if size < 100_000 else 101) == (heard, written)


@pytest.mark.parametrize(
    ("sent", "most"),
    [
        (ping() * 300, 128),
        (data() * 300, 128),
        (b"".join(get(stream) for stream in range(3, 203, 2)), 26),
        (
            b"".join(
                get(stream, (b"a", b"%d" % (1000 + stream) * 300)) for stream in range(3, 203, 2)
            ),
            3,
        ),
    ],
    ids=["PING", "empty DATA", "requests", "new headers"],
)
def test_other_connections_have_their_turn_after_some_work(sent, most):
    client = Client()
    client.feed(START + ACKED + headers(NO_TABLE + block(method=b"POST"), WHOLE), 1 << 20)
    turns, size = 1, len(next(frame_bytes(sent)))
    again, before = client.http2.receive(sent), len(sent)
    while again:
        left = client.http2.received_bytes
        assert before - left <= most * size
        before = left
        again = client.http2.receive(b"")
        turns += 1
    assert turns >= len(sent) / size / most
    assert client.http2.failed is None
