"""Changes in every worker, seen from one whose neighbours are files in a folder."""

from __future__ import annotations

import asyncio
import errno
import os
import signal

import orjson
import pytest

from service.engine import repository
from service.engine.repository import Repository, unloaded
from service.errors import InvalidInput, Unavailable, UnknownModel
from tests.service_process import PATIENCE_S


class Models:
    """Notes what it was asked for, one thing at a time; a load waits for `gate`."""

    def __init__(self):
        self.done = []
        self.changing = asyncio.Lock()
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, name):
        async with self.changing:
            await self.gate.wait()
            if name == "broken":
                raise InvalidInput("model: 'broken' was not loaded", field="model")
            if name == "fault":
                raise MemoryError
            self.done.append(f"load {name}")

    async def unload(self, name):
        async with self.changing:
            if f"load {name}" not in self.done or f"unload {name}" in self.done:
                raise UnknownModel(f"model {name!r} is not loaded", field="model")
            self.done.append(f"unload {name}")


@pytest.fixture
def models():
    return Models()


@pytest.fixture
def worker(models, tmp_path, monkeypatch):
    """A repository whose supervisor is this process, which takes SIGHUP."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield Repository(models, tmp_path, alone=False)
    signal.signal(signal.SIGHUP, before)


def progress(folder, **content):
    (folder / "repository-1").write_bytes(orjson.dumps({"refused": [], **content}))


async def test_a_change_goes_to_its_end_when_its_caller_leaves(worker, models, tmp_path):
    models.gate.clear()
    caller = asyncio.create_task(worker.load("a"))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    models.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        while not (tmp_path / "repository.json").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert models.done == ["load a"]
    neighbour = Repository(models, tmp_path, alone=False)
    await neighbour.apply_changes()
    await neighbour.apply_changes()
    assert models.done == ["load a"] * 2, "once in each worker"


async def test_the_latest_change_of_each_model_is_followed_in_their_order(worker, models, tmp_path):
    for name in ("a", "b", "c", "a"):
        await worker.load(name)
    await worker.unload("c")
    assert unloaded(tmp_path) == {"c"}
    models.done.clear()
    await Repository(models, tmp_path, alone=False).apply_changes()
    assert models.done == ["load b", "load a"], "what is not loaded is not unloaded"


async def test_a_change_of_another_worker_meanwhile_is_made_after_the_own_one_before_it(
    worker, models, tmp_path
):
    """Else this worker would end without a model that the file says is loaded."""
    models.gate.clear()
    loading = asyncio.create_task(worker.load("a"))
    await asyncio.sleep(0.01)
    (tmp_path / "repository.json").write_bytes(orjson.dumps({"a": (1, False)}))
    following = asyncio.create_task(worker.apply_changes())
    await asyncio.sleep(0.01)
    models.gate.set()
    await asyncio.wait_for(asyncio.gather(loading, following), PATIENCE_S)
    assert orjson.loads((tmp_path / "repository.json").read_bytes()) == {"a": [2, True]}
    assert models.done[-1] == "load a"


@pytest.mark.parametrize(
    ("code", "kind"), [("invalid_input", InvalidInput), ("unavailable", Unavailable)]
)
async def test_the_answer_says_that_another_worker_refused(worker, models, tmp_path, code, kind):
    progress(tmp_path, applied=1, refused=[(1, (code, "model: 'a' was not loaded: it"))])
    with pytest.raises(kind, match=r"^another worker refused it: .*: it$"):
        await worker.load("a")
    assert models.done == ["load a"]


async def test_a_worker_reports_what_it_refuses_and_serves_on(models, tmp_path):
    changes = {"broken": (6, True), "fault": (7, True), "a": (8, True)}
    (tmp_path / "repository.json").write_bytes(orjson.dumps(changes))
    await Repository(models, tmp_path, alone=False).apply_changes()
    (content,) = (path.read_bytes() for path in tmp_path.glob("repository-*"))
    report = orjson.loads(content)
    assert report["applied"] == 8
    (six, (code, message)), (seven, (internal, _)) = report["refused"]
    assert (six, code, message) == (6, "invalid_input", "model: 'broken' was not loaded")
    assert (seven, internal) == (7, "internal")
    assert models.done == ["load a"]


async def test_the_answer_says_that_others_are_late(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(repository, "_APPLY_S", 0.1)
    progress(tmp_path, applied=0)
    with pytest.raises(Unavailable, match=r"not all workers have done it within 0\.1 s"):
        await worker.load("a")


async def test_an_unload_that_the_others_were_not_told_of_can_be_asked_for_again(
    worker, tmp_path, monkeypatch
):
    await worker.load("a")

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(repository, "_write", full)
        with pytest.raises(Unavailable, match=r"could not be reached; see .* and ask again"):
            await worker.unload("a")
    await worker.unload("a")
    assert unloaded(tmp_path) == {"a"}
    with pytest.raises(UnknownModel):
        await worker.unload("a")


async def test_nothing_is_changed_when_the_workers_share_no_folder(models):
    with pytest.raises(Unavailable, match="the workers share no folder"):
        await Repository(models, alone=False).load("a")
    assert models.done == []
    await Repository(models).load("a")
    assert models.done == ["load a"]
