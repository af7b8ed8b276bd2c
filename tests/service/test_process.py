from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import threading
import time
from collections import Counter
from types import SimpleNamespace

import grpc
import pytest
from fastapi import FastAPI

from lenet.errors import DeviceError
from service import server as process
from service.engine.models import Stop
from service.errors import CannotListen, ExitCode
from service.http.connection import HttpProtocol
from service.rpc import open_inference_pb2 as pb
from service.rpc.open_inference_pb2_grpc import GRPCInferenceServiceStub
from service.server import listen, run
from service.settings import Settings

PATIENCE_S = 30.0


def received(connection):
    """All that comes until the server closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


# Listening


def test_a_port_is_taken_at_once_but_takes_no_connection():
    with listen("127.0.0.1", 0, shared=False) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        listener.listen()
        socket.create_connection(address).close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_taken_port_is_named(shared):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refusal = f"cannot listen on 127.0.0.1:{port}: Address already"
        with pytest.raises(CannotListen, match=refusal):
            listen("127.0.0.1", port, shared=shared)


def test_workers_share_a_port_and_others_do_not():
    with listen("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        first.listen()
        listen("127.0.0.1", port, shared=True).close()
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port, shared=False)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named(host):
    with pytest.raises(OSError, match=f"cannot listen on {host}:8000: "):
        listen(host, 8000, shared=False)


def test_an_ipv6_address_is_listened_on_where_there_is_one():
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with listen("::1", 0, shared=False) as listener:
        assert listener.family == socket.AF_INET6


# Starting


def test_a_missing_folder_of_weights_is_one_line_and_a_code(tmp_path, caplog):
    settings = Settings(port=0, grpc_port=0, weights=tmp_path / "nowhere")
    assert run(settings) is ExitCode.WEIGHTS
    (record,) = caplog.records
    assert record.message == (
        f"{tmp_path / 'nowhere'}: is not a folder, "
        "expected one with MODEL/VERSION.safetensors in it"
    )
    assert record.exc_info is None


def test_a_taken_grpc_port_is_told_before_the_work_of_the_start(tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = Settings(port=0, grpc_port=port, weights=tmp_path / "nowhere")
        assert run(settings) is ExitCode.ADDRESS
    (record,) = caplog.records
    assert f"127.0.0.1:{port}" in record.message


def test_a_port_is_named_when_another_program_listened_there_first(start):
    with listen("127.0.0.1", 0, shared=False) as other:
        port = other.getsockname()[1]
        service = start("--contexts", "100", port=port)
        service.wait_for("warming up")
        other.listen()
        assert service.wait() == ExitCode.ADDRESS
    (error,) = [line for line in service.lines if "ERROR" in line]
    assert error.endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")
    assert "Traceback" not in service.log


def test_an_error_that_nobody_foresaw_is_no_exit_code(tiny_weights, monkeypatch):
    def full(_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(process, "create_app", full)
    with pytest.raises(OSError, match="No space left"):
        run(Settings(port=0, grpc_port=0, weights=tiny_weights))


@pytest.mark.parametrize("sticky", [False, True])
def test_a_device_that_fails_at_the_start_is_one_line_and_a_code(
    tiny_weights, monkeypatch, caplog, sticky
):
    def broken(_, **__):
        raise DeviceError("opening GPU 0: it fell off the bus", sticky)

    def exit_at_once(code):
        raise SystemExit(code)

    monkeypatch.setattr(process, "create_app", broken)
    monkeypatch.setattr(process.os, "_exit", exit_at_once)
    settings = Settings(port=0, grpc_port=0, weights=tiny_weights)
    if sticky:  # nothing of it can be given back: it must not be tried
        with pytest.raises(SystemExit) as caught:
            run(settings)
        assert caught.value.code is ExitCode.DEVICE
    else:
        assert run(settings) is ExitCode.BACKEND
    (record,) = caplog.records
    assert record.message == "opening GPU 0: it fell off the bus"


def test_a_signal_during_the_warm_up_ends_it_with_0_when_much_is_left_to_do(start):
    service = start("--contexts", "1000")
    service.wait_for("read weights/lenet/1.safetensors: warming up")
    service.signal(signal.SIGINT)
    assert service.wait() == ExitCode.STOPPED
    assert service.stopped_after_s() < 5
    assert "ready" not in service.log
    assert service.lines[-1].endswith("stopped")


# Reloading


def test_a_hangup_during_the_warm_up_is_no_end_and_is_remembered(start, second_version):
    service = start("--contexts", "50")
    service.wait_for("read weights/lenet/1.safetensors: warming up")
    second_version()
    service.signal(signal.SIGHUP)
    service.ready().wait_for("version 2 .* replaced version 1, golden error")
    assert '"version":"2"' in service.predict()[1]
    service.signal()
    assert service.wait() == ExitCode.STOPPED


def test_a_refused_file_is_one_line_and_the_service_answers_on(start, tiny_weights):
    service = start().ready()
    path = tiny_weights / "lenet" / "2.safetensors"
    path.write_bytes(b"no weights")
    before = len(service.lines)
    service.signal(signal.SIGHUP)
    service.wait_for("reload refused, version 1 answers on: weights/lenet/2.safetensors: is not a")
    assert len(service.lines) == before + 1
    assert '"version":"1"' in service.predict()[1]
    assert service.get("/readyz")[0] == 200
    assert 'lenet_reloads_total{model="lenet",outcome="refused"} 1.0' in service.get("/metrics")[1]


def test_a_hangup_changes_nothing_when_the_service_stops(start, second_version):
    service = start("--grace-s", "0.3").ready()
    with service.in_flight() as connection:
        service.signal()
        service.wait_for("stopping")
        second_version()
        for _ in range(20):
            service.process.send_signal(signal.SIGHUP)
        connection.sendall(bytes(784))
        assert received(connection).startswith("HTTP/1.1 200 ")
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log
    assert "Traceback" not in service.log


# Serving


def test_the_loops_clock_is_as_fine_as_the_one_of_the_system():
    async def main():
        loop = asyncio.get_running_loop()
        for _ in range(3):  # in one turn, where uvloop's own stands still
            before_s = time.monotonic()
            assert before_s <= loop.time() <= time.monotonic()

    with asyncio.Runner(loop_factory=process._Loop) as runner:
        runner.run(main())


def test_several_connections_are_accepted_in_one_turn_of_the_loop(monkeypatch):
    turns = 0
    accepted_in = []  # which turn, for each connection

    class Watched(HttpProtocol):
        def connection_made(self, transport):
            accepted_in.append(turns)
            super().connection_made(transport)

    async def main():
        app = FastAPI()
        app.state.stop, app.state.grpc_port = Stop(PATIENCE_S), 0
        app.state.predictor = SimpleNamespace(ready=True)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def turn():
            nonlocal turns
            turns += 1
            if len(accepted_in) < len(connections):
                loop.call_soon(turn)
            else:
                stop.set()

        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listen("127.0.0.1", 0, shared=False))
            answering = asyncio.create_task(process._answer(app, listener, stop, Settings()))
            await asyncio.sleep(0)
            address = listener.getsockname()
            connections = [
                stack.enter_context(socket.create_connection(address))
                for _ in range(4 * process.ACCEPTED_AT_ONCE)
            ]
            turn()
            await asyncio.wait_for(answering, PATIENCE_S)

    monkeypatch.setattr(process, "HttpProtocol", Watched)
    try:
        with asyncio.Runner(loop_factory=process._Loop) as runner:
            runner.run(main())
    finally:
        gc.unfreeze()
    assert max(Counter(accepted_in).values()) == process.ACCEPTED_AT_ONCE


def test_connections_that_are_opened_all_at_once_are_all_answered(start):
    service = start().ready()
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), PATIENCE_S))
            for _ in range(4 * process.ACCEPTED_AT_ONCE)
        ]
        for connection in connections:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        for connection in connections:
            assert received(connection).startswith("HTTP/1.1 200 ")
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log


# Stopping


async def test_whoever_cancels_it_is_not_told_of_a_stop(tiny_weights):
    settings = Settings(port=0, grpc_port=0, weights=tiny_weights)
    serving = asyncio.create_task(process._serve(settings))
    await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


def test_requests_in_flight_are_answered_when_a_stop_begins(start):
    service = start().ready()
    with service.in_flight() as first, service.in_flight() as second:
        service.signal()
        service.wait_for("stopping")
        for connection in (first, second):
            connection.sendall(bytes(784))
        for connection in (first, second):
            answer = received(connection)
            assert answer.startswith("HTTP/1.1 200 ")
            assert '"predictions":[{' in answer
    assert service.wait() == ExitCode.STOPPED
    assert "ERROR" not in service.log


def test_the_service_answers_on_but_is_not_ready_when_it_is_in_its_grace(start):
    service = start("--grace-s", "0.6").ready()
    service.signal()
    service.wait_for("stopping: not ready, 0.6 s of grace")
    assert service.get("/readyz")[0] == 503
    assert service.get("/healthz")[0] == 200
    assert service.predict()[0] == 200
    assert service.wait() == ExitCode.STOPPED
    assert 0.6 <= service.stopped_after_s() < 5
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", service.port))


def test_a_stuck_client_is_told_and_cut_when_the_stop_has_waited_long_enough(start):
    service = start("--drain-timeout-s", "0.5").ready()
    with service.in_flight() as stuck:
        service.signal()
        answer = received(stuck)
    assert answer.startswith("HTTP/1.1 503 ")
    assert "retry-after: 1" in answer.lower()
    assert '"code":"unavailable"' in answer
    assert service.wait() == ExitCode.STOPPED
    assert "Traceback" not in service.log


def test_grpc_refuses_new_calls_when_http_is_still_being_answered(start):
    service = start("--drain-timeout-s", "60").ready()
    with (
        grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel,
        service.in_flight() as slow,
    ):
        stub = GRPCInferenceServiceStub(channel)

        def call_while_it_lives():
            while service.process.poll() is None:
                assert stub.ServerLive(pb.ServerLiveRequest()).live

        service.signal()
        with pytest.raises(grpc.RpcError) as caught:
            call_while_it_lives()
        # The latter where a call meets the server's goodbye half-way.
        assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        slow.sendall(bytes(784))
        assert received(slow).startswith("HTTP/1.1 200 ")
    assert service.wait() == ExitCode.STOPPED


def test_all_that_is_stuck_has_the_same_time_left_when_the_stop_begins(start):
    service = start("--drain-timeout-s", "2").ready()
    over = threading.Event()

    def never():
        over.wait()
        yield from ()

    with (
        grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel,
        service.in_flight() as stuck,
    ):
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer").future(never())
        assert GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest()).live
        service.signal()
        assert received(stuck).startswith("HTTP/1.1 503 ")
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
        over.set()
        assert service.wait() == ExitCode.STOPPED
    assert 2 <= service.stopped_after_s() < 3.8  # 4 if one waited after the other
    assert "Traceback" not in service.log


@pytest.mark.parametrize("timeout_s", [0.0, 0.4])
async def test_http_has_what_is_left_of_the_stop_and_no_more(caplog, timeout_s):
    server = process._server(FastAPI(), Stop(timeout_s))
    server.should_exit = True
    await server.serve([listen("127.0.0.1", 0, shared=False)])
    assert 0 < server.config.timeout_graceful_shutdown <= max(timeout_s, 1e-3)
    assert not caplog.records, "nothing was left to cancel"


def test_a_second_signal_waits_for_nobody(start):
    service = start("--drain-timeout-s", "60").ready()
    with service.in_flight() as stuck:
        service.signal()
        service.wait_for("stopping")
        service.signal(signal.SIGINT)
        assert received(stuck) == ""
        assert service.wait() == 128 + signal.SIGINT
        assert service.stopped_after_s() < 5
    assert "a second signal: waiting for nobody" in service.log
