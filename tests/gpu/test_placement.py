"""Workers on several GPUs: each opens its own alone, and outlives the loss of another's.

No other test may use the GPUs at the same time.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal

import cupy
import pytest

from lenet.cuda.device import devices
from service.errors import ExitCode

if devices() < 2:
    pytest.skip("needs two GPUs, found one", allow_module_level=True)


def used_bytes():
    """The memory in use on GPU 0 and on GPU 1; the first stays current."""
    found = []
    for device in (1, 0):
        cupy.cuda.Device(device).use()
        free, total = cupy.cuda.runtime.memGetInfo()
        found.append(total - free)
    return found[::-1]


@pytest.mark.parametrize("workers", ["2", "8"])
def test_workers_take_as_much_memory_on_one_gpu_as_on_the_other(start, workers):
    before = used_bytes()  # with a context of this process on each
    service = start("--device", "cuda", "--devices", "0,1", "--workers", workers)
    service.ready(int(workers))
    for _ in range(2 * int(workers)):  # of a connection each, so of every worker
        assert service.predict(64)[0] == 200
    first, second = (now - old for now, old in zip(used_bytes(), before, strict=True))
    assert first == pytest.approx(second, rel=0.05)
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_a_worker_serves_while_the_gpu_of_the_other_is_lost(start):
    given = ("--device", "cuda", "--devices", "0,1", "--workers", "2", "--fault-injection")
    service = start(*given).ready(2)
    lost, kept = service.started_workers()
    os.kill(lost, signal.SIGUSR2)
    service.wait_for("the next batch gets an injected fault")
    answers = []
    while f"worker {lost} ended with 7" not in service.log:
        with contextlib.suppress(OSError, http.client.HTTPException):  # of the lost worker
            answers.append(service.predict()[0])
    assert {200, 503} <= set(answers)
    for _ in range(5):
        assert service.predict()[0] == 200
    assert f"worker {kept} ended" not in service.log
    service.wait_for("ready:", 3)
    service.signal()
    assert service.wait() == ExitCode.STOPPED
