"""The service in this process on a real port, for HTTP and gRPC, and a device that can be held."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager

import grpc
import httpx
import numpy as np
import orjson
import pytest

from benchmarks.grpc_stub import Stub
from service.api.schemas import ErrorResponse
from service.assembly import open_service
from service.forms import open_inference_pb2 as pb
from service.settings import Settings
from tests.conformance.conftest import Device
from tests.service_process import PATIENCE_S
from tests.wire.doors import until
from wire.door import HttpService
from wire.listener import listen as bind
from wire.server import HttpServer


class Served:
    """A service on a port, and a client of its HTTP.

    Attributes:
        in_time: the requests that are queued or computed, or whose bodies arrive.
    """

    def __init__(self, service, settings, client, door, server, port):
        self.service, self.settings, self.client = service, settings, client
        self.app, self.models, self.budget = service.app, service.models, service.budget
        self.door, self.server, self.port = door, server, port
        requests = service.fast_routes[b"POST", b"/predict"].requests
        self.watched, self.decoders = requests.watched, requests.decoders

    @property
    def in_time(self):
        batchers = self.models.served
        return [*self.watched, *(one for batcher in batchers for one in batcher._unanswered())]

    async def post(self, body, content_type="application/octet-stream", query="", **headers):
        """`post(body, type, "?model=lenet", x_request_timeout_ms="5")`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(
            f"/predict{query}", content=body, headers={"Content-Type": content_type, **named}
        )

    @asynccontextmanager
    async def connect(self, *options):
        """A client of its gRPC with a connection of its own, and its `channel`."""
        options = ("grpc.use_local_subchannel_pool", 1), *options
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options) as channel:
            stub = Stub(channel)
            stub.channel = channel
            yield stub

    def samples(self):
        self.service.metrics.flush()
        return [one for family in self.service.metrics.collect() for one in family.samples]

    def value(self, name, **labels):
        """The sum of the samples `name` with these labels."""
        return sum(
            one.value
            for one in self.samples()
            if one.name == name and labels.items() <= one.labels.items()
        )

    def requests(self, outcome, **labels):
        """How many requests ended with `outcome`, of all models."""
        return self.value("lenet_requests_total", outcome=outcome, **labels)

    async def stop(self, timeout_s):
        """Stop like the service; what is open after `timeout_s` is dropped."""
        self.server._stop_timeout_s = timeout_s
        self.server.stop()
        await self.serving


@pytest.fixture
def weights(folder, write):
    """A folder with the one model `tiny`, version 3."""
    write("tiny/3")
    return folder


@pytest.fixture
def open_app(weights):
    """`open_app(max_images=2)`: an async context manager that gives a `Served`."""

    @asynccontextmanager
    async def open_(write_timeout_s=30.0, **changes):
        options = {"weights": weights, "default_model": "tiny", "max_batch_rows": 4, **changes}
        settings = Settings(port=0, grpc_port=0, **options)
        async with open_service(settings, grpc_port=0) as service:
            door = HttpService(
                service.fast_routes,
                service.budget,
                gate=service.gate,
                methods=service.methods,
                write_timeout_s=write_timeout_s,
                app=service.app,
            )
            refused = service.metrics.connection_refused
            server = HttpServer(door, settings.drain_timeout_s, refused)
            (listener,) = bind("127.0.0.1", 0)
            with listener:
                listener.listen()
                port = listener.getsockname()[1]
                serving = asyncio.create_task(server.serve([listener]))
                url, options = f"http://127.0.0.1:{port}", {"trust_env": False, "verify": False}
                options["timeout"] = PATIENCE_S
                async with httpx.AsyncClient(base_url=url, **options) as client:
                    served = Served(service, settings, client, door, server, port)
                    served.serving = serving
                    try:
                        yield served
                    finally:
                        server.stop()
                        await serving
            await settled(service)

    return open_


async def settled(service):
    """Wait until nothing is left of any request, however it ended."""
    predict = service.fast_routes[b"POST", b"/predict"]
    await until(lambda: not predict.requests.budget.held_bytes and not predict.requests.watched)
    await until(lambda: not any(batcher._unanswered() for batcher in service.models.served))


@pytest.fixture
async def served(open_app):
    async with open_app() as served:
        yield served


@pytest.fixture
def open_grpc(open_app, weights, random_weights):
    """`open_grpc(max_images=100)` serves the models tiny, the default one, and mlp."""
    (weights / "mlp").mkdir()
    random_weights("mlp").write(weights / "mlp/3.safetensors")
    options = {"contexts": 1, "max_batch_rows": 16, "max_images": 64, "max_queue_rows": 256}
    options |= {"max_body_bytes": 1 << 20, "decoders": 2, "max_in_flight_bytes": 1 << 22}
    return lambda **changes: open_app(**options | {"hang_timeout_s": 60.0} | changes)


@pytest.fixture
async def running(open_grpc):
    async with open_grpc() as running:
        yield running


@pytest.fixture
async def stub(running):
    async with running.connect() as stub:
        yield stub


@pytest.fixture
def device(monkeypatch):
    device = Device(monkeypatch)
    yield device
    device.release()


async def failure(call):
    """The error that a call of gRPC ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


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


@pytest.fixture
def raw_request(images):
    """`raw_request(rows=5, **fields)`: the images as raw UINT8, with fields replaced."""

    def make(rows=5, **fields):
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="image", datatype="UINT8", shape=(rows, 28, 28)
        )
        raw = [images[:rows].tobytes()]
        return pb.ModelInferRequest(**{"inputs": [tensor], "raw_input_contents": raw, **fields})

    return make
