"""Real models and a gRPC server on a loopback port that can be held up."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from benchmarks.grpc_stub import Stub
from lenet.context import ExecutionContext, Target
from service.api.grpc_methods import methods
from service.api.servicer import small_methods
from service.budget import Budget
from service.decode.pool import Decoders
from service.engine.deadlines import Deadlines
from service.engine.devices import Placement
from service.engine.models import EngineConfig, Models
from service.engine.repository import Repository
from service.engine.versions import WeightsFolder
from service.errors import Unavailable
from service.forms import open_inference_pb2 as pb
from service.forms.body import Limits
from service.observe.metrics import Metrics
from service.process.keys import Keys
from service.process.listener import listen
from service.request import Requests
from service.transport.door import HttpService
from service.transport.server import HttpServer
from tests.service_process import PATIENCE_S

MAX_IMAGES = 64


class Gate:
    """Holds batches up while it is closed."""

    def __init__(self):
        self._open = threading.Event()
        self._open.set()
        self.set, self.clear = self._open.set, self._open.clear

    def hold(self, monkeypatch):
        launch, run = ExecutionContext.launch, ExecutionContext.run

        def launch_if_open(context, images):
            return launch(context, images) if self._open.is_set() else None

        def held_run(context, images):  # on the context's thread
            assert self._open.wait(PATIENCE_S), "nobody opened the gate"
            return run(context, images)

        monkeypatch.setattr(ExecutionContext, "launch", launch_if_open)
        monkeypatch.setattr(ExecutionContext, "run", held_run)


class WatchedModels(Models):
    """The real one; says when a request comes, holds it at `gate`, can be made to fail."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.entered = asyncio.Event()
        self.gate = Gate()
        self.error = None
        self.timeouts_s = []

    def get(self, name="", version=""):
        served = super().get(name, version)
        return dataclasses.replace(served, batcher=WatchedBatcher(served.batcher, self))


class WatchedBatcher:
    """The real one, watched by `models`."""

    def __init__(self, batcher, models):
        self._batcher, self._models = batcher, models

    def __getattr__(self, name):
        return getattr(self._batcher, name)

    def enqueue(self, request, images):
        models = self._models
        models.timeouts_s.append(request.deadline_s - asyncio.get_running_loop().time())
        models.entered.set()
        if models.error is not None:
            raise models.error.with_traceback(None)  # that of the last call holds its message
        self._batcher.enqueue(request, images)


class RunningGrpc:
    """Models, their metrics, and servers in front of them."""

    def __init__(self, models, metrics, registry, decoders, timeout_s):
        self.models = models
        self.decoders = decoders
        self.deadlines = Deadlines()
        self.timeout_s = timeout_s
        self.budget = Budget(1 << 22)
        self.metrics = metrics
        self.registry = registry

    def requests(self, outcome):
        """How many gRPC requests ended with `outcome`, of all models."""
        return sum(
            count for (_, ended_with), count in self.outcomes().items() if ended_with == outcome
        )

    def value(self, name, **labels):
        """A sample, 0 while it is not there."""
        self.metrics.flush()
        return self.registry.get_sample_value(name, labels) or 0

    def outcomes(self):
        """Counted gRPC requests: {(model, outcome): number}."""
        self.metrics.flush()
        return {
            (sample.labels["model"], sample.labels["outcome"]): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "lenet_requests_total"
            and sample.value
            and sample.labels["protocol"] == "grpc"
        }

    @asynccontextmanager
    async def serve(self, **changes) -> AsyncIterator[Server]:
        """A server on a port of its own; its `port`, and `stop(timeout_s)`."""
        options = {
            "max_body_bytes": 1 << 20,
            "max_images": MAX_IMAGES,
            "timeout_s": self.timeout_s,
            "stop_timeout_s": 5.0,
            "write_timeout_s": 30.0,
            "keys": Keys(),
            **changes,
        }
        requests = Requests(
            self.models,
            self.metrics,
            Limits(options["max_images"]),
            options["max_body_bytes"],
            self.budget,
            self.decoders,
            self.deadlines,
            options["timeout_s"],
            "grpc",
        )
        answers = small_methods(
            self.models, Repository(self.models), self.metrics, options["max_images"]
        )
        found = methods(requests, answers, self.models, options["keys"])
        door = HttpService(
            {}, self.budget, methods=found, write_timeout_s=options["write_timeout_s"]
        )
        server = Server(door, options["stop_timeout_s"])
        (listener,) = listen("127.0.0.1", 0)
        with listener:
            listener.listen()
            server.port = listener.getsockname()[1]
            server.serving = asyncio.create_task(server.serve([listener]))
            try:
                yield server
            finally:
                await server.stop(options["stop_timeout_s"])

    @asynccontextmanager
    async def connect(self, **changes) -> AsyncIterator[Stub]:
        """A client of a server of its own, `stub.server`."""
        async with self.serve(**changes) as server, client(server) as stub:
            yield stub


@asynccontextmanager
async def client(server, *options) -> AsyncIterator[Stub]:
    """A client with a connection of its own; `channel`, `server` and `port` go with it."""
    options = ("grpc.use_local_subchannel_pool", 1), *options
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        stub = Stub(channel)
        stub.channel, stub.server, stub.port = channel, server, server.port
        yield stub


class Server(HttpServer):
    """The real one without an application, which says where it is."""

    def __init__(self, door, stop_timeout_s):
        super().__init__(FastAPI(), door, stop_timeout_s)

    async def stop(self, timeout_s):
        """Stop like the service; calls that are open after `timeout_s` are dropped."""
        self._door.stop()
        self.should_exit = True
        self.config.timeout_graceful_shutdown = timeout_s
        await self.serving
        self._door.give_up(Unavailable("the service stopped before the answer"))


@pytest.fixture
def start_grpc(tmp_path, tiny, random_weights, monkeypatch):
    """`start_grpc(timeout_s=30.0, max_queue_rows=256)` serves the models tiny and mlp."""

    @asynccontextmanager
    async def open_(timeout_s=30.0, max_queue_rows=256):
        for model in (tiny, "mlp"):
            weights = random_weights(model)
            weights.write(tmp_path / weights.model.name / "3.safetensors")
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        config = EngineConfig(
            placement=Placement((Target("cpu"),), contexts=1, max_batch_rows=16),
            max_queue_rows=max_queue_rows,
            max_wait_s=0.0,
            hang_timeout_s=60.0,
            drain_timeout_s=5.0,
        )
        folder = WeightsFolder(tmp_path)
        versions = folder.read_all(default_model="tiny")
        parts = folder, versions, "tiny", config, metrics, Deadlines()
        async with WatchedModels(*parts) as models:
            models.ready = True
            models.gate.hold(monkeypatch)
            with Decoders(metrics, 2, 320 << 20) as decoders:
                try:
                    yield RunningGrpc(models, metrics, registry, decoders, timeout_s)
                finally:
                    models.gate.set()

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
