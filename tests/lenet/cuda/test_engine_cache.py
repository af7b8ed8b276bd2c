from __future__ import annotations

import json
import logging
import threading

import pytest

from lenet.cuda.engine_cache import Choice, EngineCache
from tests.service_process import PATIENCE_S

KEY = "NVIDIA H200 | cuDNN 9.19.0 | Convolution(direction='forward', precision='fp16')"
ENGINE = Choice("eng0_k2=3", bytes(range(256)) + b"\n\n")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "lenet-serve" / "engines"


def entries(folder):
    return [path for path in folder.iterdir() if path.name != ".lock"]


def warnings(caplog):
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_a_choice_is_found_by_another_cache_under_its_own_key(folder, caplog):
    first, second = EngineCache(folder), EngineCache(folder)
    assert first.get(KEY) is None
    assert not folder.exists()
    first.put(KEY, Choice("old", b"engine"))
    first.put(KEY, ENGINE)
    second.put("other", Choice("eng1", b""))
    for cache in (first, second, EngineCache(folder)):
        assert cache.get(KEY) == ENGINE
        assert cache.get("other") == Choice("eng1", b"")
        assert cache.get("third") is None
    assert warnings(caplog) == []
    assert {json.loads(path.read_bytes().split(b"\n")[0])["key"] for path in entries(folder)} == {
        KEY,
        "other",
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content.replace(b"H200", b"H100"),
        lambda content: content.split(b"\n")[0],
        lambda content: b"[1]\n",
        lambda content: b"\xff\n",
        lambda content: b"[" * 100_000 + b"\n",
    ],
    ids=lambda change: "",
)
def test_a_damaged_file_is_ignored_with_a_warning_until_it_is_written_again(folder, caplog, change):
    cache = EngineCache(folder)
    cache.put(KEY, ENGINE)
    (path,) = entries(folder)
    path.write_bytes(change(path.read_bytes()))
    assert cache.get(KEY) is None
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{path}: a cached cuDNN engine is ignored: ")
    cache.put(KEY, ENGINE)
    assert EngineCache(folder).get(KEY) == ENGINE


def test_a_choice_holds_for_this_run_when_it_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")  # root cannot make a folder below a file either
    cache = EngineCache(tmp_path / "file" / "engines")
    with cache.locked():
        cache.put(KEY, ENGINE)
    assert cache.get(KEY) == ENGINE
    (warning,) = warnings(caplog)
    assert "a cuDNN engine cannot be cached: " in warning


@pytest.mark.parametrize("shared", [False, True])
def test_one_of_several_chooses_and_the_others_agree(folder, shared):
    together, made, one = threading.Barrier(4), [], EngineCache(folder)

    def choose(name):
        cache = one if shared else EngineCache(folder)
        together.wait(PATIENCE_S)
        with cache.locked():
            if cache.get(KEY) is None:
                made.append(name)
                cache.put(KEY, Choice(name, b""))
        assert cache.get(KEY) == Choice(made[0], b"")

    threads = [threading.Thread(target=choose, args=(f"eng{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_thread_that_has_locked_it_may_lock_it_again_and_others_wait_to_the_end(folder):
    cache, inner, end, entered = EngineCache(folder), threading.Event(), threading.Event(), []

    def locked_twice():
        with cache.locked():
            with cache.locked():
                pass
            inner.set()
            end.wait(PATIENCE_S)

    def locked_once(one):
        with one.locked():
            entered.append(one)

    first = threading.Thread(target=locked_twice, daemon=True)
    first.start()
    assert inner.wait(PATIENCE_S)
    others = [
        threading.Thread(target=locked_once, args=(one,), daemon=True)
        for one in (cache, EngineCache(folder))
    ]
    for other in others:
        other.start()
        other.join(0.1)
    assert entered == []
    end.set()
    for thread in (first, *others):
        thread.join(PATIENCE_S)
    assert len(entered) == 2
