"""The loaded models on real contexts, from real files."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading

import numpy as np
import pytest

from lenet.context import Target
from lenet.cpu import CpuBackend
from lenet.errors import GoldenMismatch, OutOfDeviceMemory
from service.engine.faults import Faults
from service.errors import Unavailable, UnknownModel
from tests.service.engine.conftest import spoil_golden
from tests.service_process import PATIENCE_S
from tests.tasks import submit
from tests.wire.doors import until

IMAGES = np.zeros((3, 28, 28), np.uint8)


async def predict(engine, name="a"):
    return await submit(engine.models.get(name), IMAGES, 20.0)


async def test_models_answer_by_name_and_version_when_they_are_loaded(engine):
    assert [served.version.name for served in engine.models.served] == ["a", "b"]
    assert await engine.ask(1, "a") == "3"
    assert await engine.ask(9, "b") == "1"
    a = engine.models.get("a")
    assert engine.models.get() is engine.models.get("", "3") is engine.models.get("a", "3") is a
    assert engine.models.get("a", "0") is a
    assert engine.models.get("b", "1") is not a
    info = {"model": "a", "version": "3", "sha256": a.version.sha256}
    assert engine.value("lenet_model_info", **info) == 1
    assert engine.value("lenet_contexts", model="b", version="1") == 2
    assert not engine.models.ready, "it is set by the caller, when the service is open"


@pytest.mark.parametrize(
    ("wanted", "name", "version", "words"),
    [
        ((), "z", "", "model 'z' is not loaded, expected one of a$"),
        ((), "", "2", "version '2' of model 'a' is not loaded, expected '3'$"),
        ((), "a", "1", "expected '3'; it is in the weights folder, and --versions all loads it"),
        (("a:3",), "a", "1", "expected '3'; it is in .* folder, and --models with a:1 loads"),
        ((), "a", "latest", "expected '3'; a request without a version gets the latest"),
        ((), "a", "\u0663", "expected '3'; a request without a version gets the latest"),
    ],
)
async def test_an_unknown_model_or_version_is_refused_with_those_there_are(
    open_engine, write, wanted, name, version, words
):
    write("a/1")
    write("a/3")
    async with open_engine(wanted=wanted) as engine:
        with pytest.raises(UnknownModel, match=words) as caught:
            engine.models.get(name, version)
        assert caught.value.field == ("version" if version else "model")


async def test_the_loaded_models_are_closed_when_a_later_one_fails_its_validation(
    open_engine, write, draw
):
    write("a/1")
    path = write("b/1")
    spoil_golden(draw("b", 0)).write(path)
    with pytest.raises(GoldenMismatch, match="'b'"):
        async with open_engine():
            raise AssertionError


@pytest.mark.states(
    "metrics",
    "`lenet_golden_error`, `lenet_golden_tolerance`: a file beyond it is not served",
    found="files whose golden logits were moved by a known share of the largest",
)
async def test_a_file_beyond_the_golden_tolerance_is_not_served(open_engine, write, draw):
    path, weights, tolerance = write("a/1"), draw("a", 0), 1e-4

    def move(share):
        logits = weights.golden.logits.copy()
        logits[3, 4] += share * np.abs(logits).max()
        golden = dataclasses.replace(weights.golden, logits=logits)
        dataclasses.replace(weights, golden=golden).write(path)

    for share in (0.5 * tolerance, 0.9 * tolerance):
        move(share)
        async with open_engine() as engine:
            labels = {"model": "a", "version": "1"}
            error = engine.value("lenet_golden_error", **labels)
            assert error == pytest.approx(share, abs=2e-6)
            assert engine.value("lenet_golden_tolerance", **labels) == tolerance
    move(1.1 * tolerance)
    with pytest.raises(GoldenMismatch, match="golden logits differ"):
        async with open_engine():
            raise AssertionError


class FullBackend(CpuBackend):
    """The CPU's, as large as a GPU's, without room for a plan if `full`."""

    device_bytes, workspace_bytes = 5000, 1000

    def __init__(self, full: bool) -> None:
        super().__init__(1)
        self._full = full

    def plan(self, weights, rows):
        if self._full:
            raise OutOfDeviceMemory("a plan for 4 rows: 1 of 80 MB is free, 2 are needed")
        return super().plan(weights, rows)


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
async def test_a_model_that_does_not_fit_is_refused_with_what_would(
    open_engine, write, monkeypatch, contexts, max_batch_rows, found, advice
):
    write("a/1")
    monkeypatch.setattr("service.engine.models.open_backend", lambda *_: FullBackend(True))
    monkeypatch.setattr("service.engine.models.open_staging", lambda *_: None)
    monkeypatch.setattr("service.engine.models.estimate_bytes", lambda *_: 67e6)
    with pytest.raises(OutOfDeviceMemory) as caught:
        async with open_engine((Target("cuda"),), contexts, max_batch_rows):
            raise AssertionError
    assert str(caught.value) == (
        f"model 'a' does not fit on the GPU with {found}, which take about 67 MB each: "
        f"a plan for 4 rows: 1 of 80 MB is free, 2 are needed; {advice}"
    )


async def test_each_gpu_has_its_contexts_and_their_memory_is_counted(
    open_engine, write, monkeypatch, caplog
):
    write("a/1")
    write("b/1")
    targets = []

    def open_(target, _):
        targets.append(target)
        return FullBackend(False)

    monkeypatch.setattr("service.engine.models.open_staging", lambda *_: None)
    monkeypatch.setattr("service.engine.models.open_backend", open_)
    caplog.set_level(logging.INFO)
    async with open_engine((Target("cuda", 2), Target("cuda", 0))) as engine:
        assert min(engine.models.start_s()) > 0
        assert sorted(target.index for target in targets) == [0] * 4 + [2] * 4
        for model in ("a", "b"):
            assert engine.value("lenet_contexts", model=model, version="1") == 4
            assert engine.value("lenet_device_bytes", model=model, version="1") == 20_000
            assert engine.value("lenet_workspace_bytes", model=model, version="1") == 4000
    digest = engine.models.get("a").version.sha256[:12]
    loaded = f"model a version 1 (sha256 {digest}) loaded: 4 contexts on cuda:2,0, golden logits "
    assert caplog.messages[0].startswith(loaded)


# A device that is lost


@pytest.fixture
async def struck(open_engine, write):
    """Models `a` and `b`, one context each, and the faults that strike their batches."""
    write("a/1")
    write("b/1")
    faults = Faults()
    async with open_engine(contexts=1, faults=faults) as engine:
        engine.faults = faults
        yield engine


async def test_every_request_of_every_model_is_unavailable_when_a_device_is_lost(
    struck, caplog, monkeypatch
):
    held, running = threading.Event(), threading.Event()
    strike = struck.faults.strike

    def hold(context):
        running.set()
        assert held.wait(PATIENCE_S)
        strike(context)

    monkeypatch.setattr(struck.faults, "strike", hold)
    for _ in "ab":  # a batch of each model
        struck.faults.inject("poison")
    requests = [asyncio.ensure_future(predict(struck, name)) for name in "aabba"]
    await asyncio.to_thread(running.wait, 20)
    assert not struck.models.lost.is_set()
    held.set()
    errors = await asyncio.gather(*requests, return_exceptions=True)
    lost = [error for error in errors if isinstance(error, Unavailable)]
    assert all(error.retry_after_s == 1 for error in lost)
    assert len(lost) == len(errors)
    assert struck.models.lost.is_set()
    for name in "ab":
        with pytest.raises(Unavailable, match="lost its device"):
            await predict(struck, name)
    workers = [worker for one in struck.models.served for worker in one.pool.workers]
    await until(lambda: all(worker.done for worker in workers))
    assert struck.value("lenet_device_losses_total", reason="sticky") == 1, (
        "however many contexts report it"
    )
    assert struck.value("lenet_device_losses_total", reason="hang") == 0
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.message.startswith("the device is lost, this process ends: context-")
    assert record.exc_info is None


# Several versions


def versions(engine, name="a"):
    return [one.version.version for one in engine.models.select(name)]


@pytest.mark.parametrize(
    ("wanted", "latest", "expected"),
    [((), 2, ["10", "3"]), ((), 0, ["10", "3", "2"]), (("a:3", "a:2", "b"), 1, ["3", "2"])],
)
async def test_versions_answer_beside_each_other(open_engine, write, wanted, latest, expected):
    seeds = {"2": 1, "3": 2, "10": 3}
    for version, seed in seeds.items():
        write(f"a/{version}", seed=seed)
    write("b/1", seed=9)
    async with open_engine(wanted=wanted, latest=latest) as engine:
        assert versions(engine) == expected
        assert await engine.ask(seeds[expected[0]]) == expected[0]
        for version in expected:
            assert await engine.ask(seeds[version], "a", version) == version
            assert engine.value("lenet_contexts", model="a", version=version) == 2
        with pytest.raises(UnknownModel, match=f"expected one of '{expected[0]}', '"):
            engine.models.get("a", "7")
        assert await engine.ask(9, "b") == "1"
