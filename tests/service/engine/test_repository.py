"""Changes that every worker has to follow, seen from one whose neighbours are notes in a folder."""

from __future__ import annotations

import asyncio
import os
import signal

import orjson
import pytest

from service.engine import repository
from service.engine.repository import Repository, unloaded
from service.errors import InvalidInput, Unavailable, UnknownModel


class Models:
    """Notes what it was asked for; a load waits for `gate`."""

    def __init__(self):
        self.done = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, name):
        await self.gate.wait()
        if name == "broken":
            raise InvalidInput("model: 'broken' was not loaded", field="model")
        self.done.append(f"load {name}")

    async def unload(self, name):
        if f"load {name}" not in self.done:
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


def note(folder, **content):
    (folder / "repository-1").write_bytes(orjson.dumps({"refused": [], **content}))


async def test_a_change_goes_to_its_end_when_its_caller_leaves(worker, models, tmp_path):
    models.gate.clear()
    caller = asyncio.create_task(worker.load("a"))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    models.gate.set()
    async with asyncio.timeout(5):
        while not (tmp_path / "repository.json").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert models.done == ["load a"]
    neighbour = Repository(models, tmp_path, alone=False)
    await neighbour.follow()
    await neighbour.follow()
    assert models.done == ["load a"] * 2, "once in each worker"


async def test_changes_are_followed_in_their_order_and_what_is_unloaded_is_known(
    worker, models, tmp_path
):
    await worker.load("a")
    await worker.load("b")
    await worker.unload("a")
    assert unloaded(tmp_path) == {"a"}
    models.done.clear()
    await Repository(models, tmp_path, alone=False).follow()
    assert models.done == ["load b"], "the unload of what is not loaded is done"


async def test_the_answer_says_that_another_worker_refused(worker, models, tmp_path):
    note(tmp_path, followed=1, refused=[(1, "model: 'a' was not loaded: no room")])
    with pytest.raises(InvalidInput, match=r"^another worker refused it: .*: no room$"):
        await worker.load("a")
    assert models.done == ["load a"]


async def test_a_worker_notes_what_it_could_not_follow(models, tmp_path):
    (tmp_path / "repository.json").write_bytes(orjson.dumps({"broken": (7, True)}))
    await Repository(models, tmp_path, alone=False).follow()
    (content,) = (path.read_bytes() for path in tmp_path.glob("repository-*"))
    assert orjson.loads(content) == {
        "followed": 7,
        "refused": [[7, "model: 'broken' was not loaded"]],
    }


async def test_the_answer_says_that_others_are_late(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(repository, "_FOLLOW_S", 0.1)
    note(tmp_path, followed=0)
    with pytest.raises(Unavailable, match=r"not all workers have followed within 0\.1 s"):
        await worker.load("a")


async def test_nothing_is_changed_when_the_others_cannot_be_told(models):
    with pytest.raises(Unavailable, match="the workers share no folder"):
        await Repository(models, alone=False).load("a")
    assert models.done == []
    await Repository(models).load("a")
    assert models.done == ["load a"]
