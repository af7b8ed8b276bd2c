"""`make load-test`: load POST /predict of a running service with real digits, check every answer.

The labels are compared with those that the same weight file predicts here, on ONNX Runtime: a label
that differs is wrong, whatever the digit shows. Exit code: 0 without errors and wrong labels,
1 with any, 2 when nothing was sent, 130 after Ctrl-C.

A process sends at most 2,000 to 3,000 requests per second (about 370 us of CPU time each; EPYC,
2026-11-20), and takes this CPU time from a service on the same machine. To get closer to the
service's limit, use --processes, more --images per request, or `python -m benchmarks.http`, which
uses wrk.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if not __package__:
    # When the file is run by its path, Python looks in this folder first, and would import its
    # http.py instead of the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.command import (
    arguments_of,
    missing_library,
    positive_float,
    positive_int,
    provenance,
    url,
)
from benchmarks.digits import Format, prepare_requests, read_digits
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile
from trainer.errors import TrainerError

if TYPE_CHECKING:
    from benchmarks.load import Summary

NOT_STARTED = 2
INTERRUPTED = 130

_LATE_MS = 10.0
"""An open loop that sends so late measures itself."""

_BUSY = 0.9
"""A client process that uses or waits for a core so much of the time limits the rate itself."""


class CannotStart(Exception):
    """No request was sent; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        from benchmarks.load import MAX_CONNECTIONS, Load, summarise
        from benchmarks.load_processes import send_from_processes
    except ImportError as exc:
        print(f"load test: {missing_library(exc)}", file=sys.stderr)
        return NOT_STARTED
    each = options.connections / options.processes
    if not 1 <= each <= MAX_CONNECTIONS:
        parser.error(f"--connections: {each:g} per process, expected 1 to {MAX_CONNECTIONS}")
    try:
        service = find_service(options.url, options.model)
        weights = _matching_weights(options.weights, service)
        digits = read_digits(options.data, weights)
        requests = prepare_requests(digits, weights, options.format, options.images)
    except (CannotStart, LeNetError, TrainerError) as exc:
        print(f"load test: {exc}", file=sys.stderr)
        return NOT_STARTED
    load = Load(
        url=options.url,
        mode=options.mode,
        connections=options.connections,
        rate=options.rate,
        duration_s=options.duration,
        seed=options.seed,
        timeout_ms=options.timeout_ms,
        model=options.model,
    )
    summary = summarise(send_from_processes(load, requests, options.processes))
    print(table(summary, _title(options, service, len(digits.images), digits.source)))
    if options.json is not None:
        write_json(options.json, options, service, summary)
    if summary.interrupted:
        return INTERRUPTED
    return 0 if summary.passed else 1


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


def write_json(
    path: Path, options: argparse.Namespace, service: dict[str, Any], summary: Summary
) -> None:
    """Write the results with the command line, versions and machine."""
    document = {
        **provenance(["lenet-serve", "httpx", "numpy", "onnxruntime"]),
        "arguments": arguments_of(options),
        "service": service,
        "results": summary.as_dict(),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _title(options: argparse.Namespace, service: dict[str, Any], digits: int, source: str) -> str:
    loop = f"{options.connections} connections"
    if options.mode == "open":
        loop = f"{options.rate:g} requests/s on up to {loop}"
    processes = f" from {options.processes} processes" if options.processes > 1 else ""
    return (
        f"{options.url}: {service['model']} version {service['version']} on {service['device']}\n"
        f"{options.mode} loop, {loop}{processes}, {options.duration:g} s; "
        f"{options.images} x {options.format} per request\n"
        f"{digits:,} digits: {source}"
    )


def table(summary: Summary, title: str) -> str:
    """One screen of text under `title`."""
    accuracy = "-" if summary.accuracy is None else f"{summary.accuracy:.3%}"
    left = [
        f"requests      {summary.requests:>11,}",
        f"errors        {sum(summary.errors.values()):>11,}",
        f"requests/s    {summary.requests_per_s:>11,.1f}",
        f"images/s      {summary.images_per_s:>11,.1f}",
        f"wrong labels  {summary.wrong_labels:>11,}",
        f"accuracy      {accuracy:>11}",
    ]
    latency = summary.latency_ms or dict.fromkeys(["no good answer"], 0.0)
    right = [f"{name:<6}{value:>10,.2f}" for name, value in latency.items()]
    lines = [title, "", f"{'':<34}latency of good answers in ms"]
    for index in range(max(len(left), len(right))):
        cells = [column[index] if index < len(column) else "" for column in (left, right)]
        lines.append(f"{cells[0]:<34}{cells[1]}".rstrip())
    lines.append("")
    lines.append(
        f"{summary.mistakes:,} of {summary.images:,} predictions differ from the true labels; "
        f"of the model's own predictions {summary.own_mistakes:,} do."
    )
    if summary.server_ms:
        stages = ", ".join(f"{name} {value:.3f}" for name, value in summary.server_ms.items())
        lines.append(f"Server-Timing, medians in ms: {stages}")
    if summary.sent_late_ms:
        late = ", ".join(f"{name} {summary.sent_late_ms[name]:.2f}" for name in ("p50", "p99"))
        lines.append(f"Sent after the due time, in ms: {late}")
        if summary.sent_late_ms["p99"] > _LATE_MS:
            lines.append(
                "The client sent too late, which adds to the latencies: lower --rate or raise "
                "--processes."
            )
    lines.append(
        f"The client was busy {summary.client_busy:.0%} of a core, and waited for a free core "
        f"{summary.client_starved:.0%} of the time."
    )
    if summary.client_busy + summary.client_starved >= _BUSY:
        lines.append(
            "The client is the limit, not the service: use --processes N if cores are free, or "
            "wrk,\nwhich `python -m benchmarks.http` runs."
        )
    lines += [f"error: {count:,} x {kind}" for kind, count in summary.errors.items()]
    if summary.interrupted:
        lines.append("Interrupted: these are the results so far.")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="load_test.py",
        description="Load POST /predict of a running service and check every answer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", type=url, help="address of the service")
    add(
        "--mode",
        default="closed",
        choices=("closed", "open"),
        help="closed: each connection sends its next request after the previous answer; open: "
        "requests are sent at random times, --rate per second, however fast the service is",
    )
    add("--connections", default=32, type=positive_int, help="maximum number at a time")
    add("--rate", default=500.0, type=positive_float, help="requests per second in open mode")
    add("--duration", default=30.0, type=positive_float, help="seconds")
    add("--images", default=1, type=positive_int, help="images per request")
    add("--format", default="json", choices=get_args(Format), help="of the request body")
    add("--model", help="model to request instead of the service's default")
    add("--timeout-ms", type=positive_int, help="sent as X-Request-Timeout-Ms")
    add("--data", type=Path, help="folder of MNIST, instead of the weight file's ten images")
    add("--weights", type=Path, help="the served file, if it is not in weights/")
    add("--processes", default=1, type=positive_int, help="that share connections and rate")
    add("--seed", default=1, type=int, help="of the random times in open mode")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
