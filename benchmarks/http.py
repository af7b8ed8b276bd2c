"""`python -m benchmarks.http`: our HTTP service compared with a plain FastAPI + ONNX Runtime app.

With --against DIR it is compared with the service of another checkout instead, for example a
`git worktree` of an older commit. Both run on the CPU backend at the same time on the same machine
and get the same bodies from wrk in alternating rounds, so that other work on the machine affects
both. wrk uses the same cores: the ratios mean something, the absolute rates are low. Exit code: 0,
1 when an answer failed, 2 when nothing was measured.
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

from benchmarks.command import arguments_of, commit, latest_weights, positive_int, provenance
from benchmarks.digits import Format, PreparedRequest, prepare_requests, read_digits
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

OURS = "lenet-serve"

_WARM_UP_S = 1
_NUMBERS = ("requests_per_s", "images_per_s", "p50_ms", "p99_ms", "max_ms", "cpu_us")
_DISTRIBUTIONS = (
    *("lenet-serve", "fastapi", "uvicorn", "uvloop", "httptools"),
    *("onnxruntime", "orjson", "pydantic"),
)
_BODIES_BYTES = 16 * 1024 * 1024  # wrk keeps all bodies in memory


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request, and the number of connections that send it."""

    form: Format
    images: int
    connections: int

    def __str__(self) -> str:
        many = "s" if self.connections > 1 else ""
        return f"{self.images} x {self.form}, {self.connections} connection{many}"


def case(text: str) -> Case:
    """A case from its notation on the command line, FORMAT:IMAGES:CONNECTIONS."""
    form, _, numbers = text.partition(":")
    images, _, connections = numbers.partition(":")
    for known in ("json", "raw"):
        if form == known:
            return Case(known, positive_int(images), positive_int(connections))
    raise argparse.ArgumentTypeError(f"{text!r}, expected json:IMAGES:CONNECTIONS or raw:...")


CASES = (
    Case("json", 1, 1),
    Case("raw", 1, 1),
    Case("json", 1, 32),
    Case("raw", 1, 32),
    Case("json", 64, 4),
)

AGAINST_CASES = tuple(
    Case(form, images, connections)
    for images in (1, 16)
    for connections in (1, 32)
    for form in ("json", "raw")
)


@dataclass(frozen=True, slots=True)
class Round:
    """One run of wrk; `cpu_us` is the server's CPU time per request."""

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
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.against is not None and not (options.against / "service").is_dir():
        parser.error(f"--against: {options.against} is not a checkout of this repository")
    try:
        wrk = find_wrk()
        path = (options.weights or latest_weights()).resolve()
        weights = WeightFile.read(path)
        digits = read_digits(options.data, weights)
    except (WrkFailed, LeNetError, TrainerError, FileNotFoundError) as exc:
        print(f"http: {exc}", file=sys.stderr)
        return 2
    rounds: list[Round] = []
    try:
        with _servers(path, weights.model.name, options) as servers:
            for one in options.cases or (CASES if options.against is None else AGAINST_CASES):
                print(f"{one} ...", file=sys.stderr, flush=True)
                requests = prepare_requests(digits, weights, one.form, one.images)
                rounds += _measure(wrk, one, requests, servers, options)
    except (WrkFailed, ServerFailed) as exc:
        print(f"http: {exc}", file=sys.stderr)
        return 1
    found = summarise(rounds)
    print(table(found))
    print(
        f"\nMedians of {options.rounds} rounds of {options.duration} s (min..max). CPU us: the "
        "server's CPU time per request.\nours/other: medians of the ratios of each pair of rounds. "
        "wrk ran on the same cores: only the\nratios mean something."
    )
    if options.json is not None:
        document = {
            **provenance(_DISTRIBUTIONS),
            "commit": commit(),
            **({} if options.against is None else {"against": commit(options.against)}),
            "arguments": arguments_of(options),
            "cases": found,
            "rounds": [asdict(one) for one in rounds],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


@contextlib.contextmanager
def _servers(weights: Path, model: str, options: argparse.Namespace) -> Iterator[list[Server]]:
    """Our service, and the one that it is compared with."""
    flags = ["--device=cpu", *shlex.split(options.service_args)]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(lenet_serve(weights, model, flags))
        if options.against is not None:
            other = stack.enter_context(
                lenet_serve(
                    weights, model, flags, name="against", checkout=options.against.resolve()
                )
            )
        else:
            port = free_port()
            command = ["benchmarks.baselines.plain_fastapi", f"--port={port}"]
            command += [f"--weights={weights}"]
            paths = {"json": "/predict", "raw": "/predict/raw"}
            other = stack.enter_context(running("plain FastAPI", command, port, paths))
        yield [ours, other]


def _measure(
    wrk: str,
    case: Case,
    requests: Sequence[PreparedRequest],
    servers: Sequence[Server],
    options: argparse.Namespace,
) -> Iterator[Round]:
    """The rounds of one case, the servers in turns, after a warm-up round of each."""
    bodies = [request.body for request in requests]
    bodies = bodies[: max(1, _BODIES_BYTES // len(bodies[0]))]
    with tempfile.TemporaryDirectory() as folder:
        pairs = []
        for index, server in enumerate(servers):
            path, kind = server.paths[case.form], requests[0].content_type
            check_answer(server, path, requests[0])
            place = Path(folder) / str(index)
            place.mkdir()
            pairs.append((server, write_script(place, path, kind, bodies)))
        for turn in range(options.rounds + 1):
            for server, script in pairs:
                duration_s = options.duration if turn else _WARM_UP_S
                before_s = server.cpu_s()
                result = run_wrk(wrk, script, server.url, case.connections, duration_s)
                after_s = server.cpu_s()
                if not turn:
                    continue
                used_s = None if before_s is None or after_s is None else after_s - before_s
                yield Round(
                    case=str(case),
                    server=server.name,
                    requests_per_s=result.requests_per_s,
                    images_per_s=result.requests_per_s * case.images,
                    p50_ms=result.p50_ms,
                    p99_ms=result.p99_ms,
                    max_ms=result.max_ms,
                    cpu_us=None if used_s is None else used_s / result.requests * 1e6,
                )
            pairs.reverse()  # a drift within a pair of rounds favours each alike


def summarise(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Median, least and most of each number, by case and server, ours first.

    `ratio`: our requests per second over the other's, the median of pairs of rounds; `cpu_ratio`:
    the same of CPU time per request. `ratio_spread`, `cpu_ratio_spread`: [minimum, maximum].
    """
    cases: list[dict[str, Any]] = []
    servers = sorted({one.server for one in rounds}, key=OURS.__ne__)
    for case in dict.fromkeys(one.case for one in rounds):
        runs = {
            server: [one for one in rounds if (one.case, one.server) == (case, server)]
            for server in servers
        }
        pairs = list(zip(*runs.values(), strict=True))
        cases.append(
            {
                "case": case,
                **{
                    server: {number: _spread(some, number) for number in _NUMBERS}
                    for server, some in runs.items()
                },
                **_ratio("ratio", [(a.requests_per_s, b.requests_per_s) for a, b in pairs]),
                **_ratio("cpu_ratio", [(a.cpu_us, b.cpu_us) for a, b in pairs]),
            }
        )
    return cases


def _ratio(name: str, pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any]:
    ratios = [ours / other for ours, other in pairs if ours is not None and other]
    if not ratios:
        return {name: None, f"{name}_spread": None}
    return {name: statistics.median(ratios), f"{name}_spread": [min(ratios), max(ratios)]}


def _spread(rounds: Sequence[Round], number: str) -> dict[str, float] | None:
    values = [getattr(one, number) for one in rounds]
    if None in values:
        return None
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def table(cases: Sequence[dict[str, Any]]) -> str:
    """A line per case and server, and one with the ratios."""
    lines = [
        f"{'':<14}{'images/s':>9} {'(min..max)':<17}"
        f"{'p50 ms':>8}{'p99 ms':>8}{'max ms':>8}{'CPU us':>8}"
    ]
    for case in cases:
        lines.append(case["case"])
        for server in (name for name in case if isinstance(case[name], dict)):
            numbers = case[server]
            rate, cpu = numbers["images_per_s"], numbers["cpu_us"]
            spread = f"({rate['least']:,.0f}..{rate['most']:,.0f})"
            lines.append(
                f"  {server:<14}{rate['median']:>9,.0f} {spread:<17}"
                f"{numbers['p50_ms']['median']:>6.2f}{numbers['p99_ms']['median']:>8.2f}"
                f"{numbers['max_ms']['median']:>8.2f}"
                f"{'-' if cpu is None else format(cpu['median'], ',.0f'):>8}"
            )
        ratios = []
        for name, key in (("requests/s", "ratio"), ("CPU", "cpu_ratio")):
            if case[key] is not None:
                low, high = case[f"{key}_spread"]
                ratios.append(f"{name} {case[key]:.3f} ({low:.2f}..{high:.2f})")
        lines.append(f"  ours/other: {', '.join(ratios)}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http",
        description="Compare our service with a plain FastAPI + ONNX Runtime app, loaded by wrk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--against", type=Path, metavar="DIR", help="compare with the checkout in DIR instead")
    add(
        "--cases",
        nargs="+",
        type=case,
        metavar="FORMAT:IMAGES:CONNECTIONS",
        help="requests to measure, such as json:1:32 raw:16:1, instead of the usual ones",
    )
    add("--rounds", default=3, type=positive_int, help="per server and case")
    add("--duration", default=5, type=positive_int, help="seconds of a round")
    add("--data", type=Path, help="folder of MNIST, instead of the weight file's ten images")
    add("--weights", type=Path, help="weight file, instead of the latest in weights/lenet")
    add("--service-args", default="", help="more arguments for our services, as one string")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
