from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from service import process
from service.errors import ExitCode
from service.process import listen, run
from service.settings import Settings


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
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already"):
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
        f"{tmp_path / 'nowhere'}: no such folder, expected MODEL/VERSION.safetensors in it"
    )
    assert record.exc_info is None


def test_a_signal_during_the_warm_up_ends_it_with_0_when_much_is_left_to_do(start):
    service = start("--contexts", "1000")
    service.wait_for("read weights/lenet/1.safetensors: warming up")
    service.signal(signal.SIGINT)
    assert service.wait() == ExitCode.STOPPED
    assert service.stopped_after_s() < 5
    assert "ready" not in service.log
    assert service.lines[-1].endswith("stopped")


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
