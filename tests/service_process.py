"""`python -m service` as a process of its own, for tests over real sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PROGRAM = Path(os.environ.get("LENET_TEST_ROOT", PROJECT))
"""The source tree whose service is started: this one, or an older one to compare with."""

ENDS_WITH_TESTS = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
"""Starts a program that is killed when the tests are that started it; of Linux."""

PATIENCE_S = 120.0
"""Longest wait of a test. Only a test that hangs waits so long, on whatever machine."""


def grpc_call(port, path=b"/x", **headers):
    """A connection on which the headers of one call were sent, as HTTP/2 frames of our own."""

    def frame(kind, flags, stream, content=b""):
        head = len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        return head + content

    lines = {":method": b"POST", ":scheme": b"http", ":path": path, ":authority": b"a"}
    lines |= {"content-type": b"application/grpc", "te": b"trailers", **headers}
    block = b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(text), text) for name, text in lines.items()
    )
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    settings, opening = frame(4, 0, 0), frame(1, 4, 1, block)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + opening)
    return connection


class Service:
    """A running `python -m service` of the code in `root`; its log lines as they come."""

    def __init__(
        self, arguments, folder, program=("-m", "service"), output=subprocess.DEVNULL, root=PROGRAM
    ):
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        plain = {key: text for key, text in os.environ.items() if not key.startswith("LENET_")}
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [*ENDS_WITH_TESTS, sys.executable, *program, *arguments],
            cwd=folder,
            env={**plain, "PYTHONPATH": path, "TMPDIR": str(self.temporary)},
            stdout=output,
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

    def catch_up(self):
        """Wait until every line that the process has written is in `lines`."""
        unread = bytearray(4)
        while fcntl.ioctl(self.process.stderr, termios.FIONREAD, unread) or any(unread):
            time.sleep(0.01)
        time.sleep(0.05)

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
        match = self.wait_for(
            r"ready: HTTP on https?://[^ ]+:(\d+), (?:gRPC on [^ ]+:(\d+)|no gRPC)", workers
        )
        self.port, self.grpc_port = int(match[1]), int(match[2] or 0)
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

    def predict(self, images=1):
        """Status and body of the answer to so many black images."""
        kind = {"Content-Type": "application/octet-stream"}
        return self._ask("POST", "/predict", bytes(784 * images), kind)

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
        """Send a signal to the service and all its children, like Ctrl-C, systemd and `timeout`."""
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

    def end(self):
        """Kill it and its workers."""
        if self.process.poll() is None:
            self.process.kill()
        for pid in self.started_workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()


@contextlib.contextmanager
def committed(folder, *arguments):
    """Serve the committed weights on the CPU inside; logs go to `folder`."""
    line = ("--port", "0", "--grpc-port", "0", "--device", "cpu")
    service = Service([*line, "--weights", str(PROJECT / "weights"), *arguments], folder)
    try:
        yield service.ready()
    finally:
        service.end()
