"""Reloading from real files, on real contexts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lenet.context import ExecutionContext, Target
from lenet.errors import GoldenMismatch
from lenet.model import Model
from lenet.reference import softmax
from service.engine import models as module
from service.engine.devices import Placement
from service.engine.models import Batching, Reloader, Repository
from service.engine.versions import read_models
from service.metrics import Metrics

BATCHING = Batching(
    placement=Placement((Target("cpu"),), contexts=2, max_batch_rows=4),
    max_queue_rows=100,
    max_wait_s=0.0,
    hang_timeout_s=60.0,
    drain_timeout_s=10.0,
)


class House:
    """Models `a` and `b` served from files, and their reloader."""

    def __init__(self, repository, reloader, registry, draw):
        self.repository = repository
        self.draw = draw
        self.reloader = reloader
        self.registry = registry

    async def ask(self, seed, name="a"):
        """The version that answers, whose answer must be that of the file drawn with `seed`."""
        golden = self.draw(name, seed).golden
        answer = await self.repository.get(name).batcher.submit(golden.images, 10.0)
        expected = softmax(golden.logits)
        np.testing.assert_allclose(answer.probabilities, expected, rtol=1e-4, atol=1e-7)
        return answer.model.version

    def reloads(self, name="a"):
        """How many ended ok and were refused."""
        return tuple(
            self.registry.get_sample_value(
                "lenet_reloads_total", {"model": name, "outcome": outcome}
            )
            for outcome in ("ok", "refused")
        )

    def loaded(self, name="a"):
        """The versions and digests that the metrics name."""
        return [
            (sample.labels["version"], sample.labels["sha256"])
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "lenet_model_info" and sample.labels["model"] == name
        ]


@pytest.fixture
def draw(random_weights, tiny):
    """`draw("a", 2)`: the weights that `write("a/1", seed=2)` writes."""
    return lambda name, seed: random_weights(Model(name, tiny.blocks), seed)


@pytest.fixture
def open_house(folder, write, draw):
    class Opened:
        async def __aenter__(self):
            write("a/3", seed=1)
            write("b/1", seed=9)
            registry = CollectorRegistry()
            metrics = Metrics(registry)
            files = read_models(folder, (), "a")
            self.repository = Repository(files, "a", BATCHING, metrics)
            await self.repository.__aenter__()
            self.reloader = Reloader(folder, self.repository, metrics)
            return House(self.repository, await self.reloader.__aenter__(), registry, draw)

        async def __aexit__(self, *error):
            await self.reloader.__aexit__(*error)
            await self.repository.__aexit__(*error)
            assert not [t for t in threading.enumerate() if t.name.startswith("context-")]

    return Opened


@pytest.fixture
async def house(open_house):
    async with open_house() as house:
        yield house


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
        assert Reads.go.wait(20)
        return read_model(folder, name)

    read_model = module.read_model
    monkeypatch.setattr(module, "read_model", held)
    yield Reads
    Reads.go.set()


async def settled(house):
    """When no reload runs any more."""
    async with asyncio.timeout(20):
        while house.reloader._task is not None:
            await asyncio.wait([house.reloader._task])
            await asyncio.sleep(0)


async def test_the_highest_version_replaces_the_served_one(house, write, caplog):
    assert await house.ask(1) == "3"
    path = write("a/10", seed=2)
    write("a/4", seed=3)
    with caplog.at_level(logging.INFO):
        await house.reloader.reload()
    assert await house.ask(2) == "10"
    assert house.repository.get("a").file.path == path
    assert house.repository.get("a", "10")
    digest = house.repository.get("a").file.sha256
    assert house.loaded() == [("10", digest)]
    assert house.reloads() == (1, 0)
    (line,) = [r.message for r in caplog.records if "model a:" in r.message]
    assert f"version 10 (sha256 {digest[:12]}) replaced version 3, golden error" in line


async def test_a_file_replaces_itself_when_its_bytes_changed(house, write):
    (before,) = house.loaded()
    write("a/3", seed=2)
    await house.reloader.reload()
    assert await house.ask(2) == "3"
    ((version, digest),) = house.loaded()
    assert version == "3"
    assert digest != before[1]


async def test_the_version_before_is_served_again_when_the_highest_was_removed(house, write):
    path = write("a/4", seed=2)
    await house.reloader.reload()
    assert await house.ask(2) == "4"
    path.unlink()
    await house.reloader.reload()
    assert await house.ask(1) == "3"
    assert house.reloads() == (2, 0)


async def test_a_version_is_told_by_its_number_when_its_bytes_are_the_same(house, write):
    write("a/4", seed=1)
    await house.reloader.reload()
    assert await house.ask(1) == "4"


async def test_no_context_is_asked_when_nothing_changed(house, monkeypatch):
    monkeypatch.setattr(ExecutionContext, "stage", lambda *_: pytest.fail("it was staged"))
    before = house.repository.get("a").file
    await house.reloader.reload()
    assert house.repository.get("a").file is before
    assert house.reloads() == (1, 0)


def broken(write, folder, draw, random_weights):
    path = write("a/4", seed=2)
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path}: is not a valid safetensors file"


def flipped(write, folder, draw, random_weights):
    path = write("a/4", seed=2)
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    return f"{path}: metadata sha256 does not match"


def of_another_architecture(write, folder, draw, random_weights):
    path = folder / "a" / "4.safetensors"
    random_weights(Model("a", random_weights("mlp").model.blocks)).write(path)
    return f"{path}: model 'a' has another architecture than the served 'a'"


def unproven(write, folder, draw, random_weights):
    path = folder / "a" / "4.safetensors"
    weights = draw("a", 2)
    golden = dataclasses.replace(weights.golden, logits=weights.golden.logits + np.float32(1))
    dataclasses.replace(weights, golden=golden).write(path)
    return f"{path}: model 'a' on backend cpu: golden logits differ"


def under_another_name(write, folder, draw, random_weights):
    path = write("a/4", seed=2, name="c")
    return f"{path}: metadata model is 'c'"


def gone(write, folder, draw, random_weights):
    for path in (folder / "a").iterdir():
        path.unlink()
    return f"{folder / 'a'}: holds no VERSION.safetensors"


@pytest.mark.parametrize(
    "spoil", [broken, flipped, of_another_architecture, unproven, under_another_name, gone]
)
async def test_a_file_is_refused_by_name_and_the_old_version_answers_on(
    house, write, folder, draw, random_weights, caplog, spoil
):
    before = house.loaded()
    reason = spoil(write, folder, draw, random_weights)
    await house.reloader.reload()
    (record,) = caplog.records
    assert record.message.startswith(f"model a: reload refused, version 3 answers on: {reason}")
    assert record.exc_info is None
    assert "\n" not in record.message
    assert house.reloads() == (0, 1)
    assert house.reloads("b") == (1, 0), "the other model is the newest"
    assert house.loaded() == before
    assert await house.ask(1) == "3"
    write("a/5", seed=4)
    await house.reloader.reload()
    assert await house.ask(4) == "5"


@pytest.mark.parametrize("error", [GoldenMismatch("not here"), ZeroDivisionError("a bug")])
async def test_no_context_serves_a_version_when_one_of_them_refuses_it(
    house, write, caplog, monkeypatch, error
):
    stage, staged = ExecutionContext.stage, []

    def second_refuses(context, weights):
        stage(context, weights)
        staged.append(context)
        if len(staged) == 2:
            raise error

    monkeypatch.setattr(ExecutionContext, "stage", second_refuses)
    path = write("a/4", seed=2)
    await house.reloader.reload()
    assert len(set(staged)) == 2
    (record,) = caplog.records
    assert record.message.endswith(f"version 3 answers on: {path}: {error}")
    assert (record.exc_info is None) == isinstance(error, GoldenMismatch)
    for _ in range(6):
        assert await asyncio.gather(*(house.ask(1) for _ in range(3))) == ["3"] * 3
    assert house.reloads() == (0, 1)


async def test_the_newest_files_are_read_when_two_reloads_are_asked_for_at_once(
    house, write, reads
):
    house.reloader.ask()
    assert await asyncio.to_thread(reads.reading.wait, 20)
    write("a/4", seed=2)
    for _ in range(100):
        house.reloader.ask()
    reads.go.set()
    await settled(house)
    assert await house.ask(2) == "4"
    assert reads.begun == 2 * 2, "the reload under way, and one for all that came meanwhile"


async def test_an_answer_is_of_the_version_that_was_served_when_it_was_asked_for(house, write):
    write("a/4", seed=2)
    house.reloader.ask()
    seen = []
    async with asyncio.timeout(20):
        while "4" not in seen:
            version = house.repository.get("a").file.version
            seen.append(await house.ask({"3": 1, "4": 2}[version]))
            assert seen[-1] == version
    assert "3" in seen
    await settled(house)


async def test_a_reload_under_way_is_given_up_when_it_is_closed(open_house, write, reads, caplog):
    async with open_house() as house:
        write("a/4", seed=2)
        house.reloader.ask()
        assert await asyncio.to_thread(reads.reading.wait, 20)
    assert not caplog.records, "nobody waited for the file"
    reads.go.set()
    house.reloader.ask()
    assert house.reloader._task is None
    assert house.reloads() == (0, 0)


async def test_the_next_reload_works_when_one_failed_in_a_way_that_nobody_foresaw(
    house, write, caplog, monkeypatch
):
    write("a/4", seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_model", lambda *_: 1 / 0)
        house.reloader.ask()
        await settled(house)
    (record,) = caplog.records
    assert record.message == "a reload failed"
    assert record.exc_info[0] is ZeroDivisionError
    house.reloader.ask()
    await settled(house)
    assert await house.ask(2) == "4"
