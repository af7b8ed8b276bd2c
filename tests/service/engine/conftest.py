"""Models `a` and `b` served from files."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lenet.context import Target
from lenet.model import Model
from lenet.reference import softmax
from service.engine.devices import Placement
from service.engine.models import EngineConfig, Models
from service.engine.repository import Repository
from service.engine.versions import WeightsFolder
from service.observe.metrics import Metrics
from tests.service_process import PATIENCE_S
from tests.tasks import submit

CPU = (Target("cpu"),)


def spoil_golden(weights):
    """These weights with logits that no device computes."""
    golden = dataclasses.replace(weights.golden, logits=weights.golden.logits + np.float32(1))
    return dataclasses.replace(weights, golden=golden)


class RunningEngine:
    """Open models, what they count, and a client of them."""

    def __init__(self, models, metrics, registry, draw):
        self.models = models
        self.repository = Repository(models)
        self.metrics = metrics
        self.registry = registry
        self.draw = draw

    def value(self, name, **labels):
        self.metrics.flush()
        return self.registry.get_sample_value(name, labels)

    async def ask(self, seed, name="a", version=""):
        """The version that answers, whose answer must be that of the file drawn with `seed`."""
        golden = self.draw(name, seed).golden
        answer = await submit(self.models.get(name, version), golden.images, 20.0)
        expected = softmax(golden.logits)
        np.testing.assert_allclose(answer.probabilities, expected, rtol=1e-4, atol=1e-7)
        assert answer.model == name
        return answer.version


@pytest.fixture
def draw(random_weights, tiny):
    """`draw("a", 2)`: the weights that `write("a/1", seed=2)` writes."""
    return lambda name, seed: random_weights(Model(name, tiny.blocks), seed)


@pytest.fixture
def open_engine(folder, draw):
    """`open_engine(contexts=2, **config)` serves every model in `folder`, `a` by default."""

    @asynccontextmanager
    async def open_(targets=CPU, contexts=2, max_batch_rows=4, wanted=(), latest=1, **changes):
        options = {
            "placement": Placement(targets, contexts, max_batch_rows),
            "max_queue_rows": 100,
            "max_wait_s": 0.0,
            "hang_timeout_s": 60.0,
            "drain_timeout_s": 10.0,
        }
        before = set(threading.enumerate())
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        weights = WeightsFolder(folder, latest)
        versions = weights.read_all(wanted, default_model="a")
        config = EngineConfig(**options | changes)
        try:
            parts = weights, versions, "a", config, metrics
            async with Models(*parts) as models:
                engine = RunningEngine(models, metrics, registry, draw)
                yield engine
                await engine.repository.close(PATIENCE_S)
        finally:
            left = set(threading.enumerate()) - before
            assert not [t for t in left if t.name.startswith("context-")]

    return open_


@pytest.fixture
async def engine(open_engine, write):
    """Version 3 of `a`, drawn with seed 1, and version 1 of `b`, with seed 9."""
    write("a/3", seed=1)
    write("b/1", seed=9)
    async with open_engine() as engine:
        yield engine
