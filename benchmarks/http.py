"""`python -m benchmarks.http`: our front door beside a plain FastAPI + ONNX Runtime app's.

Both run at the same time on the same machine and get the same bodies from wrk, in turns, A B A B,
so that whatever else the machine does meets both. wrk takes a share of the same cores: the
ratios mean something, the absolute numbers are low. Exit code: 0, 1 when an answer failed,
2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import latest_weights, positive_int
from benchmarks.digits import Format, PreparedRequest, prepare_requests, read_digits
from benchmarks.machine import provenance
from benchmarks.servers import (
    Server,
    ServerFailed,
    check_answer,
    free_port,
    lenet_serve,
    running,
)
from benchmarks.wrk import WrkFailed, find_wrk, run_wrk, write_script
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile
from trainer.errors import TrainerError

OURS, PEER = "lenet-serve", "plain FastAPI"

_WARM_UP_S = 1
_NUMBERS = ("requests_per_s", "images_per_s", "p50_ms", "p99_ms", "max_ms", "cpu_us")
_DISTRIBUTIONS = (
    *("lenet-serve", "fastapi", "uvicorn", "uvloop", "httptools"),
    *("onnxruntime", "orjson", "pydantic"),
)
_BODIES_BYTES = 16 * 1024 * 1024  # wrk keeps all bodies, and each server's cache sees them


@dataclass(frozen=True, slots=True)
class Case:
    """What is sent, and over how many connections."""

    form: Format
    images: int
    connections: int

    def __str__(self) -> str:
        many = "s" if self.connections > 1 else ""
        return f"{self.images} x {self.form}, {self.connections} connection{many}"


CASES = (
    Case("json", 1, 1),
    Case("raw", 1, 1),
    Case("json", 1, 32),
    Case("raw", 1, 32),
    Case("json", 64, 4),
)


@dataclass(frozen=True, slots=True)
class Round:
    """One server under one case once; `cpu_us` is the server's processor time a request."""

    case: str
    server: str
    requests_per_s: float
    images_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_us: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        wrk = find_wrk()
        path = options.weights or latest_weights(Path("weights") / "lenet")
        weights = WeightFile.read(path)
        digits = read_digits(options.data, weights)
    except (WrkFailed, LeNetError, TrainerError, FileNotFoundError) as exc:
        print(f"http: {exc}", file=sys.stderr)
        return 2
    rounds: list[Round] = []
    flags = ["--device=cpu", *shlex.split(options.service_args)]
    try:
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(lenet_serve(path, weights.model.name, flags)),
                stack.enter_context(_peer(path)),
            ]
            for case in CASES:
                print(f"{case} ...", file=sys.stderr)
                requests = prepare_requests(digits, weights, case.form, case.images)
                rounds += _measure(wrk, case, requests, servers, options)
    except (WrkFailed, ServerFailed) as exc:
        print(f"http: {exc}", file=sys.stderr)
        return 1
    summary = summarise(rounds)
    print(table(summary))
    print(f"\nMedians of {options.rounds} rounds of {options.duration} s (least..most).")
    print("CPU us: the server's processor time a request. ratio: requests/s, ours over the peer's.")
    print("wrk ran on the same cores: take the ratios.")
    if options.json is not None:
        document = {
            **provenance(_DISTRIBUTIONS),
            "arguments": {
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(options).items()
            },
            "cases": summary,
            "rounds": [asdict(one) for one in rounds],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


@contextlib.contextmanager
def _peer(weights: Path) -> Iterator[Server]:
    port = free_port()
    command = ["benchmarks.peers.plain_fastapi", f"--port={port}", f"--weights={weights}"]
    with running(PEER, command, port, {"json": "/predict", "raw": "/predict/raw"}) as server:
        yield server


def _measure(
    wrk: str,
    case: Case,
    requests: Sequence[PreparedRequest],
    servers: Sequence[Server],
    options: argparse.Namespace,
) -> Iterator[Round]:
    """The rounds of one case, the servers taking turns."""
    bodies = [request.body for request in requests]
    bodies = bodies[: max(1, _BODIES_BYTES // len(bodies[0]))]
    with tempfile.TemporaryDirectory() as folder:
        scripts = []
        for index, server in enumerate(servers):
            check_answer(server, server.paths[case.form], requests[0])
            place = Path(folder) / str(index)
            place.mkdir()
            path, kind = server.paths[case.form], requests[0].content_type
            scripts.append(write_script(place, path, kind, bodies))
        for turn in range(options.rounds + 1):
            for server, script in zip(servers, scripts, strict=True):
                duration_s = options.duration if turn else _WARM_UP_S
                before_s = server.cpu_s()
                result = run_wrk(wrk, script, server.url, case.connections, duration_s)
                after_s = server.cpu_s()
                if not turn:
                    continue
                used = None if before_s is None or after_s is None else after_s - before_s
                yield Round(
                    case=str(case),
                    server=server.name,
                    requests_per_s=result.requests_per_s,
                    images_per_s=result.requests_per_s * case.images,
                    p50_ms=result.p50_ms,
                    p99_ms=result.p99_ms,
                    max_ms=result.max_ms,
                    cpu_us=None if used is None else used / result.requests * 1e6,
                )


def summarise(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """For each case and server the median, least and most of each number, and `ratio`.

    `ratio` is our requests a second over the peer's, of the medians.
    """
    cases: list[dict[str, Any]] = []
    for case in dict.fromkeys(one.case for one in rounds):
        entry: dict[str, Any] = {"case": case}
        for server in (OURS, PEER):
            mine = [one for one in rounds if (one.case, one.server) == (case, server)]
            entry[server] = {number: _spread(mine, number) for number in _NUMBERS}
        ours, peers = (entry[server]["requests_per_s"]["median"] for server in (OURS, PEER))
        entry["ratio"] = ours / peers
        cases.append(entry)
    return cases


def _spread(rounds: Sequence[Round], number: str) -> dict[str, float] | None:
    values = [getattr(one, number) for one in rounds]
    if None in values:
        return None
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Two lines a case, ours and the peer's, and the ratio."""
    lines = [
        f"{'':<25}{'server':<14}{'images/s':>9} {'(least..most)':<17}"
        f"{'p50 ms':>8}{'p99 ms':>8}{'CPU us':>8}  ratio"
    ]
    for case in cases:
        for server in (OURS, PEER):
            numbers = case[server]
            rate, cpu = numbers["images_per_s"], numbers["cpu_us"]
            spread = f"({rate['least']:,.0f}..{rate['most']:,.0f})"
            cells = (
                f"{case['case'] if server == OURS else '':<25}{server:<14}"
                f"{rate['median']:>9,.0f} {spread:<17}"
                f"{numbers['p50_ms']['median']:>8.2f}{numbers['p99_ms']['median']:>8.2f}"
                f"{'-' if cpu is None else format(cpu['median'], ',.0f'):>8}"
            )
            lines.append(cells + (f"  {case['ratio']:5.2f}" if server == OURS else ""))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http",
        description="Our service beside a plain FastAPI + ONNX Runtime app, loaded by wrk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", default=3, type=positive_int, help="of each server in each case")
    add("--duration", default=5, type=positive_int, help="seconds of a round")
    add("--data", type=Path, help="folder of MNIST; without it, the weight file's ten images")
    add("--weights", type=Path, help="weight file for both; without it, weights/lenet's latest")
    add("--service-args", default="", help="more arguments for our service, as one string")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
