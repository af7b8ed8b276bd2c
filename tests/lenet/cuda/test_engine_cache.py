from __future__ import annotations

import json
import logging
import os
import re
import threading
from pathlib import Path

import pytest

from lenet.cuda.engine_cache import EngineCache, default_cache

KEY = "NVIDIA H200 | cuDNN 9.19.0 | Product(precision='fp16', m=256, n=512, k=1024)"
READ = "the cache of cuDNN engines is ignored: "
WRITTEN = "the cache of cuDNN engines cannot be written: "
PLAN = bytes(range(256)) + b"\n\n"  # with line ends, as a plan has by chance


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lenet-serve" / "plans.json"


def warnings(caplog):
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_a_choice_is_found_again_when_another_instance_reads_the_file(path, caplog):
    first = EngineCache(path)
    assert first.get(KEY) is None
    first.put(KEY, "eng0_k2=3")
    first.put("other", "eng1")
    first.put(KEY, "eng0_k2=4")
    again = EngineCache(path)
    for cache in (first, again):
        assert (cache.get(KEY), cache.get("other")) == ("eng0_k2=4", "eng1")
        assert cache.get("third") is None
    assert json.loads(path.read_text()) == {KEY: "eng0_k2=4", "other": "eng1"}
    assert warnings(caplog) == []


def test_what_another_process_has_kept_meanwhile_stays(path):
    ours, theirs = EngineCache(path), EngineCache(path)
    theirs.put("another key", "eng1")
    ours.put(KEY, "eng0")
    found = EngineCache(path)
    assert (found.get(KEY), found.get("another key")) == ("eng0", "eng1")


def test_nothing_is_written_or_said_when_there_is_no_file(path, caplog):
    assert EngineCache(path).get(KEY) is None
    assert not path.parent.exists()
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"key": "eng0"',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'["key", "eng0"]',
        b'"eng0"',
        b"null",
        b'{"key": 3}',
        b'{"key": "eng0", "other": null}',
        b'{"key": ["eng0"]}',
    ],
    ids=lambda content: content[:16].decode(errors="replace"),
)
def test_a_broken_file_is_dropped_with_a_warning_when_it_is_read(path, caplog, content):
    path.parent.mkdir()
    path.write_bytes(content)
    cache = EngineCache(path)
    assert cache.get("key") is None
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{path}: {READ}")
    cache.put("key", "eng1")
    assert json.loads(path.read_text()) == {"key": "eng1"}


def test_a_warning_is_all_when_the_file_cannot_be_read(path, caplog):
    path.mkdir(parents=True)  # a folder: root cannot read it either
    assert EngineCache(path).get(KEY) is None
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{path}: {READ}")


def test_a_choice_holds_for_this_run_when_the_folder_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")  # root too makes no folder below a file
    path = tmp_path / "file" / "plans.json"
    cache = EngineCache(path)
    caplog.clear()
    cache.put(KEY, "eng0")
    assert cache.get(KEY) == "eng0"
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{path}: {WRITTEN}")


@pytest.fixture
def interrupted(monkeypatch):
    """The disk is full when a file is to be finished."""

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.usefixtures("interrupted")
def test_the_old_file_stays_whole_when_writing_breaks_off(path, caplog):
    path.parent.mkdir()
    path.write_text('{"key": "eng0"}')
    cache = EngineCache(path)
    cache.put("key", "eng1")
    assert cache.get("key") == "eng1"
    assert json.loads(path.read_text()) == {"key": "eng0"}
    assert list(path.parent.iterdir()) == [path]
    (warning,) = warnings(caplog)
    assert warning == f"{path}: {WRITTEN}[Errno 28] No space left on device"


def test_a_reader_sees_a_whole_file_when_a_choice_is_being_written(path, monkeypatch):
    seen = []
    replace = Path.replace

    def observed(self, target):
        seen.append((json.loads(path.read_text()), json.loads(self.read_text())))
        return replace(self, target)

    cache = EngineCache(path)
    cache.put("a", "eng0")
    monkeypatch.setattr(Path, "replace", observed)
    cache.put("b", "eng1")
    assert seen == [({"a": "eng0"}, {"a": "eng0", "b": "eng1"})]


def test_plans_are_kept_below_the_users_cache_when_no_place_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "lenet-serve" / "plans.json"
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert default_cache() == tmp_path / "home" / ".cache" / "lenet-serve" / "plans.json"


def test_a_choice_is_made_once_by_several_that_come_to_it_together(path):
    together, made = threading.Barrier(4), []

    def choose(name):
        cache = EngineCache(path)
        together.wait(30)
        with cache.locked():
            if cache.get(KEY) is None:
                made.append(name)
                cache.put(KEY, name)
        assert cache.get(KEY) == made[0]

    threads = [threading.Thread(target=choose, args=(f"eng{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert EngineCache(path).get(KEY) == made[0]


def test_a_folder_that_cannot_be_made_keeps_nobody_from_choosing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with EngineCache(tmp_path / "file" / "plans.json").locked() as nothing:
        assert nothing is None


def test_a_plan_is_found_again_by_another_instance_under_its_own_key_and_name(path, caplog):
    first = EngineCache(path)
    first.put_engine(KEY, "eng0", PLAN)
    first.put_engine(KEY, "eng1", b"")
    first.put_engine("other", "eng0", b"other")
    for cache in (first, EngineCache(path)):
        assert cache.engine(KEY, "eng0") == PLAN
        assert cache.engine(KEY, "eng1") == b""
        assert cache.engine("other", "eng0") == b"other"
        assert cache.engine("other", "eng1") is None
    assert warnings(caplog) == []


def test_the_last_plan_is_the_one_that_is_kept(path):
    cache = EngineCache(path)
    for plan in (b"old", PLAN):
        cache.put_engine(KEY, "eng0", plan)
    assert cache.engine(KEY, "eng0") == PLAN


def test_nothing_is_made_or_said_when_a_plan_is_looked_for_where_none_was_kept(path, caplog):
    assert EngineCache(path).engine(KEY, "eng0") is None
    assert not path.parent.exists()
    path.parent.mkdir()
    path.with_suffix("").write_text("no folder")
    assert EngineCache(path).engine(KEY, "eng0") is None
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content[:-1],
        lambda content: content + b"\n",
        lambda content: content[:32],
        lambda content: b"",
    ],
    ids=["plan", "digest", "truncated", "longer", "only a digest", "empty"],
)
def test_a_changed_plan_is_dropped_with_a_warning_until_it_is_kept_anew(path, caplog, change):
    cache = EngineCache(path)
    cache.put_engine(KEY, "eng0", PLAN)
    (file,) = path.with_suffix("").iterdir()
    file.write_bytes(change(file.read_bytes()))
    assert cache.engine(KEY, "eng0") is None
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{file}: a cached cuDNN engine is ignored: ")
    cache.put_engine(KEY, "eng0", PLAN)
    assert cache.engine(KEY, "eng0") == PLAN


def test_a_warning_is_all_when_a_plan_cannot_be_read(path, caplog):
    cache = EngineCache(path)
    cache.put_engine(KEY, "eng0", PLAN)
    (file,) = path.with_suffix("").iterdir()
    file.unlink()
    file.mkdir()  # a folder: root cannot read it either
    assert cache.engine(KEY, "eng0") is None
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{file}: a cached cuDNN engine is ignored: ")


def test_a_warning_is_all_when_the_folder_of_plans_cannot_be_made(path, caplog):
    path.parent.mkdir()
    path.with_suffix("").write_text("in the way")
    cache = EngineCache(path)
    cache.put_engine(KEY, "eng0", PLAN)
    (warning,) = warnings(caplog)
    assert re.fullmatch(
        rf"{path.with_suffix('')}/\w+: a cuDNN engine cannot be cached: .+", warning
    )
    assert cache.engine(KEY, "eng0") is None
