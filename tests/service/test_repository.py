from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lenet.errors import GoldenMismatch
from lenet.reference import softmax
from service.batcher import Batcher
from service.errors import Unavailable, UnknownModel
from service.metrics import Metrics
from service.model_files import read_models
from service.repository import Batching, Repository, Stop

BATCHING = Batching(
    device="cpu",
    contexts=2,
    cpu_threads=1,
    max_batch_rows=4,
    max_queue_rows=100,
    max_wait_s=0.0,
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
