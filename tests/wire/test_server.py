"""A server of sockets: when it stops, and what it counts."""

from __future__ import annotations

import asyncio

import pytest

from tests.wire.doors import until
from wire.budget import Budget
from wire.door import HttpService
from wire.listener import allow_connections, listen
from wire.server import HttpServer


@pytest.mark.parametrize("timeout_s", [0.0, 0.4])
async def test_http_stops_at_once_when_nothing_runs_however_little_time_it_has(caplog, timeout_s):
    server = HttpServer(HttpService({}, Budget(1 << 20)), timeout_s)
    server.stop()
    (listener,) = listen("127.0.0.1", 0)
    await server.serve([listener])
    assert not caplog.records, "nothing was left to cancel"


async def test_the_server_reports_how_many_connections_have_ended():
    ended = []
    door = HttpService({}, Budget(1 << 20), max_connections=2)
    server = HttpServer(door, 1.0, closed=ended.append)
    (listener,) = listen("127.0.0.1", 0)
    allow_connections([listener])
    address = listener.getsockname()
    serving = asyncio.create_task(server.serve([listener]))

    async def until_ended(number):
        await until(lambda: ended[-1:] == [number])

    (_, http1), (http2_answers, http2) = [await asyncio.open_connection(*address) for _ in "12"]
    http2.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    await http2_answers.readexactly(9)
    _, refused = await asyncio.open_connection(*address)
    await until_ended(1)
    http1.close()
    await until_ended(2)
    http2.close()
    await until_ended(3)
    refused.close()
    server.stop()
    await serving
