from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager

import pytest

from benchmarks.burst import BurstFailed, first_answers

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def serving(answer):
    """`answer(number, writer)` is awaited for each connection; if false, it is closed then."""
    requests, tasks = [], []

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            requests.append(head + await reader.readexactly(70_000))
            if await answer(len(requests), writer):
                await reader.read()  # until the client leaves

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
        await asyncio.gather(*tasks)


async def measure(url, connections=20, timeout_s=20.0):
    bodies = [b"%d" % n * 70_000 for n in range(3)]  # more than one send takes
    return await asyncio.to_thread(
        first_answers, url, "/predict", "text/plain", bodies, connections, timeout_s
    )


async def test_the_one_connection_that_waits_is_the_maximum():
    async def answer(number, writer):
        writer.write(ANSWER[:20])
        await asyncio.sleep(0.5 if number == 7 else 0)
        writer.write(ANSWER[20:])
        return True

    async with serving(answer) as (url, requests):
        found = await measure(url)
    assert found.p50_ms < 400 < 500 <= found.p99_ms == found.max_ms < 5000
    assert len(requests) == 20
    assert all(r.startswith(b"POST /predict HTTP/1.1\r\nHost: ") for r in requests)
    assert {request[-1:] for request in requests} == {b"0", b"1", b"2"}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (ANSWER.replace(b"200", b"429"), "429"),
        (b"", "got no answer within"),
        (ANSWER[:-1], "got no answer within"),
        (None, "expected an answer"),
    ],
)
async def test_one_connection_without_its_answer_fails_all(sent, message):
    async def answer(number, writer):
        writer.write(ANSWER if number != 5 else sent or b"")
        return number != 5 or sent is not None

    async with serving(answer) as (url, _):
        with pytest.raises(BurstFailed, match=message):
            await measure(url, timeout_s=1.0)
