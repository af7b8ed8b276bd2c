"""Faults inside the process: callbacks of the batch loop that raise, a wall clock that jumps."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.grpc_stub import Stub
from service.errors import ExitCode
from tests.faults.checks import unharmed
from tests.faults.clients import RAW, ROUNDING, AsyncConnection, ask, infer_request, request

PROGRAM = """
import random, sys
from pathlib import Path
import {module} as module
from service.__main__ import main
original = getattr({owner}, {name!r})
random_ = random.Random({seed})
def faulty(*arguments, **options):
    if random_.random() < 0.1 and Path("armed").exists():
        raise ZeroDivisionError("planted")
    return original(*arguments, **options)
setattr({owner}, {name!r}, faulty)
sys.exit(main())
"""
"""While the file `armed` is there, a tenth of the calls fail, in an order of the seed."""

CALLBACKS = {
    "images of a batch": ("service.engine.queue", "module.Cut", "images"),
    "metrics of a batch": ("service.observe.metrics", "module.Metrics", "batch_ended"),
    "metrics of a request": ("service.observe.metrics", "module.Metrics", "predicted"),
    "metrics of a failure": ("service.observe.metrics", "module.Metrics", "request_done"),
    "JSON of an answer": ("service.forms.body", "module", "prediction_json"),
    "bytes of an answer": ("service.forms.body", "module", "prediction_bytes"),
    "message of an answer": ("service.forms.oip_proto", "module", "_encode"),
    "delivery of rows": ("service.engine.queue", "module.Work", "deliver"),
    "polling after an answer": ("service.engine.contexts", "module.BusyPoll", "extend"),
}


class Clients:
    """Ask on; every answer is right, or an error of the service."""

    def __init__(self, service, digits):
        self.service, self.digits = service, digits
        self.right = self.failed = 0

    def run(self, requests):
        asyncio.run(self._run(requests))
        return self

    async def _run(self, requests):
        target = f"127.0.0.1:{self.service.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub = Stub(channel)
            await asyncio.gather(
                *(self._over_http(requests, b"Accept: " + RAW) for _ in range(4)),
                *(self._over_http(requests, b"Accept: application/json") for _ in range(4)),
                *(self._over_grpc(requests, stub) for _ in range(4)),
            )

    def _note(self, row, found):
        if found is None:
            self.failed += 1
        else:
            assert np.abs(found - self.digits.probabilities[row]).max() <= ROUNDING
            self.right += 1

    async def _over_http(self, requests, accept):
        connection = await AsyncConnection.open(self.service.port)
        for row in range(requests):
            wrong = row % 4 == 3  # a refusal is counted, too
            body = bytes(10) if wrong else self.digits.rows([row])[0]
            answer = await connection.ask(request(body, accept))
            assert answer.status in (400 if wrong else 200, 500), answer
            if answer.headers.get("connection") == "close":
                await connection.close()
                connection = await AsyncConnection.open(self.service.port)
            if answer.status == 400:
                continue
            if answer.status == 500:
                self._note(row, None)
            elif accept.endswith(b"json"):
                (one,) = json.loads(answer.body)["predictions"]
                self._note(row, np.array(one["probabilities"], np.float32))
            else:
                self._note(row, np.frombuffer(answer.body, "<f4"))
        await connection.close()

    async def _over_grpc(self, requests, stub):
        for row in range(requests):
            try:
                answer = await stub.ModelInfer(infer_request(self.digits.images[row : row + 1]))
            except grpc.RpcError as exc:
                if exc.code() != grpc.StatusCode.INTERNAL:
                    raise
                self._note(row, None)
            else:
                self._note(row, np.frombuffer(answer.raw_output_contents[0], "<f4"))


def _fail_in(name, seed, start_committed, digits, tmp_path, requests):
    module, owner, function = CALLBACKS[name]
    program = PROGRAM.format(module=module, owner=owner, name=function, seed=seed)
    service = start_committed(program=("-c", program)).ready()
    with unharmed(service, digits.golden, log=None):
        assert Clients(service, digits).run(5).failed == 0
    lines = len(service.lines)
    (tmp_path / "armed").touch()
    struck = Clients(service, digits).run(requests)
    (tmp_path / "armed").unlink()
    assert any("ZeroDivisionError: planted" in line for line in service.lines[lines:])
    assert struck.right > struck.failed
    with unharmed(service, digits.golden, log=()):
        assert Clients(service, digits).run(20).failed == 0


def test_only_the_requests_of_a_batch_fail_when_it_cannot_be_assembled(
    start_committed, digits, tmp_path, seed
):
    # With fewer batches perhaps none fails: 0.9 ** 40 is 1.5 %.
    _fail_in("images of a batch", seed, start_committed, digits, tmp_path, requests=150)


@pytest.mark.long
@pytest.mark.parametrize("name", CALLBACKS)
def test_the_loop_lives_when_any_callback_raises(start_committed, digits, tmp_path, seed, name):
    _fail_in(name, 1000 + seed, start_committed, digits, tmp_path, requests=200)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed: no clock to preload")
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_nothing_changes_when_the_wall_clock_jumps_by_days(
    start_committed, digits, tmp_path, monkeypatch
):
    library = tmp_path / "realtime.so"
    source = Path(__file__).with_name("realtime.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    service = start_committed("--request-timeout-ms", "2000").ready()
    monkeypatch.delenv("LD_PRELOAD")
    with unharmed(service, digits.golden):
        assert Clients(service, digits).run(300).failed == 0
        # A deadline is kept, neither early nor late.
        began_s = time.monotonic()
        late = ask(service.port, request(bytes(10), b"X-Request-Timeout-Ms: 500", length=784))
        assert late.status == 408
        assert 0.4 < time.monotonic() - began_s < 1.5
    for count in range(1, 21):  # a line each, on one of three days
        service.signal(signal.SIGHUP)
        service.wait_for("reload: ", count)
    assert len({line[:10] for line in service.lines}) > 1, "the clock did not jump"
    service.signal()
    assert service.wait() == ExitCode.STOPPED
