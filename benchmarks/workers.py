"""`python -m benchmarks.workers`: single images over HTTP, answered by 1, 2, 4 and 8 workers.

The load is a closed loop with the same number of connections per worker. Service and load run on
separate cores, which are printed. On a GPU, several workers are measured with MPS and without. A
first measurement compares one connection with a bare uvicorn that computes nothing. Exit code: 0,
1 when an answer failed, 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.command import latest_weights, missing_library, positive_int, provenance
from benchmarks.digits import PreparedRequest, prepare_requests, read_digits
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
from benchmarks.wrk import WrkFailed, find_wrk, run_wrk, write_script
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile
from service.mps import PIPE
from trainer.errors import TrainerError

_WARM_UP_S = 1
_START_S = 120.0
_POLL_S = 0.05
_PATH = "/predict"
_DISTRIBUTIONS = ("lenet-serve", "uvicorn", "uvloop", "httptools", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of rounds of `n` workers; `mps`: they shared the GPU through MPS."""

    n: int
    mps: bool
    requests_per_s: float
    p50_us: float
    p99_us: float
    requests_per_s_rounds: tuple[float, ...]


Measured: TypeAlias = tuple[float, float, float]
"""Requests per second, p50 and p99 in us, of a round without a failed answer."""

Send: TypeAlias = Callable[[Server, int, int], Measured]
"""`send(server, connections, seconds)`: a round of load."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    options = _parser().parse_args(arguments)
    if not hasattr(os, "sched_setaffinity"):
        print("workers: needs Linux, to pin service and load to separate cores", file=sys.stderr)
        return 2
    try:
        path = options.weights or latest_weights()
        weights = WeightFile.read(path)
        requests = prepare_requests(read_digits(options.data, weights), weights, "raw", 1)
    except (LeNetError, TrainerError, FileNotFoundError) as exc:
        print(f"workers: {exc}", file=sys.stderr)
        return 2
    available = sorted(os.sched_getaffinity(0))
    cores = split(available, options.load_cores or max(1, len(available) // 4))
    print(f"{cores}; {options.connections} connections per worker")
    bench = Bench(path, weights.model.name, requests[0], cores, options)
    rows: list[Row] = []
    try:
        with load_generator(requests, len(cores.load)) as (name, send):
            how = {
                **provenance(_DISTRIBUTIONS),
                "device": options.device,
                "generator": name,
                "service_cores": spans(cores.service),
                "load_cores": spans(cores.load),
                "connections_per_worker": options.connections,
                "rounds": options.rounds,
                "duration_s": options.duration,
            }
            print(f"load from {name}, {options.rounds} rounds of {options.duration} s")
            single = bench.single(send)
            print(f"1 connection, p50: {json.dumps(single)}")
            merge_into(options.json, {"workers_how": how, "single": single})
            for row in bench.rows(send):
                rows.append(row)
                merge_into(options.json, {"workers": [asdict(one) for one in rows]})
    except ImportError as exc:
        print(f"workers: without wrk {missing_library(exc)}", file=sys.stderr)
        return 2
    except (WrkFailed, ServerFailed) as exc:
        print(f"workers: {exc}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0


@contextlib.contextmanager
def load_generator(requests: Sequence[PreparedRequest], cores: int) -> Iterator[tuple[str, Send]]:
    """(name, send): wrk with a thread per core where it is installed, else Python processes."""
    try:
        wrk = find_wrk()
    except WrkFailed:
        send = _send_from_python(requests, cores)
        yield f"{cores} Python processes (without wrk they may be the limit)", send
        return
    with tempfile.TemporaryDirectory() as folder:
        bodies = [request.body for request in requests]
        script = write_script(Path(folder), _PATH, requests[0].content_type, bodies)

        def send(server: Server, connections: int, duration_s: int) -> Measured:
            threads = min(cores, connections)
            found = run_wrk(wrk, script, server.url, connections, duration_s, threads)
            return found.requests_per_s, found.p50_ms * 1e3, found.p99_ms * 1e3

        yield f"wrk on {cores} threads", send


def _send_from_python(requests: Sequence[PreparedRequest], processes: int) -> Send:
    from benchmarks.load import closed_loop, send_from_processes
    from benchmarks.load_report import summarise

    def send(server: Server, connections: int, duration_s: int) -> Measured:
        load = replace(closed_loop(server.url, connections, duration_s), any_label=True)
        (results,) = send_from_processes(load, requests, min(processes, connections))
        found = summarise(results)
        if found.errors or not found.requests:
            raise ServerFailed(f"{server.name}: of {found.requests} requests failed {found.errors}")
        return found.requests_per_s, found.latency_ms["p50"] * 1e3, found.latency_ms["p99"] * 1e3

    return send


@dataclass(frozen=True, slots=True)
class Bench:
    """Starts servers on their cores and measures them under load."""

    weights: Path
    model: str
    probe: PreparedRequest
    cores: Cores
    options: argparse.Namespace

    def single(self, send: Send) -> dict[str, Any]:
        """The p50 in us of one connection, for our service and the bare server in turns."""
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(self._service(1, mps=False))
            port = free_port()
            with on(self.cores.service):
                command = ["benchmarks.baselines.bare_uvicorn", f"--port={port}"]
                bare = stack.enter_context(running("bare uvicorn", command, port, {}))
            rounds = list(self._in_turns([ours, bare], 1, send))
        found: dict[str, Any] = {}
        for name, index in (("ours", 0), ("bare", 1)):
            values = [one[index][1] for one in rounds]
            found |= {f"{name}_p50_us": statistics.median(values), f"{name}_p50_us_rounds": values}
        return found

    def rows(self, send: Send) -> Iterator[Row]:
        """A row per number of workers; for several on a GPU one with MPS and one without."""
        for n in self.options.workers:
            choices = [False] if n == 1 or self.options.device == "cpu" else [True, False]
            for mps in choices:
                if mps and self.options.no_mps:
                    continue
                with self._service(n, mps=mps) as server:
                    shared = "MPS: found" in server.logged() or "MPS: started" in server.logged()
                    if mps and not shared:
                        lines = [line for line in server.logged().splitlines() if "no MPS" in line]
                        print("\n".join(lines) or "no MPS: no worker uses a GPU", file=sys.stderr)
                        continue
                    many = n * self.options.connections
                    rounds = [one for (one,) in self._in_turns([server], many, send)]
                rates, p50s, p99s = zip(*rounds, strict=True)
                yield Row(n, shared, *map(statistics.median, (rates, p50s, p99s)), rates)

    @contextlib.contextmanager
    def _service(self, n: int, *, mps: bool) -> Iterator[Server]:
        arguments = [f"--device={self.options.device}", f"--workers={n}"]
        arguments += [f"--mps={'auto' if mps else 'off'}", *shlex.split(self.options.service_args)]
        with contextlib.ExitStack() as stack:
            environment = {}
            if not mps:
                # CUDA looks for an MPS daemon in this folder, and finds none.
                environment[PIPE] = stack.enter_context(tempfile.TemporaryDirectory())
            with on(self.cores.service):
                server = stack.enter_context(
                    lenet_serve(self.weights, self.model, arguments, environment)
                )
            deadline_s = time.monotonic() + _START_S
            while server.logged().count("ready: HTTP") < n:
                if time.monotonic() > deadline_s:
                    raise ServerFailed(
                        f"not all {n} workers became ready:\n{server.logged()[-1000:]}"
                    )
                time.sleep(_POLL_S)
            check_answer(server, _PATH, self.probe)
            yield server

    def _in_turns(
        self, servers: Sequence[Server], connections: int, send: Send
    ) -> Iterator[list[Measured]]:
        """`options.rounds` rounds, the servers in turns, after a short warm-up round of each."""
        for turn in range(self.options.rounds + 1):
            duration_s = self.options.duration if turn else _WARM_UP_S
            with on(self.cores.load):
                found = [send(server, connections, duration_s) for server in servers]
            if turn:
                yield found


def merge_into(path: Path | None, measured: dict[str, Any]) -> None:
    """Update the JSON object in `path` with `measured`; None writes nothing."""
    if path is None:
        return
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**document, **measured}, indent=2) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """A line per row; the ratio is to one worker, if that was measured."""
    one = next((row.requests_per_s for row in rows if row.n == 1), None)
    lines = [
        f"{'workers':>7}  {'MPS':<4}{'requests/s':>11}{'p50 us':>10}{'p99 us':>10}{'ratio':>8}"
    ]
    for row in rows:
        ratio = "-" if one is None else format(row.requests_per_s / one, ".2f")
        lines.append(
            f"{row.n:>7}  {'yes' if row.mps else 'no':<4}{row.requests_per_s:>11,.0f}"
            f"{row.p50_us:>10,.0f}{row.p99_us:>10,.0f}{ratio:>8}"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers",
        description="Measure single images over HTTP with one worker and with several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="of the service")
    add(
        "--workers",
        default=[1, 2, 4, 8],
        nargs="+",
        type=positive_int,
        metavar="N",
        help="numbers of workers to measure",
    )
    add("--no-mps", action="store_true", help="measure only without MPS")
    add("--connections", default=32, type=positive_int, help="per worker")
    add("--load-cores", type=positive_int, help="cores for the load, instead of a quarter of all")
    add("--rounds", default=3, type=positive_int, help="whose medians are reported")
    add("--duration", default=5, type=positive_int, help="seconds of a round")
    add("--data", type=Path, help="folder of MNIST, instead of the weight file's ten images")
    add("--weights", type=Path, help="weight file, instead of the latest in weights/lenet")
    add("--service-args", default="", help="more arguments for the service, as one string")
    add("--json", type=Path, help="file to update with the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
