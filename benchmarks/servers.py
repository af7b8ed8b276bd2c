"""The servers under test: started, found ready and right, measured, stopped.

It refuses to time a server whose answers are wrong.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.answers import judge
from benchmarks.digits import PreparedRequest

_START_S = 60.0
_STOP_S = 30.0
_POLL_S = 0.05


class ServerFailed(Exception):
    """A server did not start or does not answer right; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running process that answers at `url` and logs to `log`; `paths` by the body's format."""

    name: str
    url: str
    paths: dict[str, str]
    pid: int
    log: Path

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def cpu_s(self) -> float | None:
        """Seconds of processor time it took so far, None where the system does not tell.

        Its children's only when they have ended.
        """
        try:
            content = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        # proc(5): the name, in parentheses, may itself hold spaces; utime and stime follow.
        ticks = content.rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str],
    port: int,
    paths: dict[str, str],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`command`, a Python module with its arguments, until the block is left.

    `environment` comes on top of this process's.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        server = Server(name, url, paths, process.pid, Path(log.name))
        try:
            deadline_s = time.monotonic() + _START_S
            while not _ready(url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    tail = server.said()[-1000:]
                    raise ServerFailed(f"{name} did not become ready at {url}:\n{tail}")
                time.sleep(_POLL_S)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def lenet_serve(
    weights: Path,
    model: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Our service on the one file `weights`, of the architecture `model`.

    Raises:
        ServerFailed: as `running`.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A folder with this one model in it: what else is under weights/ would be loaded too.
        served = Path(folder) / model / "1.safetensors"
        served.parent.mkdir()
        shutil.copyfile(weights, served)
        port = free_port()
        command = ["service", f"--port={port}", "--grpc-port=0"]
        command += [f"--default-model={model}", f"--weights={folder}", *arguments]
        paths = {"json": "/predict", "raw": "/predict"}
        with running("lenet-serve", command, port, paths, environment) as server:
            yield server


def check_answer(server: Server, path: str, request: PreparedRequest) -> None:
    """Send `request` once.

    Raises:
        ServerFailed: the answer is malformed or not what the model says.
    """
    headers = {"Content-Type": request.content_type}
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        response = client.post(path, content=request.body, headers=headers)
    found = response.text[:200]
    if response.status_code != 200:
        raise ServerFailed(f"{server.name} answers {response.status_code} at {path}: {found}")
    verdict = judge(response.content, request)
    if verdict.error or verdict.wrong_labels:
        what = verdict.error or f"{verdict.wrong_labels} wrong labels"
        raise ServerFailed(f"{server.name} answers wrongly at {path}, {what}: {found}")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
