"""Limits of connections at their documented values: in memory, on virtual time."""

from __future__ import annotations

import asyncio
import gzip
import struct
from types import SimpleNamespace
from unittest.mock import MagicMock

import hpack
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from service.api import grpc_methods
from service.budget import Budget
from service.process.keys import Keys
from service.transport.door import HttpService
from tests.documented import documented
from tests.faults.http2 import WATCH, call_headers, literal, message
from tests.fuzz.connection import Transport
from tests.service.http.doors import Echo, application
from tests.service.http.test_http2 import (
    ACK,
    CONTINUATION,
    END,
    GOAWAY,
    HEADERS,
    PING,
    RST,
    SETTINGS,
    START,
    UPDATE,
    WINDOW,
    block,
    data,
    field,
    frame,
    frames,
    get,
    headers,
    ping,
    post,
    reset,
    settings,
)

CHECK = b"/grpc.health.v1.Health/Check"


class Door:
    """The service's door with a route that echoes and gRPC's methods, without a socket."""

    def __init__(self, loop):
        models, stand_in = SimpleNamespace(ready=True, names=["lenet"]), MagicMock()
        methods = grpc_methods.methods(stand_in, stand_in, models, Keys())
        self.loop, self.route = loop, Echo()
        routes = {(b"POST", b"/fast"): self.route}
        self.door = HttpService(routes, Budget(1 << 30), methods=methods)
        self.config = Config(
            application, http=self.door, ws="none", lifespan="off", log_config=None
        )
        self.config.load()
        self.state = ServerState()

    def open(self, sent=b"", unread_bytes=0):
        return Client(self, sent, unread_bytes)


class Client(Transport):
    """A client's connection; what the server wrote is read from `written`."""

    def __init__(self, door, sent, unread_bytes):
        super().__init__()
        self.loop, self.unread_bytes, self.gone = door.loop, unread_bytes, False
        events = {"begun": []}
        self.connection = self.protocol = door.door(door.config, door.state, events)
        self.connection.connection_made(self)
        self.send(sent)

    def get_write_buffer_size(self):
        return self.unread_bytes

    def send(self, sent):
        if sent and not self.closed:
            self.protocol.data_received(sent)

    @property
    def ended(self):
        return self.closed or self.shut

    def status(self):
        """Status of the last answer over HTTP/1.1; None if there is none."""
        lines = bytes(self.written).split(b"HTTP/1.1 ")
        return int(lines[-1][:3]) if len(lines) > 1 else None

    def heard(self, stream=None):
        """(kind, flags, payload) of the frames, of one stream or all."""
        return [
            (kind, flags, payload)
            for kind, flags, number, payload in frames(bytes(self.written))
            if stream in (None, number)
        ]

    def fields(self, stream=1):
        """The header fields of an answer over HTTP/2, trailers included; {} if there is none."""
        blocks = (payload for kind, _, payload in self.heard(stream) if kind == HEADERS)
        return {name: value for one in blocks for name, value in hpack.Decoder().decode(one)}

    def calm(self):
        """The code of the GOAWAY that ended it; None if none did."""
        codes = [
            int.from_bytes(payload[4:8]) for kind, _, payload in self.heard() if kind == GOAWAY
        ]
        return next((code for code in codes if code), None)


async def after_s(client, happened, dribble=b""):
    """Seconds until `happened()`, while the client sends `dribble` each second."""
    began_s = client.loop.time()
    while not happened():
        assert client.loop.time() - began_s < 1000
        await asyncio.sleep(1 / 8)
        if (client.loop.time() - began_s) % 1 == 0:
            client.send(dribble)
    return client.loop.time() - began_s


def about(seconds):
    """At the value that is written, or within a tenth after it: checks come once a second."""
    return pytest.approx(1.05 * seconds + 1 / 8, abs=0.05 * seconds + 1 / 8)


async def settled():
    """All that was sent is parsed, a part in a turn, and answered."""
    await asyncio.sleep(0.9)


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HEADERS_ROW = "bytes of a request's headers over HTTP/1.1"
IDLE_ROW = "time without a request on a connection"
SILENT_ROW = "time in which a client over HTTP/2 says nothing"
FRAME_ROW = (
    "time in which a header block, SETTINGS, PING, RST_STREAM or WINDOW_UPDATE over HTTP/2 arrives"
)
UNENDED = headers(block(), flags=0)


@pytest.mark.parametrize(
    ("row", "number", "sent", "dribble"),
    [
        (HEADERS_ROW, 1, b"", b""),
        (HEADERS_ROW, 1, b"GET / HTTP/1.1\r\nX: ", b"a"),
        (HEADERS_ROW, 1, GET + GET[:-2], b""),
        (HEADERS_ROW, 1, START[:20], b""),
        (FRAME_ROW, 0, START + UNENDED, b""),
        (FRAME_ROW, 0, START + UNENDED, frame(CONTINUATION, 0, 1, b"\0")),
        (FRAME_ROW, 0, START + get() + get(3)[:12], b"a"),
        (IDLE_ROW, 0, GET, b""),
        (IDLE_ROW, 0, START + get(), ping(bytes(8), ACK)),
    ],
)
@pytest.mark.states(
    "limits",
    "bytes of a request's headers over HTTP/1.1; time in which they arrive",
    found="connections in memory that send nothing, a byte a second, half of a second request or "
    "of the preface of HTTP/2, on virtual time",
)
@pytest.mark.states(
    "limits",
    "time without a request on a connection, also if the client answers PINGs",
    found="idle connections of both versions, one that answers PINGs, on virtual time",
)
@pytest.mark.states(
    "limits",
    "time in which a header block, SETTINGS, PING, RST_STREAM or WINDOW_UPDATE over HTTP/2 arrives",
    found="blocks that do not go on, or by a frame a second; a frame that comes by a byte a second",
)
def test_a_connection_is_closed_at_its_time(run_virtually, row, number, sent, dribble):
    async def main(loop):
        client = Door(loop).open(sent)
        assert await after_s(client, lambda: client.ended, dribble) == about(
            documented(row)[number]
        )

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "time in which a client over HTTP/2 says nothing",
    found="a client with an open request that answers no PING, on virtual time",
)
def test_a_silent_client_is_asked_and_closed_at_its_times(run_virtually):
    async def main(loop):
        door = Door(loop)
        door.route.hold = True
        client = door.open(START + get(path=b"/fast", method=b"POST"))
        silent_s, answer_s = documented(SILENT_ROW)

        def asked():
            return [one for one in client.heard() if one[0] == PING and not one[1]]

        assert await after_s(client, asked) == about(silent_s)
        assert await after_s(client, lambda: client.ended) == about(answer_s)

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "time without a request on a connection, also if the client answers PINGs",
    found="clients that take nothing: from the socket, or through HTTP/2's windows",
)
def test_a_client_that_reads_nothing_is_given_up_at_its_time(run_virtually):
    async def main(loop):
        most_s = documented(IDLE_ROW)[1]
        loop.advance(1)  # 0 is no time at which something began
        client = Door(loop).open(GET, unread_bytes=100_000)
        client.connection.pause_writing()
        assert await after_s(client, lambda: client.ended) == about(most_s)
        client = Door(loop).open(START + settings((WINDOW, 0)) + get(path=b"/mebibyte"))

        def is_reset():
            return [one for one in client.heard(1) if one[0] == RST]

        assert await after_s(client, is_reset, ping(bytes(8), ACK)) == about(most_s)

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "bytes and time of a message of other methods",
    found="calls of Check whose message is as long and one byte longer, and one that does not come",
)
def test_a_message_of_another_method_has_its_bytes_and_its_time(run_virtually):
    async def main(loop):
        most_bytes, most_s = documented("bytes and time of a message of other methods")

        async def status(size):
            content = message(b"\x12" + _varint(size - 3) + bytes(size - 3))
            call = headers(call_headers(CHECK), flags=4) + data(payload=content, flags=END)
            client = Door(loop).open(START + call)
            await settled()
            return client.fields()["grpc-status"]

        assert (await status(int(most_bytes)), await status(int(most_bytes) + 1)) == ("0", "3")
        partial = headers(call_headers(CHECK), flags=4) + data(payload=message(bytes(100))[:50])
        client = Door(loop).open(START + partial)
        assert await after_s(client, lambda: "grpc-status" in client.fields()) == about(most_s)
        assert client.fields()["grpc-status"] == "4"

    run_virtually(main)


def _varint(value):
    return bytes((value & 127 | 128, value >> 7))


def http1(count, target=b"/", size=0):
    """A request with `count` fields, and `size` bytes in all."""
    lines = [b"Host: a", *[b"X: "] * (count - 1)]
    head = b"GET %s HTTP/1.1\r\n%s\r\n\r\n" % (target, b"\r\n".join(lines))
    return head.replace(b"X: ", b"X: " + b"a" * (size - len(head)), 1) if size else head


def path_of(size):
    return b"/" + b"a" * (size - 3) + b"?b"


def query_of(count):
    return b"/?" + b"&".join([b"a"] * count)


def field_of(size):
    """A field that makes a list of `size` bytes of the request of `get()`."""
    return b"a", b"b" * (size - sum(len(n + v) + 32 for n, v in LIST) - 33)


LIST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a")]
FIELDS_ROW = "header fields of a request; bytes of its target"


@pytest.mark.parametrize(
    ("row", "number", "request_of", "refused"),
    [
        (HEADERS_ROW, 0, lambda n: http1(2, size=n), 431),
        (FIELDS_ROW, 0, http1, 431),
        (FIELDS_ROW, 0, lambda n: START + get(1, *[(b"a", b"")] * n), 431),
        (FIELDS_ROW, 1, lambda n: http1(1, path_of(n)), 414),
        (FIELDS_ROW, 1, lambda n: START + get(path=path_of(n)), 414),
        (FIELDS_ROW, 2, lambda n: http1(1, query_of(n)), 400),
        (FIELDS_ROW, 2, lambda n: START + get(path=query_of(n)), 400),
        (
            "header fields of a request over HTTP/2, each",
            0,
            lambda n: START + get(1, field_of(n)),
            431,
        ),
    ],
)
@pytest.mark.states(
    "limits",
    "header fields of a request; bytes of its target; parameters of its query",
    found="requests with as many and one more, over HTTP/1.1 and HTTP/2",
)
@pytest.mark.states(
    "limits",
    "bytes of a request's headers over HTTP/1.1; time in which they arrive",
    found="header sections of as many bytes and one more",
)
@pytest.mark.states(
    "limits",
    "header fields of a request over HTTP/2",
    found="header lists of as many bytes and one more",
)
def test_a_head_at_its_limit_is_answered_and_one_beyond_it_refused(
    run_virtually, row, number, request_of, refused
):
    async def main(loop):
        async def status(count):
            client = Door(loop).open(request_of(count))
            await settled()
            over_http2 = request_of(count).startswith(START)
            return int(client.fields()[":status"]) if over_http2 else client.status()

        most = int(documented(row)[number])
        assert (await status(most), await status(most + 1)) == (200, refused)

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "header fields of a request over HTTP/2",
    found="calls with as many bytes and one more; lists of twice as many and one more",
)
def test_header_lists_of_calls_are_limited_and_those_of_twice_the_size_end_the_connection(
    run_virtually,
):
    async def main(loop):
        (most,) = map(int, documented("header fields of a request over HTTP/2, each"))
        call = data(payload=message(b""), flags=END)
        size = sum(len(name + value) + 32 for name, value in hpack.Decoder().decode(CHECK_BLOCK))

        async def client(more_bytes):
            block = CHECK_BLOCK + field(b"a", b"b" * (more_bytes - size - 33))
            client = Door(loop).open(START + headers(block, flags=4) + call)
            await settled()
            return client

        assert [(await client(n)).fields()["grpc-status"] for n in (most, most + 1)] == ["0", "8"]
        assert [(await client(2 * most + n)).calm() for n in (0, 100)] == [None, 11]

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "header fields in a small header block over HTTP/2",
    found="blocks of indexed fields with as many bytes and one more",
)
def test_header_blocks_with_more_fields_than_their_size_allows_end_the_connection(run_virtually):
    async def main(loop):
        base, factor = map(int, documented("header fields in a small header block"))

        def small(value_bytes):
            ages = b"\x95" * 125  # age, without a value
            return block() + ages + field(b"a", b"b" * value_bytes)

        def excess(sent):
            size = sum(len(name + value) + 32 for name, value in hpack.Decoder().decode(sent))
            return size - base - factor * len(sent)

        async def code(value_bytes):
            client = Door(loop).open(START + headers(small(value_bytes)))
            await settled()
            return client.calm()

        fits = excess(small(0))  # each byte of the value allows one more
        assert [excess(small(size)) for size in (fits, fits - 1)] == [0, 1]
        assert [await code(size) for size in (fits, fits - 1)] == [None, 11]

    run_virtually(main)


CHECK_BLOCK = call_headers(CHECK)


def resets(first, count):
    """Complete requests that are reset, the number `first` and later."""
    streams = range(2 * first + 3, 2 * (first + count) + 3, 2)
    return b"".join(get(one, path=b"/fast", method=b"POST") + reset(one) for one in streams)


@pytest.mark.parametrize(
    "costly",
    [lambda _, n: ping() * n, lambda _, n: settings() * n, lambda _, n: data() * n, resets],
    ids=["PING", "SETTINGS", "DATA", "resets"],
)
@pytest.mark.states(
    "limits",
    "frames that bring no request further",
    found="as many PINGs, SETTINGS, empty DATA or resets, and 1 % more; more after some seconds",
)
def test_frames_that_bring_no_request_further_are_limited(run_virtually, costly):
    async def main(loop):
        at_once, each_s = documented("frames that bring no request further")
        few, many = int(0.99 * at_once), int(1.01 * at_once)

        async def flood(first, second=0):
            client = Door(loop).open(START + post(path=b"/fast") + costly(0, first))
            await asyncio.sleep(5)
            client.send(costly(first, second))
            await settled()
            return client.calm()

        assert [await flood(few), await flood(many)] == [None, 11]
        more = 5 / each_s
        assert await flood(few, int(0.9 * more)) is None
        assert await flood(few, int(1.1 * more) + 20) == 11

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "open requests of a connection over HTTP/2, calls of gRPC included",
    found="the setting that is announced; as many open requests and one more",
)
@pytest.mark.states(
    "limits",
    "open requests over HTTP/2 in a worker; of these, calls of `Watch`",
    found="as many open requests and calls on many connections, and one more",
)
def test_open_requests_are_limited_on_a_connection_and_in_the_process(run_virtually):
    async def main(loop):
        (each,) = map(int, documented("open requests of a connection over HTTP/2"))
        most, watches = map(int, documented("open requests over HTTP/2 in a worker"))

        async def opened(request, count):
            """`count` requests, as many as may be on a connection."""
            door, clients = Door(loop), []
            door.route.hold = True
            for first in range(0, count, each):
                streams = range(1, 2 * min(each, count - first), 2)
                clients.append(door.open(START + b"".join(map(request, streams))))
                await settled()
            return clients

        def fast(stream):
            return get(stream, path=b"/fast", method=b"POST")

        def watch(stream):
            call = headers(call_headers(WATCH), 4, stream)
            return call + data(stream, message(b""), END)

        (client,) = await opened(fast, each)
        assert struct.pack(">HI", 3, each) in client.heard()[0][2]
        assert not client.fields(2 * each - 1)
        client.send(fast(2 * each + 1))
        await settled()
        assert client.heard(2 * each + 1)[-1] == (RST, 0, b"\0\0\0\7")  # REFUSED_STREAM
        *_, client = await opened(fast, most + 1)
        last = 2 * (most % each) + 1
        assert client.fields(last)[":status"] == "429"
        assert not client.fields(last - 2)
        first, *_ = await opened(watch, watches)
        assert "grpc-status" not in first.fields(1)
        first, *_ = await opened(watch, watches + 1)
        assert first.fields(1)["grpc-status"] == "8"
        assert "grpc-status" not in first.fields(3)

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "bytes of a request over HTTP/2 that are sent before any is used",
    found="the windows that a client sees, before and after its first bytes are used",
)
def test_the_windows_of_a_client_are_those_that_are_written(run_virtually):
    async def main(loop):
        first, then, of_connection = documented("bytes of a request over HTTP/2 that are sent")
        client = Door(loop).open(START + post(path=b"/fast"))
        await settled()
        (announced,) = (
            payload for kind, flags, payload in client.heard() if kind == SETTINGS and not flags
        )
        values = dict(struct.iter_unpack(">HI", announced))

        def grown(stream):
            return sum(
                int.from_bytes(one[2], "big") for one in client.heard(stream) if one[0] == UPDATE
            )

        assert values[WINDOW] == pytest.approx(first, abs=1)
        assert 65_535 + grown(0) == of_connection
        client.send(data(payload=bytes(30_000)))
        await settled()
        assert values[WINDOW] - 30_000 + grown(1) == then

    run_virtually(main)


BEHIND_ROW = "bytes that a client sends over HTTP/1.1 behind a request"
POST = b"POST /fast HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.states(
    "limits",
    "bytes that a client sends over HTTP/1.1 behind a request that is not answered",
    found="as many bytes behind a request that is held, and one more: reading has paused",
)
def test_reading_pauses_behind_a_request_that_is_not_answered(run_virtually):
    async def main(loop):
        most = int(documented(BEHIND_ROW)[0])
        door = Door(loop)
        door.route.hold = True
        client = door.open(POST + b"Content-Length: 1\r\n\r\na")
        client.send(b"G" * most)
        assert not client.paused
        client.send(b"G")
        assert client.paused

    run_virtually(main)


@pytest.mark.parametrize(("number", "lines"), [(0, 20), (1, 1)], ids=["all", "one line"])
@pytest.mark.parametrize("trailers", [False, True], ids=["extensions", "trailers"])
@pytest.mark.states(
    "limits",
    "bytes of chunk extensions and trailers of a body; of one line of them",
    found="bodies in chunks with 1 % less and 1 % more, in one line and in twenty",
)
def test_chunk_extensions_and_trailers_are_limited(run_virtually, number, lines, trailers):
    async def main(loop):
        most = documented("bytes of chunk extensions and trailers of a body")[number]

        async def status(share):
            rest = b"a" * int(share * most / lines)
            if trailers:
                body = b"1\r\na\r\n0\r\n" + (b"a:" + rest[4:] + b"\r\n") * lines + b"\r\n"
            else:
                body = (b"1;" + rest[4:] + b"\r\na\r\n") * lines + b"0\r\n\r\n"
            client = Door(loop).open(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body)
            await settled()
            return client.status()

        assert [await status(0.99), await status(1.01)] == [200, 400]

    run_virtually(main)


@pytest.mark.states(
    "limits",
    "compressed messages of gRPC that arrive at a time, in a worker",
    found="as many calls with half of a compressed message, and one more",
)
def test_few_compressed_messages_arrive_at_a_time(run_virtually):
    async def main(loop):
        (most,) = map(int, documented("compressed messages of gRPC that arrive"))
        block = call_headers(CHECK, literal(b"grpc-encoding", b"gzip"))
        half = message(gzip.compress(bytes(100)), 1)[:20]

        def partial(stream):
            return headers(block, 4, stream) + data(stream, half)

        for count, ended in ((most, set()), (most + 1, {"8"})):
            door, clients = Door(loop), []
            for first in range(0, count, 100):
                streams = range(1, 2 * min(100, count - first), 2)
                clients.append(door.open(START + b"".join(map(partial, streams))))
            await settled()
            found = [one.fields(n).get("grpc-status") for one in clients for n in range(1, 201, 2)]
            assert set(filter(None, found)) == ended

    run_virtually(main)
