"""`python -m benchmarks.reload`: a service that switches between two versions under load.

Two clients send requests all the time, one with single images and one with many. Each answer is
compared with the version that it names: bit by bit on the CPU; on a GPU, which computes in another
precision, within a hundredth of the difference between the versions. The first phase has no
reloads, the second one does. Exit code: 0, 1 when an answer was wrong or missing, 2 when nothing
was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import latest_weights, positive_int, provenance
from benchmarks.servers import Server, ServerFailed, free_port, running
from benchmarks.timing import percentile
from lenet.cpu import CpuBackend
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile

_RAW = "application/octet-stream"
_TIMEOUT_S = 30.0
_POLL_S = 0.001
_DISTRIBUTIONS = ("lenet-serve", "fastapi", "uvicorn", "onnxruntime")


class ReloadFailed(Exception):
    """An answer was wrong or missing, or a reload did not complete."""


class Caller:
    """A client that sends the same `images` repeatedly, with its own thread and connection.

    `expected`: float32 probabilities by version; answers may differ by `tolerance`.
    """

    def __init__(
        self,
        server: Server,
        images: NDArray[np.uint8],
        expected: dict[str, NDArray[np.float32]],
        tolerance: float,
    ) -> None:
        self._address = server.url.removeprefix("http://")
        self._body = images.tobytes()
        self._expected, self._tolerance = expected, tolerance
        self._over = threading.Event()
        self.latencies_s: list[float] = []
        self.by_version = dict.fromkeys(expected, 0)
        self.wrong = ""
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        headers = {"Content-Type": _RAW, "Accept": _RAW}
        connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            while not self._over.is_set() and not self.wrong:
                start_s = time.perf_counter()
                try:
                    connection.request("POST", "/predict", self._body, headers)
                    response = connection.getresponse()
                    content = response.read()
                except (OSError, http.client.HTTPException) as exc:
                    self.wrong = repr(exc)
                    return
                self.latencies_s.append(time.perf_counter() - start_s)
                version = response.headers.get("X-Model-Version", "")
                if response.status != 200:
                    self.wrong = f"{response.status}: {content[:200].decode(errors='replace')}"
                elif not self.is_correct(content, version):
                    self.wrong = f"an answer differs from version {version!r}"
                else:
                    self.by_version[version] += 1

    def is_correct(self, content: bytes, version: str) -> bool:
        """Whether the body of an answer has the probabilities of `version`."""
        expected = self._expected.get(version)
        if expected is None or len(content) != expected.nbytes:
            return False
        answer = np.frombuffer(content, np.float32).reshape(expected.shape)
        return bool((np.abs(answer - expected) <= self._tolerance).all())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        first = WeightFile.read(options.weights or latest_weights())
    except (LeNetError, FileNotFoundError) as exc:
        print(f"reload: {exc}", file=sys.stderr)
        return 2
    try:
        phases = _measure([first, renamed(first)], options)
    except (ServerFailed, ReloadFailed) as exc:
        print(f"reload: {exc}", file=sys.stderr)
        return 1
    for name, phase in phases.items():
        print(f"{name}: {json.dumps(phase)}")
    if options.json is not None:
        document = {**provenance(_DISTRIBUTIONS), "reloads": options.reloads, **phases}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def renamed(weights: WeightFile) -> WeightFile:
    """A copy of the network with classes and golden vectors rotated by one class."""
    last = f"{list(weights.tensors)[-1].rpartition('.')[0]}."
    tensors = {
        name: np.roll(tensor, 1, axis=0) if name.startswith(last) else tensor
        for name, tensor in weights.tensors.items()
    }
    golden = dataclasses.replace(weights.golden, logits=np.roll(weights.golden.logits, 1, axis=1))
    return dataclasses.replace(weights, tensors=tensors, golden=golden)


def _measure(files: Sequence[WeightFile], options: argparse.Namespace) -> dict[str, Any]:
    name = files[0].model.name
    images = np.random.default_rng(0).integers(0, 256, (options.images, 28, 28), np.uint8)
    answers = {
        str(version): CpuBackend().plan(file, options.images).run(images).probabilities
        for version, file in enumerate(files, 1)
    }
    tolerance = 0.0
    if options.device == "cuda":
        one, other = answers.values()
        tolerance = float(np.abs(one - other).max(axis=1).min()) / 100
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / name
        folder.mkdir()
        files[0].write(folder / "1.safetensors")
        files[1].write(folder / "kept")

        def alternate(number: int) -> str:
            """Add or remove version 2; returns the version to serve."""
            if number % 2:
                (folder / "2.safetensors").unlink()
                return "1"
            os.link(folder / "kept", folder / "2.safetensors")
            return "2"

        port = free_port()
        command = ["service", f"--port={port}", "--grpc-port=0"]
        command += [f"--device={options.device}"]
        command += [f"--default-model={name}", f"--weights={root}"]
        command += shlex.split(options.service_args)
        with running("lenet-serve", command, port, {}) as server:
            phase = partial(_phase, server, images, answers, tolerance)
            quiet = phase(lambda: time.sleep(options.duration))
            # Once both versions were loaded, the device keeps both.
            _reload(server, alternate, 2)
            reloading = phase(lambda: _reload(server, alternate, options.reloads))
    return {"without reloads": quiet, "with reloads": reloading}


def _phase(
    server: Server,
    images: NDArray[np.uint8],
    answers: dict[str, NDArray[np.float32]],
    tolerance: float,
    work: Callable[[], None],
) -> dict[str, Any]:
    before, start_s = _memory_mib(server), time.perf_counter()
    with contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(
                Caller(
                    server,
                    images[:rows],
                    {version: rows_of[:rows] for version, rows_of in answers.items()},
                    tolerance,
                )
            )
            for rows in (1, len(images))
        ]
        work()
        passed_s = time.perf_counter() - start_s
    for caller in callers:
        if caller.wrong:
            raise ReloadFailed(caller.wrong)
    found: dict[str, Any] = {"seconds": round(passed_s, 2)}
    after = _memory_mib(server)
    found |= {name: [before[name], after[name]] for name in before}
    for caller, rows in zip(callers, (1, len(images)), strict=True):
        found[f"{rows} at a time"] = {
            "answers": caller.by_version,
            **{
                f"p{share}_ms": round(1e3 * percentile(caller.latencies_s, share), 2)
                for share in (50, 99, 100)
            },
        }
    return found


def _reload(server: Server, alternate: Callable[[int], str], reloads: int) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    with contextlib.closing(connection):
        for number in range(reloads):
            expected = alternate(number)
            os.kill(server.pid, signal.SIGHUP)
            deadline_s = time.monotonic() + _TIMEOUT_S
            for version in _served(connection):
                if version == expected:
                    break
                if time.monotonic() > deadline_s:
                    raise ReloadFailed(f"version {version} is still served, expected {expected}")


def _served(connection: http.client.HTTPConnection) -> Iterator[str]:
    while True:
        connection.request("GET", "/info")
        yield json.loads(connection.getresponse().read())["models"][0]["version"]
        time.sleep(_POLL_S)


def _memory_mib(server: Server) -> dict[str, float | None]:
    """Memory of the server's processes and of the GPU; None where the system does not report it."""
    try:
        pages = [
            int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
            for pid in server.pids()
        ]
        resident = round(sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    except OSError:
        resident = None
    found: dict[str, float | None] = {"resident_mib": resident}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        output = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        used = output.split()[:1]
        found["gpu_mib"] = float(used[0]) if used and used[0].isdigit() else None
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reload",
        description="Reload two versions of one model in turns, under load.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--reloads", default=1000, type=positive_int, help="number of reloads")
    add("--images", default=200, type=positive_int, help="per request of the second client")
    add("--duration", default=10, type=positive_int, help="seconds of the phase without reloads")
    add("--weights", type=Path, help="weight file, instead of the latest in weights/lenet")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the service")
    add("--service-args", default="", help="more arguments for the service, as one string")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
