"""`make load-test`: load POST /predict of a running service with real digits, check every answer.

The labels are held against what the same weight file says here, on ONNX Runtime: an answer that
differs is wrong, whatever the digit shows. Exit code: 0 when there was no error and no wrong
label, 1 when there was, 2 when nothing could be sent, 130 after Ctrl-C.

One process of httpx sends at most 2,000 to 3,000 requests a second (some 370 us of processor time
each, on an EPYC core, 2026-11-20), and on the service's own machine takes that time from the
service. Closer to the service's limit: `--processes`, more `--images` a request, or
`python -m benchmarks.http`, which drives wrk.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

if not __package__:
    # Run by its path, Python looks for modules in this folder first, and would take its http.py
    # for the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import httpx

from benchmarks.arguments import positive_float, positive_int, url
from benchmarks.crew import send_from_processes
from benchmarks.digits import Format, prepare_requests, read_digits
from benchmarks.machine import provenance
from benchmarks.results import Summary, summarise, table
from benchmarks.traffic import MAX_CONNECTIONS, Load
from lenet.errors import LeNetError
from lenet.weightfile import WeightFile
from trainer.errors import TrainerError

NOT_STARTED = 2
INTERRUPTED = 130


class CannotStart(Exception):
    """No request was sent; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    each = options.connections / options.processes
    if not 1 <= each <= MAX_CONNECTIONS:
        parser.error(f"--connections: {each:g} a process, expected 1 to {MAX_CONNECTIONS}")
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
    """Which model answers at `url`: name, version, sha256, device.

    Raises:
        CannotStart: nothing answers there, it is not ready, or it does not serve `model`.
    """
    try:
        with httpx.Client(base_url=url, timeout=10, trust_env=False) as client:
            ready = client.get("/readyz").status_code
            info = client.get("/info").raise_for_status().json()
        models = {one["name"]: one for one in info["models"]}
        wanted = model or info["default_model"]
        if ready != 200:
            raise CannotStart(f"{url} is not ready (/readyz says {ready}): wait and try again")
        if wanted not in models:
            raise CannotStart(f"{url} serves {', '.join(models)}, not {wanted!r}: mend --model")
        told = {key: models[wanted][key] for key in ("version", "sha256", "device")}
        return {"model": wanted, **told}
    except httpx.ConnectError as exc:
        raise CannotStart(
            f"nothing answers at {url} ({exc}): start the service with `make serve` in another "
            "terminal, or name where it listens with --url"
        ) from exc
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as exc:
        raise CannotStart(
            f"what answers at {url} is no lenet-serve ({type(exc).__name__}: {exc}): name where "
            "one listens with --url"
        ) from exc


def _matching_weights(path: Path | None, service: dict[str, Any]) -> WeightFile:
    if path is None:
        path = Path("weights") / service["model"] / f"{service['version']}.safetensors"
    weights = WeightFile.read(path)
    if weights.digest() != service["sha256"]:
        raise CannotStart(
            f"{path} has sha256 {weights.digest()[:12]}, the service's model {service['model']} "
            f"version {service['version']} {service['sha256'][:12]}: name the file that is served "
            "with --weights"
        )
    return weights


def write_json(
    path: Path, options: argparse.Namespace, service: dict[str, Any], summary: Summary
) -> None:
    """Everything that was printed, and with what arguments, versions and machine."""
    arguments = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    document = {
        **provenance(["lenet-serve", "httpx", "numpy", "onnxruntime"]),
        "arguments": arguments,
        "service": service,
        "results": summary.as_dict(),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _title(options: argparse.Namespace, service: dict[str, Any], digits: int, source: str) -> str:
    loop = f"{options.connections} connections"
    if options.mode == "open":
        loop = f"{options.rate:g} requests/s on at most {loop}"
    processes = f" from {options.processes} processes" if options.processes > 1 else ""
    return (
        f"{options.url}: {service['model']} version {service['version']} on {service['device']}\n"
        f"{options.mode} loop, {loop}{processes}, {options.duration:g} s; "
        f"{options.images} x {options.format} a request\n"
        f"{digits:,} digits: {source}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="load_test.py",
        description="Load POST /predict of a running service and check every answer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", type=url, help="where the service listens")
    add("--mode", default="closed", choices=("closed", "open"), help="see benchmarks/traffic.py")
    add("--connections", default=32, type=positive_int, help="most connections at a time")
    add("--rate", default=500.0, type=positive_float, help="requests a second, open loop")
    add("--duration", default=30.0, type=positive_float, help="seconds")
    add("--images", default=1, type=positive_int, help="images a request")
    add("--format", default="json", choices=get_args(Format), help="of the body")
    add("--model", help="model to ask for; without it, the service's default one")
    add("--timeout-ms", type=positive_int, help="sent as X-Request-Timeout-Ms")
    add("--data", type=Path, help="folder of MNIST; without it, the weight file's ten images")
    add("--weights", type=Path, help="the file served; without it, looked for in weights/")
    add("--processes", default=1, type=positive_int, help="that share connections and rate")
    add("--seed", default=1, type=int, help="of the arrivals, open loop")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
