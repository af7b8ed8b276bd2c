from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lenet.context import ExecutionContext, Target, open_backend
from lenet.errors import DeviceError, GoldenMismatch, OutOfDeviceMemory
from lenet.reference import softmax
from service.engine.batcher import Batcher
from service.engine.devices import Placement
from service.engine.faults import Faults
from service.engine.models import Batching, Repository, Stop
from service.engine.versions import read_models
from service.errors import InferenceFailed, Unavailable, UnknownModel
from service.metrics import Metrics

BATCHING = Batching(
    placement=Placement((Target("cpu"),), contexts=2, max_batch_rows=4),
    max_queue_rows=100,
    max_wait_s=0.0,
    hang_timeout_s=60.0,
    drain_timeout_s=10.0,
)


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


async def test_models_answer_by_name_and_version_when_they_are_loaded(
    folder, write, metrics, caplog
):
    write("a/3", seed=1)
    write("b/1", seed=2)
    files = read_models(folder, (), "b")
    with caplog.at_level(logging.INFO):
        async with Repository(files, "b", BATCHING, metrics) as repository:
            assert [served.file.name for served in repository.models] == ["b", "a"]
            for served in repository.models:
                golden = served.file.weights.golden
                answer = await served.batcher.submit(golden.images, 10.0)
                np.testing.assert_allclose(
                    answer.probabilities, softmax(golden.logits), rtol=1e-4, atol=1e-7
                )
                assert served.pool.busy == 0
            a = repository.get("a")
            assert repository.get("a", "3") is a
            assert repository.get() is repository.get("b") is repository.get("", "1")
    digest = files[0].sha256
    assert f"model a version 3 (sha256 {digest[:12]}) ready on 2 cpu contexts" in caplog.text
    exposition = metrics.exposition().decode()
    assert f'lenet_model_info{{model="a",sha256="{digest}",version="3"}} 1.0' in exposition
    assert 'lenet_contexts{model="b"} 2.0' in exposition


async def test_an_unknown_model_or_version_is_refused_with_those_there_are(folder, write, metrics):
    write("a/3")
    async with Repository(read_models(folder, (), "a"), "a", BATCHING, metrics) as repository:
        with pytest.raises(UnknownModel, match="'z' is not loaded, expected one of a") as caught:
            repository.get("z")
        assert caught.value.field == "model"
        for name in ("", "a"):
            with pytest.raises(
                UnknownModel, match="version '2' of model 'a' is not loaded, expected '3'"
            ) as caught:
                repository.get(name, "2")
            assert caught.value.field == "version"


async def test_queues_refuse_and_threads_are_gone_when_the_repository_is_left(
    folder, write, metrics
):
    write("a/1")
    async with Repository(read_models(folder, (), "a"), "a", BATCHING, metrics) as repository:
        assert sum(thread.name.startswith("context-a-") for thread in threading.enumerate()) == 2
        batcher = repository.get().batcher
    assert not any(thread.name.startswith("context-") for thread in threading.enumerate())
    with pytest.raises(Unavailable):
        await batcher.submit(np.zeros((1, 28, 28), np.uint8), 1.0)


async def test_the_loaded_models_are_closed_when_a_later_one_fails_its_proof(
    folder, write, metrics
):
    write("a/1")
    write("b/1")
    good, bad = read_models(folder, (), "a")
    golden = dataclasses.replace(
        bad.weights.golden, logits=bad.weights.golden.logits + np.float32(1)
    )
    bad = dataclasses.replace(bad, weights=dataclasses.replace(bad.weights, golden=golden))
    with pytest.raises(GoldenMismatch, match="'b'"):
        async with Repository((bad, good), "a", BATCHING, metrics):
            pass
    assert not any(thread.name.startswith("context-") for thread in threading.enumerate())


def test_the_time_of_a_stop_runs_from_its_beginning_and_never_below_zero(run_virtually):
    async def main(loop):
        stop = Stop(10.0)
        waiting = loop.create_task(stop.begun())
        await asyncio.sleep(3)
        assert not waiting.done()
        with pytest.raises(AssertionError, match="bug: the stop has not begun"):
            stop.left_s()
        stop.begin()
        await waiting
        assert stop.left_s() == 10.0
        await asyncio.sleep(4)
        stop.begin()
        assert stop.left_s() == 6.0
        await asyncio.sleep(40)
        assert stop.left_s() == 0.0

    run_virtually(main)


class FullBackend:
    """The CPU's, with room for `room` plans in all contexts together."""

    def __init__(self, room: list[int]) -> None:
        self._cpu = open_backend(Target("cpu"))
        self._room = room
        self.name, self.tolerance = self._cpu.name, self._cpu.tolerance
        self.device_bytes, self.workspace_bytes = 5000, 1000

    def plan(self, weights, batch):
        self._room[0] -= 1
        if self._room[0] < 0:
            raise OutOfDeviceMemory("a plan for 4 rows: 1 of 80 MB is free, 2 are needed")
        return self._cpu.plan(weights, batch)

    def load(self, weights):
        self._cpu.load(weights)

    def close(self):
        self._cpu.close()


def placed(contexts=2, max_batch_rows=4, gpus=(0,)):
    """As `BATCHING`, on GPUs by name; what computes is `open_backend`'s affair."""
    targets = tuple(Target("cuda", index) for index in gpus)
    return dataclasses.replace(BATCHING, placement=Placement(targets, contexts, max_batch_rows))


@pytest.mark.parametrize(
    ("contexts", "max_batch_rows", "found", "advice"),
    [
        (
            2,
            4,
            "max_batch_rows 4 and contexts 2",
            "lower max_batch_rows to 2 (67 MB each) or contexts to 1",
        ),
        (1, 5, "max_batch_rows 5 and contexts 1", "lower max_batch_rows to 2 (67 MB each)"),
        (3, 1, "max_batch_rows 1 and contexts 3", "lower contexts to 1"),
        (1, 1, "max_batch_rows 1 and contexts 1", "load fewer models"),
    ],
)
async def test_a_model_that_does_not_fit_is_told_with_what_would(
    folder, write, metrics, monkeypatch, contexts, max_batch_rows, found, advice
):
    write("a/1")
    monkeypatch.setattr("service.engine.models.open_backend", lambda _: FullBackend([0]))
    with pytest.raises(OutOfDeviceMemory) as caught:
        async with Repository(
            read_models(folder, (), "a"), "a", placed(contexts, max_batch_rows), metrics
        ):
            pass
    assert str(caught.value) == (
        f"model 'a' does not fit on the GPU with {found}, which take about 67 MB each: "
        f"a plan for 4 rows: 1 of 80 MB is free, 2 are needed; {advice}"
    )
    assert not any(thread.name.startswith("context-") for thread in threading.enumerate())


async def test_each_gpu_has_its_contexts_and_their_memory_is_told(
    folder, write, monkeypatch, caplog
):
    write("a/1")
    write("b/1")
    targets = []

    def open_(target):
        targets.append(target)
        return FullBackend([9])

    monkeypatch.setattr("service.engine.models.open_backend", open_)
    registry = CollectorRegistry()
    batching = placed(gpus=(2, 0))
    files = read_models(folder, (), "a")
    with caplog.at_level(logging.INFO):
        async with Repository(files, "a", batching, Metrics(registry)) as repository:
            opening_s, warm_up_s = repository.start_s()
            assert opening_s > 0
            assert warm_up_s > 0
    assert sorted(target.index for target in targets) == [0] * 4 + [2] * 4
    assert "ready on 4 cuda:2,0 contexts" in caplog.text
    for model in ("a", "b"):
        labels = {"model": model}
        assert registry.get_sample_value("lenet_contexts", labels) == 4
        assert registry.get_sample_value("lenet_device_bytes", labels) == 20_000
        assert registry.get_sample_value("lenet_workspace_bytes", labels) == 4000


@pytest.fixture
async def struck(folder, write):
    """A repository of models `a` and `b`, one context each, its registry and its faults."""
    write("a/1")
    write("b/1")
    faults, registry = Faults(), CollectorRegistry()
    placement = Placement((Target("cpu"),), contexts=1, max_batch_rows=4)
    batching = dataclasses.replace(BATCHING, placement=placement, faults=faults)
    files = read_models(folder, (), "a")
    async with Repository(files, "a", batching, Metrics(registry)) as repository:
        yield repository, registry, faults


IMAGES = np.zeros((3, 28, 28), np.uint8)


async def test_every_request_of_every_model_is_unavailable_when_a_device_is_lost(
    struck, caplog, monkeypatch
):
    repository, registry, faults = struck
    held, running = threading.Event(), threading.Event()
    strike = faults.strike

    def hold(context):
        running.set()
        assert held.wait(20)
        strike(context)

    monkeypatch.setattr(faults, "strike", hold)
    faults.inject("poison")
    a, b = (repository.get(name).batcher for name in ("a", "b"))
    requests = [asyncio.ensure_future(batcher.submit(IMAGES, 20.0)) for batcher in (a, a, b, b, a)]
    await asyncio.to_thread(running.wait, 20)
    assert not repository.lost.is_set()
    held.set()
    errors = await asyncio.gather(*requests, return_exceptions=True)
    lost = [error for error in errors if isinstance(error, Unavailable)]
    assert all(error.retry_after_s == 1 for error in lost)
    # The model whose batch was not struck may have been faster.
    assert len(lost) >= 3
    assert len(lost) == sum(isinstance(error, Exception) for error in errors)
    assert repository.lost.is_set()
    for batcher in (a, b):
        with pytest.raises(Unavailable, match="lost its device"):
            await batcher.submit(IMAGES, 20.0)
    value = registry.get_sample_value
    assert value("lenet_device_losses_total", {"reason": "sticky"}) == 1
    assert value("lenet_device_losses_total", {"reason": "hang"}) == 0
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.message.startswith("the device is lost, this process ends: context-")
    assert record.exc_info is None


async def test_a_device_is_lost_once_when_several_contexts_tell_of_it(struck, caplog):
    repository, registry, _ = struck
    repository._lose("hang", "context-a-0 has been at it for long")
    repository._lose("sticky", "context-b-0: illegal address")
    value = registry.get_sample_value
    assert value("lenet_device_losses_total", {"reason": "hang"}) == 1
    assert value("lenet_device_losses_total", {"reason": "sticky"}) == 0
    assert len(caplog.records) == 1


async def test_a_batch_alone_fails_when_the_device_can_go_on(struck, monkeypatch):
    repository, registry, faults = struck

    def fails(context):
        monkeypatch.undo()
        raise DeviceError("this launch was refused")

    monkeypatch.setattr(faults, "strike", fails)
    batcher = repository.get("a").batcher
    with pytest.raises(InferenceFailed):
        await batcher.submit(IMAGES, 20.0)
    assert (await batcher.submit(IMAGES, 20.0)).probabilities.shape == (3, 10)
    assert not repository.lost.is_set()
    assert registry.get_sample_value("lenet_device_losses_total", {"reason": "sticky"}) == 0


async def test_no_context_asks_for_faults_unless_a_test_injects_them(folder, write, metrics):
    write("a/1")
    files = read_models(folder, (), "a")
    async with Repository(files, "a", BATCHING, metrics) as repository:
        (worker, _) = repository.get().pool.workers
        assert await worker._do(type) is ExecutionContext


async def test_models_drain_at_the_same_time_with_what_is_left_of_the_stop(
    folder, write, metrics, monkeypatch
):
    write("a/1")
    write("b/1")
    both, found = asyncio.Barrier(2), []

    async def drain(_, timeout_s):
        found.append(timeout_s)
        await asyncio.wait_for(both.wait(), 5)

    monkeypatch.setattr(Batcher, "drain", drain)
    async with Repository(read_models(folder, (), "a"), "a", BATCHING, metrics) as repository:
        repository.stop.begin()
        await asyncio.sleep(0.001)  # real time passes
    assert len(found) == 2
    assert all(5 < left_s < 10 for left_s in found)
