"""Tables of gRPC calls over a connection in memory: what a client sends, and what it gets."""

from __future__ import annotations

import gzip
import zlib
from unittest.mock import Mock

import hpack
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamReset, TrailersReceived

from service.api.errors import status_of
from service.api.paths import POLICY
from service.errors import (
    Cancelled,
    Forbidden,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
)
from tests.fuzz.connection import Transport
from tests.fuzz.turns import Turns
from wire.budget import Budget
from wire.door import HttpService
from wire.errors import StatusCode
from wire.gate import Gate
from wire.grpc import Method, timeout_s_of
from wire.grpc_status import Status
from wire.http2_fields import Malformed
from wire.http2_head import Http2Head

MOST = 1_000_000
"""Bytes of a message that the calls below take."""

POST = (
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a.B/C"), (b":authority", b"a")),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
BEGIN = {
    b":status": b"200",
    b"content-type": b"application/grpc",
    b"grpc-accept-encoding": b"identity,deflate,gzip",
}


def status_text(fields):
    name = StatusCode(int(fields[b"grpc-status"])).name
    return f"{name} {fields[b'grpc-message'].decode()}" if b"grpc-message" in fields else name


class Client(Transport):
    """A client by h2 with one call; `got` says what it was answered.

    `window`: of its stream for answers.
    """

    def __init__(self, call, encoding="identity", window=65_535, is_endless=False):
        super().__init__()
        self.loop, self.got, self.body = Turns(), [], b""
        method = Method(timeout_s_of, call.open, is_endless=is_endless)
        self.door = HttpService(
            {}, Budget(1 << 30), methods={b"/a.B/C": method}, gate=Gate(policy=POLICY)
        )
        self.connection = self.protocol = self.loop.call(self.door, self.loop)
        self.loop.call(self.connection.connection_made, self)
        self.h2 = H2Connection(H2Configuration(header_encoding=None))
        self.h2.initiate_connection()
        self.h2.update_settings({4: window})
        self.h2.send_headers(1, (*POST, (b"grpc-encoding", encoding.encode())))
        self.turn()

    @property
    def room(self):
        """Bytes that the windows take."""
        return self.h2.local_flow_control_window(1)

    @property
    def is_over(self):
        return any("OK" in one or "_" in one for one in self.got[-1:]) or self.h2.streams[1].closed

    def send(self, data, end=False):
        """Send `data` in frames, as far as the windows allow at a time."""
        while not self.is_over:
            if data and not self.room:
                self.turn()
                if self.is_over:
                    break
                assert self.room, "the window stays closed"
            size = min(len(data), self.room, 16_384)
            self.h2.send_data(1, data[:size], end_stream=end and size == len(data))
            data = data[size:]
            if not data:
                break
        return self

    def turn(self):
        """Deliver what is written on both sides, and run what is ready."""
        if not self.closed:
            self.loop.call(self.protocol.data_received, self.h2.data_to_send())
        self.loop.settle()
        written, self.written = bytes(self.written), bytearray()
        for event in self.h2.receive_data(written):
            if isinstance(event, ResponseReceived):
                fields = dict(event.headers)
                assert {name: fields.pop(name) for name in BEGIN} == BEGIN
                self.got.append(f"only {status_text(fields)}" if fields else "headers")
            elif isinstance(event, TrailersReceived):
                self.got.append(status_text(dict(event.headers)))
            elif isinstance(event, DataReceived) and event.data:
                self.body += event.data
                while 5 + (size := int.from_bytes(self.body[1:5], "big")) <= len(self.body):
                    assert self.body[0] == 0
                    self.got.append(f"{self.body[5 : 5 + size]!r:.40}"[1:])
                    self.body = self.body[5 + size :]
            elif isinstance(event, StreamReset):
                assert event.error_code == 0, "reset"
        return self


class Calls:
    """A method whose calls answer each message with its size and first bytes.

    `many`: several answers, ended by the half-close; else one, to the first. A call is ahead from
    each message on, until the next turn, if `slow`. A message that begins with "refuse" fails.
    """

    body_timeout_s = 7.0
    is_ahead = is_open = False

    def __init__(self, many=False, slow=False):
        self.many, self.slow = many, slow
        self.heard, self.sizes = [], []

    def open(self, wanted, exchange):
        self.exchange, self.is_open = exchange, True
        return self

    # The call.

    def message(self, size):
        assert self.is_open
        if self.sizes and not self.many:
            raise InvalidInput("a second message")
        if size is not None and size > MOST:
            raise TooLarge(f"{size} bytes")
        self.sizes.append(size)
        self.body = b""
        return self

    def half_close(self):
        if not self.sizes:
            raise InvalidInput("no message")
        if self.many and self.is_open:
            self.is_open = False
            self.exchange.end()

    def wait(self):
        self.heard.append("wait")

    def stop(self, error):
        self.fail(error)

    def fail(self, error):
        if self.is_open:
            self.is_open = False
            self.exchange.refuse(error)

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
            self.is_ahead = True
            self.exchange.writer.loop.call_soon(self._follow)

    def _follow(self):
        self.is_ahead = False
        self.exchange.read_on()


def message(body, compressed=0, size=None):
    return bytes((compressed,)) + (len(body) if size is None else size).to_bytes(4, "big") + body


def gzipped(body):
    return message(gzip.compress(body), 1)


def outcome(call, encoding, sent, step, turns_between):
    """What the client got. `sent` is cut every `step` bytes; END ends the last piece."""
    client = Client(call, encoding)
    pieces = [piece for piece in sent if piece is not END]
    for number, piece in enumerate(pieces, 1):
        for at in range(0, max(1, len(piece)), step):
            ends = sent[-1] is END and number == len(pieces) and at + step >= len(piece)
            client.send(piece[at : at + step], ends)
            if turns_between:
                client.turn()
    for _ in range(20):
        client.turn()
    assert not client.door.budget.held_bytes
    return ", ".join(client.got)


END = object()
"""The client sends no more."""
ABC, DE = message(b"abc"), message(b"de")
LARGE = bytes(range(256)) * 3000
LARGE_GZIP = gzipped(LARGE)
GOT_LARGE = "'768000 bytes, \\x00\\x01'"
FULL = f"'{MOST} bytes, \\x00\\x00'"
BOMB = message(zlib.compress(bytes(100 * MOST), 9), 1)
SECOND = "only INVALID_ARGUMENT a second message"
SAYS = "compressed as grpc-encoding says"
NOT_COMPRESSED = f"only INVALID_ARGUMENT message: not {SAYS}"
BEHIND = f"only INVALID_ARGUMENT message: {SAYS}, but bytes follow its end"
CUT = f"only INVALID_ARGUMENT message: {SAYS}, but it ends too early"


def early(missing):
    return f"INVALID_ARGUMENT message: the request ended {missing} bytes before its message"


def first(byte):
    text = f"message: got {byte} as the first byte of a message, expected 0 or 1"
    return f"INVALID_ARGUMENT {text}"


def short(data, wbits=15):
    return message(zlib.compress(data, wbits=wbits), 1)


ONE = {
    "a message": ([ABC, END], "headers, 'abc', OK"),
    "an empty message": ([message(b""), END], "headers, '', OK"),
    "a message, and the end later": ([ABC, b"", END], "headers, 'abc', OK"),
    "a message without the end": ([ABC], "headers, 'abc', OK"),
    "a large message": ([message(LARGE), END], f"headers, {GOT_LARGE}, OK"),
    "no message": ([b"", END], "only INVALID_ARGUMENT no message"),
    "a prefix without its message": ([ABC[:5]], ""),
    "a part of a prefix, and the end": ([b"\0\0", END], f"only {early(3)}"),
    "a prefix, and the end": ([ABC[:5], END], f"only {early(3)}"),
    "a part of a message, and an empty end": ([ABC[:7], b"", END], f"only {early(1)}"),
    "a length that is too long": ([message(b"abc", size=10), END], f"only {early(7)}"),
    "a length that is too short": ([message(b"hold", size=4) + b"de", END], f"only {early(3)}"),
    "a length over the limit": (
        [message(b"", size=MOST + 1)],
        f"only INVALID_ARGUMENT {MOST + 1} bytes",
    ),
    "a length at the limit": ([message(bytes(MOST)), END], f"headers, {FULL}, OK"),
    "a second message behind the answer": ([ABC + DE, END], "headers, 'abc', OK"),
    "a second message before the answer": ([message(b"hold") + DE, END], SECOND),
    "a message that is refused": ([message(b"refuse"), END], "only RESOURCE_EXHAUSTED busy"),
    "a first byte of 2": ([message(b"abc", 2), END], f"only {first(2)}"),
    "text instead of a message": ([b"GET / HTTP/1.1\r\n", END], f"only {first(71)}"),
    "a compressed message without an encoding": (
        [gzipped(b"abc"), END],
        "only INTERNAL message: got a compressed message, expected grpc-encoding to say how",
    ),
}

GZIP = {
    "gzip": ([gzipped(b"abc"), END], "headers, 'abc', OK"),
    "gzip of nothing": ([gzipped(b""), END], "headers, '', OK"),
    "gzip of much, in two frames": (
        [LARGE_GZIP[:2000], LARGE_GZIP[2000:], END],
        f"headers, {GOT_LARGE}, OK",
    ),
    "gzip of much that is stored": (
        [message(gzip.compress(LARGE, 0), 1), END],
        f"headers, {GOT_LARGE}, OK",
    ),
    "gzip of two turns to the byte": (
        [gzipped(bytes(2 * 128 * 1024)), END],
        "headers, '262144 bytes, \\x00\\x00', OK",
    ),
    "gzip of the limit": ([gzipped(bytes(MOST)), END], f"headers, {FULL}, OK"),
    "gzip of more": ([gzipped(bytes(MOST + 1)), END], "only INVALID_ARGUMENT too many bytes"),
    "a message that is not compressed": ([ABC, END], "headers, 'abc', OK"),
    "deflate": ([short(b"abc"), END], NOT_COMPRESSED),
    "a part": ([message(gzip.compress(b"abc")[:-1], 1), END], CUT),
    "no compressed bytes": ([message(b"", 1), END], CUT),
    "bytes behind": ([message(gzip.compress(b"abc") + b"x", 1), END], BEHIND),
    "many bytes behind": (
        [message(gzip.compress(b"abc"), 1, 1 << 31) + bytes(100_000)],
        BEHIND,
    ),
    "two compressed parts": ([message(gzip.compress(b"abc") * 2, 1), END], BEHIND),
    "a part of a message that ends": (
        [LARGE_GZIP[:1000], END],
        f"only {early(len(LARGE_GZIP) - 1000)}",
    ),
    "a second message before the answer": ([gzipped(b"hold") + gzipped(b"abc"), END], SECOND),
}

DEFLATE = {
    "deflate": ([short(b"abc"), END], "headers, 'abc', OK"),
    "a bomb": ([BOMB, END], "only INVALID_ARGUMENT too many bytes"),
    "deflate without zlib's frame": ([short(b"abc", -15), END], NOT_COMPRESSED),
    "a wrong checksum": ([short(b"abc")[:-1] + b"x", END], NOT_COMPRESSED),
}

MANY = {
    "two messages": ([ABC, DE, END], "headers, 'abc', 'de', OK"),
    "two messages in a frame": ([ABC + DE, END], "headers, 'abc', 'de', OK"),
    "a frame that ends within the second": (
        [ABC + DE[:3], DE[3:], END],
        "headers, 'abc', 'de', OK",
    ),
    "no messages": ([b"", END], "only INVALID_ARGUMENT no message"),
    "an end within the second": ([ABC + DE[:6], END], f"headers, 'abc', {early(1)}"),
    "an end within the second's prefix": ([ABC + b"\0", END], f"headers, 'abc', {early(4)}"),
    "a wrong second": ([ABC + message(b"de", 3), END], f"headers, 'abc', {first(3)}"),
    "a second that is refused": (
        [ABC + message(b"refuse"), DE, END],
        "headers, 'abc', RESOURCE_EXHAUSTED busy",
    ),
    "messages with and without compression": (
        [gzipped(b"abc") + DE + LARGE_GZIP + message(b"f"), END],
        f"headers, 'abc', 'de', {GOT_LARGE}, 'f', OK",
    ),
    "large messages": ([message(LARGE) * 3, END], f"headers, {', '.join([GOT_LARGE] * 3)}, OK"),
}

SLOW = {
    "messages that wait": (
        [message(b"a") + message(b"b"), message(b"c"), message(b"d"), END],
        "headers, 'a', 'b', 'c', 'd', OK",
    ),
    "compressed messages that wait": (
        [gzipped(b"a") + LARGE_GZIP, gzipped(b"c"), END],
        f"headers, 'a', {GOT_LARGE}, 'c', OK",
    ),
    "a part that waits, and the end": (
        [message(b"a") + message(b"bc")[:6], END],
        f"headers, 'a', {early(1)}",
    ),
    "a wrong message that waits": (
        [message(b"a") + message(b"b", 9) + message(b"c"), END],
        f"headers, 'a', {first(9)}",
    ),
}

TABLES = {
    "one": (ONE, Calls, "identity"),
    "gzip": (GZIP, Calls, "gzip"),
    "deflate": (DEFLATE, Calls, "deflate"),
    "many": (MANY, lambda: Calls(many=True), "gzip"),
    "slow": (SLOW, lambda: Calls(many=True, slow=True), "gzip"),
}


@pytest.mark.parametrize(
    ("table", "name"), [(table, name) for table, (rows, *_) in TABLES.items() for name in rows]
)
def test_messages_do_what_their_row_says_however_they_are_cut(table, name):
    rows, call, encoding = TABLES[table]
    sent, expected = rows[name]
    size = sum(len(piece) for piece in sent if piece is not END)
    for step in [1 << 24, 4096 + 1] if size > 4000 else [1 << 24, 1, 2, 3, 5, 6, 7]:
        for turns_between in (True, False):
            found = outcome(call(), encoding, sent, step, turns_between)
            assert found == expected, (step, turns_between)


# Headers.


def head(*more, **changed):
    """`changed`: of the fields that every call has; None leaves one out."""
    named = {name.strip(b":").decode().replace("-", "_"): name for name, _ in POST}
    pairs = {**dict(POST), **{named[name]: value for name, value in changed.items()}}
    fields = [(name, value) for name, value in pairs.items() if value is not None]
    method = Method(timeout_s_of, lambda *_: None)
    return Http2Head((*fields, *more), {}, {b"/a.B/C": method}, Gate())


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        *((b"2H", 7200), (b"2M", 120), (b"10S", 10), (b"1500m", 1.5), (b"20u", 2e-5), (b"0S", 0)),
        *((b"99999999n", 0.099999999), (b"99999999H", 99999999 * 3600)),
        *((b"999999u", 0.999999), (b"1000001u", 1.001), (b"20000000u", 20)),
        *((text, None) for text in (b"999999999n", b"S", b"10", b"10s", b"-1S", b"1.5S", b"1 S")),
        *((text, None) for text in (b"1S1S", b"", "\N{ARABIC-INDIC DIGIT ONE}S".encode())),
    ],
)
def test_a_timeout_is_read_in_seconds_or_refused(text, expected_s):
    found = head((b"grpc-timeout", text))
    if expected_s is None:
        status = status_of(found.error)
        assert status.code is StatusCode.INVALID_ARGUMENT
        assert status.details.startswith("grpc-timeout: got ")
        assert ("lenet-error-field", "grpc-timeout") in status.metadata
    else:
        assert found.error is None
        assert found.wanted == pytest.approx(expected_s, rel=1e-12)


def kind(value):
    return {"content_type": value}


NO_METHOD = "UNIMPLEMENTED method: got '/a.B/D', expected one that is served here"
NO_KIND = "UNIMPLEMENTED content-type: got '%s', expected application/grpc"
HEADS = [
    ((), {}, "a call"),
    ((), kind(b"application/grpc+proto"), "a call"),
    ((), kind(b"application/grpc;charset=utf-8"), "a call"),
    ((), kind(b"application/grpc+json"), NO_KIND % "application/grpc+json"),
    ((), kind(b"application/grpc-web"), "a plain request"),
    ((), kind(b"application/json"), "a plain request"),
    ((), kind(None), "a plain request"),
    ((), {"method": b"GET"}, "a plain request"),
    ((), {"te": None}, "a call"),
    ((), {"te": b"gzip"}, "malformed"),
    ((), {"path": b"/a.B/D"}, NO_METHOD),
    ((), {"path": b"/a.B/D?x"}, NO_METHOD),
    *([((b"grpc-encoding", name),), {}, "a call"] for name in (b"gzip", b"deflate", b"identity")),
    (
        ((b"grpc-encoding", b"zstd"),),
        *({}, "UNIMPLEMENTED grpc-encoding: got 'zstd', expected one of identity, gzip, deflate"),
    ),
    (
        ((b"a", b"b" * 16_384),),
        *({}, "RESOURCE_EXHAUSTED metadata: got 16691 bytes, expected at most 16384"),
    ),
    ([(b"a", b"b")] * 98, {}, "a call"),
    (
        [(b"a", b"b")] * 99,
        *({}, "RESOURCE_EXHAUSTED metadata: got 101 fields, expected at most 100"),
    ),
    (
        [(b"authorization", b"Bearer a")] * 2,
        *({}, "INVALID_ARGUMENT authorization: got 2 fields, expected at most one"),
    ),
    (((b"a-bin", b"AAECAw"),), {}, "a call"),
]


@pytest.mark.parametrize(("more", "changed", "expected"), HEADS)
def test_headers_lead_to_a_call_or_to_the_status_of_their_row(more, changed, expected):
    try:
        found = head(*more, **changed)
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


def decoded(status):
    return dict(hpack.Decoder().decode(status.block()))


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (Forbidden("a"), "PERMISSION_DENIED"),
        (Cancelled("a"), "CANCELLED"),
        (UnsupportedMediaType("a"), "INVALID_ARGUMENT"),
    ],
)
def test_an_error_has_the_status_of_its_row(error, name):
    fields = decoded(status_of(error))
    assert (StatusCode(int(fields["grpc-status"])).name, fields["grpc-message"]) == (name, "a")
    assert fields["lenet-error-code"] == error.code


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
    assert decoded(status_of(ServiceError(text))).get("grpc-message") == expected


def test_the_field_of_an_error_and_the_time_to_a_retry_are_metadata():
    fields = decoded(status_of(Overloaded("a", field="b\n\xe9", retry_after_s=3)))
    assert fields["lenet-error-field"] == r"b\n\xe9"
    assert fields["grpc-retry-pushback-ms"] == "3000"


# Calls ended by the connection.


def test_a_cancelled_call_writes_nothing():
    client = Client(call := Calls(many=True), is_endless=True).send(ABC[:6]).turn()
    places = client.door.places
    assert call.heard == ["wait"]
    assert (len(places.streams), len(places.endless_calls)) == (1, 1)
    client.h2.reset_stream(1)
    client.turn()
    for step in (call.exchange.cancel, call.exchange.end, lambda: call.exchange.write(b"de")):
        step()
    client.turn()
    assert call.heard == ["wait", "cancelled"]
    assert (len(places.streams), len(places.endless_calls)) == (0, 0)
    assert client.got == []


def test_the_log_of_a_cancelled_call_says_what_was_sent():
    client = Client(call := Calls(many=True))
    client.door.access = Mock()
    client.send(ABC).turn()
    client.h2.reset_stream(1)
    client.turn()
    assert call.heard[-1] == "cancelled"
    assert client.door.access.add.call_args.args[3:5] == ("CANCELLED", 3)


def test_a_call_that_raises_while_its_message_is_decompressed_is_reset(caplog):
    client = Client(call := Calls(many=True), "gzip")
    call.data = Mock(side_effect=[None, MemoryError])
    client.send(LARGE_GZIP, end=True)
    with pytest.raises(AssertionError, match="reset"):
        client.turn()
    assert "a request failed" in caplog.text
    assert not client.door.places.streams
    assert not client.door.places.inflaters


@pytest.mark.parametrize("ahead", [False, True])
def test_a_call_that_raises_is_reset_wherever_its_message_waited(ahead, caplog):
    client = Client(call := Calls(many=True)).send(ABC).turn()
    call.message = None  # raises TypeError
    call.is_ahead = ahead
    client.send(DE)
    if ahead:
        client.turn()
        call.is_ahead = False
        call.exchange.read_on()
    with pytest.raises(AssertionError, match="reset"):
        client.turn()
    assert "a request failed" in caplog.text
    assert not client.door.places.streams


def test_a_call_that_fails_in_the_middle_of_its_answers_ends_with_a_status():
    client = Client(Calls(many=True)).send(ABC).turn()
    for _ in range(2):
        client.connection.give_up(Unavailable("stopping"))
    assert client.turn().got == ["headers", "'abc'", "UNAVAILABLE stopping"]


def test_a_call_that_is_stopped_before_its_answer_has_a_status_alone():
    client = Client(Calls()).send(ABC[:6]).turn()
    client.loop.call(client.connection.shutdown)
    client.loop.wait(client.loop.time() + 0.5)
    assert b"grpc-status\x0214" in client.written  # which h2 does not read behind GOAWAY
    assert b"the service is stopping" in client.written


def test_a_call_without_an_answer_ends_with_ok_alone():
    client = Client(call := Calls())
    call.exchange.end(Status(StatusCode.OK))
    call.exchange.end(Status(StatusCode.INTERNAL))
    assert client.turn().got == ["only OK"]


@pytest.mark.parametrize("sent", [b"", ABC[:6]], ids=["no message", "a part of one"])
def test_a_call_fails_when_its_message_does_not_arrive_in_time(sent):
    client = Client(call := Calls()).send(sent).turn()
    assert call.heard == ["wait"]
    client.loop.wait(client.loop.time() + call.body_timeout_s - 1)
    assert client.turn().got == []
    client.loop.wait(client.loop.time() + 3)
    assert client.turn().got == ["only DEADLINE_EXCEEDED body: it did not arrive in time"]


def test_the_client_sends_no_more_than_its_window_while_messages_wait():
    client = Client(call := Calls(many=True)).send(ABC).turn()
    call.is_ahead = True
    before = client.room
    client.send(message(bytes(1000)) * 1030)
    client.turn()
    assert call.sizes == [3]
    assert client.room == before - 1030 * 1005
    call.is_ahead = False
    call.exchange.read_on()
    client.turn()
    assert call.sizes == [3] + [1000] * 1030


def test_a_call_that_answers_waits_for_a_client_that_does_not_read():
    client = Client(call := Calls(many=True), window=0)
    done = []

    async def answer():
        await call.exchange.drained()
        call.exchange.write(bytes(20))
        await call.exchange.drained()
        done.append(True)

    task = client.loop.call(client.loop.create_task, answer())
    client.turn()
    assert not done
    client.h2.increment_flow_control_window(10, 1)
    client.turn()
    assert not done
    client.loop.call(client.connection.pause_writing)
    client.h2.increment_flow_control_window(100, 1)
    client.turn()
    assert not done  # the window is open, and the socket takes nothing
    client.loop.call(client.connection.resume_writing)
    client.turn()
    assert done
    assert task.done()
