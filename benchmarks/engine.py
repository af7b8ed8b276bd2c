"""`python -m benchmarks.engine`: the serving engine on this GPU, beside PyTorch in one process.

Parts, each asked for with --only: `limits` of the machine; `buckets`, the network for each batch
size and precision, ours before and after PyTorch's; `pool`, several contexts on one GPU; `gpus`,
two contexts on each of several; `cold`, the start of the service; `figure`, a picture of what is
known. A replay reads one buffer again and again: the largest bucket's pixels are 6 MB, which lie
in the cache of a large GPU after any copy, so a pool of inputs would change nothing. Exit code: 0,
1 when PyTorch was not measured, the service did not start or there is no picture, 2 when there is
no GPU or a part failed on it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import latest_weights, positive_float, positive_int
from benchmarks.engine_figure import FigureMissing, draw
from benchmarks.engine_limits import limits
from benchmarks.engine_pool import ContextFailed, best, measure_gpus, measure_pool, open_cuda
from benchmarks.engine_report import (
    PRECISIONS,
    Document,
    gpus_line,
    head,
    limits_line,
    line,
    pool_line,
)
from benchmarks.machine import commit, provenance
from benchmarks.peers.torch_serving import Precision, measure
from benchmarks.peers.torch_step import WAYS
from benchmarks.peers.torch_training import PeerMissing
from benchmarks.stopwatch import cupy_timer, host_summary, host_us, rounds_us, summary
from lenet import reference
from lenet.backend import BatchResult
from lenet.errors import BackendUnavailable, LeNetError
from lenet.pixels import Images
from lenet.weightfile import WeightFile

ROWS = (*(1 << exponent for exponent in range(11)), 8192)
COMPILED_ROWS = (1, 8, 32, 256, 1024, 8192)
POOL_ROWS, POOL_CONTEXTS = (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4)

_CONTEXTS = 2  # the service's default
_SAMPLE = 64
_DISTRIBUTIONS = (
    *("cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cudnn-frontend", "torch", "triton"),
)


class Plan(Protocol):
    """What is timed of a bucket, and how it chose its way: microseconds of each it tried."""

    measured_us: dict[str, float]
    strategy: str

    def run(self, images: Images) -> BatchResult:
        """Copies, computes, copies back and waits."""
        ...

    def run_in_place(self, rows: int) -> BatchResult:
        """As `run`, of the images that lie in its page-locked memory."""
        ...

    def replay(self) -> None:
        """Queues the network alone, from device buffers to device buffers."""
        ...


def digits(weights: WeightFile, count: int) -> Images:
    """Golden images, each under noise of its own, uint8 (count, 28, 28)."""
    random = np.random.default_rng(1)
    chosen = random.integers(0, len(weights.golden.images), count)
    noise = random.integers(0, 64, (count, 28, 28), np.uint8)
    images: Images = np.maximum(weights.golden.images[chosen], noise)
    return images


def exact(weights: WeightFile, images: Images) -> NDArray[np.float64]:
    """Probabilities (n, classes) of the reference in float64."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    probabilities: NDArray[np.float64] = reference.softmax(
        reference.logits(weights.model, tensors, images)
    )
    return probabilities


def bucket(
    plan: Plan,
    rows: int,
    precision: Precision,
    device_us: Sequence[float],
    single_us: Sequence[float],
    error: float,
    peer: dict[str, Any],
) -> dict[str, Any]:
    """An entry for the file; `peer` is empty where PyTorch was not measured."""
    found = {"rows": rows, "precision": precision, **summary("device", device_us)}
    return {
        **found,
        **host_summary(single_us),
        "images_per_s": 1e6 * rows / found["device_us"],
        "max_error": error,
        "way": plan.strategy,
        "ways_us": dict(plan.measured_us),
        "torch": {
            **{f"{way}_us": peer.get(f"{way}_us") for way in WAYS},
            **({"details": peer} if peer else {}),
        },
    }


def ask_limits(weights: WeightFile, asked: argparse.Namespace, document: Document) -> int:
    """Of GPU 0."""
    found = limits(weights.model)
    document.keep({"limits": found})
    print(limits_line(found), flush=True)
    return 0


def ask_buckets(weights: WeightFile, asked: argparse.Namespace, document: Document) -> int:
    """Each precision and batch size; 1 if PyTorch was not measured."""
    sample = digits(weights, _SAMPLE)
    # In turns, so that every row of every bucket is compared with the reference.
    turns = np.arange(max(asked.rows)) % _SAMPLE
    images, expected = sample[turns], exact(weights, sample)[turns]
    missing: PeerMissing | None = None
    for precision in asked.precisions:
        print(head(precision), flush=True)
        with open_cuda(0, precision) as backend:
            timer = cupy_timer(backend.stream)
            for rows in asked.rows:
                plan, mine, true = backend.plan(weights, rows), images[:rows], expected[:rows]
                error = float(np.abs(plan.run(mine).probabilities - true).max())
                # What `run` copies its images to: they come from page-locked memory.
                single_us = host_us(partial(plan.run_in_place, rows))
                device_us = rounds_us(plan.replay, timer)
                ways = WAYS if rows in asked.compile_buckets else WAYS[:-1]
                peer: dict[str, Any] = {}
                try:
                    peer = measure(weights, mine, true, precision, ways, _progress)
                except PeerMissing as exc:
                    missing = exc
                device_us += rounds_us(plan.replay, timer)
                found = bucket(plan, rows, precision, device_us, single_us, error, peer)
                document.keep({"buckets": [found]})
                print(line(found), flush=True)
    if missing is not None:
        _progress(str(missing))
    return int(missing is not None)


def ask_pool(weights: WeightFile, asked: argparse.Namespace, document: Document) -> int:
    """Contexts on GPU 0."""
    pool_all = measure_pool(open_cuda, weights, POOL_ROWS, POOL_CONTEXTS, asked.duration)
    document.keep({"pool": best(pool_all, _CONTEXTS), "pool_all": pool_all})
    for found in pool_all:
        print(pool_line(found, document.content.get("limits", {})), flush=True)
    return 0


def ask_gpus(weights: WeightFile, asked: argparse.Namespace, document: Document) -> int:
    """Contexts on several GPUs, at the batch size that was the best on one."""
    rows = document.content.get("pool", {}).get("rows", POOL_ROWS[-2])
    found = measure_gpus(open_cuda, asked.weights, asked.gpus, _CONTEXTS, rows, asked.duration)
    document.keep({"gpus": found})
    for kind in ("threads", "processes"):
        print(gpus_line(found, kind), flush=True)
    return 0


def ask_cold(weights: WeightFile, asked: argparse.Namespace, document: Document) -> int:
    """The service with its own settings, started twice; 1 if it did not become ready."""
    # They need an HTTP client, which nothing else here does.
    from benchmarks.engine_cold import cold_start_s
    from benchmarks.servers import ServerFailed

    try:
        found = cold_start_s()
    except ServerFailed as exc:
        _progress(str(exc))
        return 1
    document.keep({"cold_start_s": found})
    for name, after_s in found.items():
        print(f"the service is ready after {after_s:.1f} s, {name.replace('_', ' ')}", flush=True)
    return 0


def ask_figure(weights: WeightFile, asked: argparse.Namespace, document: Document) -> int:
    """A PNG of what the document has; 1 if it cannot be drawn."""
    try:
        draw(document.content, asked.figure)
    except FigureMissing as exc:
        _progress(str(exc))
        return 1
    return 0


PARTS = {
    "limits": ask_limits,
    "buckets": ask_buckets,
    "pool": ask_pool,
    "gpus": ask_gpus,
    "cold": ask_cold,
    "figure": ask_figure,
}
"""In the order in which they run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    parts = asked.only or [
        *("limits", "buckets", "pool", "cold"),
        *(["gpus"] if asked.gpus > 1 else []),
        *(["figure"] if asked.figure else []),
    ]
    if "figure" in parts and not asked.figure:
        parser.error("--only figure needs --figure PATH")
    code = 0
    try:
        document = Document(asked.json)
        asked.weights = asked.weights or latest_weights(Path("weights") / "lenet")
        weights = WeightFile.read(asked.weights)
        if set(parts) != {"figure"}:
            document.keep(_provenance(asked))
        for part, ask in PARTS.items():
            if part in parts:
                code |= ask(weights, asked, document)
    except (ImportError, OSError, json.JSONDecodeError, LeNetError, ContextFailed) as exc:
        _progress(str(exc))
        return 2
    return code


def _provenance(asked: argparse.Namespace) -> dict[str, Any]:
    """Where and with what; a GPU for everything that was asked for is there."""
    from lenet.cuda.device import devices

    count = devices()
    if "gpus" in (asked.only or ["gpus"]) and count < asked.gpus:
        raise BackendUnavailable(f"--gpus is {asked.gpus}, and there are {count} GPUs here")
    import cupy

    return {
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        **provenance(_DISTRIBUTIONS),
        "commit": asked.commit or commit(),
        "weights": asked.weights.name,
    }


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, help="without it: limits, buckets, pool and cold")
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    add("--rows", nargs="+", type=positive_int, default=ROWS, help="batch sizes of the buckets")
    add(
        "--compile-buckets",
        nargs="*",
        type=positive_int,
        default=COMPILED_ROWS,
        help="those of --rows that torch.compile is tried with, for up to minutes each",
    )
    add("--duration", type=positive_float, default=2.0, help="seconds of a measurement of contexts")
    add("--gpus", type=positive_int, default=1, help="more than one: contexts on that many, too")
    add("--weights", type=Path, help="weight file; without it, weights/lenet's latest")
    add("--commit", help="what to note where there is no repository")
    add("--json", type=Path, help="write everything measured at once, keep what else is there")
    add("--figure", type=Path, help="PNG to draw of what --json has then")
    return parser


if __name__ == "__main__":
    sys.exit(main())
