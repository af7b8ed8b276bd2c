"""Metrics of several workers that cannot be written or read: no process ends for it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import Counter

import pytest

from service.errors import ExitCode
from tests.faults.checks import program, samples
from tests.service_process import PATIENCE_S

NOWHERE = """
import resource
from service.process import shared_folder
shared_folder._SHARED_MEMORY = "/nowhere"
"""
"""A service without shared memory, as on a machine where nothing is writable."""


def metrics(service):
    """Sums of all samples by name; that they can be read is part of every test."""
    found = Counter()
    for (name, _), value in samples(service).items():
        found[name] += value
    assert found["lenet_contexts"] >= 1
    return found


def kill_one(service, ready):
    """Kill a worker and wait for its successor."""
    pid = service.started_workers()[0]
    os.kill(pid, signal.SIGKILL)
    service.wait_for(f"worker {pid} ended with -9")
    service.ready(ready)


def assert_serving_and_stopping(service):
    for _ in range(10):
        assert service.predict()[0] == 200
        metrics(service)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(PATIENCE_S) == ExitCode.STOPPED
    service.wait_for(" stopped$")
    assert "Traceback" not in service.log
    assert service.log.count("ended with") <= 1


@contextlib.contextmanager
def mounted(folder, options):
    """A tmpfs on `folder`."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def temporary(tmp_path):
    """The service's folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def test_a_removed_folder_costs_the_merged_metrics_and_nothing_else(start, temporary):
    service = start("--workers", "2").ready(2)
    assert service.predict()[0] == 200
    (folder,) = temporary.iterdir()
    shutil.rmtree(folder)
    for _ in range(10):
        assert metrics(service)["lenet_contexts"] == 1, "of the worker that answers"
    service.wait_for("WARNING .*metrics of the other .*shows only the worker that answers")
    kill_one(service, 3)
    assert_serving_and_stopping(service)
    assert service.log.count("shows only the worker") <= 3, "one line a worker, of two and another"
    assert list(temporary.iterdir()) == []


def fill(folder):
    with contextlib.suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_costs_the_merged_metrics_and_nothing_else(start, temporary):
    with mounted(temporary, "size=4m"):
        service = start("--workers", "2").ready(2)
        fill(temporary)
        kill_one(service, 3)
        service.wait_for(
            r"WARNING .*metrics: cannot write to .*No space left on device.*only its own"
        )
        assert_serving_and_stopping(service)


@pytest.mark.long
@pytest.mark.parametrize("options", ["size=64k", "ro"], ids=["full", "read-only"])
def test_shared_memory_is_used_when_the_folder_for_temporary_files_cannot(
    start, temporary, options
):
    with mounted(temporary, options):
        changed = NOWHERE.replace("/nowhere", str(temporary.parent))
        # Neither may Python choose /tmp instead, which is another place.
        changed += f"import tempfile; tempfile.tempdir = {str(temporary)!r}"
        service = start("--workers", "2", program=program(changed)).ready(2)
        (folder,) = temporary.parent.glob("lenet-serve-metrics-*")
        assert metrics(service)["lenet_contexts"] == 2
        assert_serving_and_stopping(service)
        assert not folder.exists()
    assert "WARNING" not in service.log


@pytest.mark.usefixtures("unmeasured")
def test_a_read_only_machine_costs_the_merged_metrics_and_nothing_else(start, temporary):
    # No file may have a byte: as on a read-only root, neither TMPDIR nor /tmp nor . is writable.
    changed = f"{NOWHERE}\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    service = start("--workers", "2", program=program(changed)).ready(2)
    (line,) = [line for line in service.lines if "WARNING" in line]
    assert re.search("no folder for the metrics of several workers: .*; set TMPDIR", line)
    kill_one(service, 3)
    assert_serving_and_stopping(service)
    assert service.log.count("WARNING") == 1
    assert list(temporary.iterdir()) == []
