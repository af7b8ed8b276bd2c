"""`python -m benchmarks.http`: our HTTP service beside other Python model servers.

The others are mosec, a plain FastAPI + ONNX Runtime application, LitServe, MLServer and our engine
behind Ray Serve where they are installed, and a bare ASGI application on uvicorn that answers a
constant. With --against DIR our service is compared with that of another checkout instead, for
example a `git worktree` of an older commit, and with --against-args with itself under other
arguments. All servers run at the same time on the CPU, and wrk
loads one after another in alternating rounds, so that other work on the machine affects all. wrk
uses the same cores: the ratios mean something, the absolute rates are low. Exit code: 0, 1 when an
answer failed, 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines.model import WEIGHTS_VARIABLE
from benchmarks.burst import BurstFailed, first_answers
from benchmarks.command import (
    arguments_of,
    commit,
    latest_weights,
    missing_library,
    positive_int,
    provenance,
    save_picture,
)
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
from lenet.files import write_atomically
from lenet.weightfile import WeightFile
from trainer.errors import TrainerError

RESULTS = Path("docs/benchmarks/http.json")

_HERE = Path(__file__).parents[1]

_WARM_UP_S = 1
_BURST_CONNECTIONS = 512  # cases of so many also measure them when all are opened at once
_FIRST_ANSWERS = ("first_answer_p50_ms", "first_answer_p99_ms", "first_answer_max_ms")
_NUMBERS = ("rps", "p50_ms", "p99_ms", "cpu_us", *_FIRST_ANSWERS)
_BODIES_BYTES = 16 * 1024 * 1024  # wrk keeps all bodies in memory
_DISTRIBUTIONS = (
    *("lenet-serve", "fastapi", "uvicorn", "uvloop", "httptools", "h11", "onnxruntime", "orjson"),
    *("pydantic", "mosec", "litserve", "mlserver", "ray"),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of `benchmarks.baselines`; it is measured where `library` is installed."""

    module: str
    library: str
    arguments: tuple[str, ...] = ()
    raw: str = "/predict/raw"
    ready: str = "/readyz"


CONSTANT = "floor"
"""The peer that answers a constant: its answers are not checked."""

PEERS = {
    "mosec": Peer("plain_mosec", "mosec", ready="/"),
    "fastapi_1": Peer("plain_fastapi", "fastapi"),
    "fastapi_2": Peer("plain_fastapi", "fastapi", ("--workers=2",)),
    CONSTANT: Peer("bare_uvicorn", "uvicorn"),
    "litserve": Peer("plain_litserve", "litserve"),
    "mlserver": Peer("plain_mlserver", "mlserver", ready="/v2/health/ready"),
    "ray": Peer("ray_serve", "ray", raw="/predict", ready="/predict"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request, and the number of connections that send it."""

    form: Format
    images: int
    connections: int

    def __str__(self) -> str:
        images = f"{self.images}x" if self.images > 1 else ""
        return f"{self.form}_{images}{self.connections}"


def case(text: str) -> Case:
    """A case from its name: json_32 is one image a request, raw_64x4 64, on 4 connections."""
    found = re.fullmatch(r"(json|raw)_(?:([1-9]\d*)x)?([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected json_CONNECTIONS or json_IMAGESxCONNECTIONS, or the same with raw"
        )
    form: Format = "json" if found[1] == "json" else "raw"
    return Case(form, int(found[2] or 1), int(found[3]))


CASES = (
    *(Case(form, 1, connections) for connections in (1, 32) for form in ("json", "raw")),
    Case("json", 64, 4),
    Case("raw", 64, 4),
    Case("json", 1, 512),
)
AGAINST_CASES = tuple(
    Case(form, images, connections)
    for images in (1, 16)
    for connections in (1, 32)
    for form in ("json", "raw")
)


@dataclass(frozen=True, slots=True)
class Round:
    """One run of wrk; `cpu_us` is the server's CPU time per request, None without /proc.

    `first_answer_`: see `benchmarks.burst`; None in cases of few connections.
    """

    case: str
    server: str
    rps: float
    p50_ms: float
    p99_ms: float
    cpu_us: float | None
    first_answer_p50_ms: float | None = None
    first_answer_p99_ms: float | None = None
    first_answer_max_ms: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.against is None and options.against_args is not None:
        options.against = _HERE
    against = options.against
    if against is not None and not (against / "service").is_dir():
        parser.error(f"--against: {against} is not a checkout of this repository")
    results = options.json or (RESULTS if against is None else None)
    if results is not None and not results.parent.is_dir():
        parser.error(f"--json: there is no folder {results.parent}")
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
            for one in options.cases or (CASES if against is None else AGAINST_CASES):
                print(f"{one} ...", file=sys.stderr, flush=True)
                requests = prepare_requests(digits, weights, one.form, one.images)
                rounds += _measure(wrk, one, requests, servers, options)
    except (WrkFailed, ServerFailed, BurstFailed) as exc:
        print(f"http: {exc}", file=sys.stderr)
        return 1
    document = {
        **provenance(_DISTRIBUTIONS),
        "commit": commit(),
        "arguments": arguments_of(options),
        "rounds": options.rounds,
        "cases": summarise(rounds),
    }
    if against is not None:
        document |= {"against": commit(against), "ratios": ratios(rounds)}
    print(table(document))
    if results is not None:
        write_atomically(results, (json.dumps(document, indent=1) + "\n").encode())
        if against is None:
            draw(document, results.with_suffix(".png"))
    return 0


@contextlib.contextmanager
def _servers(weights: Path, model: str, options: argparse.Namespace) -> Iterator[list[Server]]:
    """Our service, and the servers that it is compared with."""
    flags = ["--device=cpu", *shlex.split(options.service_args)]
    with contextlib.ExitStack() as stack:
        if options.against is not None:
            others = flags
            if options.against_args is not None:
                others = ["--device=cpu", *shlex.split(options.against_args)]
            pair = ("ours", flags, _HERE), ("against", others, options.against.resolve())
            yield [
                stack.enter_context(lenet_serve(weights, model, some, name=name, checkout=folder))
                for name, some, folder in pair
            ]
            return
        servers = [
            stack.enter_context(
                lenet_serve(weights, model, [*flags, f"--workers={n}"], name=f"ours_{n}")
            )
            for n in (1, 2)
        ]
        for name, peer in PEERS.items():
            if importlib.util.find_spec(peer.library) is None:
                print(f"{name} is not measured: it is not installed", file=sys.stderr)
                continue
            port = free_port()
            command = [f"benchmarks.baselines.{peer.module}", f"--port={port}", *peer.arguments]
            paths = {"json": "/predict", "raw": peer.raw}
            # ONNX Runtime runs without telemetry here, as in our CPU backend.
            environment = {WEIGHTS_VARIABLE: str(weights), "ORT_DISABLE_TELEMETRY": "1"}
            server = running(name, command, port, paths, environment, ready=peer.ready)
            servers.append(stack.enter_context(server))
        yield servers


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
        for server in servers:
            path, kind = server.paths[case.form], requests[0].content_type
            if server.name != CONSTANT:
                check_answer(server, path, requests[0])
            place = Path(folder) / server.name
            place.mkdir()
            pairs.append((server, write_script(place, path, kind, bodies)))
        for turn in range(options.rounds + 1):
            for server, script in pairs:
                duration_s = options.duration if turn else _WARM_UP_S
                path = server.paths[case.form]
                first: dict[str, float] = {}
                if case.connections >= _BURST_CONNECTIONS:
                    found = first_answers(server.url, path, kind, bodies, case.connections)
                    values = found.p50_ms, found.p99_ms, found.max_ms
                    first = dict(zip(_FIRST_ANSWERS, values, strict=True))
                before_s = server.cpu_s()
                try:
                    result = run_wrk(wrk, script, server.url, case.connections, duration_s)
                except WrkFailed as exc:
                    raise WrkFailed(f"{case}, {server.name}: {exc}") from exc
                after_s = server.cpu_s()
                if not turn:
                    continue
                used_s = None if before_s is None or after_s is None else after_s - before_s
                yield Round(
                    case=str(case),
                    server=server.name,
                    rps=result.requests_per_s,
                    p50_ms=result.p50_ms,
                    p99_ms=result.p99_ms,
                    cpu_us=None if used_s is None else used_s / result.requests * 1e6,
                    **first,
                )
            pairs.reverse()  # a drift during a turn favours none


def _grouped(rounds: Sequence[Round]) -> dict[str, dict[str, list[Round]]]:
    """The rounds of each server of each case, ours first."""
    order = ["ours", "against", "ours_1", "ours_2", *PEERS]
    found: dict[str, dict[str, list[Round]]] = {}
    for one in sorted(rounds, key=lambda one: order.index(one.server)):
        found.setdefault(one.case, {}).setdefault(one.server, []).append(one)
    return {name: found[name] for name in dict.fromkeys(one.case for one in rounds)}


def summarise(rounds: Sequence[Round]) -> dict[str, dict[str, dict[str, Any]]]:
    """The median of each number by case and server, [minimum, maximum] as NUMBER_spread.

    A number is missing where it was not measured.
    """
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for name, servers in _grouped(rounds).items():
        cases[name] = {}
        for server, some in servers.items():
            found = cases[name][server] = {}
            for number in _NUMBERS:
                values = [getattr(one, number) for one in some]
                if None not in values:
                    found[number] = round(statistics.median(values), 3)
                    found[f"{number}_spread"] = [round(min(values), 3), round(max(values), 3)]
    return cases


def ratios(rounds: Sequence[Round]) -> dict[str, dict[str, list[float]]]:
    """The [median, minimum, maximum] by case of ours / against, of each pair of rounds.

    `rps`: requests per second. `cpu_us`: CPU time per request, missing without /proc.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for name, servers in _grouped(rounds).items():
        found[name] = {}
        for number in ("rps", "cpu_us"):
            pairs = [
                (getattr(ours, number), getattr(other, number))
                for ours, other in zip(servers["ours"], servers["against"], strict=True)
            ]
            values = [ours / other for ours, other in pairs if ours is not None and other]
            if values:
                found[name][number] = [statistics.median(values), min(values), max(values)]
    return found


def table(document: dict[str, Any]) -> str:
    """A line per case and server, and with --against one with the ratios."""
    lines = [
        f"{'':<12}{'requests/s':>10} {'(min..max)':<17}{'p50 ms':>8}{'p99 ms':>8}{'CPU us':>8}"
    ]
    for name, servers in document["cases"].items():
        lines.append(name)
        for server, found in servers.items():
            low, high = found["rps_spread"]
            cpu = format(found["cpu_us"], ",.0f") if "cpu_us" in found else "-"
            lines.append(
                f"  {server:<10}{found['rps']:>10,.0f} {f'({low:,.0f}..{high:,.0f})':<17}"
                f"{found['p50_ms']:>8.2f}{found['p99_ms']:>8.2f}{cpu:>8}"
            )
            if "first_answer_max_ms" in found:
                p50, p99, longest = (found[number] for number in _FIRST_ANSWERS)
                highest = found["first_answer_max_ms_spread"][1]
                lines.append(
                    f"    first answers, all connections opened at once: p50 {p50:.0f} ms, "
                    f"p99 {p99:.0f} ms, max {longest:.0f} ms (at most {highest:.0f})"
                )
        if "ratios" in document:
            pairs = ", ".join(
                f"{'requests/s' if number == 'rps' else 'CPU'} {median:.3f} ({low:.2f}..{high:.2f})"
                for number, (median, low, high) in document["ratios"][name].items()
            )
            lines.append(f"  ours/against: {pairs}")
    lines += [
        "",
        f"Medians of {document['rounds']} rounds (min..max). CPU us: the server's CPU time per",
        "request. wrk ran on the same cores: only the ratios mean something.",
    ]
    return "\n".join(lines)


# Colours that colour-blind readers can tell apart. Source: Okabe & Ito 2008.
_COLORS = {"ours": "#0072B2", "mosec": "#D55E00", "fastapi": "#E69F00"}
_OTHER_COLOR = "#999999"


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the throughput of each server, a panel per case; without matplotlib say so."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        print(f"no picture: {missing_library(exc)}", file=sys.stderr)
        return
    cases = document["cases"]
    columns = min(4, len(cases))
    rows = -(-len(cases) // columns)
    figure = Figure(figsize=(1 + 3.4 * columns, 0.6 + 2.4 * rows), layout="constrained", dpi=120)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, (name, servers) in zip(panels, cases.items(), strict=False):
        _bars(panel, {key: found for key, found in servers.items() if key != CONSTANT})
        title = f"{_title(case(name))} (floor: {servers[CONSTANT]['rps']:,.0f})"
        panel.set_title(title, fontsize=8)
    for panel in panels[len(cases) :]:
        panel.set_axis_off()
    figure.suptitle(
        "Requests per second, median and spread; in parentheses p50 / p99 of the latency in ms.\n"
        "Floor: a bare ASGI application on uvicorn that answers a constant.",
        fontsize=9,
    )
    save_picture(figure, path)


def _bars(panel: Any, servers: dict[str, dict[str, Any]]) -> None:
    """A bar per server, its numbers on the right of its error bar."""
    for row, (server, found) in enumerate(servers.items()):
        rate, (low, high) = found["rps"], found["rps_spread"]
        color = _COLORS.get(server.partition("_")[0], _OTHER_COLOR)
        panel.barh(row, rate, xerr=[[rate - low], [high - rate]], color=color, capsize=2)
        text = f" {rate:,.0f} ({found['p50_ms']:.3g} / {found['p99_ms']:.3g})"
        panel.text(high, row, text, va="center", fontsize=7)
    panel.set_yticks(range(len(servers)), servers)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.7 * max(found["rps_spread"][1] for found in servers.values()))
    panel.locator_params(axis="x", nbins=4)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def _title(case: Case) -> str:
    form = {"json": "JSON", "raw": "raw"}[case.form]
    images = f"{case.images} image{'s' if case.images > 1 else ''}"
    return f"{images}, {form}, {case.connections} connection{'s' if case.connections > 1 else ''}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http",
        description="Compare our service with other Python model servers on the CPU, with wrk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--against", type=Path, metavar="DIR", help="compare with the checkout in DIR instead")
    add(
        "--cases",
        nargs="+",
        type=case,
        metavar="CASE",
        help="FORMAT_CONNECTIONS or FORMAT_IMAGESxCONNECTIONS, such as json_32 raw_64x4, instead "
        "of the usual ones",
    )
    add("--rounds", default=5, type=positive_int, help="per server and case")
    add("--duration", default=5, type=positive_int, help="seconds of a round")
    add("--data", type=Path, help="folder of MNIST, instead of the weight file's ten images")
    add("--weights", type=Path, help="weight file, instead of the latest in weights/lenet")
    add("--service-args", default="", help="more arguments for our services, as one string")
    add("--against-args", help="instead of --service-args, for the service compared with")
    add(
        "--json",
        type=Path,
        help=f"file to write the results to; {RESULTS} by default, none with --against. The "
        "picture is written beside it",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
