"""The servers under test: start on chosen cores, wait for readiness, check an answer, stop."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import CannotStart
from benchmarks.digits import BINARY, JSON, PreparedRequest, judge, judge_binary
from lenet.weightfile import WeightFile

_ROOT = Path(__file__).resolve().parents[1]
_START_S = 60.0
_STOP_S = 30.0
_POLL_S = 0.05


class ServerFailed(Exception):
    """A server did not start or answered wrongly; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running process that listens at `url` and logs to `log`.

    `paths`: the path for each format of a body.
    """

    name: str
    url: str
    paths: dict[str, str]
    pid: int
    log: Path

    def logged(self) -> str:
        """The server's log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def pids(self) -> list[int]:
        """The process and its descendants.

        Raises:
            OSError: the system has no /proc, or the process ended.
        """
        found = [self.pid]
        for pid in found:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
            found += map(int, children.split())
        return found

    def cpu_s(self) -> float | None:
        """The CPU time of the process and its running descendants; None without /proc."""
        try:
            return sum(map(_cpu_s, self.pids()))
        except OSError:
            return None

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of GET `path`.

        Raises:
            OSError: there was no answer.
            http.client.HTTPException: the answer was not HTTP.
        """
        return self._exchange("GET", path, None, {}, timeout_s=5)

    def post(
        self, path: str, body: bytes, content_type: str, accept: str = "*/*"
    ) -> tuple[int, bytes]:
        """Status and body of POST `path`; raises as `get`."""
        headers = {"Content-Type": content_type, "Accept": accept}
        return self._exchange("POST", path, body, headers, timeout_s=30)

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        address = self.url.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()


def _cpu_s(pid: int) -> float:
    content = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    # proc(5): the name, in parentheses, may contain spaces; fields 14 and 15 are utime and stime.
    ticks = content.rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str],
    port: int,
    paths: dict[str, str],
    environment: Mapping[str, str] | None = None,
    checkout: Path = _ROOT,
    ready: str = "/readyz",
) -> Iterator[Server]:
    """Run `command`, a Python module with its arguments, from the packages of `checkout`.

    `environment` is added to this process's. GET `ready` answers 200 once the server is ready.

    Raises:
        ServerFailed: it ended, or was not ready in time.
    """
    url = f"http://127.0.0.1:{port}"
    packages = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=log,
            stderr=subprocess.STDOUT,
            # `-m` imports from the working directory before PYTHONPATH.
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": packages, **(environment or {})},
            process_group=0,
        )
        server = Server(name, url, paths, process.pid, Path(log.name))
        try:
            deadline_s = time.monotonic() + _START_S
            while not _ready(server, ready):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    tail = server.logged()[-1000:]
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
            # Processes that it started and left behind; usually there are none.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def lenet_serve(
    weights: Path,
    model: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    name: str = "lenet-serve",
    checkout: Path = _ROOT,
) -> Iterator[Server]:
    """Our service with only the file `weights`, of the architecture `model`.

    Raises:
        ServerFailed: as `running`.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A folder of its own: the service would also load the other models under weights/.
        served = Path(folder) / model / "1.safetensors"
        served.parent.mkdir()
        shutil.copyfile(weights, served)
        port = free_port()
        command = ["service", f"--port={port}", "--grpc-port=0"]
        command += [f"--default-model={model}", f"--weights={folder}", *arguments]
        paths = {"json": "/predict", "raw": "/predict"}
        with running(name, command, port, paths, environment, checkout) as server:
            yield server


def check_answer(server: Server, path: str, request: PreparedRequest, accept: str = JSON) -> None:
    """Send `request` once, and check the answer in the form `accept`: JSON or BINARY.

    Raises:
        ServerFailed: there was no well-formed answer, or its labels are not the model's.
    """
    try:
        status, content = server.post(path, request.body, request.content_type, accept)
    except (OSError, http.client.HTTPException) as exc:
        raise ServerFailed(f"{server.name} does not answer at {path}: {exc!r}") from exc
    start = repr(content[:200])
    if status != 200:
        raise ServerFailed(f"{server.name} answers {status} at {path}: {start}")
    verdict = (judge_binary if accept == BINARY else judge)(content, request)
    if verdict.error or verdict.wrong_labels:
        what = verdict.error or f"{verdict.wrong_labels} wrong labels"
        raise ServerFailed(f"{server.name} answers wrongly at {path}, {what}: {start}")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(server: Server, path: str) -> bool:
    try:
        return server.get(path)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def find_service(
    url: str, model: str | None, path: Path | None
) -> tuple[dict[str, Any], WeightFile]:
    """The model of the service at `url` (name, version, sha256, device), and the same weight file.

    `path`: the weight file, instead of the one in the folder `weights`.

    Raises:
        CannotStart: nothing answers there, or it serves another model or other weights.
    """
    import httpx

    try:
        response = httpx.get(f"{url}/info", timeout=10, trust_env=False)
        info = response.raise_for_status().json()
        models = {one["name"]: one for one in info["models"]}
        name = model or info["default_model"]
        if name not in models:
            raise CannotStart(f"the service has {', '.join(models)}, not {name}: change --model")
        service = {key: models[name][key] for key in ("name", "version", "sha256", "device")}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as exc:
        raise CannotStart(
            f"no lenet-serve answers at {url} ({type(exc).__name__}: {exc}): start it with "
            "`make serve` in another terminal, or name its address with --url"
        ) from exc
    path = path or Path("weights") / name / f"{service['version']}.safetensors"
    weights = WeightFile.read(path)
    if weights.digest() != service["sha256"]:
        raise CannotStart(
            f"{path} has sha256 {weights.digest()[:12]}, but the service's {name} has "
            f"{service['sha256'][:12]}: name its file with --weights"
        )
    return service, weights


@dataclass(frozen=True, slots=True)
class Cores:
    """The core numbers of each, disjoint unless there is only one core."""

    service: tuple[int, ...]
    load: tuple[int, ...]

    def __str__(self) -> str:
        if self.service == self.load:
            return f"core {spans(self.load)} for service and load: only ratios mean something"
        return f"cores {spans(self.service)} for the service, {spans(self.load)} for the load"


def split(available: Sequence[int], load: int) -> Cores:
    """Give the last `load` cores, at most all but one, to the load and the rest to the service.

    A single core is shared.
    """
    load = min(load, len(available) - 1)
    if not load:
        return Cores(tuple(available), tuple(available))
    return Cores(tuple(available[:-load]), tuple(available[-load:]))


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in the notation of `taskset --cpu-list`: 0-3,8."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)


@contextlib.contextmanager
def on(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread on `cores` inside the block; processes started there stay on them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
