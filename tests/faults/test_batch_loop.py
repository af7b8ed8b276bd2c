"""Faults inside the process: callbacks of the batch loop that raise, a wall clock that jumps."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from benchmarks.grpc_stub import Stub
from service.errors import ExitCode
from tests.faults.checks import program, unharmed
from tests.faults.clients import ACCEPT, Known, ask, infer_request, request

PROGRAM = """
import random
from pathlib import Path
import {module} as module
original = getattr({owner}, {name!r})
random_ = random.Random({seed})
def faulty(*arguments, **options):
    if random_.random() < 0.1 and Path("armed").exists():
        raise ZeroDivisionError("planted")
    return original(*arguments, **options)
setattr({owner}, {name!r}, faulty)
"""
"""While the file `armed` is there, a tenth of the calls fail, in an order of the seed."""

CALLBACKS = {
    "images of a batch": ("service.engine.contexts", "module.Worker", "run"),
    "metrics of a batch": ("service.observe.metrics", "module.Metrics", "batch_ended"),
    "metrics of a request": ("service.observe.metrics", "module.Metrics", "predicted"),
    "metrics of a failure": ("service.observe.metrics", "module.Metrics", "request_done"),
    "JSON of an answer": ("service.forms.prediction", "module", "prediction_json"),
    "bytes of an answer": ("service.forms.prediction", "module", "prediction_bytes"),
    "message of an answer": ("service.forms.oip_proto", "module", "_encode_raw"),
    "delivery of rows": ("service.engine.queue", "module.Work", "deliver"),
    "polling after an answer": ("service.engine.contexts", "module.BusyPoll", "extend"),
}


async def ask_on(known, requests):
    """Twelve clients with so many requests each; how many failed. The others are right."""
    failed = 0

    async def over_http(*lines):
        nonlocal failed
        connection = await known.connect()
        for number in range(requests):
            rows, images = known.choose(1)
            wrong = number % 4 == 3  # a refusal is counted, too
            answer = await connection.ask(request(images.tobytes()[wrong:], *lines))
            assert answer.status in (400 if wrong else 200, 500), answer
            failed += answer.status == 500
            if answer.status == 200:
                known.judge(rows, answer)
            if answer.headers.get("connection") == "close":
                await connection.close()
                connection = await known.connect()
        await connection.close()

    async def over_grpc(stub):
        nonlocal failed
        for _ in range(requests):
            rows, images = known.choose(1)
            try:
                known.judge(rows, await stub.ModelInfer(infer_request(images)))
            except grpc.RpcError as exc:
                if exc.code() != grpc.StatusCode.INTERNAL:
                    raise
                failed += 1

    async with grpc.aio.insecure_channel(f"127.0.0.1:{known.service.grpc_port}") as channel:
        http = [over_http(*lines) for lines in 4 * ((ACCEPT,), ())]
        await asyncio.gather(*http, *(over_grpc(Stub(channel)) for _ in range(4)))
    return failed


async def _fail_in(name, seed, start_committed, digits, tmp_path, requests):
    module, owner, function = CALLBACKS[name]
    changed = PROGRAM.format(module=module, owner=owner, name=function, seed=seed)
    service = start_committed("--busy-poll-us", "100", program=program(changed)).ready()
    known = Known(service, digits, seed=seed)
    with unharmed(service, digits.golden, log=None):
        assert await ask_on(known, 5) == 0
    known.answered.clear()
    lines = len(service.lines)
    (tmp_path / "armed").touch()
    failed = await ask_on(known, requests)
    (tmp_path / "armed").unlink()
    assert any("ZeroDivisionError: planted" in line for line in service.lines[lines:])
    assert known.answered.total() > failed
    with unharmed(service, digits.golden):
        assert await ask_on(known, 20) == 0


async def test_only_the_requests_of_a_batch_fail_when_it_cannot_be_assembled(
    start_committed, digits, tmp_path, seed
):
    # With fewer batches perhaps none fails: 0.9 ** 40 is 1.5 %.
    await _fail_in("images of a batch", seed, start_committed, digits, tmp_path, requests=150)


@pytest.mark.long
@pytest.mark.parametrize("name", CALLBACKS)
async def test_the_loop_lives_when_any_callback_raises(
    start_committed, digits, tmp_path, seed, name
):
    await _fail_in(name, 1000 + seed, start_committed, digits, tmp_path, requests=200)


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
        assert asyncio.run(ask_on(Known(service, digits), 300)) == 0
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
