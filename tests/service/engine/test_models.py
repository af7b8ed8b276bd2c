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
from lenet.model import Model
from service.engine.faults import Faults
from service.engine.versions import WeightsFolder
from service.errors import InvalidInput, Unavailable, UnknownModel
from tests.service_process import PATIENCE_S
from tests.tasks import submit

IMAGES = np.zeros((3, 28, 28), np.uint8)


async def predict(engine, name="a"):
    return await submit(engine.models.get(name).batcher, IMAGES, 20.0)


async def test_models_answer_by_name_and_version_when_they_are_loaded(engine):
    assert [served.version.name for served in engine.models.served] == ["a", "b"]
    assert await engine.ask(1, "a") == "3"
    assert await engine.ask(9, "b") == "1"
    a = engine.models.get("a")
    assert engine.models.get() is engine.models.get("", "3") is engine.models.get("a", "3") is a
    assert engine.models.get("b", "1") is not a
    info = {"model": "a", "version": "3", "sha256": a.version.sha256}
    assert engine.value("lenet_model_info", **info) == 1
    assert engine.value("lenet_contexts", model="b", version="1") == 2
    assert not engine.models.ready, "it is set by the caller, when the service is open"


async def test_an_unknown_model_or_version_is_refused_with_those_there_are(engine):
    with pytest.raises(UnknownModel, match="'z' is not loaded, expected one of a, b") as caught:
        engine.models.get("z")
    assert caught.value.field == "model"
    for name in ("", "a"):
        with pytest.raises(
            UnknownModel, match="version '2' of model 'a' is not loaded, expected '3'"
        ) as caught:
            engine.models.get(name, "2")
        assert caught.value.field == "version"


@pytest.mark.parametrize(
    ("wanted", "version", "words"),
    [
        ((), "1", "expected '3'; it is in the weights folder, and --versions all loads it"),
        (("a:3",), "1", "expected '3'; it is in the weights folder, and --models with a:1 loads"),
        ((), "2", "expected '3'$"),
        ((), "latest", "expected '3'; a request without a version gets the latest"),
        ((), "\u0663", "expected '3'; a request without a version gets the latest"),
    ],
)
async def test_a_version_that_was_left_out_is_answered_with_its_flag(
    open_engine, write, wanted, version, words
):
    write("a/1")
    write("a/3")
    async with open_engine(wanted=wanted) as engine:
        with pytest.raises(UnknownModel, match=words):
            engine.models.get("a", version)


async def test_the_loaded_models_are_closed_when_a_later_one_fails_its_validation(
    open_engine, write, draw
):
    write("a/1")
    path = write("b/1")
    spoil_golden(draw("b", 0)).write(path)
    with pytest.raises(GoldenMismatch, match="'b'"):
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
    struck.faults.inject("poison")
    requests = [asyncio.ensure_future(predict(struck, name)) for name in "aabba"]
    await asyncio.to_thread(running.wait, 20)
    assert not struck.models.lost.is_set()
    held.set()
    errors = await asyncio.gather(*requests, return_exceptions=True)
    lost = [error for error in errors if isinstance(error, Unavailable)]
    assert all(error.retry_after_s == 1 for error in lost)
    # The model whose batch was not struck may have been faster.
    assert len(lost) >= 3
    assert len(lost) == sum(isinstance(error, Exception) for error in errors)
    assert struck.models.lost.is_set()
    for name in "ab":
        with pytest.raises(Unavailable, match="lost its device"):
            await predict(struck, name)
    assert struck.value("lenet_device_losses_total", reason="sticky") == 1, (
        "however many contexts report it"
    )
    assert struck.value("lenet_device_losses_total", reason="hang") == 0
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.message.startswith("the device is lost, this process ends: context-")
    assert record.exc_info is None


# Reloading


def reloads(engine, name="a"):
    """How many ended ok and were refused."""
    return tuple(
        engine.value("lenet_reloads_total", model=name, outcome=outcome)
        for outcome in ("ok", "refused")
    )


def loaded(engine, name="a"):
    """The versions and digests that the metrics name."""
    engine.metrics.flush()
    return [
        (sample.labels["version"], sample.labels["sha256"])
        for family in engine.registry.collect()
        for sample in family.samples
        if sample.name == "lenet_model_info" and sample.labels["model"] == name
    ]


def spoil_golden(weights):
    golden = dataclasses.replace(weights.golden, logits=weights.golden.logits + np.float32(1))
    return dataclasses.replace(weights, golden=golden)


@pytest.fixture
def reads(monkeypatch):
    """Each reading of a file waits for `go`; `begun` counts them."""

    class Reads:
        begun = 0
        reading = threading.Event()
        go = threading.Event()

    def held(folder, name):
        Reads.begun += 1
        Reads.reading.set()
        assert Reads.go.wait(PATIENCE_S)
        return read(folder, name)

    read = WeightsFolder.read
    monkeypatch.setattr(WeightsFolder, "read", held)
    yield Reads
    Reads.go.set()


@pytest.mark.states(
    "metrics",
    "`lenet_reloads_total`: ok; log: how many were replaced, unchanged, refused",
    found="a newer file that answers afterwards, beside one that did not change",
)
async def test_the_highest_version_replaces_the_served_one_and_the_log_says_so(
    engine, write, caplog
):
    path = write("a/10", seed=2)
    write("a/4", seed=3)
    caplog.set_level(logging.INFO)
    await engine.models.reload()
    assert await engine.ask(2) == "10"
    version = engine.models.get("a", "10").version
    assert version.path == path
    assert loaded(engine) == [("10", version.sha256)]
    assert (reloads(engine), reloads(engine, "b")) == ((1, 0), (1, 0))
    changed, summary = caplog.messages
    assert changed.startswith(
        f"model a: version 10 (sha256 {version.sha256[:12]}) replaced version 3, golden logits "
    )
    assert summary == "reload: 1 replaced, 1 unchanged, 0 refused"


async def test_a_file_replaces_itself_when_its_bytes_changed(engine, write):
    ((_, before),) = loaded(engine)
    write("a/3", seed=2)
    await engine.models.reload()
    assert await engine.ask(2) == "3"
    ((version, digest),) = loaded(engine)
    assert version == "3"
    assert digest != before


def broken(write, folder, draw, random_weights):
    path = write("a/4", seed=2)
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path}: is not a valid safetensors file"


def of_another_architecture(write, folder, draw, random_weights):
    path = folder / "a" / "4.safetensors"
    random_weights(Model("a", random_weights("mlp").model.blocks)).write(path)
    return f"{path}: model 'a' has another architecture than the served 'a'"


def invalid(write, folder, draw, random_weights):
    path = folder / "a" / "4.safetensors"
    spoil_golden(draw("a", 2)).write(path)
    return f"{path}: model 'a' on backend cpu: golden logits differ"


def gone(write, folder, draw, random_weights):
    for path in (folder / "a").iterdir():
        path.unlink()
    return f"{folder / 'a'}: holds no VERSION.safetensors"


@pytest.mark.parametrize("spoil", [broken, of_another_architecture, invalid, gone])
async def test_a_file_is_refused_by_name_and_the_old_version_answers_on(
    engine, write, folder, draw, random_weights, caplog, spoil
):
    before = loaded(engine)
    reason = spoil(write, folder, draw, random_weights)
    await engine.models.reload()
    (record,) = caplog.records
    assert record.message.startswith(f"model a: reload refused, still serving version 3: {reason}")
    assert record.exc_info is None
    assert "\n" not in record.message
    assert (reloads(engine), reloads(engine, "b")) == ((0, 1), (1, 0))
    assert loaded(engine) == before
    assert await engine.ask(1) == "3"
    write("a/5", seed=4)
    await engine.models.reload()
    assert await engine.ask(4) == "5"


async def served(engine, version):
    async with asyncio.timeout(PATIENCE_S):
        while engine.models.get("a").version.version != version:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_the_newest_files_are_read_when_reloads_are_requested_at_once(engine, write, reads):
    engine.models.request_reload()
    assert await asyncio.to_thread(reads.reading.wait, 20)
    write("a/4", seed=2)
    for _ in range(100):
        engine.models.request_reload()
    reads.go.set()
    await served(engine, "4")
    async with asyncio.timeout(PATIENCE_S):
        while reloads(engine, "b") != (2, 0):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert await engine.ask(2) == "4"
    assert reads.begun == 2 * 2, "the reload under way, and one for all that came meanwhile"


async def test_a_reload_under_way_is_given_up_when_the_models_are_closed(
    open_engine, write, reads, caplog
):
    write("a/3", seed=1)
    reads.go.set()
    async with open_engine() as engine:
        reads.go.clear()
        reads.reading.clear()
        write("a/4", seed=2)
        engine.models.request_reload()
        assert await asyncio.to_thread(reads.reading.wait, 20)
    assert not caplog.records, "nobody waited for the file"
    reads.go.set()
    begun = reads.begun
    engine.models.request_reload()
    await asyncio.sleep(0)
    assert reads.begun == begun, "a closed service reloads nothing"
    assert reloads(engine) == (0, 0)


# Several versions, and models that come and go


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


async def test_a_reload_keeps_as_many_versions_as_are_wanted(open_engine, write):
    write("a/1", seed=1)
    two = write("a/2", seed=2)
    async with open_engine(latest=2) as engine:
        write("a/4", seed=4)
        await engine.models.reload()
        assert versions(engine) == ["4", "2"]
        two.unlink()
        await engine.models.reload()
        assert versions(engine) == ["4", "1"]
        for version, seed in (("4", 4), ("1", 1)):
            assert await engine.ask(seed, "a", version) == version
        (engine.models.get("a", "4").version.path).unlink()
        await engine.models.reload()
        assert versions(engine) == ["1"]
        assert [version for version, _ in loaded(engine)] == ["1"]
        assert engine.value("lenet_contexts", model="a", version="4") is None
        write("a/3", seed=3)
        await engine.models.reload()
        assert versions(engine) == ["3", "1"]


async def test_a_model_comes_and_goes_and_its_requests_are_finished(engine, write):
    write("c/1", seed=5)
    assert {one.name: one.loaded for one in await engine.models.index()} == {
        "a": True,
        "b": True,
        "c": False,
    }
    with pytest.raises(UnknownModel):
        engine.models.get("c")
    await engine.models.load("c")
    assert await engine.ask(5, "c") == "1"
    running = [asyncio.ensure_future(engine.ask(5, "c")) for _ in range(9)]
    await asyncio.sleep(0)
    await engine.models.unload("c")
    assert [task.result() for task in running] == ["1"] * 9
    with pytest.raises(UnknownModel, match="model 'c' is not loaded, expected one of a, b"):
        engine.models.get("c")
    for name in ("c", ""):
        with pytest.raises(UnknownModel):
            await engine.models.unload(name)
    assert not [t for t in threading.enumerate() if t.name.startswith("context-c")]
    await engine.models.unload("a")
    with pytest.raises(UnknownModel, match="model 'a' is not loaded, expected one of b"):
        engine.models.get()
    await engine.models.load("a")
    assert engine.models.get().version.name == "a"
    assert await engine.ask(1, "a") == "3"


@pytest.mark.parametrize("spoil", [broken, of_another_architecture, invalid])
async def test_a_load_that_is_refused_says_why_and_changes_nothing(
    engine, write, folder, draw, random_weights, caplog, spoil
):
    before = loaded(engine)
    reason = spoil(write, folder, draw, random_weights)
    with pytest.raises(InvalidInput) as caught:
        await engine.models.load("a")
    assert str(caught.value).startswith("model: 'a' was not loaded: ")
    assert reason.rpartition(": ")[2] in str(caught.value)
    assert caught.value.field == "model"
    assert loaded(engine) == before
    assert await engine.ask(1) == "3"
    for name in ("z", "../weights/a", "", "a/3"):
        with pytest.raises(UnknownModel, match="in the weights folder, expected one of a, b"):
            await engine.models.load(name)


async def test_a_load_goes_on_when_its_caller_leaves_and_ends_with_the_models(
    open_engine, write, reads, caplog
):
    write("a/3", seed=1)
    write("b/1", seed=2)
    reads.go.set()
    async with open_engine(wanted=("a",)) as engine:
        reads.go.clear()
        reads.reading.clear()
        caller = asyncio.create_task(engine.models.load("b"))
        assert await asyncio.to_thread(reads.reading.wait, 20)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        reads.go.set()
        async with asyncio.timeout(PATIENCE_S):
            while engine.models.find("b") is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert await engine.ask(2, "b") == "1"
        reads.go.clear()
        reads.reading.clear()
        waiting = asyncio.create_task(engine.models.load("b"))
        assert await asyncio.to_thread(reads.reading.wait, 20)
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await engine.models.load("b")
    reads.go.set()
    assert not caplog.records
