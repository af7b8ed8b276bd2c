"""Few file descriptors, none left, and the standard ones closed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection

import grpc
import pytest

from benchmarks.grpc_stub import Stub
from service.errors import ExitCode
from service.forms import open_inference_pb2 as pb
from service.process.descriptors import LEAST, LEAST_PER_WORKER
from tests.faults.checks import cpu_s, descriptors, program, until
from tests.pictures import seven
from tests.service_process import PATIENCE_S, PROGRAM


def limited(soft, hard=None):
    """The service with limits of so many descriptors."""
    limits = soft, soft if hard is None else hard
    return program(f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits})")


REQUESTS = (
    ("GET", "/readyz", None, {}),
    ("GET", "/metrics", None, {}),
    ("GET", "/info", None, {}),
    ("POST", "/predict", bytes(784), {"Content-Type": "application/octet-stream"}),
    ("POST", "/predict", seven(), {"Content-Type": "image/png"}),
    ("POST", "/predict", bytes(784 * 3000), {"Content-Type": "application/octet-stream"}),
)


def assert_answering(connection):
    for request in REQUESTS:
        connection.request(*request)
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, (request[1], text)


@pytest.mark.parametrize(
    "number",
    [16, LEAST - 1, *(pytest.param(number, marks=pytest.mark.long) for number in (12, 24, 32))],
)
def test_too_few_descriptors_are_one_line_and_8(start, number):
    service = start(program=limited(number))
    assert service.wait() == ExitCode.DESCRIPTORS
    (line,) = service.lines
    assert line.startswith(f"file descriptors: got a limit of {number}, expected at least {LEAST};")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_everything_works_with_as_few_descriptors_as_are_asked_for(start, second_version, workers):
    least = LEAST + (LEAST_PER_WORKER * workers if workers > 1 else 0)
    service = start(
        *("--workers", str(workers), "--host", "localhost"), program=limited(least)
    ).ready(workers)
    connection = HTTPConnection("localhost", service.port, timeout=PATIENCE_S)
    with (
        contextlib.closing(connection),
        grpc.insecure_channel(f"localhost:{service.grpc_port}") as channel,
    ):
        assert_answering(connection)
        assert Stub(channel).ServerLive(pb.ServerLiveRequest()).live
        second_version()
        service.signal(signal.SIGHUP)
        service.wait_for("version 2 .* replaced", workers)
    if workers > 1:
        os.kill(service.started_workers()[0], signal.SIGKILL)
        service.ready(workers + 1)
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "Traceback" not in service.log


def test_the_limit_is_raised_as_far_as_the_process_may(start):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    service = start(program=limited(70, hard)).ready()
    assert resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)


def test_connections_beyond_the_descriptors_are_closed_and_nothing_else(start):
    service = start(program=limited(LEAST)).ready()
    pid = service.process.pid
    before = descriptors(pid)
    first = HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
    with contextlib.closing(first), contextlib.ExitStack() as held:
        assert_answering(first)  # makes what is made at first use
        for port in (service.port, service.grpc_port):
            for _ in range(2 * LEAST):
                held.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        assert_answering(first)  # with a picture, whose decoder needs some, too
        lines, spent_s = len(service.lines), cpu_s(pid)
        time.sleep(3)
        assert cpu_s(pid) - spent_s < 0.5, "of 3 s: it does not try all the time"
        assert len(service.lines) == lines
        assert descriptors(pid) < LEAST
        assert_answering(first)
        service.process.send_signal(signal.SIGHUP)
        service.wait_for("reload: ")
        assert_answering(first)
    until(lambda: descriptors(pid) <= before + 2)
    assert service.predict()[0] == 200
    service.signal()
    assert service.wait() == ExitCode.STOPPED
    assert "Traceback" not in service.log


@pytest.mark.parametrize(
    ("closed", "workers"),
    [
        ((0, 1, 2), "1"),
        *(
            pytest.param(closed, workers, marks=pytest.mark.long)
            for closed in ((0,), (2,), (0, 1, 2))
            for workers in ("1", "2")
        ),
    ],
)
def test_a_service_without_standard_descriptors_serves_and_stops_with_0(
    tiny_weights, tmp_path, closed, workers
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ("--port", str(port), "--grpc-port", "0", "--workers", workers)
    closing = " ".join(f"{number}>&-" for number in closed)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["sh", "-c", f'exec "$0" -m service {" ".join(arguments)} {closing}', sys.executable],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(PROGRAM)},
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: answers(port) or process.poll() is not None)
        process.terminate()
        assert process.wait(PATIENCE_S) == ExitCode.STOPPED
    finally:
        process.kill()
        process.wait()
    assert b"Traceback" not in log.read_bytes()
    assert b"HTTP/1.1" not in log.read_bytes()


def answers(port):
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        assert_answering(connection)
        return True
    return False
