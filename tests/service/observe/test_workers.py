"""Metrics of several workers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from threading import current_thread, main_thread

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from lenet.backend import BatchResult
from service.observe.metrics import Metrics
from service.observe.workers import fold
from service.process.shared_folder import FILE_BYTES
from tests.wire.doors import until

MODEL = "lenet", "1"
DEATHS = ("lenet_worker_deaths_total",)
OK = (
    "lenet_requests_total",
    *(("model", "lenet"), ("outcome", "ok"), ("protocol", "http"), ("version", "1")),
)
PHASE = ("lenet_start_phase_seconds", ("phase", "weights"))


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """`worker(pid)`: the metrics of a worker with this process id, which has a model."""

    def start(pid, model=MODEL, sha256="ab"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid)
            metrics = Metrics(CollectorRegistry(), tmp_path)
        load(metrics, model, sha256)
        metrics.flush()
        return metrics

    return start


def load(metrics, model=MODEL, sha256="ab", rows=10):
    """Load a version; a flush writes that."""
    numbers = {"contexts": 2, "golden_error": 1e-7, "device_bytes": 10, "workspace_bytes": 1}
    numbers |= {"queue_limit_rows": 10 * rows, "golden_tolerance": 1e-4}
    metrics.model_loaded(model, sha256, load=lambda: (rows, 1), **numbers)


def predict(metrics, count=1, model=MODEL):
    for _ in range(count):
        metrics.predicted("http", model, (0.1, 0.1, 0.1, 0.1, 0.5))
        metrics.batch_ended(model, 3, "full", 0.1, BatchResult(None, 4, True))
    metrics.flush()


def scrape(metrics):
    """Samples by name and labels."""
    text = asyncio.run(metrics.exposition())[0].decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    found = {(one.name, *sorted(one.labels.items())): one.value for one in samples}
    assert len(found) == len(samples)
    return found


def counts(found):
    """What outlives a worker, but for the CPU time of those that live."""
    kept = ("_total", "_bucket", "_count", "_sum", "last_prediction_timestamp_seconds")
    return {key: one for key, one in found.items() if key[0].endswith(kept) and "cpu" not in key[0]}


def files(folder):
    return [path for path in folder.iterdir() if path.is_file()]


@pytest.mark.states(
    "metrics",
    "sums over several workers, of every kind of series",
    found="known numbers, counted by three workers",
)
def test_one_worker_answers_for_all_that_share_a_folder(worker):
    lenet, version = ("model", "lenet"), ("version", "2")
    of_model = "lenet", "2"
    for pid, (rows, sha256) in enumerate({3: "cd", 4: "ef"}.items()):
        one = worker(pid, sha256="old")
        load(one, of_model, "cd", rows)
        one.model_unloaded(MODEL)
        load(one, of_model, sha256, rows)
        one.reloaded("lenet", "ok")
        one.started("weights", rows / 10)
        one.certificate_read(1000.0 * rows)
        one.predicted("http", of_model, (0.1, 0.1, 0.1, 0.1, 0.5))
        one.batch_ended(of_model, rows, "full", 0.1, BatchResult(None, rows + 1, rows == 3))
        one.device_lost("hang")
    last = worker(9)
    last.model_unloaded(MODEL)
    found = scrape(last)
    assert (
        found["lenet_requests_total", lenet, ("outcome", "ok"), ("protocol", "http"), version] == 2
    )
    assert found["lenet_images_total", lenet, version] == 7
    assert found["lenet_batches_total", lenet, ("reason", "full"), version] == 2
    assert found["lenet_request_duration_seconds_sum", ("protocol", "http")] == 1.0
    assert found["lenet_request_duration_seconds_bucket", ("le", "0.5"), ("protocol", "http")] == 2
    assert found["lenet_batch_rows_count",] == 2
    assert found["lenet_device_losses_total", ("reason", "hang")] == 2
    assert found["lenet_graph_replays_total", lenet, ("result", "hit"), version] == 1
    assert found["lenet_graph_replays_total", lenet, ("result", "miss"), version] == 1
    assert found["lenet_padding_rows_total", lenet, version] == 2
    assert found["lenet_device_bytes", lenet, version] == 20
    assert found["lenet_contexts", lenet, version] == 4
    assert found["lenet_contexts_busy", lenet, version] == 2
    assert found["lenet_queue_rows", lenet, version] == 7
    assert found["lenet_queue_limit_rows", lenet, version] == 70
    assert found["lenet_golden_error", lenet, version] == 1e-7, "the largest, not the sum"
    assert found["lenet_workers",] == 3
    assert found[PHASE] == 0.4, "the longest"
    assert found["lenet_certificate_end_timestamp_seconds",] == 3000, "of whose ends first"
    assert found["lenet_reloads_total", lenet, ("outcome", "ok")] == 2
    info = {key: value for key, value in found.items() if key[0] == "lenet_model_info"}
    assert info == {
        ("lenet_model_info", lenet, ("sha256", sha), version): 1 for sha in ("cd", "ef")
    }
    assert ("lenet_contexts", lenet, ("version", "1")) not in found
    assert found["lenet_images_total", lenet, ("version", "1")] == 0
    alone = scrape(Metrics(CollectorRegistry()))
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"):
        assert found[name,] == pytest.approx(3 * alone[name,], rel=0.5), "three times this process"


def test_sixteen_dead_workers_cost_a_scrape_half_as_much_again_and_every_count_stays(
    worker, tmp_path
):
    live = [worker(pid) for pid in (1, 2)]
    for number, one in enumerate(live):
        predict(one, number + 1)
    alone = files(tmp_path)
    alone_bytes = sum(path.stat().st_size for path in alone)
    dead = range(100, 116)
    for pid in dead:
        predict(one := worker(pid), pid)
        one.started("weights", float(pid))
    before = scrape(live[0])
    assert before[OK] == 3 + sum(dead)
    assert before[PHASE] == 115
    for number, pid in enumerate(dead, 1):
        fold(tmp_path, pid)
        found = scrape(live[0])
        assert found["lenet_workers",] == 18 - number
        assert counts(found) == counts(before) | {DEATHS: number}
    assert PHASE not in found, "of the dead"
    assert len(files(tmp_path)) <= 1.5 * len(alone)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1.5 * alone_bytes


@pytest.mark.parametrize("moment", range(5))
def test_no_count_is_lost_or_doubled_while_a_worker_is_folded(
    worker, tmp_path, monkeypatch, moment
):
    asking = worker(1)
    for pid in (2, 3):
        predict(worker(pid))
    fold(tmp_path, 3)
    read, reads = Path.read_bytes, iter(range(100))

    def folding(path):
        if next(reads) == moment:  # before this file is read
            fold(tmp_path, 2)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", folding)
    for _ in range(2):
        assert scrape(asking)[OK] == 2


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing", ["unlink", "write_bytes"])
def test_counts_that_cannot_be_folded_are_counted_once_without_gauges_and_folded_later(
    worker, tmp_path, monkeypatch, caplog, failing
):
    asking = worker(1)
    predict(worker(2), 2)
    unlink = Path.unlink
    with monkeypatch.context() as patch:
        patch.setattr(
            *(Path, failing),
            lambda path, *of, **to: full() if path.suffix != ".json" else unlink(path, *of, **to),
        )
        fold(tmp_path, 2)
    (message,) = caplog.messages
    assert message.startswith("metrics of worker 2 are not added to those of the dead: ")
    found = scrape(asking)
    assert (found[OK], found["lenet_workers",], found[DEATHS]) == (2, 1, 1)
    predict(worker(3), 5)
    fold(tmp_path, 3)
    found = scrape(asking)
    assert (found[OK], found["lenet_workers",], found[DEATHS]) == (7, 1, 2)
    assert len(files(tmp_path)) == 2


def test_a_worker_is_folded_when_its_process_id_returns_or_it_was_killed_while_it_wrote(
    worker, tmp_path
):
    asking = worker(1)
    for number in (1, 2, 3):
        predict(worker(2))
        for name in ("2-5.new", "22-5.new"):
            (tmp_path / name).touch()
        fold(tmp_path, 2)
        assert scrape(asking)[OK] == number
        assert [path.name for path in files(tmp_path) if path.suffix == ".new"] == ["22-5.new"]
    fold(tmp_path, 77)  # before its first file
    assert scrape(asking)[DEATHS] == 4


@pytest.mark.parametrize("name", ["2-0.json", "dead-workers.sum"])
@pytest.mark.parametrize("content", [b'{"lenet_workers":[[[],[null]]]}', b"\xff"])
def test_a_file_of_the_dead_that_cannot_be_read_is_removed(worker, tmp_path, caplog, name, content):
    asking = worker(1)
    predict(worker(3), 4)
    (tmp_path / name).write_bytes(b"\n" + content)
    fold(tmp_path, 2)
    fold(tmp_path, 3)
    found = scrape(asking)
    assert (found[OK], found[DEATHS]) == (4, 2)
    assert len(files(tmp_path)) == 2
    (message,) = caplog.messages
    assert message.startswith("metrics of dead workers are lost: ")


@pytest.mark.parametrize("damage", ["folder", "file", "null"])
def test_files_that_cannot_be_read_are_one_warning_and_the_workers_own_numbers(
    worker, tmp_path, caplog, damage
):
    predict(worker(1))
    asking = worker(2)
    predict(asking, 5)
    if damage != "folder":
        null = b'{"lenet_golden_error":[[["lenet","2"],[null]]]}'
        (tmp_path / "1-1.json").write_bytes(b"{" if damage == "file" else null)
    else:
        for path in files(tmp_path):
            path.unlink()
        tmp_path.rmdir()
    for _ in range(2):
        assert scrape(asking)[OK] == 5
    (message,) = [one for one in caplog.messages if "cannot be read" in one]
    assert "/metrics shows only the worker that answers" in message


def test_a_metric_of_a_foreign_file_that_is_unknown_is_skipped(worker, tmp_path, caplog):
    asking = worker(1)
    (tmp_path / "2-0.json").write_bytes(b'{"lenet_later":[[["a"],[1]]],"lenet_workers":[[[],[1]]]}')
    predict(worker(3), 5)
    assert (scrape(asking)[OK], scrape(asking)["lenet_workers",]) == (5, 3)
    for pid in (2, 3):
        fold(tmp_path, pid)
    found = scrape(asking)
    assert (found[OK], found[DEATHS], found["lenet_workers",]) == (5, 2, 1)
    assert not caplog.records


def test_a_file_is_written_when_its_numbers_have_changed(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(ProcessCollector, "collect", lambda _: [])  # its CPU time may change
    one = worker(1)
    written, write = [], Path.write_bytes
    monkeypatch.setattr(
        Path, "write_bytes", lambda path, data: (written.append(path), write(path, data))
    )
    for count, files_written in ((0, 0), (1, 1), (0, 1), (2, 2), (0, 2)):
        predict(one, count)
        assert len(written) == files_written


async def test_the_file_is_written_off_the_event_loop(worker, monkeypatch):
    one = worker(1)
    threads, write = [], Path.write_bytes
    monkeypatch.setattr(
        Path, "write_bytes", lambda *of: (threads.append(current_thread()), write(*of))
    )
    monkeypatch.setattr("service.observe.metrics.FLUSH_INTERVAL_S", 0.001)
    with one.flushed_regularly():
        one.explained(0.1)
        await until(lambda: threads)
        one.explained(0.1)
        await one.exposition()
        assert main_thread() not in threads


def test_a_worker_that_cannot_write_its_file_removes_it_until_it_can(worker, monkeypatch, caplog):
    one, other = worker(1), worker(2)
    predict(one)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for _ in range(3):
            predict(one)
        (message,) = caplog.messages
        assert "cannot write to" in message
        assert "No space left on device" in message
        assert scrape(one)[OK] == 4
    assert scrape(other)[OK] == 0
    predict(one)
    assert scrape(other)[OK] == scrape(one)[OK] == 5
    other.reloaded("\ud800", "ok")  # a name that cannot be encoded
    other.flush()
    assert "cannot write to" in caplog.messages[-1]


def test_a_folder_has_room_for_two_hundred_versions(worker, tmp_path):
    one = worker(1)
    for model in [(name, str(version)) for name in "abcde" for version in range(40)]:
        load(one, model, "ab" * 32)
        for power in range(11):
            one.batch_ended(model, 1 << power, "full", 0.1, BatchResult(None, 1 << power, True))
        one.predicted("http", model, (0.1, 0.1, 0.1, 0.1, 0.5))
    one.flush()
    (path,) = files(tmp_path)
    assert path.stat().st_size > 50_000
    assert 2 * path.stat().st_size < FILE_BYTES, "beside its successor"
