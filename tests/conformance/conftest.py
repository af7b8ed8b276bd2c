"""The doors by which a request reaches the service: our own server, and others."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from service.assembly import open_service
from service.process.listener import listen
from service.settings import Settings
from service.transport.door import HttpService
from service.transport.server import HttpServer
from tests.service.http.conftest import hold, settled, weights
from tests.service_process import PATIENCE_S

__all__ = ["hold", "weights"]

DOORS = ("HTTP/1.1", "HTTP/2", "uvicorn", "ASGITransport")


@dataclass
class Opened:
    """A service behind a door, and a client of it; `stop()` is what SIGTERM does to the server."""

    service: Any
    client: httpx.AsyncClient
    stop: Any = None

    async def outcomes(self):
        """How many requests ended in each way."""
        text = (await self.service.metrics.exposition()).decode()
        found = re.findall(
            r'^lenet_requests_total\{.*outcome="(\w+)".*\} (\d+)', text, re.MULTILINE
        )
        counts = Counter()
        for outcome, count in found:
            counts[outcome] += int(count)
        return +counts

    async def until(self, outcomes):
        """Wait until requests have ended so, and in no other way."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.outcomes() != outcomes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def _wire(service):
    door = HttpService(service.fast_routes, service.budget, gate=service.gate)
    return HttpServer(service.app, door, PATIENCE_S)


def _uvicorn(service):
    return uvicorn.Server(
        uvicorn.Config(service.asgi, lifespan="off", log_config=None, server_header=False)
    )


@asynccontextmanager
async def _served(server, **versions):
    (listener,) = listen("127.0.0.1", 0)
    with listener:
        listener.listen()
        port = listener.getsockname()[1]
        serving = asyncio.create_task(server.serve(sockets=[listener]))

        def stop():
            server.should_exit = True
            return serving

        url = f"http://127.0.0.1:{port}"
        transport = httpx.AsyncHTTPTransport(**versions)
        try:
            yield httpx.AsyncClient(base_url=url, transport=transport, timeout=PATIENCE_S), stop
        finally:
            await stop()


@asynccontextmanager
async def _called(service):
    transport = httpx.ASGITransport(service.asgi, raise_app_exceptions=False)
    url = "http://127.0.0.1"
    yield httpx.AsyncClient(base_url=url, transport=transport, timeout=PATIENCE_S), None


_OPEN = {
    "HTTP/1.1": lambda service: _served(_wire(service)),
    "HTTP/2": lambda service: _served(_wire(service), http1=False, http2=True),
    "uvicorn": lambda service: _served(_uvicorn(service)),
    "ASGITransport": _called,
}


@pytest.fixture
def open_doors(weights):
    """`open_doors("uvicorn", max_images=2)`: a context with an `Opened` for each door, by name.

    When it is left, nothing of any request is held any more, however it ended.
    """

    @asynccontextmanager
    async def open_(*doors, **changes):
        options = {"weights": weights, "default_model": "tiny", "max_batch_rows": 4, **changes}
        async with open_service(Settings(device="cpu", **options), grpc_port=0) as service:
            async with AsyncExitStack() as stack:
                opened = {}
                for door in doors:
                    client, stop = await stack.enter_async_context(_OPEN[door](service))
                    await stack.enter_async_context(client)
                    opened[door] = Opened(service, client, stop)
                yield opened
            await settled(service)

    return open_


@pytest.fixture(params=DOORS)
def door(request):
    return request.param


@pytest.fixture
def open_door(door, open_doors):
    """`open_door(max_images=2)`: a context with the `Opened` of the door that is tested."""

    @asynccontextmanager
    async def open_(**changes):
        async with open_doors(door, **changes) as opened:
            yield opened[door]

    return open_
