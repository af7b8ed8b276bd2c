from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from service.engine import models as predictor
from service.engine.models import Predictor
from service.engine.queue import Answer
from service.errors import Overloaded, ServiceError, UnknownModel
from service.metrics import Metrics

IMAGES = np.zeros((3, 28, 28), np.uint8)


class PuppetBatcher:
    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []
        self.error: BaseException | None = None
        self.model = SimpleNamespace(name="lenet", version="4")

    async def submit(self, images, timeout_s):
        self.asked.append((len(images), timeout_s))
        if self.error is not None:
            raise self.error
        probabilities = np.full((len(images), 10), 0.1, np.float32)
        return Answer(probabilities, self.model, queue_s=0.25, compute_s=0.5)


class PuppetRepository:
    def __init__(self, batcher: PuppetBatcher) -> None:
        self.served = SimpleNamespace(batcher=batcher)

    def get(self, name="", version=""):
        if (name, version) not in (("", ""), ("lenet", "4")):
            raise UnknownModel("not loaded", field="model")
        return self.served


class Clock:
    """Stands in for the `time` module of the predictor."""

    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return Metrics(registry)


@pytest.fixture
def batcher():
    return PuppetBatcher()


@pytest.fixture
def served(batcher, metrics):
    return Predictor(PuppetRepository(batcher), metrics, timeout_s=5.0)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(predictor, "time", clock)
    return clock


async def test_a_prediction_says_who_made_it_and_where_the_time_went(served, batcher):
    with served.clock("http") as clock:
        prediction = await served.predict(IMAGES, clock)
    assert (prediction.model, prediction.version) == ("lenet", "4")
    assert prediction.probabilities.shape == (3, 10)
    assert clock.stages == {"queue": 0.25, "compute": 0.5}
    assert batcher.asked == [(3, 5.0)]


async def test_the_version_is_the_one_that_answered_when_another_is_served_now(served, batcher):
    batcher.model = SimpleNamespace(name="lenet", version="3")
    with served.clock("http") as clock:
        assert (await served.predict(IMAGES, clock)).version == "3"


@pytest.mark.parametrize(("asked_s", "given_s"), [(None, 5.0), (2.0, 2.0), (60.0, 5.0)])
async def test_the_callers_time_is_cut_to_the_services_when_it_asks_for_more(
    served, batcher, asked_s, given_s
):
    with served.clock("grpc") as clock:
        await served.predict(IMAGES, clock, model="lenet", version="4", timeout_s=asked_s)
    assert batcher.asked == [(3, given_s)]


async def test_nothing_is_queued_when_the_model_is_unknown(served, batcher):
    with pytest.raises(UnknownModel), served.clock("http") as clock:
        await served.predict(IMAGES, clock, model="alexnet")
    assert batcher.asked == []


async def test_strange_model_names_make_no_series_when_they_are_asked_for(served, metrics):
    async def ask(name):
        with pytest.raises(UnknownModel), served.clock("http") as clock:
            await served.predict(IMAGES, clock, model=name, version=name)

    await ask("first")
    lines = metrics.exposition().count(b"\n")
    for number in range(100):
        await ask(f"model-{number}\n\u2028{{}}")
    assert metrics.exposition().count(b"\n") == lines


def test_a_predictor_is_not_ready_when_it_was_just_made(served):
    assert served.ready is False


def test_stages_and_the_total_are_timed_when_a_request_ends_well(served, metrics, registry, clock):
    with served.clock("http") as request:
        clock.now_s += 1.0
        request.lap()
        clock.now_s += 0.25
        request.record("decode")
        clock.now_s += 2.0
        request.lap()
        clock.now_s += 0.125
        request.record("encode")
        assert request.total_s == 3.375
    assert request.stages == {"decode": 0.25, "encode": 0.125}

    def value(name, **labels):
        metrics.tallies.flush()
        return registry.get_sample_value(name, labels)

    assert value("lenet_request_duration_seconds_sum", protocol="http") == 3.375
    assert value("lenet_request_duration_seconds_count", protocol="http") == 1
    assert value("lenet_stage_duration_seconds_sum", stage="decode") == 0.25
    assert value("lenet_stage_duration_seconds_sum", stage="encode") == 0.125
    assert value("lenet_requests_total", protocol="http", outcome="ok") == 1


def test_the_first_stage_begins_with_the_request_when_no_lap_was_noted(served, clock):
    with served.clock("http") as request:
        clock.now_s += 0.5
        request.record("decode")
    assert request.stages == {"decode": 0.5}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Overloaded("full"), "overloaded"),
        (ServiceError("?"), "internal"),
        (asyncio.CancelledError(), "cancelled"),
        (ZeroDivisionError(), "internal"),
    ],
)
async def test_exactly_one_outcome_is_counted_when_a_request_ends_badly(
    served, registry, batcher, error, outcome
):
    batcher.error = error
    with pytest.raises(type(error)), served.clock("grpc") as clock:
        await served.predict(IMAGES, clock)
    counted = {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "lenet_requests_total" and sample.value
    }
    assert counted == {("grpc", outcome): 1.0}
    assert (
        registry.get_sample_value("lenet_request_duration_seconds_count", {"protocol": "grpc"}) == 0
    ), "only answers are timed"


async def test_a_profiler_sees_each_request_from_its_beginning_to_its_end(served, monkeypatch):
    open_ranges = []

    def begin(name):
        open_ranges.append(name)
        return len(open_ranges)

    monkeypatch.setattr("lenet.nvtx.begin", begin)
    monkeypatch.setattr("lenet.nvtx.end", lambda opened: open_ranges.__setitem__(opened - 1, ""))
    with served.clock("http"), served.clock("grpc"):
        assert open_ranges == ["request", "request"]
    with pytest.raises(UnknownModel), served.clock("http") as clock:
        await served.predict(IMAGES, clock, model="nobody")
    assert open_ranges == ["", "", ""]
