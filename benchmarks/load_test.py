"""`make load-test`: load a running service with real digits, check every answer.

The labels are compared with those that the same weight file predicts here, on ONNX Runtime: a label
that differs is wrong, whatever the digit shows. Exit code: 0 when every target is reached (without
any: no errors) and no label is wrong, 1 otherwise, 2 when nothing was sent, 130 after Ctrl-C.

The client takes its CPU time from a service on the same machine. The report says how much, and
whether the client is the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO, get_args
from urllib.parse import urlsplit

if not __package__:
    # When the file is run by its path, Python looks in this folder first, and would import its
    # http.py instead of the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.command import (
    arguments_of,
    missing_library,
    non_negative_float,
    positive_float,
    positive_int,
    provenance,
    url,
)
from benchmarks.digits import Format, PreparedRequest, prepare_requests, read_digits
from benchmarks.load import MAX_CONNECTIONS, Load, Progress, Stage, send_from_processes
from benchmarks.load_report import (
    COLUMNS,
    Check,
    ErrorLimit,
    Summary,
    check,
    draw,
    duration_ms,
    error_limit,
    summarise_stages,
    table,
)
from benchmarks.timing import percentile
from benchmarks.wrk import WrkFailed, find_wrk, run_wrk, write_script
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile
from trainer.errors import TrainerError

FAILED = 1
NOT_STARTED = 2
INTERRUPTED = 130

_RATE = 500.0
_CONNECTIONS = 32
_DURATION_S = 30.0
_RAMP_PARTS = 10


class CannotStart(Exception):
    """No request was sent; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _complete(parser, options)
    try:
        import httpx  # noqa: F401

        if options.figure is not None:
            import matplotlib  # noqa: F401 - is missed before the test, not after it
    except ImportError as exc:
        print(f"load test: {missing_library(exc)}", file=sys.stderr)
        return NOT_STARTED
    try:
        service = find_service(options.url, options.model)
        weights = _matching_weights(options.weights, service)
        digits = read_digits(options.data, weights)
        requests = prepare_requests(digits, weights, options.format, options.images)
    except (CannotStart, LeNetError, TrainerError) as exc:
        print(f"load test: {exc}", file=sys.stderr)
        return NOT_STARTED
    grpc = options.format == "grpc"
    load = Load(
        url=options.url,
        mode=options.mode,
        stages=options.stages,
        connections=options.connections,
        arrivals=options.arrivals,
        seed=options.seed,
        warm_up_s=options.warm_up,
        timeout_ms=options.timeout_ms,
        model=service["model"] if grpc else options.model,
        grpc=options.grpc if grpc else None,
    )
    if options.wrk is not None:
        return _compare_with_wrk(load, requests, options.processes, options.wrk)
    progress = ProgressLine(load, options.processes, sys.stderr)
    results = send_from_processes(load, requests, options.processes, progress.add)
    progress.clear()
    total, stages = summarise_stages(load, results)
    limits_ms = {name: value for name in COLUMNS if (value := vars(options)[name]) is not None}
    checks = check(total, limits_ms, options.errors)
    title = _title(options, service, len(digits.images), digits.source)
    print(table(total, stages, title))
    for one in checks:
        print(f"{'met   ' if one.met else 'MISSED'}  {one.text}")
    if options.json is not None:
        write_json(options.json, options, service, total, stages, checks)
    if options.figure is not None:
        draw(stages, options.mode, title, options.figure)
    if total.interrupted:
        return INTERRUPTED
    return 0 if all(one.met for one in checks) else FAILED


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in what depends on other options, and report contradictions."""
    if options.stages and (options.rate or options.duration):
        parser.error("--stages: has rates and durations of its own: leave out --rate, --duration")
    if options.mode is None:
        options.mode = "open" if options.rate or options.stages else "closed"
    if options.mode == "closed":
        if options.rate:
            parser.error("--rate: only an open loop has one: leave out --mode closed")
        if options.stages:
            if options.connections:
                parser.error("--connections: the --stages of a closed loop say how many")
            options.connections = math.ceil(max(max(s.start, s.end) for s in options.stages))
    options.connections = options.connections or _CONNECTIONS
    if not options.stages:
        options.rate = options.rate or _RATE
        level = options.rate if options.mode == "open" else options.connections
        options.stages = [Stage(level, level, options.duration or _DURATION_S)]
    else:
        options.stages = [part for stage in options.stages for part in _parts(stage)]
    if options.figure is not None and len(options.stages) == 1:
        parser.error("--figure: needs several loads: use --stages")
    if options.wrk is not None and (options.mode, len(options.stages)) != ("closed", 1):
        parser.error("--wrk: wrk sends a closed loop of one stage: leave out --rate and --stages")
    if options.wrk is not None and options.format == "grpc":
        parser.error("--wrk: wrk sends no gRPC: choose another --format")
    host = urlsplit(options.url).hostname or ""
    options.grpc = options.grpc or f"{host}:8001"
    options.processes = options.processes or min(spare_cores(host), options.connections)
    each = options.connections / options.processes
    if not 1 <= each <= MAX_CONNECTIONS:
        parser.error(f"--connections: {each:g} per process, expected 1 to {MAX_CONNECTIONS}")


def spare_cores(host: str) -> int:
    """The cores that a client here may use: all but one for a service on the same machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, cores - (host in ("localhost", "127.0.0.1", "::1")))


def stage(text: str) -> Stage:
    """A stage from its notation on the command line, LOAD:SECONDS or FROM-TO:SECONDS."""
    levels, _, seconds = text.partition(":")
    start, _, end = levels.partition("-")
    try:
        return Stage(positive_float(start), positive_float(end or start), positive_float(seconds))
    except (ValueError, argparse.ArgumentTypeError) as exc:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected LOAD:SECONDS or FROM-TO:SECONDS, as in 100:5 100-1000:20"
        ) from exc


def _parts(stage: Stage) -> Iterator[Stage]:
    """The parts in which a stage is reported: itself, or ten of a ramp."""
    count = 1 if stage.start == stage.end else _RAMP_PARTS
    part_s = stage.duration_s / count
    for index in range(count):
        yield Stage(stage.at(index * part_s), stage.at((index + 1) * part_s), part_s)


class ProgressLine:
    """One line on a terminal that is overwritten twice a second; nothing on other files."""

    def __init__(self, load: Load, processes: int, file: TextIO) -> None:
        self._file, self._shown = file, file.isatty()
        self._processes, self._reports = processes, 0
        self._warm_up_s = load.warm_up_s
        self._total_s = sum(stage.duration_s for stage in load.stages)
        self._from_s = 0.0
        self._latencies_s = array("d")
        self._errors = 0

    def add(self, progress: Progress) -> None:
        """Count what a process received; shown when all have reported, as of the last time."""
        if not self._shown:
            return
        self._latencies_s.extend(progress.latencies_s)
        self._errors += progress.errors
        self._reports += 1
        passed_s = progress.at_s - self._from_s
        if self._reports < self._processes or passed_s < 0.25:  # short at the end of a stage
            return
        self._reports = 0
        at_s = progress.at_s - self._warm_up_s
        where = "warm-up" if at_s <= 0 else f"{at_s:.0f} of {self._total_s:g} s"
        text = f"{where}: {len(self._latencies_s) / passed_s:,.0f} requests/s"
        if self._latencies_s:
            p50, p99 = (1e3 * percentile(self._latencies_s, p) for p in (50, 99))
            text += f", p50 {p50:,.2f} ms, p99 {p99:,.2f} ms"
        self._write(f"{text}; {self._errors:,} errors")
        self._from_s, self._latencies_s = progress.at_s, array("d")

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=self._file, flush=True)


def find_service(url: str, model: str | None) -> dict[str, Any]:
    """The model that the service at `url` uses: name, version, sha256, device.

    Raises:
        CannotStart: nothing answers there, it is not ready, or it does not serve `model`.
    """
    import httpx

    try:
        with httpx.Client(base_url=url, timeout=10, trust_env=False) as client:
            ready = client.get("/readyz").status_code
            info = client.get("/info").raise_for_status().json()
        models = {one["name"]: one for one in info["models"]}
        wanted = model or info["default_model"]
        if ready != 200:
            raise CannotStart(f"{url} is not ready (/readyz answers {ready}): try again later")
        if wanted not in models:
            raise CannotStart(f"{url} serves {', '.join(models)}, not {wanted!r}: change --model")
        about = {key: models[wanted][key] for key in ("version", "sha256", "device")}
        return {"model": wanted, **about}
    except httpx.ConnectError as exc:
        raise CannotStart(
            f"nothing answers at {url} ({exc}): start the service with `make serve` in another "
            "terminal, or name its address with --url"
        ) from exc
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as exc:
        raise CannotStart(
            f"the server at {url} is not lenet-serve ({type(exc).__name__}: {exc}): name the "
            "service's address with --url"
        ) from exc


def _matching_weights(path: Path | None, service: dict[str, Any]) -> WeightFile:
    if path is None:
        path = Path("weights") / service["model"] / f"{service['version']}.safetensors"
    weights = WeightFile.read(path)
    if weights.digest() != service["sha256"]:
        raise CannotStart(
            f"{path} has sha256 {weights.digest()[:12]}, but version {service['version']} of the "
            f"service's {service['model']} has {service['sha256'][:12]}: name the service's file "
            "with --weights"
        )
    return weights


def _compare_with_wrk(
    load: Load, requests: Sequence[PreparedRequest], processes: int, rounds: int
) -> int:
    """Send the same load from here and with wrk in turns, and print both; the exit code."""
    (stage,) = load.stages
    seconds = math.ceil(stage.duration_s)
    load = replace(load, stages=(replace(stage, duration_s=seconds),))
    path = f"/predict?model={load.model}" if load.model else "/predict"
    rows = []
    print(
        f"{'':<11}{'requests/s':>22}{'p50 in ms':>16}\n{'':<11}{'here':>12}{'wrk':>10}"
        f"{'here':>8}{'wrk':>8}   ratios"
    )
    try:
        wrk = find_wrk()
        with tempfile.TemporaryDirectory() as folder:
            bodies = [request.body for request in requests]
            script = write_script(Path(folder), path, requests[0].content_type, bodies)
            for number in range(rounds):
                theirs = run_wrk(wrk, script, load.url, load.connections, seconds)
                ours, _ = summarise_stages(load, send_from_processes(load, requests, processes))
                if ours.errors or ours.interrupted:
                    print(f"load test: errors {ours.errors}", file=sys.stderr)
                    return INTERRUPTED if ours.interrupted else FAILED
                pairs = (
                    (ours.requests_per_s, theirs.requests_per_s),
                    (ours.latency_ms["p50"], theirs.p50_ms),
                )
                rows.append([*pairs[0], *pairs[1], *(mine / other for mine, other in pairs)])
                print(_wrk_row(f"round {number + 1}", rows[-1]), flush=True)
    except WrkFailed as exc:
        print(f"load test: {exc}", file=sys.stderr)
        return NOT_STARTED
    print(_wrk_row("medians", [statistics.median(column) for column in zip(*rows, strict=True)]))
    return 0


def _wrk_row(name: str, row: Sequence[float]) -> str:
    rate, their_rate, p50, their_p50, *ratios = row
    return (
        f"{name:<11}{rate:>12,.0f}{their_rate:>10,.0f}{p50:>8,.2f}{their_p50:>8,.2f}   "
        f"{' '.join(f'{ratio:.2f}' for ratio in ratios)}"
    )


def write_json(
    path: Path,
    options: argparse.Namespace,
    service: dict[str, Any],
    total: Summary,
    stages: Sequence[Summary],
    checks: Sequence[Check],
) -> None:
    """Write the results with the command line, versions and machine."""
    document = {
        **provenance(["lenet-serve", "httpx", "grpcio", "numpy", "onnxruntime"]),
        "arguments": {
            **arguments_of(options),
            "stages": [asdict(stage) for stage in options.stages],
        },
        "service": service,
        "passed": all(one.met for one in checks) and not total.interrupted,
        "checks": [asdict(one) for one in checks],
        "results": asdict(total),
        "stages": [asdict(one) for one in stages],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _title(options: argparse.Namespace, service: dict[str, Any], digits: int, source: str) -> str:
    connections = f"{options.connections} connection{'s' * (options.connections > 1)}"
    seconds = sum(stage.duration_s for stage in options.stages)
    load = f"closed loop, {connections}"
    if options.mode == "open":
        rates = sorted({rate for stage in options.stages for rate in (stage.start, stage.end)})
        rate = f"{rates[0]:g}" + (f" to {rates[-1]:g}" if len(rates) > 1 else "")
        load = f"open loop, {rate} requests/s ({options.arrivals}) on up to {connections}"
    processes = f" from {options.processes} processes" if options.processes > 1 else ""
    target = options.grpc if options.format == "grpc" else options.url
    return (
        f"{target}: {service['model']} version {service['version']} on {service['device']}\n"
        f"{load}{processes}, {seconds:g} s; {options.images} x {options.format} per request\n"
        f"{digits:,} digits: {source}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="load_test.py",
        description="Load a running service with digits and check every answer.",
    )
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:8000",
        type=url,
        help="address of the service (default: %(default)s)",
    )
    add("--grpc", metavar="HOST:PORT", help="for --format grpc (default: port 8001 of --url)")
    add(
        "--format",
        default="json",
        choices=get_args(Format),
        help="of the request: a body for POST /predict, or a gRPC call (default: %(default)s)",
    )
    add("--images", default=1, type=positive_int, help="per request (default: %(default)s)")
    add("--model", help="model to request instead of the service's default")
    add("--timeout-ms", type=positive_int, help="deadline of a request, sent to the service")
    add("--data", type=Path, help="folder of MNIST, instead of the weight file's ten images")
    add("--weights", type=Path, help="the served file, if it is not in weights/")

    load = parser.add_argument_group("load")
    add = load.add_argument
    add(
        "--mode",
        choices=("closed", "open"),
        help="closed: each connection sends its next request after the previous answer; open: "
        "requests are sent at --rate, however fast the service is, and latency counts from the "
        "intended time (default: open with --rate or --stages, else closed)",
    )
    add(
        "--connections",
        type=positive_int,
        help=f"maximum number at a time (default: {_CONNECTIONS})",
    )
    add(
        "--rate",
        type=positive_float,
        help=f"requests per second of an open loop (default: {_RATE:g})",
    )
    add(
        "--arrivals",
        default="poisson",
        choices=("poisson", "constant"),
        help="of an open loop: at random or evenly spaced times (default: %(default)s)",
    )
    add("--duration", type=positive_float, help=f"seconds (default: {_DURATION_S:g})")
    add(
        "--stages",
        nargs="+",
        type=stage,
        metavar="LOAD:SECONDS",
        help="instead of --rate and --duration: loads in sequence, each reported by itself. "
        "FROM-TO:SECONDS is a ramp, reported in ten parts. LOAD is requests per second, or "
        "connections with --mode closed. Example: 100:5 100-1000:20",
    )
    add(
        "--warm-up",
        default=2.0,
        type=non_negative_float,
        metavar="SECONDS",
        help="of load before the test, not reported (default: %(default)g)",
    )
    add(
        "--processes",
        type=positive_int,
        help="that send the load (default: one for each core, except one core for a service on "
        "this machine)",
    )
    add("--seed", default=1, type=int, help="of random times (default: %(default)s)")

    targets = parser.add_argument_group(
        "targets", "for all stages together; a missed one ends with exit code 1"
    )
    add = targets.add_argument
    for name in COLUMNS:
        add(
            f"--{name}",
            dest=name,
            type=duration_ms,
            metavar="TIME",
            help=f"most that the {name} latency may be, such as 5ms",
        )
    add(
        "--errors",
        default=ErrorLimit(0, percent=False),
        type=error_limit,
        metavar="N",
        help="most requests that may fail, as a number or a share such as 0.1%% (default: 0); "
        "wrong labels always fail the test",
    )

    report = parser.add_argument_group("report")
    report.add_argument(
        "--wrk",
        type=positive_int,
        metavar="ROUNDS",
        help="instead of a report, send the load from here and with wrk in turns and compare "
        "(a closed loop over HTTP)",
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    report.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw latency over load, as PNG, SVG or PDF"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
