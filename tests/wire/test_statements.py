"""Limits of connections at their documented values: in memory, on virtual time."""

from __future__ import annotations

import gzip
import re
import struct
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import hpack
import pytest

import tests.wire.test_http2 as h2
from service.api import grpc_methods
from tests.documented import documented
from tests.faults.http2 import WATCH, call_headers, message
from tests.fuzz.connection import Transport
from tests.fuzz.turns import Turns
from tests.wire.doors import Echo, application
from wire.budget import Budget
from wire.door import HttpService
from wire.keys import Keys

CHECK = call_headers(b"/grpc.health.v1.Health/Check")
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /fast HTTP/1.1\r\nHost: a\r\n"
HELD = b"POST /held HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na"
PONG = h2.ping(bytes(8), h2.ACK)


class Door:
    """The service's door with gRPC's methods and two routes: /fast echoes, /held never answers."""

    def __init__(self):
        models, stand_in, held = SimpleNamespace(ready=True, names=["lenet"]), MagicMock(), Echo()
        held.hold, self.loop = True, Turns()
        routes = {(b"POST", b"/fast"): Echo(), (b"POST", b"/held"): held}
        methods = grpc_methods.methods(stand_in, SimpleNamespace(models=models), Keys())
        app = partial(application, {"begun": []})
        self.door = HttpService(routes, Budget(1 << 30), methods=methods, app=app)


class Client(Transport):
    """A client's connection. `blocked`: it reads nothing of 100,000 bytes that were written."""

    def __init__(self, sent, blocked=False, door=None):
        super().__init__()
        door = door or Door()
        self.loop, self.blocked, self.over_http2 = door.loop, blocked, sent.startswith(h2.START)
        connection = self.protocol = self.loop.call(door.door, self.loop)
        self.loop.call(connection.connection_made, self)
        self.send(sent)
        if blocked:
            self.loop.call(connection.pause_writing)

    def get_write_buffer_size(self):
        return 100_000 * self.blocked

    def send(self, sent, wait_s=0.9):
        """Send, and wait until all is parsed, a part in a turn, and answered."""
        if sent and not self.closed:
            self.loop.call(self.protocol.data_received, sent)
        self.loop.wait(self.loop.time() + wait_s)
        return self

    def frames(self):
        return list(h2.frames(bytes(self.written)))

    def answers(self):
        """Over HTTP/2, {stream: how it ended}: by a status, gRPC's status or the code of a reset;
        0 stands for the connection."""
        begun, ended = {}, {}
        for kind, flags, stream, payload in self.frames():
            if kind == h2.HEADERS:
                fields = dict(hpack.Decoder().decode(payload))
                begun[stream] = fields.get("grpc-status") or fields[":status"]
            if kind in (h2.HEADERS, h2.DATA) and flags & h2.END:
                ended[stream] = begun[stream]
            elif kind == h2.RST:
                ended.setdefault(stream, h2.CODES[h2.word(payload)])
            elif kind == h2.GOAWAY and h2.word(payload[4:]):
                ended[0] = h2.CODES[h2.word(payload[4:])]
        return ended

    def outcome(self):
        """How the last request or the connection ended by an answer; None if none did."""
        if self.over_http2:
            return next(reversed(self.answers().values()), None)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", self.written)
        return statuses[-1].decode() if statuses else "PAUSED" if self.paused else None

    def events(self):
        asked = self.over_http2 and any(one[:2] == (h2.PING, 0) for one in self.frames())
        return {self.outcome(), asked and "ASKED", (self.closed or self.shut) and "CLOSED"}


def check(content, field=b"", end=True):
    return h2.START + h2.headers(CHECK + field, 4) + h2.data(1, content, h2.END * end)


HEAD = "bytes of a request's headers over HTTP/1.1; time in which they arrive"
IDLE = "time without a request on a connection, also if the client answers PINGs"
SILENT = "time in which a client over HTTP/2 says nothing"
FRAME = (
    "time in which a header block, SETTINGS, PING, RST_STREAM or WINDOW_UPDATE over HTTP/2 arrives"
)
OTHER = "bytes and time of a message of other methods"
UNENDED = h2.START + h2.headers(h2.block(), flags=0)
UNREAD = h2.START + h2.settings((h2.WINDOW, 0)) + h2.get(path=b"/mebibyte")
HELD_CALL = h2.START + h2.post(path=b"/held")


@pytest.mark.parametrize(
    ("row", "numbers", "event", "sent", "dribble"),
    [
        (HEAD, [1], "CLOSED", b"", b""),
        (HEAD, [1], "CLOSED", b"GET / HTTP/1.1\r\nX: ", b"a"),
        (HEAD, [1], "CLOSED", GET + GET[:-2], b""),
        (HEAD, [1], "CLOSED", h2.START[:20], b""),
        (FRAME, [0], "CLOSED", UNENDED, b""),
        (FRAME, [0], "CLOSED", UNENDED, h2.more(b"\0")),
        (FRAME, [0], "CLOSED", h2.START + h2.get() + h2.get(3)[:12], b"a"),
        (IDLE, [0], "CLOSED", GET, b""),
        (IDLE, [0], "CLOSED", h2.START + h2.get(), PONG),
        (IDLE, [1], "CLOSED", GET, None),
        (IDLE, [1], "CANCEL", UNREAD, PONG),
        (SILENT, [0], "ASKED", HELD_CALL, b""),
        (SILENT, [0, 1], "CLOSED", HELD_CALL, b""),
        (OTHER, [1], "4", check(message(bytes(100))[:50], end=False), b""),
    ],
)
@pytest.mark.states(
    "limits",
    {
        HEAD: "connections in memory that send nothing, a byte a second, half of a second request "
        "or of the preface of HTTP/2, on virtual time",
        IDLE: "idle connections of both versions, one that answers PINGs, on virtual time",
        FRAME: "blocks that do not go on, or by a frame a second; a frame by a byte a second",
        SILENT: "a client with an open request that answers no PING, on virtual time",
        OTHER: "a call of Check whose message does not come, on virtual time",
    },
)
@pytest.mark.states(
    "limits", IDLE, found="clients that take nothing: from the socket, or through HTTP/2's windows"
)
def test_a_connection_is_ended_at_its_time(row, numbers, event, sent, dribble):
    client = Client(sent, blocked=dribble is None)
    began_s = client.loop.time() - 0.9
    while event not in client.events():
        assert client.loop.time() < began_s + 1000
        client.loop.wait(client.loop.time() + 1, lambda: event in client.events())
        client.send(dribble, 0)
    least_s = sum(documented(row)[number] for number in numbers)
    # Checks come once a second; one may see a client's state that the next finds unchanged.
    assert least_s <= client.loop.time() - began_s <= least_s + 2


FIELDS = "header fields of a request; bytes of its target; parameters of its query"
LISTS = "header fields of a request over HTTP/2"
SMALL = "header fields in a small header block over HTTP/2"
BEHIND = "bytes that a client sends over HTTP/1.1 behind a request that is not answered"
COSTLY = "frames that bring no request further"
CHUNKS = "bytes of chunk extensions and trailers of a body; of one line of them"


def http1(count, target=b"/", size=0):
    """A request with `count` fields, and `size` bytes in all."""
    lines = [b"Host: a", *[b"X: "] * (count - 1)]
    head = b"GET %s HTTP/1.1\r\n%s\r\n\r\n" % (target, b"\r\n".join(lines))
    return head.replace(b"X: ", b"X: " + b"a" * (size - len(head)), 1) if size else head


def target(number, count):
    """One of `count` bytes, or of `count` parameters."""
    return b"/%b?b" % (b"a" * (count - 3)) if number == 1 else b"/?a" + b"&a" * (count - 1)


def counted(block):
    return sum(len(name + value) + 32 for name, value in hpack.Decoder().decode(block))


def listed(size, block):
    """A field that makes a header list of `size` bytes of that of `block`."""
    return b"a", b"b" * (size - counted(block) - 33)


def listed_call(size):
    return check(message(b""), h2.field(*listed(size, CHECK)))


def small(most):
    """A block whose fields count as `most` bytes and as those that its own bytes allow."""
    block, allowed = h2.block((b"a", b"")) + b"\x95" * 125, int(documented(SMALL)[1])
    rest = (counted(block) - allowed * len(block) - most) // (allowed - 1)
    return h2.START + h2.headers(h2.block((b"a", b"b" * rest)) + b"\x95" * 125)


def message_of(size):
    """A call whose message is one string of a field."""
    varint = bytes((size - 3 & 127 | 128, size - 3 >> 7))
    return check(message(b"\x12" + varint + bytes(size - 3)))


def chunks(size, lines, trailers):
    """A body whose chunk extensions or trailers are `size` bytes in so many lines."""
    rest = b"a" * (size // lines - 4)
    if trailers:
        body = b"1\r\na\r\n0\r\n" + (b"a:" + rest + b"\r\n") * lines + b"\r\n"
    else:
        body = (b"1;" + rest + b"\r\na\r\n") * lines + b"0\r\n\r\n"
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + body


@pytest.mark.parametrize(
    ("row", "number", "make", "within", "beyond", "more"),
    [
        (HEAD, 0, lambda n: http1(2, size=n), "200", "431", 1),
        (FIELDS, 0, http1, "200", "431", 1),
        (FIELDS, 0, lambda n: h2.START + h2.get(1, *[(b"a", b"")] * n), "200", "431", 1),
        (FIELDS, 1, lambda n: http1(1, target(1, n)), "200", "414", 1),
        (FIELDS, 1, lambda n: h2.START + h2.get(path=target(1, n)), "200", "414", 1),
        (FIELDS, 2, lambda n: http1(1, target(2, n)), "200", "400", 1),
        (FIELDS, 2, lambda n: h2.START + h2.get(path=target(2, n)), "200", "400", 1),
        (LISTS, 0, lambda n: h2.START + h2.get(1, listed(n, h2.block())), "200", "431", 1),
        (LISTS, 0, listed_call, "0", "8", 1),
        (LISTS, 0, lambda n: listed_call(2 * n), "8", "ENHANCE_YOUR_CALM", 1),
        (SMALL, 0, small, "431", "ENHANCE_YOUR_CALM", 1),
        (OTHER, 0, message_of, "0", "3", 1),
        (BEHIND, 0, lambda n: HELD + b"G" * n, None, "PAUSED", 1),
        (CHUNKS, 0, lambda n: chunks(n, 20, trailers=False), "200", "400", 640),
        (CHUNKS, 0, lambda n: chunks(n, 20, trailers=True), "200", "400", 20),
        (CHUNKS, 1, lambda n: chunks(n, 1, trailers=False), "200", "400", 40),
        (CHUNKS, 1, lambda n: chunks(n, 1, trailers=True), "200", "400", 1),
    ],
)
@pytest.mark.states(
    "limits",
    {
        FIELDS: "requests with as many and one more, over HTTP/1.1 and HTTP/2",
        HEAD: "header sections of as many bytes and one more",
        LISTS: "header lists of as many bytes and one more",
        SMALL: "blocks of indexed fields with as many bytes and one more",
        OTHER: "calls of Check whose message is as long and one byte longer",
        BEHIND: "as many bytes behind a request that is held, and one more: reading has paused",
        CHUNKS: "bodies in chunks with as many and 1 % more, in one line and in twenty",
    },
)
@pytest.mark.states(
    "limits", LISTS, found="calls with as many bytes and one more; with twice as many and two more"
)
def test_what_is_at_its_limit_is_answered_and_no_more(row, number, make, within, beyond, more):
    most = int(documented(row)[number])
    outcomes = [Client(make(count)).outcome() for count in (most, most + more)]
    assert outcomes == [within, beyond]


def held(stream):
    return h2.get(stream, path=b"/held", method=b"POST")


@pytest.mark.parametrize("frame", [h2.ping(), h2.settings(), h2.data(), None])
@pytest.mark.states(
    "limits",
    COSTLY,
    found="as many PINGs, SETTINGS, empty DATA or resets, and 1 % more; more after some seconds",
)
def test_frames_that_bring_no_request_further_are_limited(frame):
    at_once, each_s = documented(COSTLY)
    few, many, later = int(0.99 * at_once), int(1.01 * at_once), 5 / each_s

    def costly(first, count):
        """Frames, or requests of which the first has the number `first` and each is reset."""
        numbers = range(2 * first + 3, 2 * (first + count) + 3, 2)
        return b"".join(frame or held(number) + h2.reset(number) for number in numbers)

    def flood(first, second=0):
        client = Client(h2.START + h2.post(path=b"/fast") + costly(0, first)).send(b"", 4.1)
        return client.send(costly(first, second)).outcome()

    assert [flood(few), flood(many)] == [None, "ENHANCE_YOUR_CALM"]
    assert flood(few, int(0.9 * later)) is None
    assert flood(few, int(1.1 * later) + 20) == "ENHANCE_YOUR_CALM"


EACH = "open requests of a connection over HTTP/2, calls of gRPC included"
ALL = "open requests over HTTP/2 in a worker; of these, calls of `Watch`"
WINDOWS = "bytes of a request over HTTP/2 that are sent before any is used"
PARTS = "compressed messages of gRPC that arrive at a time, in a worker"
GZIP = call_headers(b"/grpc.health.v1.Health/Check", h2.field(b"grpc-encoding", b"gzip"))
PART = message(gzip.compress(bytes(100)), 1)[:20]


def watch(stream):
    return h2.headers(call_headers(WATCH), 4, stream) + h2.data(stream, message(b""), h2.END)


@pytest.mark.parametrize(
    ("row", "number", "open_", "which", "status"),
    [
        (EACH, 0, held, -1, "REFUSED_STREAM"),
        (ALL, 0, held, -1, "429"),
        (ALL, 1, watch, 0, "8"),
        (PARTS, 0, lambda n: h2.headers(GZIP, 4, n) + h2.data(n, PART), 0, "8"),
    ],
)
@pytest.mark.states(
    "limits",
    {
        EACH: "the setting that is announced; as many open requests and one more",
        ALL: "as many open requests and calls on many connections, and one more",
        PARTS: "as many calls with half of a compressed message, and one more",
    },
)
def test_one_request_ends_when_more_are_open_than_may_be(row, number, open_, which, status):
    most, (each,) = int(documented(row)[number]), map(int, documented(EACH))
    for count in (most, most + 1):
        door, expected = Door(), [None] * count
        on_one = count if row == EACH else each
        parts = [range(1, 2 * min(on_one, count - n), 2) for n in range(0, count, on_one)]
        sent = [h2.START + b"".join(map(open_, streams)) for streams in parts]
        clients = [Client(one, door=door) for one in sent]
        expected[which] = status if count > most else None
        answers = [client.answers() for client in clients]
        pairs = zip(answers, parts, strict=True)
        assert [found.get(stream) for found, streams in pairs for stream in streams] == expected


@pytest.mark.states(
    "limits", WINDOWS, found="the windows of a client, before and after its first bytes are used"
)
def test_the_windows_of_a_client_are_those_that_are_written():
    first, then, of_connection = documented(WINDOWS)
    client = Client(h2.START + h2.post(path=b"/fast"))
    settings = dict(struct.iter_unpack(">HI", client.frames()[0][3]))

    def grown(number):
        updates = [one for one in client.frames() if one[0] == h2.UPDATE and one[2] == number]
        return sum(h2.word(payload) for *_, payload in updates)

    assert settings[h2.STREAMS] == documented(EACH)[0]
    assert settings[h2.WINDOW] == pytest.approx(first, abs=1)
    assert 65_535 + grown(0) == of_connection
    client.send(h2.data(payload=bytes(30_000)))
    assert settings[h2.WINDOW] - 30_000 + grown(1) == then
    # The body of a refused request is not read to its end.
    client = Client(h2.START + h2.headers(h2.block(path=b"/fast?x=1", method=b"POST"), 4))
    found = [client.send(h2.data(1, bytes(15_000), 0)).outcome() for _ in range(5)]
    assert found == [None] * 4 + ["400"], "64 KiB are dropped, so that the stream can go on"
