"""The files of several workers; tests/faults/test_metrics_files.py has them fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.observe import metrics_files
from service.observe.metrics_files import (
    VARIABLE,
    are_there,
    merge,
    prepare,
    remove_live,
    shared_folder,
    unchanged,
)
from service.observe.samples import all_workers

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The only place for folders."""
    monkeypatch.setenv(VARIABLE, "")  # put back when the test ends
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(metrics_files.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(metrics_files, "_SHARED_MEMORY", str(tmp_path / "nowhere"))
    return tmp_path


KEPT = ("counter", "histogram", "gauge_max")

WORKER = """
from service.observe import metrics_files
metrics_files.prepare()
import asyncio, os
from prometheus_client import CollectorRegistry
from lenet.backend import BatchResult
from service.observe.metrics import Metrics
def sizes():
    folder = os.environ[metrics_files.VARIABLE]
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
before = sizes()
metrics = Metrics(CollectorRegistry())
numbers = {"contexts": 2, "golden_error": 1e-7, "device_bytes": 1, "workspace_bytes": 1}
numbers |= {"queue_limit_rows": 10, "golden_tolerance": 1e-4}
numbers["load"] = lambda: (1, 1)
for name in "abcde":
    for version in range(40):
        model = name, str(version)
        metrics.model_loaded(model, "ab" * 32, **numbers)
        metrics.predicted("http", model, (0.1,) * 5)
        for power in range(11):
            result = BatchResult(None, 1 << power, True)
            metrics.batch_ended(model, 1 << power, "full", 0.1, result)
        for outcome in ("cancelled", "invalid_input", "too_large"):
            metrics.request_done(model, "http", outcome)
        if version:
            metrics.model_unloaded((name, str(version - 1)))
metrics.started("weights", 1.0)
metrics.certificate_read(1e9)
asyncio.run(metrics.exposition())
assert before == {name: size for name, size in sizes().items() if name in before}
assert sizes().keys() - before <= {"ended"}
assert before
"""


def test_the_library_uses_the_prepared_files_and_no_others_and_they_are_large_enough(place):
    # Fails when prometheus_client changes the names of its files, or how it takes them over.
    subprocess.run(
        [sys.executable, "-c", WORKER],
        env={**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(place)},
        check=True,
    )


def test_the_folder_lives_as_long_as_the_block(place):
    with shared_folder(2):
        (folder,) = place.iterdir()
        assert os.environ[VARIABLE] == str(folder)
        prepare()
        assert are_there()
    assert list(place.iterdir()) == []
    assert VARIABLE not in os.environ


def test_live_gauges_of_a_dead_worker_are_removed_and_its_counters_stay(place):
    with shared_folder(2):
        prepare()
        remove_live(os.getpid())
        left = {path.name for path in Path(os.environ[VARIABLE]).glob("*.db")}
        assert left == {f"{kind}_{os.getpid()}.db" for kind in KEPT}


def counted():
    """Every sample of what outlives a worker, by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for metric in all_workers()
        if metric.type != "gauge" or metric.name == "lenet_last_prediction_timestamp_seconds"
        for sample in metric.samples
    }


def used(folder):
    """How many bytes of metrics a scrape reads, and from how many files."""
    sizes = [metrics_files._USED.unpack_from(path.read_bytes())[0] for path in folder.glob("*.db")]
    return sum(sizes), len(sizes)


def test_sixteen_dead_workers_cost_a_scrape_half_as_much_again_and_every_count_stays(place):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(place)}
    command = [sys.executable, "-c", WORKER.replace("range(40)", "range(2)")]
    pids = []
    for _ in range(2):
        with subprocess.Popen(command, env=environment) as worker:
            pids.append(worker.pid)
        assert worker.returncode == 0
    with shared_folder(2):
        folder = Path(os.environ[VARIABLE])
        for path in place.glob("*_*.db"):
            path.rename(folder / path.name)
        alone_bytes, alone_files = used(folder)
        dead = [10**9 + number for number in range(16)]
        for number, pid in enumerate(dead):
            for path in folder.glob(f"*_{pids[number % 2]}.db"):
                shutil.copy(path, folder / path.name.replace(str(pids[number % 2]), str(pid)))
        for pid in dead:
            remove_live(pid)
        before = counted()
        assert before["lenet_worker_deaths_total",] == 16
        for pid in dead:
            assert merge(pid)
            assert counted() == before
        size, files = used(folder)
        assert size <= 1.5 * alone_bytes
        assert files <= 1.5 * alone_files


def test_nothing_is_merged_while_a_scrape_reads(place):
    with shared_folder(2):
        prepare()
        with unchanged():
            assert not merge(os.getpid())
            assert are_there()
        assert merge(os.getpid())
        left = {path.name for path in Path(os.environ[VARIABLE]).glob("*.db")}
        assert {f"{kind}_ended.db" for kind in KEPT} <= left
        assert not {f"{kind}_{os.getpid()}.db" for kind in KEPT} & left
        assert merge(os.getpid())  # gone: nothing to do


def test_counts_that_cannot_be_merged_stay_and_are_reported(place, caplog):
    with shared_folder(2):
        prepare()
        path = Path(os.environ[VARIABLE], f"counter_{os.getpid()}.db")
        path.write_bytes(b"\xff" * 100)
        assert merge(os.getpid())
        assert path.exists()
    (message,) = caplog.messages
    assert message.startswith(f"metrics of worker {os.getpid()} stay in files of their own: ")


def test_counters_of_a_worker_with_the_same_process_id_are_kept(place):
    with shared_folder(2):
        prepare()
        counter = Path(os.environ[VARIABLE], f"counter_{os.getpid()}.db")
        counter.write_bytes(b"counts")
        prepare()
        assert counter.read_bytes() == b"counts"


def test_a_folder_of_a_live_supervisor_stays_and_of_a_dead_one_goes(place):
    dead, foreign = place / "lenet-serve-metrics-dead", place / "other-folder"
    for folder in (dead, foreign):
        folder.mkdir()
    (dead / "counter_1.db").touch()
    (place / "lenet-serve-metrics-link").symlink_to(foreign)
    with shared_folder(2):
        first = Path(os.environ[VARIABLE])
        with shared_folder(2):
            assert first.is_dir()
        assert not dead.exists()
    assert foreign.is_dir()


def test_a_place_without_room_is_one_warning_and_no_folder(place, monkeypatch, caplog):
    monkeypatch.setattr(metrics_files.tempfile, "tempdir", "/dev/null/nowhere")
    with shared_folder(2):
        assert VARIABLE not in os.environ
        prepare()
        assert not are_there()
        remove_live(1)
    (message,) = caplog.messages
    assert "no folder for the metrics of several workers: /dev/null/nowhere (Not a dir" in message
    assert "set TMPDIR" in message


SERVING = """
import asyncio, sys
from service.observe import metrics_files
metrics_files.prepare()
from prometheus_client import CollectorRegistry
from service.observe.metrics import Metrics
metrics = Metrics(CollectorRegistry())
metrics.certificate_read(float(sys.argv[1]))
metrics.started("weights", float(sys.argv[1]))
print(asyncio.run(metrics.exposition()).decode())
"""


def test_the_certificate_of_the_worker_whose_ends_first_is_shown(place):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(place)}
    for end in ("1000", "9000"):  # the second worker reads the renewed one
        line = [sys.executable, "-c", SERVING, end]
        shown = subprocess.run(line, env=environment, check=True, capture_output=True, text=True)
    assert "lenet_certificate_end_timestamp_seconds 1000.0" in shown.stdout


def test_the_longest_start_of_the_workers_that_live_is_shown(place, monkeypatch):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(place)}
    monkeypatch.setenv(VARIABLE, str(place))
    for duration in ("40", "3"):
        line = [sys.executable, "-c", SERVING, duration]
        with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as worker:
            shown = worker.stdout.read()
        assert worker.returncode == 0
        assert f'lenet_start_phase_seconds{{phase="weights"}} {duration}.0' in shown
        remove_live(worker.pid)
        assert merge(worker.pid)
