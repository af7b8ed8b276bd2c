"""One serving process: opened in this process, or run as one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading

import grpc
import numpy as np
import pytest

import lenet
from benchmarks.grpc_stub import Stub
from lenet.errors import DeviceError, InvalidWeightFile
from service import server as module
from service.assembly import open_service
from service.errors import ExitCode, Unavailable
from service.forms import open_inference_pb2 as pb
from service.process.signals import Signals
from service.process.stopping import Stop
from service.settings import Settings
from tests.service_process import PATIENCE_S
from tests.tasks import submit
from wire.sharing import AT_ONCE

ONE = np.zeros((1, 28, 28), np.uint8)


def received(connection):
    """All that comes until the server closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


def run(settings):
    return module.run(settings, Signals())


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("context-")]


@pytest.fixture
def settings(tmp_path, tiny, random_weights):
    for model in (tiny, "mlp"):
        file = random_weights(model)
        file.write(tmp_path / "weights" / file.model.name / "1.safetensors")
    return Settings(
        port=0, grpc_port=0, weights=tmp_path / "weights", default_model="tiny", max_batch_rows=2
    )


# Opened in this process


async def predict(service):
    return await submit(service.models.get(), ONE, 20.0)


async def test_an_open_service_is_ready_and_nothing_of_one_that_failed_is_left(settings):
    opened = open_service(settings, grpc_port=0)
    service = await opened.__aenter__()
    assert service.models.ready
    assert len(threads()) == 2
    assert (await predict(service)).model == "tiny"
    assert not await opened.__aexit__(RuntimeError, RuntimeError("inside"), None)
    assert not service.models.ready
    assert not threads()
    with pytest.raises(Unavailable):
        await predict(service)


async def test_a_broken_weight_file_is_refused_before_any_context_is_made(settings, monkeypatch):
    path = settings.weights / "mlp" / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr("service.assembly.Models", lambda *_: pytest.fail("a context was made"))
    with pytest.raises(InvalidWeightFile, match=r"mlp/1.safetensors: "):
        async with open_service(settings, grpc_port=0):
            pytest.fail("it opened")


def test_the_version_is_0_when_the_distribution_is_not_installed(monkeypatch):
    monkeypatch.setattr(lenet, "DISTRIBUTION", "not-installed")
    assert lenet.distribution_version() == "0"


def test_the_ports_are_checked_before_the_work_of_the_start(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for ports in ({"port": 0, "grpc_port": port}, {"port": port, "grpc_port": 0}):
            assert run(Settings(weights=tmp_path / "nowhere", **ports)) is ExitCode.ADDRESS
            assert f"127.0.0.1:{port}" in caplog.messages[-1]
    gc.collect()  # warns of a listener that was left open


@pytest.mark.parametrize("sticky", [False, True])
def test_a_device_that_fails_at_the_start_is_one_line_and_a_code(
    settings, monkeypatch, caplog, sticky
):
    def broken(*_, **__):
        raise DeviceError("opening GPU 0: it fell off the bus", sticky)

    def exit_at_once(code):
        raise SystemExit(code)

    monkeypatch.setattr(module, "open_service", broken)
    monkeypatch.setattr(module.os, "_exit", exit_at_once)
    if sticky:  # nothing of it can be given back: it must not be tried
        with pytest.raises(SystemExit) as caught:
            run(settings)
        assert caught.value.code is ExitCode.DEVICE
    else:
        assert run(settings) is ExitCode.BACKEND
    assert caplog.messages == ["opening GPU 0: it fell off the bus"]


async def test_a_cancelled_start_is_no_stop(settings):
    serving = asyncio.create_task(module._serve(settings, Stop(60.0)))
    await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


# A process of its own


def test_it_says_once_when_it_is_ready_and_connections_that_come_all_at_once_are_answered(start):
    service = start().ready()
    (line,) = [line for line in service.lines if "ready" in line]
    assert line == service.lines[-1]
    assert f", pid {service.process.pid}" in line
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S))
            for _ in range(4 * AT_ONCE)
        ]
        for connection in connections:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        for connection in connections:
            assert received(connection).startswith("HTTP/1.1 200 ")
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log
    assert "WARNING" not in service.log


def test_uvicorn_answers_every_connection_of_its_port(start):
    service = start("--http-server", "uvicorn", "--workers", "2").ready(2)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", service.port), PATIENCE_S) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            assert received(connection).endswith("\r\n\r\nInvalid HTTP request received.")
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        assert Stub(channel).ServerLive(pb.ServerLiveRequest()).live
    service.signal()
    assert service.wait() == ExitCode.STOPPED


@pytest.mark.parametrize("by", ["wire", "uvicorn"])
def test_there_is_no_grpc_when_it_is_off(start, by):
    service = start("--http-server", by, grpc_port="off").ready()
    assert '"grpc_port":null' in service.get("/info")[1]
    assert service.predict()[0] == 200
    with (
        grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        Stub(channel).ServerLive(pb.ServerLiveRequest())
    expected = grpc.StatusCode.UNIMPLEMENTED if by == "wire" else grpc.StatusCode.UNAVAILABLE
    assert caught.value.code() is expected
    service.signal()
    assert service.wait() == ExitCode.STOPPED


@pytest.mark.states(
    "metrics", "`lenet_reloads_total`: refused", found="a file that the test spoiled"
)
def test_a_refused_file_is_one_line_and_the_service_answers_on(start, tiny_weights):
    service = start().ready()
    path = tiny_weights / "lenet" / "2.safetensors"
    path.write_bytes(b"no weights")
    before = len(service.lines)
    service.signal(signal.SIGHUP)
    service.wait_for("reload refused, still serving version 1: weights/lenet/2.safetensors: is")
    service.wait_for("reload: 0 replaced, 0 unchanged, 1 refused")
    assert len(service.lines) == before + 2
    assert '"version":"1"' in service.predict()[1]
    assert service.get("/readyz")[0] == 200
    assert 'lenet_reloads_total{model="lenet",outcome="refused"} 1.0' in service.get("/metrics")[1]


# Stopping


def test_in_its_grace_the_service_answers_on_and_afterwards_what_it_accepted(start):
    service = start("--grace-s", "2", "--drain-timeout-s", "3600").ready()
    with service.in_flight() as first, service.in_flight() as second:
        service.signal()
        service.wait_for("stopping: not ready, 2 s of grace")
        assert service.get("/readyz")[0] == 503
        assert service.get("/healthz")[0] == 200
        assert service.predict()[0] == 200
        until_closed(service.port)
        for connection in (first, second):
            connection.sendall(bytes(784))
        for connection in (first, second):
            answer = received(connection)
            assert answer.startswith("HTTP/1.1 200 ")
            assert '"predictions":[{' in answer
    assert service.wait() == ExitCode.STOPPED
    assert service.stopped_after_s() >= 2
    assert "ERROR" not in service.log


def until_closed(port):
    """Connect until nobody listens any more."""
    with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
        while True:
            socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()


@pytest.mark.states(
    "times and counts in operations.md",
    "a stop ends within grace, drain and 3 s",
    found="the clock from the signal to the end, with requests that never end",
)
def test_all_that_is_stuck_is_answered_and_cut_after_the_same_time(start):
    service = start("--drain-timeout-s", "4").ready()
    over = threading.Event()

    def never():
        over.wait()
        yield from ()

    with (
        grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel,
        service.in_flight() as stuck,
    ):
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer").future(never())
        assert Stub(channel).ServerLive(pb.ServerLiveRequest()).live
        service.signal()
        answer = received(stuck)
        assert answer.startswith("HTTP/1.1 503 ")
        assert "retry-after: 1" in answer.lower()
        assert '"code":"unavailable"' in answer
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
        over.set()
        assert service.wait() == ExitCode.STOPPED
    assert 4 <= service.stopped_after_s() < 8, "8 if one waited after the other"
    assert "Traceback" not in service.log
