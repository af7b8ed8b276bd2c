"""Signals at every moment of a process's life, and how long a stop takes whatever is stuck."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from service.engine.contexts import CLOSE_TIMEOUT_S
from service.errors import ExitCode
from service.process.signals import SAME_STOP_S
from tests.faults.checks import STUCK_LOOP, program, until, workers_program
from tests.service_process import PATIENCE_S, PROGRAM

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LIMIT_S = 3.0
"""Most seconds from the end of the drain to the end of the process."""

SCRIPT = program()
"""The code of the console script `lenet-serve`."""


def until_received(service):
    """Wait for the first line of `main`: from then on the signals are blocked, and received."""
    status = Path(f"/proc/{service.process.pid}/status")
    wanted = sum(1 << (number - 1) for number in SIGNALS)

    def blocked():
        return int(re.search(r"SigBlk:\s+(\w+)", status.read_text())[1], 16)

    until(lambda: blocked() & wanted == wanted)


def assert_stopped(service):
    assert service.wait() == ExitCode.STOPPED, service.log
    assert service.lines[-1].endswith(" stopped")
    for word in ("Traceback", "ERROR", "WARNING"):
        assert word not in service.log


MANY = [index * 0.05 for index in range(30)]
"""Seconds after the first line of `main`, up to after the service is ready."""


def long(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.long)


# From the first line on


def test_nothing_slow_is_imported_before_signals_are_received():
    code = "import sys; before = set(sys.modules); import service.__main__; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(PROGRAM)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.split()
    assert "service.__main__" in loaded
    assert not {"logging", "pydantic", "numpy", "asyncio", "lenet", "service.settings"} & {*loaded}


SIGNALLED = """
import builtins, os, signal, sys
number, imported = int(sys.argv.pop(1)), builtins.__import__
def signalled_import(name, *rest):
    if name.startswith("service.process"):
        os.kill(os.getpid(), number)
    return imported(name, *rest)
builtins.__import__ = signalled_import
from service.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_no_process_that_imports_what_receives_it(number):
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(int(number)), "--version"],
        env={"PYTHONPATH": str(PROGRAM)},
        check=False,
    )
    assert done.returncode == 0


MODULE = ("-m", "service")


@pytest.mark.parametrize(
    ("how", "number", "delay_s"),
    [
        (MODULE, signal.SIGTERM, 0.0),
        (MODULE, signal.SIGINT, 0.3),
        (SCRIPT, signal.SIGINT, 0.0),
        *itertools.starmap(
            long, itertools.product((MODULE, SCRIPT), (signal.SIGTERM, signal.SIGINT), MANY)
        ),
    ],
)
def test_a_stop_is_exit_code_0_and_one_line_at_every_moment(start, how, number, delay_s):
    service = start(program=how)
    until_received(service)
    time.sleep(delay_s)  # the moment is what is tested
    service.signal(number)
    assert_stopped(service)
    assert service.log.count(" stopped") == 1


@pytest.mark.parametrize("delay_s", [0.6, *(long(2 * moment) for moment in MANY)])
def test_a_stop_is_exit_code_0_at_every_moment_of_a_supervisor_s_life(start, delay_s):
    service = start("--workers", "2")
    until_received(service)
    time.sleep(delay_s)  # the moment is what is tested
    service.signal_all(signal.SIGTERM)
    assert_stopped(service)


@pytest.mark.parametrize("delay_s", [0.3, *map(long, MANY)])
def test_a_hangup_never_ends_the_start_and_is_satisfied_when_it_is_ready(
    start, second_version, delay_s
):
    service = start()
    until_received(service)
    time.sleep(delay_s)  # the moment is what is tested
    second_version()
    service.signal(signal.SIGHUP)
    service.ready()
    until(lambda: '"version":"2"' in service.predict()[1])
    service.signal()
    assert_stopped(service)


@pytest.mark.parametrize("workers", ["1", long("2")])
def test_hangups_never_end_a_process_from_its_first_line_to_its_end(start, workers):
    service = start("--workers", workers)
    until_received(service)

    def storm():
        while service.process.poll() is None:
            service.process.send_signal(signal.SIGHUP)
            time.sleep(0.001)

    thread = threading.Thread(target=storm)
    thread.start()
    service.ready(int(workers))
    assert service.predict()[0] == 200
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    thread.join(PATIENCE_S)
    assert "Traceback" not in service.log


def test_a_stop_is_no_other_end_when_it_comes_with_a_start_that_fails(start, tiny_weights):
    (tiny_weights / "lenet" / "1.safetensors").write_bytes(b"no weights")
    service = start()
    until_received(service)
    service.signal()
    assert service.wait() in {ExitCode.STOPPED, ExitCode.WEIGHTS}
    assert "Traceback" not in service.log


# A stop that something holds up


def hang(service, *pids):
    """Let the next batch of each of these hang, and ask for one; returns once it is computed."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    service.wait_for("gets an injected fault: hang", len(pids))

    def ask():
        with contextlib.suppress(OSError):
            service.predict()

    threading.Thread(target=ask, daemon=True).start()
    service.wait_for("injecting fault: hang")


STUCK = ("--drain-timeout-s", "0.5", "--fault-injection", "--hang-timeout-s", "3600")


def stop(service):
    """Stop it, though something in it would never end."""
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "Traceback" not in service.log


@pytest.mark.long  # seconds are measured, and a busy machine takes more
def test_a_stop_takes_three_seconds_after_the_drain_when_a_context_hangs(start):
    service = start(*STUCK).ready()
    hang(service, service.process.pid)
    service.signal()
    assert service.stopped_after_s() < 0.5 + LIMIT_S


def test_a_stop_abandons_a_hung_context_and_names_it(start):
    service = start(*STUCK).ready()
    hang(service, service.process.pid)
    assert CLOSE_TIMEOUT_S > LIMIT_S, "or the context is given up before, and this tests nothing"
    stop(service)
    service.wait_for(r"ERROR .* not done 1.5 s after the drain; ending without context-")


def stick(service, pid):
    """Let the event loop of this process stand still."""
    assert service.predict()[0] == 200  # its line "ready" is written, and the log's lock free
    os.kill(pid, signal.SIGUSR1)
    service.wait_for("stuck")


@pytest.mark.usefixtures("unmeasured")
def test_a_stop_abandons_a_stuck_event_loop_and_says_so(start):
    service = start("--drain-timeout-s", "0.5", program=program(STUCK_LOOP)).ready()
    stick(service, service.process.pid)
    stop(service)
    service.wait_for("ending without the event loop, which is stuck")


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
def test_a_second_signal_exits_at_once_when_the_event_loop_is_stuck(start):
    service = start(program=program(STUCK_LOOP)).ready()
    stick(service, service.process.pid)
    service.signal(signal.SIGINT)
    time.sleep(2 * SAME_STOP_S)  # sooner it would not be a second one
    service.signal(signal.SIGTERM)
    assert service.wait() == 128 + signal.SIGTERM
    assert service.stopped_after_s() < 1


@pytest.mark.parametrize("ready", [True, long(False)])
def test_a_stop_ends_a_stopped_worker_in_time(start, ready):
    service = start("--workers", "2", "--drain-timeout-s", "0.5")
    service.wait_for("worker [0-9]+ started", 2)
    if ready:
        service.ready(2)
    stopped, _ = service.started_workers()
    os.kill(stopped, signal.SIGSTOP)
    stop(service)
    service.wait_for(f"worker {stopped} did not stop within 2 s after the drain: killed")


@pytest.mark.long
@pytest.mark.usefixtures("unmeasured")
def test_a_stuck_worker_ends_in_time_when_its_supervisor_was_killed(start, tmp_path):
    stuck = workers_program(tmp_path, STUCK_LOOP)
    service = start("--workers", "2", "--drain-timeout-s", "0.5", program=stuck).ready(2)
    stick(service, service.started_workers()[0])
    service.signal(signal.SIGKILL)
    # Waits for the end of the log, too, which the workers hold.
    assert service.stopped_after_s() < 0.5 + LIMIT_S
    service.wait_for("ending without the event loop, which is stuck")
