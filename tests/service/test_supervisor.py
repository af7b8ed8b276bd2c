from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.parser import text_string_to_metric_families

from lenet.model import Model
from service import supervisor
from service.errors import ExitCode
from service.settings import Settings
from service.supervisor import RESTARTS, SAME_FAULT_S, supervise

LONG_S = 30.0
"""How long workers may take to tell what they counted."""

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start_two(start):
    def start_two_(*arguments):
        return start("--workers", "2", *arguments)

    return start_two_


def values(service):
    """The sum over labels of each sample, as any worker answers it."""
    found = {}
    for family in text_string_to_metric_families(service.get("/metrics")[1]):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def metric_files(service):
    (folder,) = service.temporary.iterdir()
    return folder


def answered_by(service, pid):
    """How many requests the worker has counted."""
    file = metric_files(service) / f"counter_{pid}.db"
    found = MmapedDict.read_all_values_from_file(str(file))
    return sum(value for key, value, *_ in found if "lenet_requests_total" in key)


def until_told(service, requests):
    """Wait until the files of both workers tell of so many in all; the two counts."""
    deadline_s = time.monotonic() + LONG_S
    while True:
        counts = [answered_by(service, pid) for pid in service.started_workers()]
        assert sum(counts) <= requests
        if sum(counts) == requests:
            return counts
        assert time.monotonic() < deadline_s, f"they tell of {counts}"
        time.sleep(0.02)


def test_both_workers_answer_and_either_tells_of_both_when_they_share_a_port(start_two):
    service = start_two().ready(workers=2)
    for _ in range(40):
        assert service.predict()[0] == 200
    assert all(until_told(service, 40))
    for _ in range(5):
        found = values(service)
        assert found["lenet_requests_total"] == 40
        assert found["lenet_request_duration_seconds_count"] == 40
        assert found["lenet_contexts"] == 2
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log


def test_a_killed_worker_is_replaced_and_its_live_gauges_vanish(start_two):
    service = start_two().ready(workers=2)
    for _ in range(10):
        service.predict()
    until_told(service, 10)
    killed, other = service.started_workers()
    os.kill(killed, signal.SIGKILL)
    service.wait_for(f"ERROR .* worker {killed} ended with -9")
    service.ready(workers=3)
    assert len(service.started_workers()) == 3
    assert other in service.started_workers()
    found = values(service)
    assert found["lenet_contexts"] == 2
    assert found["lenet_requests_total"] == 10
    assert not list(metric_files(service).glob(f"gauge_live*_{killed}.db"))
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_more_deaths_than_the_budget_end_the_service_with_6(start_two):
    service = start_two()
    for number in range(1, RESTARTS + 2):
        service.wait_for("worker [0-9]+ started", number + 1)
        os.kill(service.started_workers()[number], signal.SIGKILL)
        service.wait_for("ended with -9", number)
    assert service.wait() == ExitCode.WORKERS
    assert len(service.started_workers()) == 2 + RESTARTS
    service.wait_for("ERROR .* more than 2 deaths in 60 s: giving up")


def test_weights_that_fail_their_proof_end_all_with_3_and_nobody_tries_again(
    start_two, tiny_weights, tiny, random_weights
):
    weights = random_weights(Model("lenet", tiny.blocks))
    golden = dataclasses.replace(weights.golden, logits=weights.golden.logits + 1)
    dataclasses.replace(weights, golden=golden).write(tiny_weights / "lenet" / "2.safetensors")
    service = start_two()
    assert service.wait() == ExitCode.WEIGHTS
    assert len(service.started_workers()) == 2
    assert "golden logits differ" in service.log
    assert "Traceback" not in service.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_requests_in_flight_are_answered_when_a_signal_reaches_every_process(start_two, number):
    service = start_two().ready(workers=2)
    with service.in_flight() as connection:
        service.signal_all(number)
        service.wait_for("stopping", 2)
        connection.sendall(bytes(784))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert service.wait() == ExitCode.STOPPED
    assert "second signal" not in service.log
    assert "Traceback" not in service.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_waits_for_no_worker_and_is_the_exit_code(start_two, number):
    service = start_two("--drain-timeout-s", "60").ready(workers=2)
    with service.in_flight() as stuck:
        service.signal()
        service.wait_for("stopping", 2)
        service.signal_all(number)
        with contextlib.suppress(ConnectionResetError):
            assert stuck.recv(1000) == b""
    assert service.wait() == 128 + number
    assert service.stopped_after_s() < 5
    assert "second signal: exiting immediately" in service.log
    assert "Traceback" not in service.log


@pytest.mark.parametrize("to", ["signal", "signal_all"])
def test_a_signal_is_not_lost_when_workers_are_being_started(start, to):
    service = start("--workers", "2")
    service.wait_for("worker [0-9]+ started")
    getattr(service, to)(signal.SIGTERM)
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log


def test_no_worker_outlives_a_killed_supervisor_and_none_drops_its_requests(start_two):
    service = start_two().ready(workers=2)
    with service.in_flight() as connection:
        service.signal(signal.SIGKILL)
        service.wait_for("stopping", 2)
        connection.sendall(bytes(784))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    # Waits for the end of the log, too, which every process of the service holds.
    assert service.wait() == -signal.SIGKILL
    assert len([line for line in service.lines if line.endswith(" stopped")]) == 2


def loaded(service):
    """The versions that any worker's metrics name."""
    return {
        sample.labels["version"]
        for family in text_string_to_metric_families(service.get("/metrics")[1])
        for sample in family.samples
        if sample.name == "lenet_model_info"
    }


def test_every_worker_reloads_when_the_supervisor_is_hung_up(start_two, second_version):
    service = start_two().ready(workers=2)
    assert loaded(service) == {"1"}
    second_version()
    service.signal(signal.SIGHUP)
    service.wait_for("version 2 .* replaced version 1", 2)
    for _ in range(10):
        assert '"version":"2"' in service.predict()[1]
    assert loaded(service) == {"2"}
    assert values(service)["lenet_reloads_total"] == 2
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_nobody_dies_of_a_hangup_that_reaches_every_process(start_two, second_version):
    service = start_two().ready(workers=2)
    second_version()
    service.signal_all(signal.SIGHUP)
    service.wait_for("version 2 .* replaced version 1", 2)
    os.kill(service.started_workers()[0], signal.SIGKILL)
    service.ready(workers=3)
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "resource_tracker" not in service.log
    assert len(service.started_workers()) == 3


def test_a_hangup_is_not_lost_and_kills_nobody_when_workers_are_being_started(
    start, second_version
):
    service = start("--workers", "2")
    service.wait_for("worker [0-9]+ started", 2)
    service.wait_for("warming up")
    second_version()
    service.signal_all(signal.SIGHUP)
    service.ready(workers=2)
    service.wait_for("version 2 .* replaced|reload: 0 replaced, 1 unchanged", 2)
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert len(service.started_workers()) == 2


# Without processes


class Puppet:
    """A worker that dies at once."""

    def __init__(self, pid, exitcode):
        self.pid = pid
        self.exitcode = exitcode
        self.sentinel, self._end = os.pipe()
        os.close(self._end)

    def is_alive(self):
        return False


@pytest.fixture
def puppets(monkeypatch, tmp_path):
    """`puppets(*codes)`: workers that end with these codes, one after another."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    made = []

    def install(*codes):
        left = iter(codes)

        def start(_):
            made.append(Puppet(len(made) + 1, next(left)))
            return made[-1]

        monkeypatch.setattr(supervisor._Supervisor, "_start", start)
        return made

    yield install
    for puppet in made:
        os.close(puppet.sentinel)


@pytest.fixture
def settings(tiny_weights):
    return Settings(port=0, grpc_port=0, workers=2, weights=tiny_weights)


def test_deaths_long_ago_are_forgiven(puppets, settings, monkeypatch):
    made = puppets(*[-9] * 10, ExitCode.WEIGHTS, -9)
    clock = iter(range(0, 2000, 61))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: next(clock))
    assert supervise(settings) is ExitCode.WEIGHTS
    assert len(made) == 12


def test_a_backend_that_cannot_run_ends_the_service_when_it_never_ran(puppets, settings):
    made = puppets(ExitCode.BACKEND, -9)
    assert supervise(settings) is ExitCode.BACKEND
    assert len(made) == 2


def test_a_backend_that_fails_a_replacement_is_one_death_more(puppets, settings):
    made = puppets(-9, *[ExitCode.BACKEND] * 20)
    assert supervise(settings.model_copy(update={"workers": 1})) is ExitCode.WORKERS
    assert len(made) == 1 + RESTARTS


def test_workers_that_lose_their_device_together_count_once(puppets, settings):
    made = puppets(*[ExitCode.DEVICE] * 20)
    assert supervise(settings) is ExitCode.WORKERS
    assert len(made) == 2 * (1 + RESTARTS), "two at a time, three times"


def test_workers_that_die_of_anything_else_count_each(puppets, settings):
    made = puppets(*[-9] * 20)
    assert supervise(settings) is ExitCode.WORKERS
    assert len(made) == 2 + RESTARTS


def test_one_worker_that_loses_its_device_again_and_again_counts_each_time(puppets, settings):
    made = puppets(*[ExitCode.DEVICE] * 20)
    assert supervise(settings.model_copy(update={"workers": 1})) is ExitCode.WORKERS
    assert len(made) == 1 + RESTARTS


def test_workers_that_lose_their_devices_some_time_apart_count_each(puppets, settings, monkeypatch):
    made = puppets(*[ExitCode.DEVICE] * 20)
    clock = itertools.count(0, SAME_FAULT_S)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: next(clock))
    assert supervise(settings) is ExitCode.WORKERS
    assert len(made) == 2 + RESTARTS


def test_the_first_reason_is_told_when_the_stop_brings_others(puppets, settings):
    puppets(ExitCode.WEIGHTS, ExitCode.ADDRESS)
    assert supervise(settings) is ExitCode.WEIGHTS


def test_an_error_that_nobody_foresaw_is_no_exit_code(settings, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervisor.tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="No space left"):
        supervise(settings)


def test_signals_and_folders_are_given_back_when_it_ends(puppets, settings, monkeypatch, tmp_path):
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(supervisor.tempfile, "tempdir", str(tmp_path / "folder"))
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    puppets(ExitCode.WEIGHTS, ExitCode.WEIGHTS)
    supervise(settings)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert list(Path(tmp_path / "folder").iterdir()) == []


def test_a_storm_of_signals_is_taken_when_nobody_reads_them():
    with supervisor._signals() as told:
        for _ in range(2000):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert told.recv(1) == bytes([signal.SIGTERM])


def test_the_supervisor_starts_workers_without_what_only_they_need():
    code = "import sys, service.supervisor; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split()
    assert "service.supervisor" in loaded
    assert not {"fastapi", "uvicorn", "uvloop", "grpc", "service.server"} & set(loaded)
