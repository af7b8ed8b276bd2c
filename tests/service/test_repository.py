from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from lenet.errors import GoldenMismatch, InvalidWeightFile
from lenet.model import Model
from lenet.reference import softmax
from service.batcher import Batcher
from service.errors import Unavailable, UnknownModel
from service.metrics import Metrics
from service.repository import Batching, Repository, Stop, read_models

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
def write(tmp_path, random_weights, tiny):
    """`write("a/1")` puts a valid file of model `a` there; the folder is `tmp_path / "weights"`."""

    def write(place, *, seed=0, name=None):
        path = tmp_path / "weights" / f"{place}.safetensors"
        model = Model(name or path.parent.name, tiny.blocks)
        random_weights(model, seed).write(path)
        return path

    return write


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


def refusal(folder, wanted=(), default="a"):
    with pytest.raises(InvalidWeightFile) as caught:
        read_models(folder, wanted, default)
    return str(caught.value)


def test_every_model_is_found_when_none_is_named(folder, write):
    for place in ("b/1", "a/1", "a/2"):
        write(place)
    (folder / "notes.txt").write_text("no model")
    (folder / "empty").mkdir()
    found = read_models(folder, (), "a")
    assert [(file.name, file.version) for file in found] == [("a", "2"), ("b", "1")]
    assert found[0].path == folder / "a" / "2.safetensors"
    assert found[0].weights.model.name == "a"


def test_the_highest_version_is_a_number_when_there_are_many(folder, write):
    for version in ("9", "10", "1"):
        write(f"a/{version}")
    ((file,)) = read_models(folder, (), "a")
    assert file.version == "10"


@pytest.mark.parametrize(
    "stem", ["01", "0", "-3", "1.5", "latest", "", "\N{FULLWIDTH DIGIT TWO}", "+7", "1e3"]
)
def test_a_file_is_no_version_when_its_name_is_no_positive_integer(folder, write, stem):
    write(f"a/{stem}")
    assert "holds no VERSION.safetensors with VERSION a positive integer" in refusal(folder)
    write("a/1")
    (file,) = read_models(folder, (), "a")
    assert file.version == "1"


def test_only_the_wanted_are_read_once_each_when_models_are_named(folder, write):
    write("a/1")
    write("b/1")
    (folder / "broken").mkdir()
    (folder / "broken" / "1.safetensors").write_bytes(b"not read")
    found = read_models(folder, ("b", "a", "b"), "a")
    assert [file.name for file in found] == ["b", "a"]


def test_the_start_is_refused_when_the_folder_is_missing_or_a_file(folder):
    (folder / "file").write_bytes(b"")
    for name in ("absent", "file"):
        assert refusal(folder / name) == (
            f"{folder / name}: is not a folder, expected one with MODEL/VERSION.safetensors in it"
        )


def test_the_start_is_refused_when_the_default_model_is_missing(folder, write):
    assert "default model 'a' is not among the models []" in refusal(folder)
    write("b/1")
    assert "default model 'a' is not among the models [b]" in refusal(folder)


def test_the_start_is_refused_when_a_wanted_model_has_no_version(folder, write):
    write("a/1")
    write("b/latest")
    message = refusal(folder, ("a", "b"))
    assert message.startswith(f"{folder / 'b'}: holds no VERSION.safetensors")


def test_the_start_is_refused_when_a_file_is_broken(folder, write):
    path = write("a/1")
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(folder).startswith(f"{path}: is not a valid safetensors file")


def test_the_start_is_refused_when_the_folder_bears_another_name(folder, write):
    path = write("a/1", name="b")
    assert refusal(folder) == f"{path}: metadata model is 'b', expected 'a' as its folder"


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_is_refused_when_it_leaves_the_folder(folder, write, tmp_path, linked):
    inside = write("a/1")
    outside = tmp_path / "secret"
    inside.parent.rename(outside)
    if linked == "folder":
        inside.parent.symlink_to(outside)
    else:
        inside.parent.mkdir()
        inside.symlink_to(outside / "1.safetensors")
    assert refusal(folder) == f"{inside}: leads out of {folder} through a symlink"


def test_a_link_is_followed_when_it_stays_in_the_folder(folder, write):
    path = write("a/2")
    path.rename(folder / "kept")
    path.symlink_to(folder / "kept")
    (file,) = read_models(folder, (), "a")
    assert (file.version, file.path) == ("2", path)


def test_a_link_to_itself_is_refused_when_it_is_read(folder):
    path = folder / "a" / "1.safetensors"
    path.parent.mkdir()
    path.symlink_to(path)
    assert refusal(folder) == f"{path}: cannot be read (Too many levels of symbolic links)"


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
    digest = files[0].weights.digest()
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
