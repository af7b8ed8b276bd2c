"""`python -m benchmarks.peers.torch_training`: what a training step costs in PyTorch on a GPU.

Three ways: eager, the whole step as one CUDA graph, and torch.compile. Each is written in several
variants (`benchmarks.peers.torch_step`) and the fastest one counts. It refuses to report a variant
whose loss does not fall below guessing.

torch is no dependency of this project: it is imported when something is measured. Exit code: 0,
1 when a way has no number, 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.arguments import positive_int
from benchmarks.machine import provenance
from benchmarks.peers.torch_step import (
    WAYS,
    Precision,
    Step,
    settings,
    training_step,
    variants,
)
from lenet.errors import LeNetError
from lenet.model import ARCHITECTURES, named

STEPS, ROUNDS = 200, 9

_DISTRIBUTIONS = ("torch", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


class PeerMissing(Exception):
    """There is no PyTorch here, or no GPU for it; the message says what to do."""


class NotTraining(RuntimeError):
    """The steps of a variant do not train: what they take means nothing."""


def measure(
    model_name: str,
    batch: int,
    precision: Precision,
    ways: Sequence[str] = WAYS,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time the variants of a step of the architecture `model_name`, images a step: `batch`.

    `ways`: those of `WAYS` to time; "compile" takes minutes. `report` gets a line a variant, as
    soon as it is done.

    Returns: for each way of `WAYS` `<way>_us`, the median of `ROUNDS` rounds of the fastest
    variant, `<way>_spread_us`, its [least, most], and `<way>_variant`, its name; all None where
    none was tried or worked. `medians_us` has the median of each variant that worked, `failed`
    the reason of each that did not. `model`, `batch`, `precision`, `device`, `torch` say what was
    measured.

    Raises:
        PeerMissing: no PyTorch or no GPU.
        InvalidModel: no such architecture.
    """
    model = named(model_name)
    torch = torch_on_gpu()
    rounds_us: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    failed: dict[str, str] = {}
    with settings(precision):
        for way, tried in variants(model, precision).items():
            for variant in tried if way in ways else ():
                name = str(variant)
                begun_s = time.monotonic()
                torch.compiler.reset()
                try:
                    step = training_step(model, batch, precision, variant)
                    times_us = _time_us(step, math.log(model.classes))
                except RuntimeError as exc:  # what compilation and capture raise
                    failed[f"{way}: {name}"] = f"{type(exc).__name__}: {exc}"[:500]
                    found = "failed"
                else:
                    rounds_us[way][name] = times_us
                    found = f"{statistics.median(times_us):,.1f} us"
                report(f"{way}: {name}: {found}, after {time.monotonic() - begun_s:.0f} s")
    return {
        "model": model_name,
        "batch": batch,
        "precision": precision,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **summarise(rounds_us),
        "failed": failed,
    }


def torch_on_gpu() -> Any:
    """The module.

    Raises:
        PeerMissing: there is none, or it sees no GPU.
    """
    try:
        import torch
    except ImportError as exc:
        raise PeerMissing(
            "PyTorch is not installed, and this project does not depend on it: "
            "`pip install torch` to measure against it"
        ) from exc
    if not torch.cuda.is_available():
        raise PeerMissing("PyTorch sees no GPU: run this on a machine with an NVIDIA one")
    return torch


def _time_us(step: Step, guessing: float) -> list[float]:
    """Microseconds of a step, of each round; `guessing` is the loss of equal probabilities.

    Raises:
        NotTraining: the loss after the last round is not below `guessing`.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us = []
    for turn in range(ROUNDS + 1):
        start.record()
        for _ in range(STEPS):
            step()
        end.record()
        end.synchronize()
        if turn:  # the first round warms up
            times_us.append(start.elapsed_time(end) * 1e3 / STEPS)
    loss = float(step())
    if not loss < guessing:
        raise NotTraining(f"the loss is {loss:.4f} in the end, expected below {guessing:.4f}")
    return times_us


def summarise(rounds_us: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The numbers of `measure` from the rounds by way and variant."""
    found: dict[str, Any] = {}
    medians_us = {
        way: {variant: statistics.median(times) for variant, times in tried.items()}
        for way, tried in rounds_us.items()
    }
    for way, medians in medians_us.items():
        best = min(medians, key=medians.__getitem__, default=None)
        times = rounds_us[way][best] if best is not None else None
        found[f"{way}_us"] = medians[best] if best is not None else None
        found[f"{way}_spread_us"] = [min(times), max(times)] if times else None
        found[f"{way}_variant"] = best
    return {**found, "medians_us": medians_us}


def table(result: dict[str, Any]) -> str:
    """A line for each way."""
    lines = [
        f"PyTorch {result['torch']} on {result['device']}: a training step of {result['model']}, "
        f"batch {result['batch']}, {result['precision']}",
        f"{'':<9}{'us a step':>10} {'(least..most)':<19} fastest variant",
    ]
    for way in WAYS:
        if result[f"{way}_us"] is None:
            lines.append(f"{way:<9}{'-':>10}")
            continue
        least, most = result[f"{way}_spread_us"]
        lines.append(
            f"{way:<9}{result[f'{way}_us']:>10,.1f} {f'({least:,.1f}..{most:,.1f})':<19} "
            f"{result[f'{way}_variant']}"
        )
    lines += [f"failed: {variant}: {reason}" for variant, reason in result["failed"].items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one network; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        result = measure(
            options.model,
            options.batch,
            options.precision,
            options.ways,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (PeerMissing, LeNetError) as exc:
        print(f"torch_training: {exc}", file=sys.stderr)
        return 2
    print(table(result))
    if options.json is not None:
        document = {**provenance(_DISTRIBUTIONS), **result}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result[f"{way}_us"] is not None for way in options.ways) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.torch_training",
        description="The time of a training step in PyTorch on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="lenet", choices=tuple(ARCHITECTURES), help="the architecture")
    add("--batch", default=256, type=positive_int, help="images a step")
    add("--precision", default="tf32", choices=get_args(Precision), help="of the arithmetic")
    add("--ways", nargs="+", default=WAYS, choices=WAYS, help="compile takes minutes")
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
