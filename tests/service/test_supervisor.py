from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service import supervisor
from service.errors import ExitCode
from service.process.signals import SAME_STOP_S, Signals
from service.settings import Settings
from service.supervisor import RESTARTS, shares
from tests.service_process import PATIENCE_S

ROOT = Path(__file__).parents[2]
LATE = {"fastapi", "uvicorn", "uvloop", "grpc", "prometheus_client", "service.server"}


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


def until_counted(service, requests):
    """Wait until the metrics of both workers count so many requests in all; returns `values`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := values(service))["lenet_requests_total"] < requests:
        assert time.monotonic() < deadline_s, f"they count {found['lenet_requests_total']}"
        time.sleep(0.02)
    assert found["lenet_requests_total"] == requests
    return found


@pytest.mark.states(
    "metrics",
    "`lenet_worker_deaths_total`; `lenet_workers` after a death",
    found="a worker that the test killed",
)
def test_workers_count_together_and_a_killed_one_is_replaced_and_its_live_gauges_vanish(start_two):
    service = start_two().ready(workers=2)
    descriptors = Path(f"/proc/{service.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(40):
        assert service.predict()[0] == 200
    found = until_counted(service, 40)
    for _ in range(5):  # whoever answers
        assert values(service)["lenet_contexts"] == 2
    assert found["process_resident_memory_bytes"] > 0
    killed, other = service.started_workers()
    os.kill(killed, signal.SIGKILL)
    service.wait_for(f"ERROR .* worker {killed} ended with -9")
    service.ready(workers=3)
    assert len(service.started_workers()) == 3
    assert other in service.started_workers()
    assert len(list(descriptors.iterdir())) == before
    found = values(service)
    assert found["lenet_contexts"] == 2, "not the killed one's"
    assert found["lenet_workers"] == 2
    assert found["lenet_worker_deaths_total"] == 1
    assert found["lenet_requests_total"] == found["lenet_request_duration_seconds_count"] == 40
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_a_broken_file_ends_no_worker_and_its_successor_waits_until_it_is_whole(start_two, write):
    service = start_two().ready(2)
    write("lenet/2").write_bytes(b"broken")
    service.signal(signal.SIGHUP)
    service.wait_for("reload refused, still serving version 1", 2)
    os.kill(service.started_workers()[0], signal.SIGKILL)
    service.wait_for(r"ERROR service.server: weights/lenet/2.safetensors: is not")
    service.wait_for(r"worker \d+: another try in 5 s, others serve")
    assert service.predict()[0] == 200
    write("lenet/2", seed=1)
    service.ready(3)
    assert service.predict()[0] == 200
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_requests_in_flight_are_answered_when_a_signal_reaches_every_process(start_two):
    service = start_two().ready(workers=2)
    with service.in_flight() as connection:
        service.signal_all(signal.SIGINT)
        service.wait_for("stopping", 2)
        connection.sendall(bytes(784))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert service.wait() == ExitCode.STOPPED
    assert "second signal" not in service.log
    assert "Traceback" not in service.log


def test_a_second_signal_waits_for_no_worker_and_is_the_exit_code(start_two):
    service = start_two("--drain-timeout-s", "3600").ready(workers=2)
    with service.in_flight() as stuck:
        service.signal()
        service.wait_for("stopping", 2)
        time.sleep(SAME_STOP_S)  # sooner it would not be a second one
        service.signal_all(signal.SIGTERM)
        with contextlib.suppress(ConnectionResetError):
            assert stuck.recv(1000) == b""
    assert service.wait() == 128 + signal.SIGTERM
    assert "second signal: exiting immediately" in service.log
    assert "Traceback" not in service.log


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


IMPORT = """
import os, pathlib, time
pathlib.Path(f"importing.{os.getpid()}").touch()
time.sleep(3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends them")
def test_no_worker_outlives_a_supervisor_that_is_killed_while_they_import(
    start_two, tmp_path, monkeypatch
):
    (tmp_path / "uvloop.py").write_text(IMPORT)  # found before the library, by workers alone
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    service = start_two()
    deadline_s = time.monotonic() + PATIENCE_S
    while len(list(tmp_path.glob("importing.*"))) < 2:
        assert time.monotonic() < deadline_s, service.log
        time.sleep(0.01)
    service.signal(signal.SIGKILL)
    assert service.wait() == -signal.SIGKILL  # the log ends with the last process that holds it


# Without processes


def supervise(settings):
    return supervisor.supervise(settings, Signals())


class FakeProcess:
    """A worker that ends at once with `exitcode`; with None it runs until it is killed."""

    def __init__(self, pid, exitcode):
        self.pid, self.exitcode = pid, None
        self.sentinel, self._end = os.pipe()
        if exitcode is not None:
            self.end(exitcode)

    def end(self, exitcode):
        self.exitcode = exitcode
        os.close(self._end)

    def start(self):
        pass

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        assert self.exitcode is None
        self.end(-9)

    def close(self):
        os.close(self.sentinel)


@pytest.fixture
def spawned(monkeypatch):
    """`spawned(*codes)`: processes that end with these codes, in the order of their start.

    Returns: of each that was started how many others ran then.
    """

    def install(*codes):
        made, running = [], []

        def start(target, args, daemon):
            running.append(sum(map(FakeProcess.is_alive, made)))
            code = codes[len(made)]
            if callable(code):
                code = code(made)
            made.append(FakeProcess(len(made) + 1, code))
            return made[-1]

        pipe = multiprocessing.get_context("spawn").Pipe
        context = SimpleNamespace(Pipe=pipe, Process=start)
        monkeypatch.setattr(supervisor.multiprocessing, "get_context", lambda _: context)
        return running

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield install
    # The supervisor blocks its signals; what later tests start would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.fixture
def settings(tiny_weights):
    return Settings(port=0, grpc_port=0, workers=2, weights=tiny_weights)


@pytest.mark.states(
    "times and counts in operations.md",
    "the third death within a minute ends the service",
    found="deaths every 61 s of an injected clock do not",
)
def test_deaths_long_ago_are_forgiven(spawned, settings, monkeypatch):
    started = spawned(*[-9] * 10, ExitCode.ADDRESS, -9)
    clock = SimpleNamespace(monotonic=itertools.count(0, 61).__next__)
    monkeypatch.setattr(supervisor, "time", clock)
    assert supervise(settings) is ExitCode.ADDRESS
    assert len(started) == 12


D, MANY = ExitCode.DEVICE, [-9] * 20


@pytest.mark.parametrize(
    ("workers", "codes", "outcome", "started"),
    [
        (2, [ExitCode.BACKEND, *MANY], ExitCode.BACKEND, 2),
        (1, [-9, *[ExitCode.BACKEND] * 20], ExitCode.WORKERS, 1 + RESTARTS),
        (2, MANY, ExitCode.WORKERS, 2 + RESTARTS),
        (1, [D] * 20, ExitCode.WORKERS, 1 + RESTARTS),
        (2, [D] * 20, ExitCode.WORKERS, 2 * (1 + RESTARTS)),
        (2, [ExitCode.WEIGHTS, ExitCode.ADDRESS], ExitCode.WEIGHTS, 2),
        (2, [-9, -9, ExitCode.WEIGHTS, ExitCode.WEIGHTS], ExitCode.WEIGHTS, 4),
        (2, [-9, None, ExitCode.SETTINGS, ExitCode.ADDRESS], ExitCode.ADDRESS, 4),
    ],
    ids=[
        "a backend that never ran is the end",
        "one that fails a replacement is one death more",
        "each death counts",
        "each loss of one worker counts",
        "what two lose together counts once",
        "the first reason is the exit code",
        "a broken file is the end when no worker is left",
        "half a certificate is read again while others serve",
    ],
)
def test_the_end_is_that_of_the_third_death_or_of_one_that_cannot_be_mended(
    spawned, settings, monkeypatch, workers, codes, outcome, started
):
    running = spawned(*codes)
    monkeypatch.setattr(supervisor, "RETRY_S", 0.1)
    monkeypatch.setattr(supervisor, "STOP_LIMIT_S", 0.1)
    changes = {"workers": workers, "drain_timeout_s": 0.0}
    assert supervise(settings.model_copy(update=changes)) is outcome
    assert len(running) == started


def test_workers_that_lose_their_devices_some_time_apart_count_each(spawned, settings, monkeypatch):
    running = spawned(*[D] * 20)
    monkeypatch.setattr(supervisor, "SAME_FAULT_S", 0.0)
    assert supervise(settings) is ExitCode.WORKERS
    assert len(running) == 2 + RESTARTS


def the_first_loses_its_gpu(made):
    """While the replacement of another finds a broken file."""
    made[1].end(D)
    return ExitCode.WEIGHTS


@pytest.mark.parametrize(
    ("changes", "codes", "running"),
    [
        ({"workers": 2}, [D, None, ExitCode.ADDRESS, None], [0, 0, 0, 0]),
        (
            {"workers": 4, "devices": (0, 1)},
            [D, D, None, None, ExitCode.ADDRESS, None, None, None],
            [0, 0, 0, 1, 0, 0, 1, 2],
        ),
        (
            {"workers": 3},
            [-9, None, None, the_first_loses_its_gpu, ExitCode.ADDRESS, None, None],
            [0, 0, 1, 2, 0, 0, 1],
        ),
    ],
    ids=["one", "of two GPUs one after the other", "while a replacement waits"],
)
def test_under_mps_neighbours_of_a_lost_gpu_are_ended_before_any_is_replaced(
    spawned, settings, monkeypatch, caplog, changes, codes, running
):
    found = spawned(*codes)
    monkeypatch.setattr(supervisor, "SAME_FAULT_S", 0.3)
    monkeypatch.setattr(supervisor, "RETRY_S", 0.1)
    monkeypatch.setattr(supervisor, "BEAT_S", 0.05)
    monkeypatch.setattr(supervisor, "STOP_LIMIT_S", 0.1)
    monkeypatch.setattr(supervisor.mps, "wanted", lambda _: True)
    monkeypatch.setattr(supervisor.mps, "shared_gpu", lambda: contextlib.nullcontext(True))
    changes = {"drain_timeout_s": 0.0, **changes}
    assert supervise(settings.model_copy(update=changes)) is ExitCode.ADDRESS
    assert found == running
    assert "no sign of life" not in caplog.text, "it was ended for another reason"


def test_no_worker_is_started_when_a_stop_was_requested_before(spawned, settings):
    running = spawned()
    signals = Signals()
    signals.take(signal.SIGHUP)
    signals.take(signal.SIGTERM)
    assert supervisor.supervise(settings, signals) is ExitCode.STOPPED
    assert running == []


def test_a_storm_of_signals_is_taken_when_nobody_reads_them():
    signals = Signals(clock=itertools.count().__next__)
    with supervisor._received(signals) as received:
        for _ in range(2000):
            signals.take(signal.SIGTERM)
        assert received.recv(1) == bytes([signal.SIGTERM])


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
    assert not LATE & set(loaded)


@pytest.mark.parametrize(
    ("devices", "workers", "expected"),
    [
        ((0,), 4, [(0,)]),
        ((), 2, [()]),
        ((0, 1), 1, [(0, 1)]),
        ((0, 1), 2, [(0,), (1,)]),
        ((2, 0, 1), 2, [(2, 1), (0,)]),
        ((0, 1), 4, [(0,), (1,)]),
    ],
)
def test_gpus_are_divided_over_the_workers(devices, workers, expected):
    assert shares(devices, workers) == expected
