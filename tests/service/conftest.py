"""`python -m service` as a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from lenet.model import Model

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


class Service:
    """A running `python -m service`; its log lines as they come."""

    def __init__(self, arguments, folder, program=("-m", "service")):
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        plain = {key: text for key, text in os.environ.items() if not key.startswith("LENET_")}
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=folder,
            env={**plain, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        self._grown = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._signalled_s = time.monotonic()

    def _read(self):
        for line in self.process.stderr:
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()
        with self._grown:
            self._ended = True
            self._grown.notify_all()

    @property
    def log(self):
        return "\n".join(self.lines)

    def wait_for(self, pattern, count=1):
        """Wait until `count` lines match `pattern`; returns the last match."""

        def found():
            return [match for line in self.lines if (match := re.search(pattern, line))]

        with self._grown:
            self._grown.wait_for(lambda: len(found()) >= count or self._ended, PATIENCE_S)
            assert len(found()) >= count, f"no {pattern!r} in:\n{self.log}"
            return found()[count - 1]

    def ready(self, workers=1):
        """Wait until all workers are; afterwards `port` and `grpc_port` are known."""
        match = self.wait_for(r"ready: HTTP on http://[^ ]+:(\d+), gRPC on [^ ]+:(\d+)", workers)
        self.port, self.grpc_port = int(match[1]), int(match[2])
        return self

    def started_workers(self):
        """Process ids of all workers that were ever started."""
        return [int(pid) for pid in re.findall(r"worker (\d+) started", self.log)]

    def get(self, path):
        """Status and body."""
        return self._ask("GET", path)

    @contextlib.contextmanager
    def in_flight(self):
        """A request that is being read, its 784 bytes yet to be sent."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            connection.sendall(
                b"POST /predict HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
                b"Content-Type: application/octet-stream\r\nContent-Length: 784\r\n\r\n"
            )
            assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            yield connection

    def predict(self):
        """Status and body of the answer to one black image."""
        kind = {"Content-Type": "application/octet-stream"}
        return self._ask("POST", "/predict", bytes(784), kind)

    def _ask(self, method, path, *request):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, *request)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def signal(self, number=signal.SIGTERM):
        self._signalled_s = time.monotonic()
        self.process.send_signal(number)

    def signal_all(self, number):
        """To the service and all its children, as Ctrl-C, systemd and `timeout` do."""
        self._signalled_s = time.monotonic()
        os.killpg(self.process.pid, number)

    def wait(self):
        """The exit code; and that nothing was left in the folder of temporary files."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert not self._reader.is_alive(), "a worker lives on and holds the log"
        if code >= 0:
            assert list(self.temporary.iterdir()) == []
        return code

    def stopped_after_s(self):
        """Seconds from the last signal to the end."""
        self.wait()
        return time.monotonic() - self._signalled_s


@pytest.fixture
def folder(tmp_path):
    """An empty weights folder."""
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


@pytest.fixture
def write(folder, random_weights, tiny):
    """`write("a/1")` puts a valid file of model `a`, the smallest there is, into `folder`."""

    def write(place, *, seed=0, name=None):
        path = folder / f"{place}.safetensors"
        model = Model(name or path.parent.name, tiny.blocks)
        random_weights(model, seed).write(path)
        return path

    return write


@pytest.fixture
def tiny_weights(folder, write):
    """A folder with the one model `lenet`."""
    write("lenet/1")
    return folder


@pytest.fixture
def second_version(tiny_weights, write):
    """`second_version()` puts version 2 of `lenet` beside the first."""
    return lambda: write("lenet/2", seed=1)


@pytest.fixture
def start(tmp_path, tiny_weights):
    """`start("--workers", "2")` runs the service on free ports; killed when the test ends."""
    services = []

    def start_(*arguments, port=0, grpc_port=0, **options):
        ports = ("--port", str(port), "--grpc-port", str(grpc_port))
        service = Service([*ports, "--max-batch-rows", "4", *arguments], tmp_path, **options)
        services.append(service)
        return service

    yield start_
    for service in services:
        if service.process.poll() is None:
            service.process.kill()
        for pid in service.started_workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        service.process.wait()
        service._reader.join()
        service.process.stderr.close()


@pytest.fixture
def ranges(monkeypatch):
    """The ranges that a profiler sees: what began, and the places in it of what ended."""
    began, ended = [], []

    def begin(name):
        began.append(name)
        return len(began)

    monkeypatch.setattr("lenet.nvtx.begin", begin)
    monkeypatch.setattr("lenet.nvtx.end", lambda place: place and ended.append(place))
    return began, ended
