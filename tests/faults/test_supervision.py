"""Workers that are stopped or stuck, or whose metrics cannot be shared, under a supervisor."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from service.errors import ExitCode
from tests.faults.checks import STUCK_LOOP, samples, total, workers_program

CHECKS = 3
"""Checks, a second apart, that a worker may miss with the hang timeout of these tests."""


@pytest.fixture
def start_two(start, tmp_path, unmeasured):
    """Two ready workers, whose event loop stands still after SIGUSR1."""

    def start_two():
        changed = workers_program(tmp_path, STUCK_LOOP)
        service = start("--workers", "2", "--hang-timeout-s", "0.5", program=changed).ready(2)
        assert service.predict()[0] == 200  # the log's lock is free again
        return service

    return start_two


def assert_serving(service):
    for _ in range(20):  # so many connections reach every worker
        assert service.predict()[0] == 200
        assert service.get("/healthz")[0] == 200


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGSTOP, id="stopped"),
        pytest.param(signal.SIGUSR1, id="stuck", marks=pytest.mark.long),
    ],
)
def test_a_worker_without_a_heartbeat_is_replaced_and_counted_as_a_death(start_two, number):
    service = start_two()
    lost, other = service.started_workers()
    os.kill(lost, number)
    began_s = time.monotonic()
    service.wait_for(f"ERROR .* worker {lost} gave no sign of life in {CHECKS} checks")
    took_s = time.monotonic() - began_s
    assert took_s > CHECKS - 1
    service.wait_for(f"ERROR .* worker {lost} ended with -9")
    service.ready(3)
    assert_serving(service)
    assert other in service.started_workers()
    assert len(service.started_workers()) == 3
    service.signal()
    assert service.wait() == ExitCode.STOPPED


@pytest.mark.states(
    "times and counts in operations.md",
    "the third death within a minute ends the service with 6",
    found="workers that are stopped, three times",
)
@pytest.mark.long
def test_workers_that_are_stuck_again_and_again_end_the_service_with_6(start_two):
    service = start_two()
    for count in (2, 3, 4):
        service.ready(count)
        os.kill(service.started_workers()[-1], signal.SIGSTOP)
        service.wait_for("gave no sign of life", count - 1)
    assert service.wait() == ExitCode.WORKERS


@pytest.mark.long
@pytest.mark.parametrize("who", ["supervisor", "all"])
def test_no_worker_is_killed_when_the_supervisor_or_all_were_stopped_as_in_a_suspend(
    start_two, who
):
    service = start_two()
    workers = service.started_workers()
    stopped = [service.process.pid, *(workers if who == "all" else ())]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in stopped:
            os.kill(pid, number)
        time.sleep(CHECKS + 2)  # it is the passing of time that nothing may come of
    assert_serving(service)
    assert service.started_workers() == workers
    assert "no sign of life" not in service.log
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_a_removed_folder_costs_the_merged_metrics_and_nothing_else(start):
    service = start("--workers", "2").ready(2)
    (folder,) = service.temporary.iterdir()
    shutil.rmtree(folder)
    for _ in range(10):
        assert total(samples(service), "lenet_contexts") == 1, "of the worker that answers"
    service.wait_for("WARNING .*metrics of the other .*shows only the worker that answers")
    os.kill(service.started_workers()[0], signal.SIGKILL)
    service.ready(3)
    assert_serving(service)
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert service.log.count("shows only the worker") <= 3, "one line a worker, of two and another"
