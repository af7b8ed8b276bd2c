"""`python -m benchmarks.reload`: one service, two versions of its model in turns, under load.

Two clients ask all the time, one for single images and one for many at a time, and hold each answer
against the version that it names: to the bit on the CPU, and on a GPU, which computes in another
precision, within a hundredth of what tells the two versions apart. First without reloads, then
with. Exit code: 0, 1 when an answer was wrong or missing, 2 when nothing was measured.
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

from benchmarks.arguments import latest_weights, positive_int
from benchmarks.machine import provenance
from benchmarks.results import percentile
from benchmarks.servers import Server, ServerFailed, free_port, running
from lenet.cpu import CpuBackend
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile

_RAW = "application/octet-stream"
_PATIENCE_S = 30.0
_POLL_S = 0.001
_DISTRIBUTIONS = ("lenet-serve", "fastapi", "uvicorn", "onnxruntime")


class ReloadFailed(Exception):
    """An answer was wrong or did not come, or a reload did not end."""


class Caller:
    """A client that asks for the same `images` on and on, on a thread and connection of its own.

    `expected`: by version, float32 probabilities; an answer may be `tolerance` off.
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
        self.over = threading.Event()
        self.latencies_s: list[float] = []
        self.by_version = dict.fromkeys(expected, 0)
        self.wrong = ""
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def _ask(self) -> None:
        headers = {"Content-Type": _RAW, "Accept": _RAW}
        connection = http.client.HTTPConnection(self._address, timeout=_PATIENCE_S)
        with contextlib.closing(connection):
            while not self.over.is_set() and not self.wrong:
                began_s = time.perf_counter()
                try:
                    connection.request("POST", "/predict", self._body, headers)
                    response = connection.getresponse()
                    content = response.read()
                except (OSError, http.client.HTTPException) as exc:
                    self.wrong = repr(exc)
                    return
                self.latencies_s.append(time.perf_counter() - began_s)
                version = response.headers.get("X-Model-Version", "")
                if response.status != 200:
                    self.wrong = f"{response.status}: {content[:200].decode(errors='replace')}"
                elif not self._is_right(content, version):
                    self.wrong = f"an answer is not what version {version!r} says"
                else:
                    self.by_version[version] += 1

    def _is_right(self, content: bytes, version: str) -> bool:
        expected = self._expected.get(version)
        if expected is None or len(content) != expected.nbytes:
            return False
        answer = np.frombuffer(content, np.float32).reshape(expected.shape)
        return bool((np.abs(answer - expected) <= self._tolerance).all())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        first = WeightFile.read(options.weights or latest_weights(Path("weights") / "lenet"))
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
    """The same network that takes each digit for the next one; its proof says the same."""
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
            """Change the files; the version that is the highest now."""
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
            # From the second version on both are kept on the device.
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
    before, began_s = _memory_mib(server.pid), time.perf_counter()
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
        passed_s = time.perf_counter() - began_s
    for caller in callers:
        if caller.wrong:
            raise ReloadFailed(caller.wrong)
    told: dict[str, Any] = {"seconds": round(passed_s, 2)}
    after = _memory_mib(server.pid)
    told |= {name: [before[name], after[name]] for name in before}
    for caller, rows in zip(callers, (1, len(images)), strict=True):
        told[f"{rows} at a time"] = {
            "answers": caller.by_version,
            **{
                f"p{share}_ms": round(1e3 * percentile(caller.latencies_s, share), 2)
                for share in (50, 99, 100)
            },
        }
    return told


def _reload(server: Server, alternate: Callable[[int], str], reloads: int) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    with contextlib.closing(connection):
        for number in range(reloads):
            expected = alternate(number)
            os.kill(server.pid, signal.SIGHUP)
            deadline_s = time.monotonic() + _PATIENCE_S
            for version in _served(connection):
                if version == expected:
                    break
                if time.monotonic() > deadline_s:
                    raise ReloadFailed(f"version {version} is served still, expected {expected}")


def _served(connection: http.client.HTTPConnection) -> Iterator[str]:
    while True:
        connection.request("GET", "/info")
        yield json.loads(connection.getresponse().read())["models"][0]["version"]
        time.sleep(_POLL_S)


def _memory_mib(pid: int) -> dict[str, float | None]:
    """Of the process and its children, and of the GPU; None what the system does not tell."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        pages = [
            int(Path(f"/proc/{number}/statm").read_text(encoding="ascii").split()[1])
            for number in (pid, *children)
        ]
        resident = round(sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    except OSError:
        resident = None
    found: dict[str, float | None] = {"resident_mib": resident}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        used = said.split()[:1]
        found["gpu_mib"] = float(used[0]) if used and used[0].isdigit() else None
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reload",
        description="Two versions of one model in turns, reloaded under load.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--reloads", default=1000, type=positive_int)
    add("--images", default=200, type=positive_int, help="in the larger requests")
    add("--duration", default=10, type=positive_int, help="seconds without reloads, before")
    add("--weights", type=Path, help="weight file; without it, weights/lenet's latest")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="what the service computes on")
    add("--service-args", default="", help="more arguments for the service, as one string")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
