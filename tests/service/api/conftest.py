"""The service in this process, on a real port."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import asynccontextmanager

import httpx
import numpy as np
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lenet.context import ExecutionContext
from service.api.schemas import ErrorResponse
from service.assembly import open_service
from service.engine.batcher import Batcher
from service.settings import Settings
from tests.service_process import PATIENCE_S
from tests.wire.doors import until
from wire.door import HttpService
from wire.listener import listen as bind
from wire.server import HttpServer


class Served:
    """A service on a port, and a client of it."""

    def __init__(self, service, settings, client, door, port):
        self.service = service
        self.app = service.app
        self.models = service.models
        self.settings = settings
        self.client = client
        self.door = door
        self.port = port

    async def post(self, body, content_type="application/octet-stream", query="", **headers):
        """`post(body, type, "?model=lenet", x_request_timeout_ms="5")`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(
            f"/predict{query}", content=body, headers={"Content-Type": content_type, **named}
        )

    async def families(self):
        response = await self.client.get("/metrics")
        assert response.status_code == 200
        return {family.name: family for family in text_string_to_metric_families(response.text)}

    async def value(self, name, **labels):
        """The sample `name` with exactly `labels`, 0 where there is none."""
        samples = [s for family in (await self.families()).values() for s in family.samples]
        found = [s.value for s in samples if (s.name, s.labels) == (name, labels)]
        assert len(found) <= 1
        return found[0] if found else 0

    async def requests(self, outcome):
        """How many requests ended with `outcome`, of all models."""
        family = (await self.families())["lenet_requests"]
        labels = {"protocol": "http", "outcome": outcome}
        return sum(s.value for s in family.samples if labels.items() <= s.labels.items())


@pytest.fixture
def weights(folder, write):
    """A folder with the one model `tiny`, version 3."""
    write("tiny/3")
    return folder


@pytest.fixture
def open_app(weights):
    """`open_app(max_images=2)`: an async context manager that gives a `Served`."""

    @asynccontextmanager
    async def open_(**changes):
        options = {"weights": weights, "default_model": "tiny", "max_batch_rows": 4, **changes}
        settings = Settings(port=0, grpc_port=0, **options)
        async with open_service(settings, grpc_port=0) as service:
            door = HttpService(
                service.fast_routes, service.budget, gate=service.gate, app=service.app
            )
            refused = service.metrics.connection_refused
            server = HttpServer(door, settings.drain_timeout_s, refused)
            (listener,) = bind("127.0.0.1", 0)
            with listener:
                listener.listen()
                port = listener.getsockname()[1]
                serving = asyncio.create_task(server.serve([listener]))
                url = f"http://127.0.0.1:{port}"
                try:
                    async with httpx.AsyncClient(
                        base_url=url, trust_env=False, verify=False, timeout=PATIENCE_S
                    ) as client:
                        yield Served(service, settings, client, door, port)
                finally:
                    server.stop()
                    await serving
            await settled(service)

    return open_


@pytest.fixture
def listen(open_app):
    return open_app


async def settled(service):
    """Wait until nothing is left of any request, however it ended."""
    predict = service.fast_routes[b"POST", b"/predict"]
    await until(
        lambda: not predict.requests.budget.held_bytes and not predict.requests.deadlines._waiting
    )
    await until(lambda: not any(model._unanswered() for model in service.models.served))


@pytest.fixture
async def served(open_app):
    async with open_app() as served:
        yield served


class Hold:
    """Batches that have begun wait for `release`; `submitted` counts requests at the queue."""

    def __init__(self, monkeypatch):
        run, enqueue, end = ExecutionContext.run, Batcher.enqueue, Batcher._end
        self._begun = threading.Semaphore(0)
        self._released = threading.Event()
        self._submitted = asyncio.Semaphore(0)
        self._left = asyncio.Semaphore(0)

        def held_run(context, images):
            self._begun.release()
            assert self._released.wait(PATIENCE_S), "nobody released the batch"
            return run(context, images)

        def watched_enqueue(batcher, *arguments):
            request = enqueue(batcher, *arguments)
            self._submitted.release()
            return request

        def watched_end(batcher, request):
            end(batcher, request)
            self._left.release()

        monkeypatch.setattr(ExecutionContext, "launch", lambda context, images: None)
        monkeypatch.setattr(ExecutionContext, "run", held_run)
        monkeypatch.setattr(Batcher, "enqueue", watched_enqueue)
        monkeypatch.setattr(Batcher, "_end", watched_end)

    def release(self):
        self._released.set()

    async def begun(self):
        """Wait until one more batch is on its context."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=PATIENCE_S)

    async def submitted(self):
        """Wait until one more request stands in the queue."""
        async with asyncio.timeout(PATIENCE_S):
            await self._submitted.acquire()

    async def left(self):
        """Wait until one more request has its answer or gave up."""
        async with asyncio.timeout(PATIENCE_S):
            await self._left.acquire()


@pytest.fixture
def hold(monkeypatch):
    hold = Hold(monkeypatch)
    yield hold
    hold.release()


@pytest.fixture
def refusal():
    """`refusal(response, status, code)`: the error, which must have the one shape."""

    def check(response, status, code):
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        document = orjson.loads(response.content)
        assert set(document) == {"error"}
        assert set(document["error"]) == {"code", "field", "message"}
        error = ErrorResponse.model_validate(document, strict=True).error
        assert error.code == code
        assert error.message
        assert not re.search(r"Traceback|\.py\b|/work|/tmp|0x[0-9a-f]{6}", response.text)
        return error

    return check


@pytest.fixture(scope="session")
def images():
    """Five random images, uint8 (5, 28, 28)."""
    return np.random.default_rng(7).integers(0, 256, (5, 28, 28), np.uint8)


@pytest.fixture(scope="session")
def one(images):
    """784 bytes."""
    return images[0].tobytes()
