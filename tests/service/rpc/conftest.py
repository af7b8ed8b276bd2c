"""The service in this process, with gRPC on a loopback port, whose batches can be held up."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.grpc_stub import Stub
from lenet.context import ExecutionContext
from service.assembly import open_service
from service.engine.batcher import Batcher
from service.forms import open_inference_pb2 as pb
from service.settings import Settings
from tests.service_process import PATIENCE_S
from wire.door import HttpService
from wire.listener import listen
from wire.server import HttpServer


class Gate:
    """Holds batches up while it is closed."""

    def __init__(self, monkeypatch):
        self._open = threading.Event()
        self._open.set()
        self.set, self.clear = self._open.set, self._open.clear
        launch, run = ExecutionContext.launch, ExecutionContext.run

        def launch_if_open(context, images):
            return launch(context, images) if self._open.is_set() else None

        def held_run(context, images):  # on the context's thread
            assert self._open.wait(PATIENCE_S), "nobody opened the gate"
            return run(context, images)

        monkeypatch.setattr(ExecutionContext, "launch", launch_if_open)
        monkeypatch.setattr(ExecutionContext, "run", held_run)


class Running:
    """An open service and its server.

    Attributes:
        entered: set when a request comes to a queue.
        timeouts_s: how long each of them could wait.
        error: raised instead of taking it.
    """

    def __init__(self, service, server, door, port, registry, monkeypatch):
        self.models, self.budget, self.metrics = (
            service.models,
            service.budget,
            service.metrics,
        )
        self.decoders = service.fast_routes[b"POST", b"/predict"].requests.decoders
        self.gate, self.port = Gate(monkeypatch), port
        self.entered, self.timeouts_s, self.error = asyncio.Event(), [], None
        self._server, self._door, self._registry = server, door, registry
        enqueue = Batcher.enqueue

        def watched_enqueue(batcher, request, images):
            self.timeouts_s.append(request.deadline_s - asyncio.get_running_loop().time())
            self.entered.set()
            if self.error is not None:
                raise self.error.with_traceback(None)  # that of the last call holds its message
            enqueue(batcher, request, images)

        monkeypatch.setattr(Batcher, "enqueue", watched_enqueue)

    def value(self, name, **labels):
        """The sum of the samples `name` with these labels."""
        self.metrics.flush()
        wanted = labels.items()
        samples = [one for family in self._registry.collect() for one in family.samples]
        return sum(
            one.value for one in samples if one.name == name and wanted <= one.labels.items()
        )

    def requests(self, outcome):
        """How many gRPC requests ended with `outcome`, of all models."""
        return self.value("lenet_requests_total", protocol="grpc", outcome=outcome)

    @asynccontextmanager
    async def connect(self, *options):
        """A client with a connection of its own, and its `channel`."""
        options = ("grpc.use_local_subchannel_pool", 1), *options
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options) as channel:
            stub = Stub(channel)
            stub.channel = channel
            yield stub

    async def stop(self, timeout_s):
        """Stop like the service; calls that are open after `timeout_s` are dropped."""
        self._server._stop_timeout_s = timeout_s
        self._server.stop()
        await self.serving


@pytest.fixture
def start_grpc(folder, write, random_weights, monkeypatch):
    """`start_grpc(max_images=100)` serves the models tiny, the default one, and mlp."""
    write("tiny/3")
    (folder / "mlp").mkdir()
    random_weights("mlp").write(folder / "mlp/3.safetensors")

    @asynccontextmanager
    async def open_(write_timeout_s=30.0, **changes):
        options = {"default_model": "tiny", "contexts": 1, "max_batch_rows": 16, "max_images": 64}
        options |= {"max_queue_rows": 256, "max_body_bytes": 1 << 20, "decoders": 2}
        options |= {"max_in_flight_bytes": 1 << 22, "hang_timeout_s": 60.0, **changes}
        registry = CollectorRegistry()
        monkeypatch.setattr("service.assembly.CollectorRegistry", lambda: registry)
        async with open_service(Settings(weights=folder, **options), grpc_port=0) as service:
            door = HttpService(
                service.fast_routes,
                service.budget,
                gate=service.gate,
                methods=service.methods,
                write_timeout_s=write_timeout_s,
                app=service.app,
            )
            server = HttpServer(door, 5.0)
            (listener,) = listen("127.0.0.1", 0)
            listener.listen()
            port = listener.getsockname()[1]
            running = Running(service, server, door, port, registry, monkeypatch)
            running.serving = asyncio.create_task(server.serve([listener]))
            try:
                yield running
            finally:
                await running.stop(5.0)
                running.gate.set()

    return open_


@pytest.fixture
async def running(start_grpc):
    async with start_grpc() as running:
        yield running


@pytest.fixture
async def stub(running):
    async with running.connect() as stub:
        yield stub


@pytest.fixture
def images():
    return np.random.default_rng(7).integers(0, 256, (5, 28, 28), np.uint8)


@pytest.fixture
def raw_request(images):
    """`raw_request(rows=5, **fields)`: the images as raw UINT8, with fields replaced."""

    def make(rows=5, **fields):
        tensor = pb.ModelInferRequest.InferInputTensor(
            name="image", datatype="UINT8", shape=(rows, 28, 28)
        )
        fields = {
            "inputs": [tensor],
            "raw_input_contents": [images[:rows].tobytes()],
            **fields,
        }
        return pb.ModelInferRequest(**fields)

    return make
