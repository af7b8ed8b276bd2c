"""`python -m benchmarks.baselines.torch_training`: the time of a training step in PyTorch on a GPU.

Three modes: eager, the whole step as one CUDA graph, and torch.compile. Each is measured in several
variants (`benchmarks.baselines.torch_step`), and the fastest one counts. A variant counts only if
its loss falls below that of guessing.

Exit code: 0, 1 when a mode has no number, 2 when nothing was measured.
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

from benchmarks.baselines.torch_step import (
    MODES,
    Precision,
    Step,
    settings,
    training_step,
    variants,
)
from benchmarks.command import missing_library, positive_int, provenance
from benchmarks.timing import torch_timer
from lenet.errors import LeNetError
from lenet.model import ARCHITECTURES, named

STEPS, ROUNDS = 200, 9

_DISTRIBUTIONS = ("torch", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


class BaselineUnavailable(Exception):
    """PyTorch or JAX is not installed or has no GPU; the message says what to do."""


class NotTraining(RuntimeError):
    """The steps of a variant do not train, so their time means nothing."""


def measure(
    model_name: str,
    batch: int,
    precision: Precision,
    modes: Sequence[str] = MODES,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time the variants of a training step of the architecture `model_name`.

    `modes`: those of `MODES` to time; "compile" takes minutes. `report` gets one line per variant,
    as soon as it is measured.

    Returns: for each of `MODES` `<mode>_us`, the median of `ROUNDS` rounds of the fastest variant,
    `<mode>_spread_us`, its [minimum, maximum], and `<mode>_variant`, its name; all None where no
    variant was measured. `medians_us` has the median of each measured variant, `failed` the error
    of each that failed. `model`, `batch`, `precision`, `device`, `torch` say what was measured.

    Raises:
        BaselineUnavailable: no PyTorch or no GPU.
        InvalidModel: no such architecture.
    """
    model = named(model_name)
    torch = torch_on_gpu()
    rounds_us: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    failed: dict[str, str] = {}
    with settings(precision):
        for mode, tried in variants(model, precision).items():
            for variant in tried if mode in modes else ():
                name = str(variant)
                start_s = time.monotonic()
                torch.compiler.reset()
                try:
                    step = training_step(model, batch, precision, variant)
                    times_us = _time_us(step, math.log(model.classes))
                except RuntimeError as exc:  # what compilation and capture raise
                    failed[f"{mode}: {name}"] = f"{type(exc).__name__}: {exc}"[:500]
                    found = "failed"
                else:
                    rounds_us[mode][name] = times_us
                    found = f"{statistics.median(times_us):,.1f} us"
                report(f"{mode}: {name}: {found}, after {time.monotonic() - start_s:.0f} s")
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
    """The torch module.

    Raises:
        BaselineUnavailable: it is not installed, or finds no GPU.
    """
    try:
        import torch
    except ImportError as exc:
        raise BaselineUnavailable(missing_library(exc)) from exc
    if not torch.cuda.is_available():
        raise BaselineUnavailable("PyTorch finds no GPU: run this on a machine with an NVIDIA GPU")
    return torch


def _time_us(step: Step, guessing: float) -> list[float]:
    """The time of a step in us in each round; `guessing` is the loss of equal probabilities.

    Raises:
        NotTraining: the loss after the last round is not below `guessing`.
    """
    timer = torch_timer()
    timer(step, STEPS)  # warm-up
    times_us = [timer(step, STEPS) / STEPS for _ in range(ROUNDS)]
    loss = float(step())
    if not loss < guessing:
        raise NotTraining(f"the last loss is {loss:.4f}, expected below {guessing:.4f}")
    return times_us


def summarise(rounds_us: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The numbers that `measure` returns, from the rounds of each variant of each mode."""
    found: dict[str, Any] = {}
    medians_us = {
        mode: {variant: statistics.median(times) for variant, times in tried.items()}
        for mode, tried in rounds_us.items()
    }
    for mode, medians in medians_us.items():
        best = min(medians, key=medians.__getitem__, default=None)
        times = rounds_us[mode][best] if best is not None else None
        found[f"{mode}_us"] = medians[best] if best is not None else None
        found[f"{mode}_spread_us"] = [min(times), max(times)] if times else None
        found[f"{mode}_variant"] = best
    return {**found, "medians_us": medians_us}


def table(result: dict[str, Any]) -> str:
    """A line per mode."""
    lines = [
        f"PyTorch {result['torch']} on {result['device']}: a training step of {result['model']}, "
        f"batch {result['batch']}, {result['precision']}",
        f"{'':<9}{'us a step':>10} {'(min..max)':<19} fastest variant",
    ]
    for mode in MODES:
        if result[f"{mode}_us"] is None:
            lines.append(f"{mode:<9}{'-':>10}")
            continue
        low, high = result[f"{mode}_spread_us"]
        lines.append(
            f"{mode:<9}{result[f'{mode}_us']:>10,.1f} {f'({low:,.1f}..{high:,.1f})':<19} "
            f"{result[f'{mode}_variant']}"
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
            options.modes,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (BaselineUnavailable, LeNetError) as exc:
        print(f"torch_training: {exc}", file=sys.stderr)
        return 2
    print(table(result))
    if options.json is not None:
        document = {**provenance(_DISTRIBUTIONS), **result}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result[f"{mode}_us"] is not None for mode in options.modes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.baselines.torch_training",
        description="The time of a training step in PyTorch on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="lenet", choices=tuple(ARCHITECTURES), help="the architecture")
    add("--batch", default=256, type=positive_int, help="images per step")
    add("--precision", default="tf32", choices=get_args(Precision), help="of the arithmetic")
    add(
        *("--modes", "--ways"),
        nargs="+",
        default=MODES,
        choices=MODES,
        help="execution modes to measure; compile takes minutes",
    )
    add("--json", type=Path, help="file to write the results to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
