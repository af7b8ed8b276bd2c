"""Tables of gRPC calls: the bytes received, and the bytes written."""

from __future__ import annotations

import asyncio
import gzip
import math
import zlib
from functools import partial
from types import SimpleNamespace

import hpack
import pytest

from service.api.errors import status_of
from service.api.paths import POLICY
from service.errors import (
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnsupportedMediaType,
)
from wire.errors import StatusCode
from wire.gate import Gate
from wire.grpc import GrpcStream, timeout_s_of
from wire.grpc_status import Status
from wire.http2 import Malformed
from wire.http2_head import Http2Head
from wire.ids import Ids
from wire.streams import OpenStreams

MOST = 1_000_000
"""Bytes of a message that the calls below take."""

HEAD = {
    ":status": "200",
    "content-type": "application/grpc",
    "grpc-accept-encoding": "identity,deflate,gzip",
}


def decoded(block):
    return dict(hpack.Decoder().decode(block))


def status_text(fields):
    name = StatusCode(int(fields["grpc-status"])).name
    return f"{name} {fields['grpc-message']}" if "grpc-message" in fields else name


class Client:
    """A client that reads all, seen as the connection of its one call: its writer, HTTP/2, access
    log, and a loop whose turns are taken by `turn`.
    """

    active_s, client = 0.0, None

    def __init__(self):
        self.policy = POLICY
        self.peer = self.loop = self.places = self.inflations = self.access = self.http2 = self
        self.inflaters = OpenStreams(1)
        self.written, self.used, self.later, self.most_held = [], 0, [], 0
        self.has_ended, self.reads = False, True

    def call(self, method, encoding):
        """Open one."""
        head = SimpleNamespace(error=None, method_of_grpc=method, wanted=None, encoding=encoding)
        head.path, head.ids = b"/a.B/C", Ids()
        stream = GrpcStream(self, None, head)
        stream.open()
        return stream

    def headers(self, stream, block, end=False):
        fields = decoded(block)
        assert {name: fields.pop(name) for name in HEAD} == HEAD
        self.written.append(f"only {status_text(fields)}" if end else "headers")

    def answer(self, stream, block, body, trailers):
        self.headers(stream, block)
        self.write(stream, (body,))
        self.finish(stream, trailers)

    def write(self, stream, pieces):
        body = b"".join(pieces)
        assert body[:1] == b"\0"
        assert int.from_bytes(body[1:5], "big") == len(body) - 5
        self.written.append(f"{body[5:]!r:.40}"[1:])

    def finish(self, stream, trailers):
        self.written.append(status_text(decoded(trailers)))

    def taken(self, stream, size):
        self.used += size

    def is_read(self, exchange):
        return self.reads

    def call_soon(self, call, *arguments):
        self.later.append(partial(call, *arguments))

    def add(self, *logged):
        if len(logged) > 1:  # to the access log, and not to the turns
            assert not self.has_ended
            self.has_ended = True
            return
        (step,) = logged

        def again():
            if step():
                self.later.append(again)

        self.later.append(again)

    def turn(self):
        later, self.later = self.later, []
        for call in later:
            call()


class Calls:
    """A method whose calls answer each message with its size and first bytes.

    `many`: several answers, ended by the half-close; else one, to the first. A call is ahead from
    each message on, until the next turn, if `slow`. A message that begins with "refuse" fails.
    """

    body_timeout_s = 7.0
    is_limited = is_endless = is_open = False

    def __init__(self, many=False, slow=False):
        self.many, self.slow = many, slow

    def read(self, headers):
        return timeout_s_of(headers)

    def open(self, wanted, exchange):
        self.exchange, self.heard, self.wanted = exchange, [], wanted
        self.count, self.ahead, self.body, self.is_open = 0, False, b"", True
        self.sizes = []
        return self

    # The call.

    def message(self, size):
        assert self.is_open
        if self.count and not self.many:
            raise InvalidInput("a second message")
        if size is not None and size > MOST:
            raise TooLarge(f"{size} bytes")
        self.count += 1
        self.sizes.append(size)
        self.body = b""
        return self

    def half_close(self):
        if not self.count:
            raise InvalidInput("no message")
        self.heard.append("half-close")
        if self.many and self.is_open:
            self.is_open = False
            self.exchange.end()

    def wait(self):
        self.heard.append("wait")

    @property
    def is_ahead(self):
        return self.ahead

    def stop(self, error):
        self.fail(error)

    def fail(self, error):
        if self.is_open:
            self.is_open = False
            self.exchange.end(status_of(error))

    def cancel(self):
        self.is_open = False
        self.heard.append("cancelled")

    # The message that arrives.

    def data(self, data):
        assert self.is_open
        assert data
        self.body += data
        if len(self.body) > MOST:
            raise TooLarge("too many bytes")

    def wait_for_body(self):
        assert self.is_open

    def complete(self, body=None):
        if body is None:
            body = self.body
            assert self.sizes[-1] in (None, len(body))
        body = bytes(body)
        if body.startswith(b"refuse"):
            raise Overloaded("busy", retry_after_s=2)
        if body.startswith(b"hold"):
            return
        found = body if len(body) < 20 else b"%d bytes, %b" % (len(body), body[:2])
        if not self.many:
            self.is_open = False
            self.exchange.reply(found)
            return
        self.exchange.write(found)
        if self.slow:
            self.ahead = True
            self.exchange.writer.call_soon(self._follow)

    def _follow(self):
        self.ahead = False
        self.exchange.read_on()


def message(body, compressed=0, size=None):
    return bytes((compressed,)) + (len(body) if size is None else size).to_bytes(4, "big") + body


def gzipped(body):
    return message(gzip.compress(body), 1)


def deflated(body):
    return message(zlib.compress(body), 1)


def outcome(method, encoding, sent, step, turns_between):
    """The output and the handler's calls. `sent` is cut every `step` bytes; the last one ends."""
    client = Client()
    exchange = client.call(method, encoding)
    pieces = [piece for piece in sent if piece is not END]
    cut = [
        (piece[at : at + step], last and at + step >= len(piece))
        for piece, last in zip(pieces, [*[False] * (len(pieces) - 1), sent[-1] is END], strict=True)
        for at in range(0, max(1, len(piece)), step)
    ]
    total = 0
    for piece, end in cut:
        total += len(piece)
        exchange.data(piece, end)
        if not end:
            exchange.wait()
        if turns_between:
            client.turn()
    for _ in range(100):
        client.turn()
    assert client.used == total or exchange.answered or sent[-1] is not END
    assert client.used <= total
    return ", ".join(client.written)


END = object()
"""The client sends no more."""

ONE, MANY = Calls, lambda: Calls(many=True)


def slow():
    return Calls(many=True, slow=True)


BOMB = zlib.compress(bytes(100 * MOST), 9)
LARGE = bytes(range(256)) * 3000
ENDED_EARLY = "only INVALID_ARGUMENT message: the request ended %d bytes before its message"

ROWS = {
    # The framing of messages, of a call with one.
    "a message": (ONE, "identity", [message(b"abc"), END], "headers, 'abc', OK"),
    "an empty message": (ONE, "identity", [message(b""), END], "headers, '', OK"),
    "a message, and the end later": (
        ONE,
        "identity",
        [message(b"abc"), b"", END],
        "headers, 'abc', OK",
    ),
    "a message without the end": (ONE, "identity", [message(b"abc")], "headers, 'abc', OK"),
    "a large message": (
        ONE,
        "identity",
        [message(LARGE), END],
        "headers, '768000 bytes, \\x00\\x01', OK",
    ),
    "no message": (ONE, "identity", [b"", END], "only INVALID_ARGUMENT no message"),
    "nothing yet": (ONE, "identity", [b""], ""),
    "a prefix without its message": (ONE, "identity", [message(b"abc")[:5]], ""),
    "a part of a prefix, and the end": (
        *(ONE, "identity", [b"\0\0", END]),
        ENDED_EARLY % 3,
    ),
    "a prefix, and the end": (ONE, "identity", [message(b"abc")[:5], END], ENDED_EARLY % 3),
    "a part of a message, and the end": (
        ONE,
        "identity",
        [message(b"abc")[:7], END],
        ENDED_EARLY % 1,
    ),
    "a part of a message, and an empty end": (
        *(ONE, "identity", [message(b"abc")[:7], b"", END]),
        ENDED_EARLY % 1,
    ),
    "a length that is too long": (
        ONE,
        "identity",
        [message(b"abc", size=10), END],
        ENDED_EARLY % 7,
    ),
    "a length that is too short": (
        *(ONE, "identity", [message(b"hold", size=4) + b"de", END]),
        ENDED_EARLY % 3,
    ),
    "a length of 4 GiB": (
        *(ONE, "identity", [message(b"abc", size=2**32 - 1)]),
        "only INVALID_ARGUMENT 4294967295 bytes",
    ),
    "a length over the limit": (
        *(ONE, "identity", [message(b"", size=MOST + 1)]),
        f"only INVALID_ARGUMENT {MOST + 1} bytes",
    ),
    "a length at the limit": (
        *(ONE, "identity", [message(bytes(MOST)), END]),
        f"headers, '{MOST} bytes, \\x00\\x00', OK",
    ),
    "a second message behind the answer": (
        *(ONE, "identity", [message(b"abc") + message(b"de"), END]),
        "headers, 'abc', OK",
    ),
    "a second message before the answer": (
        *(ONE, "identity", [message(b"hold") + message(b"de"), END]),
        "only INVALID_ARGUMENT a second message",
    ),
    "a message that is refused": (
        *(ONE, "identity", [message(b"refuse"), END]),
        "only RESOURCE_EXHAUSTED busy",
    ),
    "a first byte of 2": (
        *(ONE, "identity", [message(b"abc", 2), END]),
        "only INVALID_ARGUMENT message: got 2 as the first byte of a message, expected 0 or 1",
    ),
    "a first byte of 255": (
        *(ONE, "gzip", [message(b"abc", 255), END]),
        "only INVALID_ARGUMENT message: got 255 as the first byte of a message, expected 0 or 1",
    ),
    "text instead of a message": (
        *(ONE, "identity", [b"GET / HTTP/1.1\r\n", END]),
        "only INVALID_ARGUMENT message: got 71 as the first byte of a message, expected 0 or 1",
    ),
    # Compression.
    "a compressed message without an encoding": (
        *(ONE, "identity", [gzipped(b"abc"), END]),
        "only INTERNAL message: got a compressed message, expected grpc-encoding to say how",
    ),
    "gzip": (ONE, "gzip", [gzipped(b"abc"), END], "headers, 'abc', OK"),
    "deflate": (ONE, "deflate", [deflated(b"abc"), END], "headers, 'abc', OK"),
    "gzip of nothing": (ONE, "gzip", [gzipped(b""), END], "headers, '', OK"),
    "gzip of much": (ONE, "gzip", [gzipped(LARGE), END], "headers, '768000 bytes, \\x00\\x01', OK"),
    "gzip of much, in two frames": (
        *(ONE, "gzip", [gzipped(LARGE)[:2000], gzipped(LARGE)[2000:], END]),
        "headers, '768000 bytes, \\x00\\x01', OK",
    ),
    "gzip of much that is stored": (
        *(ONE, "gzip", [message(gzip.compress(LARGE, 0), 1), END]),
        "headers, '768000 bytes, \\x00\\x01', OK",
    ),
    "gzip of two turns to the byte": (
        *(ONE, "gzip", [gzipped(bytes(2 * 128 * 1024)), END]),
        "headers, '262144 bytes, \\x00\\x00', OK",
    ),
    "gzip of the limit": (
        *(ONE, "gzip", [gzipped(bytes(MOST)), END]),
        f"headers, '{MOST} bytes, \\x00\\x00', OK",
    ),
    "gzip of more than the limit": (
        *(ONE, "gzip", [gzipped(bytes(MOST + 1)), END]),
        "only INVALID_ARGUMENT too many bytes",
    ),
    "a bomb": (ONE, "deflate", [message(BOMB, 1), END], "only INVALID_ARGUMENT too many bytes"),
    "a message that is not compressed, of a call with an encoding": (
        *(ONE, "gzip", [message(b"abc"), END]),
        "headers, 'abc', OK",
    ),
    "deflate where gzip is announced": (
        *(ONE, "gzip", [deflated(b"abc"), END]),
        "only INVALID_ARGUMENT message: not compressed as grpc-encoding says",
    ),
    "gzip where deflate is announced": (
        *(ONE, "deflate", [gzipped(b"abc"), END]),
        "only INVALID_ARGUMENT message: not compressed as grpc-encoding says",
    ),
    "deflate without zlib's frame": (
        *(ONE, "deflate", [message(zlib.compress(b"abc", wbits=-15), 1), END]),
        "only INVALID_ARGUMENT message: not compressed as grpc-encoding says",
    ),
    "compressed bytes that end too early": (
        *(ONE, "gzip", [message(gzip.compress(b"abc")[:-1], 1), END]),
        "only INVALID_ARGUMENT message: its compressed bytes end too early",
    ),
    "no compressed bytes": (
        *(ONE, "gzip", [message(b"", 1), END]),
        "only INVALID_ARGUMENT message: its compressed bytes end too early",
    ),
    "a wrong checksum": (
        *(ONE, "deflate", [message(zlib.compress(b"abc")[:-1] + b"x", 1), END]),
        "only INVALID_ARGUMENT message: not compressed as grpc-encoding says",
    ),
    "bytes behind the compressed ones": (
        *(ONE, "gzip", [message(gzip.compress(b"abc") + b"x", 1), END]),
        "only INVALID_ARGUMENT message: bytes behind its compressed end",
    ),
    "many bytes behind the compressed ones": (
        *(ONE, "gzip", [message(gzip.compress(b"abc"), 1, 1 << 31) + bytes(100_000)]),
        "only INVALID_ARGUMENT message: bytes behind its compressed end",
    ),
    "two compressed parts": (
        *(ONE, "gzip", [message(gzip.compress(b"abc") * 2, 1), END]),
        "only INVALID_ARGUMENT message: bytes behind its compressed end",
    ),
    "compressed bytes of a message that ends": (
        *(ONE, "gzip", [gzipped(LARGE)[:1000], END]),
        ENDED_EARLY % (len(gzipped(LARGE)) - 1000),
    ),
    "a second compressed message before the answer": (
        *(ONE, "gzip", [gzipped(b"hold") + gzipped(b"abc"), END]),
        "only INVALID_ARGUMENT a second message",
    ),
    # Several messages.
    "two messages": (
        *(MANY, "identity", [message(b"abc"), message(b"de"), END]),
        "headers, 'abc', 'de', OK",
    ),
    "two messages in a frame": (
        *(MANY, "identity", [message(b"abc") + message(b"de"), END]),
        "headers, 'abc', 'de', OK",
    ),
    "a frame that ends within the second": (
        *(MANY, "identity", [message(b"abc") + message(b"de")[:3], message(b"de")[3:], END]),
        "headers, 'abc', 'de', OK",
    ),
    "empty messages": (MANY, "identity", [message(b"") * 5, END], "headers" + ", ''" * 5 + ", OK"),
    "no messages": (MANY, "identity", [b"", END], "only INVALID_ARGUMENT no message"),
    "an end within the second": (
        *(MANY, "identity", [message(b"abc") + message(b"de")[:6], END]),
        "headers, 'abc', " + ENDED_EARLY[5:] % 1,
    ),
    "an end within the second's prefix": (
        *(MANY, "identity", [message(b"abc") + b"\0", END]),
        "headers, 'abc', " + ENDED_EARLY[5:] % 4,
    ),
    "a wrong second": (
        *(MANY, "identity", [message(b"abc") + message(b"de", 3), END]),
        "headers, 'abc', INVALID_ARGUMENT message: got 3 as the first byte of a message, "
        "expected 0 or 1",
    ),
    "a second that is refused": (
        *(MANY, "identity", [message(b"abc") + message(b"refuse"), message(b"de"), END]),
        "headers, 'abc', RESOURCE_EXHAUSTED busy",
    ),
    "messages with and without compression": (
        *(MANY, "gzip", [gzipped(b"abc") + message(b"de") + gzipped(LARGE) + message(b"f"), END]),
        "headers, 'abc', 'de', '768000 bytes, \\x00\\x01', 'f', OK",
    ),
    "large messages": (
        *(MANY, "identity", [message(LARGE) * 3, END]),
        "headers" + ", '768000 bytes, \\x00\\x01'" * 3 + ", OK",
    ),
    # A call that takes a message in each turn of the loop.
    "messages that wait": (
        *(slow, "identity", [message(b"a") + message(b"b"), message(b"c"), message(b"d"), END]),
        "headers, 'a', 'b', 'c', 'd', OK",
    ),
    "compressed messages that wait": (
        *(slow, "gzip", [gzipped(b"a") + gzipped(LARGE), gzipped(b"c"), END]),
        "headers, 'a', '768000 bytes, \\x00\\x01', 'c', OK",
    ),
    "a part of a message that waits, and the end": (
        *(slow, "identity", [message(b"a") + message(b"bc")[:6], END]),
        "headers, 'a', " + ENDED_EARLY[5:] % 1,
    ),
    "a wrong message that waits": (
        *(slow, "identity", [message(b"a") + message(b"b", 9) + message(b"c"), END]),
        "headers, 'a', INVALID_ARGUMENT message: got 9 as the first byte of a message, "
        "expected 0 or 1",
    ),
}


@pytest.mark.parametrize(("method", "encoding", "sent", "expected"), ROWS.values(), ids=ROWS)
def test_messages_do_what_their_row_says_however_they_are_cut(method, encoding, sent, expected):
    size = sum(len(piece) for piece in sent if piece is not END)
    steps = [1 << 24, 4096 + 1] if size > 4000 else [1 << 24, 1, 2, 3, 5, 6, 7]
    for step in steps:
        for turns_between in (True, False):
            found = outcome(method(), encoding, sent, step, turns_between)
            assert found == expected, (step, turns_between)


# Headers.

POST = (
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a.B/C"), (b":authority", b"a")),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)


def head(*more, without=(), **changed):
    fields = [(name, changed.get(name.strip(b":").decode(), value)) for name, value in POST]
    fields = [(name, value) for name, value in fields if name not in without]
    return Http2Head((*fields, *more), {}, {b"/a.B/C": Calls()}, Gate())


def timeout(text):
    return head((b"grpc-timeout", text))


TIMEOUTS = {
    "hours": (b"2H", 7200),
    "minutes": (b"2M", 120),
    "seconds": (b"10S", 10),
    "milliseconds": (b"1500m", 1.5),
    "microseconds": (b"20u", 2e-5),
    "nanoseconds": (b"99999999n", 0.099999999),
    "no time": (b"0S", 0),
    "eight digits": (b"99999999H", 99999999 * 3600),
    "nine digits": (b"999999999n", None),
    "no digits": (b"S", None),
    "no unit": (b"10", None),
    "an unknown unit": (b"10s", None),
    "a sign": (b"-1S", None),
    "a fraction": (b"1.5S", None),
    "a space": (b"1 S", None),
    "two": (b"1S1S", None),
    "nothing": (b"", None),
    "digits of another script": ("\N{ARABIC-INDIC DIGIT ONE}S".encode(), None),
}


@pytest.mark.parametrize(("text", "expected_s"), TIMEOUTS.values(), ids=TIMEOUTS)
def test_a_timeout_is_read_in_seconds_or_refused(text, expected_s):
    found = timeout(text)
    if expected_s is None:
        status = status_of(found.error)
        assert status.code is StatusCode.INVALID_ARGUMENT
        assert status.details.startswith("grpc-timeout: got ")
        assert ("lenet-error-field", "grpc-timeout") in status.metadata
    else:
        assert found.error is None
        assert found.wanted == pytest.approx(expected_s, rel=1e-12)


HEADS = {
    "as it should be": (head, "a call"),
    "no timeout": (lambda: head(), "a call"),
    "application/grpc+proto": (lambda: change_type(b"application/grpc+proto"), "a call"),
    "a parameter": (lambda: change_type(b"application/grpc;charset=utf-8"), "a call"),
    "application/grpc+json": (
        lambda: change_type(b"application/grpc+json"),
        "UNIMPLEMENTED content-type: got 'application/grpc+json', expected application/grpc",
    ),
    "application/grpc-web": (
        lambda: change_type(b"application/grpc-web"),
        "UNIMPLEMENTED content-type: got 'application/grpc-web', expected application/grpc",
    ),
    "application/json": (lambda: change_type(b"application/json"), "a plain request"),
    "no content-type": (lambda: head(without=(b"content-type",)), "a plain request"),
    "GET": (lambda: head(method=b"GET"), "a plain request"),
    "no te": (lambda: head(without=(b"te",)), "a call"),
    "te: gzip": (lambda: head((b"te", b"gzip"), without=(b"te",)), "malformed"),
    "an unknown method": (
        lambda: head(path=b"/a.B/D"),
        "UNIMPLEMENTED method: got '/a.B/D', expected one that is served here",
    ),
    "a method with a query": (
        lambda: head(path=b"/a.B/D?x"),
        "UNIMPLEMENTED method: got '/a.B/D', expected one that is served here",
    ),
    "grpc-encoding: gzip": (lambda: head((b"grpc-encoding", b"gzip")), "a call"),
    "grpc-encoding: deflate": (lambda: head((b"grpc-encoding", b"deflate")), "a call"),
    "grpc-encoding: identity": (lambda: head((b"grpc-encoding", b"identity")), "a call"),
    "grpc-encoding: zstd": (
        lambda: head((b"grpc-encoding", b"zstd")),
        "UNIMPLEMENTED grpc-encoding: got 'zstd', expected one of identity, gzip, deflate",
    ),
    "metadata of 16 KiB": (
        lambda: head((b"a", b"b" * 16_384)),
        "RESOURCE_EXHAUSTED metadata: got 16691 bytes, expected at most 16384",
    ),
    "authorization twice": (
        lambda: head(*[(b"authorization", b"Bearer a")] * 2),
        "INVALID_ARGUMENT authorization: got 2 fields, expected at most one",
    ),
    "binary metadata": (lambda: head((b"a-bin", b"AAECAw")), "a call"),
}


def change_type(value):
    return head((b"content-type", value), without=(b"content-type",))


@pytest.mark.parametrize(("read", "expected"), HEADS.values(), ids=HEADS)
def test_headers_lead_to_a_call_or_to_the_status_of_their_row(read, expected):
    try:
        found = read()
    except Malformed:
        assert expected == "malformed"
        return
    if not found.is_grpc:
        assert expected == "a plain request"
    elif found.error is None:
        assert expected == "a call"
    else:
        status = status_of(found.error)
        assert f"{status.code.name} {status.details}" == expected


# Statuses.

STATUSES = {
    "INVALID_ARGUMENT": InvalidInput("a"),
    "UNAUTHENTICATED": Unauthorized("a"),
    "PERMISSION_DENIED": Forbidden("a"),
    "NOT_FOUND": UnknownModel("a"),
    "RESOURCE_EXHAUSTED": Overloaded("a"),
    "DEADLINE_EXCEEDED": DeadlineExceeded("a"),
    "CANCELLED": Cancelled("a"),
    "UNAVAILABLE": Unavailable("a"),
    "INTERNAL": InferenceFailed("a"),
}


@pytest.mark.parametrize(("name", "error"), STATUSES.items(), ids=STATUSES)
def test_an_error_has_the_status_of_its_row(name, error):
    fields = decoded(status_of(error).block())
    assert status_text(fields) == f"{name} a"
    assert fields["lenet-error-code"] == error.code


@pytest.mark.parametrize("error", [TooLarge("a"), UnsupportedMediaType("a")])
def test_what_a_client_has_to_change_is_an_invalid_argument(error):
    assert status_of(error).code is StatusCode.INVALID_ARGUMENT


MESSAGES = {
    "plain": ("abc d", "abc d"),
    "a percent sign": ("100%", "100%25"),
    "an umlaut": ("ä", "%C3%A4"),
    "beyond the basic plane": ("😀", "%F0%9F%98%80"),
    "a line feed": ("a\nb", "a%0Ab"),
    "a tilde and a DEL": ("~\x7f", "~%7F"),
    "NUL": ("a\0b", "a%00b"),
    "half of a surrogate pair": ("a\ud800", "a?"),
    "spaces around it": (" a ", "a"),
    "500 characters": ("a" * 500, "a" * 500),
    "501 characters": ("a" * 501, "a" * 497 + "..."),
    "none": ("", None),
}


@pytest.mark.parametrize(("text", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_is_percent_encoded(text, expected):
    assert decoded(status_of(ServiceError(text)).block()).get("grpc-message") == expected


def test_the_field_of_an_error_and_the_time_to_a_retry_are_metadata():
    fields = decoded(status_of(Overloaded("a", field="b\n\xe9", retry_after_s=3)).block())
    assert fields["lenet-error-field"] == r"b\n\xe9"
    assert fields["grpc-retry-pushback-ms"] == "3000"


# Calls ended by the connection.


def opened(method):
    client = Client()
    return client, client.call(method, "gzip")


def test_a_cancelled_call_writes_nothing():
    client, exchange = opened(method := Calls(many=True))
    exchange.data(message(b"abc")[:6], False)
    exchange.cancel()
    exchange.cancel()
    exchange.write(b"de")
    exchange.end()
    exchange.data(message(b"abc")[6:], True)
    assert method.heard == ["cancelled"]
    assert client.written == []
    assert client.used == len(message(b"abc"))


def test_a_call_that_fails_in_the_middle_of_its_answers_ends_with_a_status():
    client, exchange = opened(Calls(many=True))
    exchange.data(message(b"abc"), False)
    exchange.fail(Unavailable("stopping"))
    exchange.fail(Unavailable("stopping"))
    assert client.written == ["headers", "'abc'", "UNAVAILABLE stopping"]


def test_a_call_that_is_stopped_before_its_answer_has_a_status_alone():
    client, exchange = opened(Calls())
    exchange.data(message(b"abc")[:6], False)
    exchange.stop(Unavailable("stopping"))
    assert client.written == ["only UNAVAILABLE stopping"]


def test_a_call_without_an_answer_ends_with_ok_alone():
    client, exchange = opened(Calls())
    exchange.end(Status(StatusCode.OK))
    exchange.end(Status(StatusCode.INTERNAL))
    assert client.written == ["only OK"]
    assert exchange.body_timeout_s() == math.inf


def test_the_client_sends_no_more_than_its_window_while_messages_wait():
    client, exchange = opened(method := Calls(many=True, slow=True))
    for _ in range(10):
        exchange.data(message(b"abc"), False)
    assert client.used == len(message(b"abc"))
    for count in range(2, 11):
        client.turn()  # the call takes more
        client.turn()  # and gets it
        assert client.used == count * len(message(b"abc"))
    assert method.body_timeout_s == exchange.body_timeout_s()


def test_a_call_waits_while_a_message_is_not_complete():
    _, exchange = opened(method := Calls())
    exchange.wait()
    exchange.data(message(b"abc")[:6], False)
    exchange.wait()
    assert method.heard == ["wait"]


def test_a_call_that_answers_waits_for_a_client_that_does_not_read():
    async def run():
        client, exchange = opened(Calls(many=True))
        await exchange.drained()
        client.reads = False
        waits = asyncio.ensure_future(exchange.drained())
        await asyncio.sleep(0)
        exchange.sent()  # by the stream's window, and the connection still does not write
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waits.done()
        client.reads = True
        exchange.sent()
        await waits

    asyncio.run(run())
