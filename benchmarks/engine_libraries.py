"""Our kernels beside cuDNN with cuBLAS and beside PyTorch: every network, precision and bucket."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.torch_serving import Precision, measure
from benchmarks.baselines.torch_training import BaselineUnavailable
from benchmarks.command import latest_weights
from benchmarks.engine_report import Document
from benchmarks.timing import cupy_timer, rounds_us
from lenet import reference
from lenet.model import ARCHITECTURES, IDENTITY, ConvBlock, DenseBlock, Model, Pool
from lenet.pixels import Images
from lenet.weightfile import Golden, Training, WeightFile

WAYS = ("auto", "cudnn", "measured")
"""Values of --convolutions."""

PAGE_ROWS = (1, 32, 1024, 8192)
"""The batch sizes that docs/benchmarks.md shows."""

_SAMPLE = 64
_TURNS, _ROUNDS = 3, 3

_POOL = Pool("max")
_LAST = DenseBlock(10, activation=IDENTITY)
OWN_NETWORKS = (
    Model(
        "3x3-64-64",
        (
            ConvBlock(64, (3, 3), padding=(1, 1), pool=_POOL),
            ConvBlock(64, (3, 3), padding=(1, 1), pool=_POOL),
            DenseBlock(128),
            _LAST,
        ),
    ),
    Model(
        "strided",
        (
            ConvBlock(32, (3, 3), stride=(2, 2), padding=(1, 1)),
            ConvBlock(64, (3, 3), stride=(2, 2), padding=(1, 1)),
            DenseBlock(128),
            _LAST,
        ),
    ),
)
"""Networks as users may have them, besides the named ones."""


def drawn(model: Model) -> WeightFile:
    """A weight file of `model` with random tensors, scaled so that activations keep their size."""
    random = np.random.default_rng(0)
    tensors = {}
    for name, shape in model.parameters().items():
        spread = 0.1 if len(shape) == 1 else math.sqrt(2 / math.prod(shape[1:]))
        tensors[name] = (spread * random.standard_normal(shape)).astype(np.float32)
    images = random.integers(0, 256, (10, 28, 28), np.uint8)
    logits = reference.logits(model, tensors, images)
    golden = Golden(images, logits.argmax(axis=1).astype(np.uint8), logits)
    labels = tuple(map(str, range(model.classes)))
    return WeightFile(model, tensors, golden, Training("", 0, "drawn at random", 0, None, labels))


def networks() -> Iterator[WeightFile]:
    """The latest committed file of each named network, then the networks of our own."""
    for name in ARCHITECTURES:
        yield WeightFile.read(latest_weights(Path("weights") / name))
    yield from map(drawn, OWN_NETWORKS)


def run_libraries(weights: WeightFile, options: argparse.Namespace, document: Document) -> int:
    """Measure every network; 1 if PyTorch was not measured. `weights` are not used."""
    complete = True
    for one in networks():
        if options.networks and one.model.name not in options.networks:
            continue
        for precision in options.precisions:
            print(f"\n{one.model.name}, {precision}, us on the device", flush=True)
            print(f"{'rows':>5}{'own':>9}{'cuDNN':>9}{'PyTorch':>9}  measured, layers by auto")
            found = []
            for entry in measured(one, precision, options.rows):
                found.append(entry)
                print(line(entry), flush=True)
            columns = {key: [entry[key] for entry in found] for key in found[0]}
            complete = complete and None not in columns["torch_us"]
            name = f"{one.model.name}, {precision}"
            document.add({"libraries": document.content.get("libraries", {}) | {name: columns}})
    return int(not complete)


def measured(
    weights: WeightFile, precision: Precision, sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """An entry for each bucket: our ways in turn, and PyTorch's CUDA graph. Medians of rounds."""
    from lenet.cuda.backend import CudaBackend
    from lenet.cuda.engine_cache import EngineCache, default_cache

    cache = EngineCache(default_cache())
    sample = np.random.default_rng(1).integers(0, 256, (_SAMPLE, 28, 28), np.uint8)
    exact = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    # Repeated, so that every row is compared with the reference.
    indices = np.arange(max(sizes)) % _SAMPLE
    images: Images = sample[indices]
    wanted = reference.softmax(reference.logits(weights.model, exact, sample))[indices]
    backends = [CudaBackend(0, precision, cache, convolutions=way) for way in WAYS]
    try:
        for rows in sizes:
            rounds: dict[str, list[float]] = {way: [] for way in WAYS}
            plans = {}
            for way, backend in zip(WAYS, backends, strict=True):
                with backend.stream:
                    plans[way] = backend.plan(weights, rows)
                    got = plans[way].run(images[:rows]).probabilities
                    error = float(np.abs(got - wanted[:rows]).max())
                    assert error < 1e-2, f"{way}: probabilities differ by {error:.1e}"
            for _ in range(_TURNS):
                for way, backend in zip(WAYS, backends, strict=True):
                    with backend.stream:
                        timer = cupy_timer(backend.stream)
                        rounds[way] += rounds_us(plans[way].replay, timer, _ROUNDS)
            yield {
                "rows": rows,
                **{
                    f"{way}_us": round(statistics.median(times), 2) for way, times in rounds.items()
                },
                "torch_us": _torch_us(weights, images[:rows], wanted[:rows], precision),
                "layers": ", ".join(plans["auto"].layers.values()),
                "taken": next(way for way in WAYS if plans[way].layers == plans["measured"].layers),
            }
    finally:
        for backend in backends:
            backend.close()


def _torch_us(
    weights: WeightFile, images: Images, wanted: NDArray[np.float64], precision: Precision
) -> float | None:
    """The time of the faster of two CUDA graphs; None where PyTorch cannot be measured."""
    try:
        found = measure(weights, images, wanted, precision, ("graph",))
    except BaselineUnavailable:
        return None
    return None if found["graph_us"] is None else round(found["graph_us"], 2)


def line(entry: dict[str, Any]) -> str:
    """An entry in one line; `measured` took the named way."""
    times = entry["auto_us"], entry["cudnn_us"], entry["torch_us"]
    cells = "".join(f"{'-' if time_us is None else f'{time_us:.1f}':>9}" for time_us in times)
    measured = f"{entry['measured_us']:.1f} {entry['taken']}"
    return f"{entry['rows']:>5}{cells}  {measured}; {entry['layers']}"


def table(content: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md: us on the device, own / cuDNN and cuBLAS / PyTorch."""
    lines = [
        f"| network, precision | {' | '.join(f'{rows:,}' for rows in PAGE_ROWS)} |",
        "| --- " * (1 + len(PAGE_ROWS)) + "|",
    ]
    for name, columns in content["libraries"].items():
        times = zip(*(columns[f"{way}_us"] for way in ("auto", "cudnn", "torch")), strict=True)
        cells = dict(
            zip(columns["rows"], (" / ".join(map(_rounded, row)) for row in times), strict=True)
        )
        network, precision = name.split(", ")
        shown = " | ".join(cells[rows] for rows in PAGE_ROWS)
        lines.append(f"| `{network}`, {precision} | {shown} |")
    return "\n".join(lines)


def _rounded(time_us: float | None) -> str:
    if time_us is None:
        return "-"
    return f"{time_us:.1f}" if time_us < 100 else f"{time_us:,.0f}"
