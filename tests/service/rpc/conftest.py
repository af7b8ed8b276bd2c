"""A service with real models and a gRPC server on a loopback port, and ways to hold it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lenet.context import Target
from service.engine.devices import Placement
from service.engine.models import Batching, Predictor, Repository
from service.engine.versions import read_models
from service.metrics import Metrics
from service.rpc import open_inference_pb2 as pb
from service.rpc.open_inference_pb2_grpc import GRPCInferenceServiceStub
from service.rpc.server import serve

MAX_IMAGES = 64


class WatchedPredictor(Predictor):
    """The real one; says when a request comes and goes, holds it at `gate`, can be made to fail."""

    def __init__(self, repository, metrics, timeout_s):
        super().__init__(repository, metrics, timeout_s)
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error = None
        self.timeouts_s = []

    async def predict(self, images, clock, *, timeout_s=None, **names):
        self.timeouts_s.append(timeout_s)
        self.entered.set()
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return await super().predict(images, clock, timeout_s=timeout_s, **names)
        finally:
            self.left.set()


class House:
    """A predictor, what it stands on, and servers in front of it."""

    def __init__(self, predictor, repository, metrics, registry):
        self.predictor = predictor
        self.repository = repository
        self.metrics = metrics
        self.registry = registry

    def requests(self, outcome):
        """How many gRPC requests ended with `outcome`."""
        return self.value("lenet_requests_total", protocol="grpc", outcome=outcome)

    def value(self, name, **labels):
        """A sample, 0 while it is not there."""
        self.metrics.tallies.flush()
        return self.registry.get_sample_value(name, labels) or 0

    def serve(self, **changes):
        options = {
            "host": "127.0.0.1",
            "port": 0,
            "shared": False,
            "max_body_bytes": 1 << 20,
            "max_images": MAX_IMAGES,
            "stop_timeout_s": 5.0,
        }
        return serve(self.predictor, self.repository, **{**options, **changes})

    @asynccontextmanager
    async def connect(self, **changes) -> AsyncIterator[GRPCInferenceServiceStub]:
        """A client of a server of its own; `stub.channel` and `stub.port` go with it."""
        async with AsyncExitStack() as stack:
            port = await stack.enter_async_context(self.serve(**changes))
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            )
            stub = GRPCInferenceServiceStub(channel)
            stub.channel, stub.port = channel, port
            yield stub


@pytest.fixture
def open_house(tmp_path, tiny, random_weights):
    """`open_house(timeout_s=30.0, max_queue_rows=256)` serves the models tiny and mlp."""

    @asynccontextmanager
    async def open_(timeout_s=30.0, max_queue_rows=256):
        for model in (tiny, "mlp"):
            weights = random_weights(model)
            weights.write(tmp_path / weights.model.name / "3.safetensors")
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        batching = Batching(
            placement=Placement((Target("cpu"),), contexts=1, max_batch_rows=16),
            max_queue_rows=max_queue_rows,
            max_wait_s=0.0,
            hang_timeout_s=60.0,
            drain_timeout_s=5.0,
        )
        files = read_models(tmp_path, (), "tiny")
        async with Repository(files, "tiny", batching, metrics) as repository:
            predictor = WatchedPredictor(repository, metrics, timeout_s)
            predictor.ready = True
            yield House(predictor, repository, metrics, registry)

    return open_


@pytest.fixture
async def house(open_house):
    async with open_house() as house:
        yield house


@pytest.fixture
async def stub(house):
    async with house.connect() as stub:
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
