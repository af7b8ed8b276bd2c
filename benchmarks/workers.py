"""`python -m benchmarks.workers`: the service over HTTP with one worker and with several.

wrk sends raw images in a closed loop. The cases of one start of the service are measured in
alternating rounds, and beside one worker a bare uvicorn that computes nothing. Several workers
share a GPU through MPS. Service and load run on separate cores, which are printed. Exit code: 0, 1
when a case failed, 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import commit, latest_weights, positive_int, provenance
from benchmarks.digits import JSON, LabelledDigits, prepare_requests, read_digits
from benchmarks.servers import (
    Cores,
    Server,
    ServerFailed,
    check_answer,
    free_port,
    lenet_serve,
    on,
    running,
    spans,
    split,
)
from benchmarks.workers_report import Case, Measured, rows, table
from benchmarks.wrk import WrkFailed, find_wrk, run_wrk, write_script
from lenet.errors import LeNetError
from lenet.files import write_atomically
from lenet.weightfile import WeightFile
from service.process.mps import PIPE, wanted
from trainer.errors import TrainerError

_WARM_UP_S = 1
_PAUSE_S = 0.2  # after a round: the service drops the requests that wrk left unanswered
_START_S = 120.0
_POLL_S = 0.05
_PATH = "/predict"
_BODIES_BYTES = 16 * 1024 * 1024  # each thread of wrk keeps all bodies in memory
_DISTRIBUTIONS = ("lenet-serve", "uvicorn", "uvloop", "httptools", "onnxruntime")


CASES = (
    Case("single_1", 1, 1),
    Case("floor_1", 1, 1, floor=True),
    Case("single_32", 1, 32, several=True),
    Case("floor_32", 1, 32, floor=True),
    Case("single_128", 1, 128),
    Case("images_64", 64, 4, several=True),
    Case("floor_64", 64, 4, floor=True),
    Case("images_1024", 1024, 4, several=True),
    Case("images_1024_json", 1024, 4, accept=JSON),
    Case("images_8192", 8192, 4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    if 1 not in options.workers and not any(case.several for case in cases):
        parser.error("--cases: these are measured with one worker, and --workers has no 1")
    if not hasattr(os, "sched_setaffinity"):
        print("workers: needs Linux, to pin service and load to separate cores", file=sys.stderr)
        return 2
    try:
        wrk = find_wrk()
        path = options.weights or latest_weights()
        weights = WeightFile.read(path)
        digits = read_digits(options.data, weights)
    except (WrkFailed, LeNetError, TrainerError, FileNotFoundError) as exc:
        print(f"workers: {exc}", file=sys.stderr)
        return 2
    available = sorted(os.sched_getaffinity(0))
    cores = split(available, options.load_cores or max(1, len(available) // 4))
    print(f"{cores}; {options.rounds} rounds of {options.duration} s", flush=True)
    document: dict[str, Any] = {
        **provenance(_DISTRIBUTIONS),
        "commit": commit(),
        "weights": str(path),
        "digits": digits.source,
        "cores": {"service": spans(cores.service), "load": spans(cores.load)},
        "rounds": options.rounds,
        "duration_s": options.duration,
        "rows": [],
    }
    bench = Bench(wrk, path, weights, digits, cores, options)
    for workers in options.workers:
        mps = workers > 1 and wanted(options.device) and not options.no_mps
        measured = bench.measure(workers, mps, [c for c in cases if c.several or workers == 1])
        document["rows"] += rows(workers, mps, measured)
        if options.json is not None:
            write_atomically(options.json, (json.dumps(document, indent=1) + "\n").encode())
    print(table(document["rows"]))
    return 1 if any("error" in row for row in document["rows"]) else 0


@dataclass(frozen=True, slots=True)
class Bench:
    """Starts servers on their cores and measures them under load."""

    wrk: str
    path: Path
    weights: WeightFile
    digits: LabelledDigits
    cores: Cores
    options: argparse.Namespace

    def measure(self, workers: int, mps: bool, cases: Sequence[Case]) -> list[Measured]:
        """All `cases` on one start of the service.

        They take turns, after a warm-up round of each. One that fails is left out from then on.
        """
        found = [Measured(case, case.connections * workers) for case in cases]
        try:
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                ours = stack.enter_context(self._service(workers, mps))
                floor = ours
                if any(case.floor for case in cases):
                    floor = stack.enter_context(self._floor())
                loads = []
                for one in found:
                    server = floor if one.case.floor else ours
                    try:
                        loads.append((one, server, self._prepare(one.case, server, folder)))
                    except ServerFailed as exc:
                        one.error = str(exc)
                for turn in range(self.options.rounds + 1):
                    for one, server, script in loads:
                        if not one.error:
                            self._round(one, server, script, workers, turn)
                    loads.reverse()  # a drift during a turn favours none
        except ServerFailed as exc:
            for one in found:
                one.error = one.error or str(exc)
        return found

    @contextlib.contextmanager
    def _service(self, workers: int, mps: bool) -> Iterator[Server]:
        arguments = [f"--device={self.options.device}", f"--workers={workers}"]
        arguments += [f"--mps={'auto' if mps else 'off'}", *shlex.split(self.options.service_args)]
        with contextlib.ExitStack() as stack:
            environment = {}
            if not mps:
                # CUDA looks for an MPS daemon in this folder, and finds none.
                environment[PIPE] = stack.enter_context(tempfile.TemporaryDirectory())
            name = self.weights.model.name
            with on(self.cores.service):
                server = stack.enter_context(lenet_serve(self.path, name, arguments, environment))
            deadline_s = time.monotonic() + _START_S
            while server.logged().count("ready: HTTP") < workers:
                if time.monotonic() > deadline_s:
                    tail = server.logged()[-1000:]
                    raise ServerFailed(f"not all {workers} workers became ready:\n{tail}")
                time.sleep(_POLL_S)
            if mps and not ("MPS: found" in server.logged() or "MPS: started" in server.logged()):
                lines = [line for line in server.logged().splitlines() if "no MPS" in line]
                raise ServerFailed("\n".join(lines) or "no MPS: no worker uses a GPU")
            yield server

    @contextlib.contextmanager
    def _floor(self) -> Iterator[Server]:
        port = free_port()
        command = ["benchmarks.baselines.bare_uvicorn", f"--port={port}"]
        with on(self.cores.service), running("bare uvicorn", command, port, {}) as server:
            yield server

    def _prepare(self, case: Case, server: Server, folder: Path) -> Path:
        """Check an answer of `server` and write the script of `case` below `folder`."""
        requests = prepare_requests(self.digits, self.weights, "raw", case.images)
        if not case.floor:
            check_answer(server, _PATH, requests[0], case.accept)
        bodies = [request.body for request in requests]
        bodies = bodies[: max(1, _BODIES_BYTES // len(bodies[0]))]
        place = folder / case.name
        place.mkdir()
        kind = requests[0].content_type
        return write_script(place, _PATH, kind, bodies, {"Accept": case.accept})

    def _round(self, one: Measured, server: Server, script: Path, workers: int, turn: int) -> None:
        """Add a round to `one`, or its error; turn 0 is the warm-up."""
        duration_s = self.options.duration if turn else _WARM_UP_S
        threads = threads_for(one.connections, len(self.cores.load))
        line = f"workers {workers}, {one.case.name}, round {turn}: "
        try:
            with on(self.cores.load):
                result = run_wrk(self.wrk, script, server.url, one.connections, duration_s, threads)
        except WrkFailed as exc:
            error = f"{exc}{'' if one.case.floor else outcomes(server)}"
            line += f"failed, {error}"
            if turn:  # a warm-up may be too short for a single answer
                one.error = error
        else:
            line += f"{result.requests_per_s:,.0f} requests/s, wrk {result.busy:.0%} busy"
            if turn:
                one.rounds.append(result)
        print(line, file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)


def outcomes(server: Server) -> str:
    """Counts of failed requests so far, for the end of a message."""
    try:
        _, content = server.get("/metrics")
    except (OSError, http.client.HTTPException) as exc:
        return f"; then /metrics was not answered: {exc!r}"
    counts = re.findall(rb'lenet_requests_total\{.*outcome="(\w+)".*\} ([1-9]\S*)', content)
    named = [f"{name.decode()} {float(count):.0f}" for name, count in counts if name != b"ok"]
    return f"; outcomes counted so far: {', '.join(named)}" if named else ""


def threads_for(connections: int, cores: int) -> int:
    """The most threads, at most one per core, that share `connections` evenly."""
    # wrk drops the connections of a remainder.
    return max(n for n in range(1, cores + 1) if connections % n == 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers",
        description="Measure the service over HTTP with one worker and with several, with wrk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the service")
    add(
        "--workers",
        default=[1, 8],
        nargs="+",
        type=positive_int,
        metavar="N",
        help="numbers of workers to measure",
    )
    add(
        "--cases",
        nargs="+",
        choices=[case.name for case in CASES],
        metavar="CASE",
        help=f"instead of all: {' '.join(case.name for case in CASES)}",
    )
    add("--no-mps", action="store_true", help="several workers share the GPU without MPS")
    add("--load-cores", type=positive_int, help="cores for the load, instead of a quarter of all")
    add("--rounds", default=3, type=positive_int, help="whose medians are reported")
    add("--duration", default=3, type=positive_int, help="seconds of a round")
    add("--data", type=Path, help="folder of MNIST, instead of the weight file's ten images")
    add("--weights", type=Path, help="weight file, instead of the latest in weights/lenet")
    add("--service-args", default="", help="more arguments for the service, as one string")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
