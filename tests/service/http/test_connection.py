from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import orjson
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from service.http.connection import HttpProtocol
from service.http.openapi import ErrorResponse

KEEP_ALIVE_S = 75
LONG_S = 60.0
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HUGE = bytes(64 << 20)


async def app(scope, receive, send):
    """Answers with the body; before it came on /early, and much on /huge."""
    body = b""
    if scope["path"] == "/":
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
    body = HUGE if scope["path"] == "/huge" else body
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class Server:
    """Records the timers that its connections set, the bytes received and the disconnect."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.handles = []
        self.received = asyncio.Condition()
        self.bytes = 0
        self.lost = asyncio.Event()

    def call_later(self, delay, callback, *args):
        handle = self.loop.call_later(delay, callback, *args)
        self.handles.append((delay, handle))
        return handle

    def create_task(self, work):
        return self.loop.create_task(work)

    def timers(self, delay):
        """Whether each of those that were set for `delay` seconds is still pending."""
        return [not handle.cancelled() for set_for, handle in self.handles if set_for == delay]

    async def has(self, count):
        """Wait until `count` bytes were received."""
        async with asyncio.timeout(20), self.received:
            await self.received.wait_for(lambda: self.bytes >= count)

    async def count(self, data):
        async with self.received:
            self.bytes += len(data)
            self.received.notify_all()


@pytest.fixture
def connect():
    """`connect(header_timeout_s=60.0)`: a server of `app`, and a reader and writer to it."""

    @asynccontextmanager
    async def connect_(**attributes):
        server = Server()

        class Watched(HttpProtocol):
            def data_received(self, data):
                super().data_received(data)
                self.counting = server.loop.create_task(server.count(data))

            def connection_lost(self, exc):
                super().connection_lost(exc)
                server.lost.set()

        for name, value in {"header_timeout_s": LONG_S, **attributes}.items():
            setattr(Watched, name, value)
        config = Config(
            app, lifespan="off", ws="none", log_config=None, timeout_keep_alive=KEEP_ALIVE_S
        )
        state = ServerState()
        listener = await server.loop.create_server(
            lambda: Watched(config, state, {}, server), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        try:
            yield server, reader, writer
        finally:
            writer.transport.abort()
            async with asyncio.timeout(20):
                await server.lost.wait()
            listener.close()
            await listener.wait_closed()

    return connect_


async def answer(reader):
    """Status, headers and body of the next one."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        first, *lines = head.split("\r\n")[:-2]
        headers = dict(line.split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers["content-length"]))
    return int(first.split()[1]), headers, body


async def rest(reader):
    """What comes before the end of the connection."""
    async with asyncio.timeout(20):
        return await reader.read()


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"G", b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: "])
async def test_a_connection_is_closed_when_its_first_headers_do_not_end(connect, sent):
    async with connect(header_timeout_s=0.05) as (_, reader, writer):
        writer.write(sent)
        assert await rest(reader) == b""


async def test_a_connection_is_closed_when_headers_come_byte_by_byte(connect):
    async with connect(header_timeout_s=0.05, max_header_bytes=1 << 30) as (server, _, writer):
        start = b"GET / HTTP/1.1\r\nX-Slow: "
        writer.write(start)
        count = len(start)
        await server.has(count)
        lost = asyncio.create_task(server.lost.wait())
        while not lost.done():
            writer.write(b"a")
            count += 1
            came = asyncio.create_task(server.has(count))
            await asyncio.wait((lost, came), return_when=asyncio.FIRST_COMPLETED)
            came.cancel()
        assert len(server.timers(0.05)) == 1


@pytest.mark.parametrize("sent", [b"\r\n", b"G", b"GET / HTTP/1.1\r\nHost: a\r\nX-Half: "])
async def test_a_kept_connection_is_closed_when_its_next_headers_do_not_end(connect, sent):
    async with connect(header_timeout_s=0.05) as (server, reader, writer):
        writer.write(GET)
        assert (await answer(reader))[0] == 200
        writer.write(sent)
        assert await rest(reader) == b""
        assert len(server.timers(0.05)) == 2


async def test_one_timer_is_set_when_a_client_keeps_its_connection(connect):
    async with connect() as (server, reader, writer):
        for _ in range(5):
            writer.write(GET)
            status, headers, _ = await answer(reader)
            assert (status, headers.get("connection")) == (200, None)
        assert server.timers(LONG_S) == [False]
        # Between requests uvicorn's own time counts, as it did.
        assert server.timers(KEEP_ALIVE_S) == [False] * 4 + [True]


async def test_a_request_has_one_timer_when_its_headers_come_in_pieces(connect):
    async with connect() as (server, reader, writer):
        for time in (1, 2):
            for piece in (GET[:5], GET[5:20], GET[20:]):
                writer.write(piece)
                await server.has(server.bytes + len(piece))
            assert (await answer(reader))[0] == 200
            assert server.timers(LONG_S) == [False] * time


async def test_no_timer_runs_when_only_the_body_is_still_to_come(connect):
    async with connect() as (server, reader, writer):
        head = b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\n"
        writer.write(head + b"abc")
        await server.has(len(head) + 3)
        assert server.timers(LONG_S) == [False]
        writer.write(b"def")
        assert (await answer(reader))[2] == b"abcdef"
        assert server.timers(LONG_S) == [False]


async def test_a_connection_is_closed_when_a_body_goes_on_after_its_answer(connect):
    async with connect(header_timeout_s=0.05, max_header_bytes=100) as (server, reader, writer):
        writer.write(b"POST /early HTTP/1.1\r\nContent-Length: 5000\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(bytes(4999))  # more than headers may have, and no header
        assert await rest(reader) == b""
        assert len(server.timers(0.05)) == 2


async def test_a_connection_ends_when_its_client_reads_no_answer_and_sends_no_request(connect):
    async with connect(header_timeout_s=0.05) as (server, _, writer):
        writer.transport.pause_reading()
        writer.write(b"GET /huge HTTP/1.1\r\n\r\n")
        await server.has(22)
        writer.write(b"G")
        async with asyncio.timeout(20):
            await server.lost.wait()


async def test_the_timer_goes_when_the_client_does(connect):
    async with connect() as (server, _, writer):
        writer.close()
        async with asyncio.timeout(20):
            await server.lost.wait()
        assert server.timers(LONG_S) == [False]


def refused(status, headers, body):
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    error = ErrorResponse.model_validate(orjson.loads(body), strict=True).error
    assert (error.code, error.field) == ("invalid_input", "")
    return error.message


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
async def test_a_malformed_request_is_answered_in_json_and_not_logged(connect, caplog, sent):
    async with connect() as (_, reader, writer):
        writer.write(sent)
        assert "malformed HTTP request" in refused(*await answer(reader))
        assert await rest(reader) == b""
    assert not caplog.records


@pytest.mark.parametrize("before", [b"", GET])
async def test_headers_are_refused_when_they_are_too_long(connect, before):
    async with connect(max_header_bytes=1000) as (_, reader, writer):
        if before:
            writer.write(before)
            assert (await answer(reader))[0] == 200
        writer.write(b"GET / HTTP/1.1\r\nX-Long: " + bytes([97]) * 1000)
        assert "more than 1000 bytes" in refused(*await answer(reader))
        assert await rest(reader) == b""


async def test_each_request_has_the_size_of_its_own_headers_when_a_connection_is_kept(connect):
    async with connect(max_header_bytes=1000) as (server, reader, writer):
        for _ in range(5):
            for piece in (b"GET / HTTP/1.1\r\nX-Long: " + bytes([97]) * 600, b"\r\n\r\n"):
                writer.write(piece)
                await server.has(server.bytes + len(piece))
            assert (await answer(reader))[0] == 200


def posted(size):
    return b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)


@pytest.mark.parametrize("sizes", [[200], [950], [5000], [10] * 30])
async def test_what_came_before_pipelined_headers_is_not_counted_as_theirs(connect, sizes):
    async with connect(max_header_bytes=1000) as (server, reader, writer):
        head = b"GET / HTTP/1.1\r\nX-Long: " + bytes([97]) * 600
        sent = b"".join(map(posted, sizes)) + head
        writer.write(sent)
        await server.has(len(sent))
        writer.write(b"\r\n\r\n")
        for size in sizes:
            assert (await answer(reader))[2] == bytes(size)
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    "wrong",
    [
        b"hello\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET / HTTP/1.1\r\nX-Long: " + bytes([97]) * 2000,
    ],
    ids=["garbage", "chunks", "headers"],
)
async def test_a_malformed_request_is_answered_after_those_before_it(connect, wrong):
    async with connect(max_header_bytes=1000) as (server, reader, writer):
        sent = posted(7) + posted(9)
        writer.write(sent)
        await server.has(len(sent))
        writer.write(posted(11) + wrong[:60])
        await server.has(len(sent + posted(11) + wrong[:60]))
        writer.write(wrong[60:])
        for size in (7, 9, 11):
            assert (await answer(reader))[2] == bytes(size)
        refused(*await answer(reader))
        assert await rest(reader) == b""


async def test_a_request_is_answered_in_silence_when_it_asks_for_an_upgrade(connect, caplog):
    async with connect() as (_, reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await answer(reader))[0] == 200
    assert not caplog.records


async def test_the_service_speaks_so_when_it_runs(start):
    service = start().ready()
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"hello\r\n\r\n")
    refused(*await answer(reader))
    writer.close()
    await writer.wait_closed()
