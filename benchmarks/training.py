"""`python -m benchmarks.training`: training on this GPU, compared with PyTorch in one process.

--only selects parts: `step`, the time of a step in each precision and in PyTorch; `time`, the time
to 99 % accuracy on the test images; `accuracy`, the default recipe's accuracy in float32 and in
mixed precision. Seeds are 1, 2, 3, ...; test images are evaluated after a run and choose nothing.
Exit code: 0, 1 when PyTorch was not measured, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.torch_step import MODES
from benchmarks.baselines.torch_training import BaselineUnavailable, measure
from benchmarks.command import commit, explained, measured, positive_int
from benchmarks.recipes import spread, trained
from benchmarks.timing import cupy_timer
from lenet.cuda.engine_cache import EngineCache, default_cache
from lenet.model import named
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors, take_step
from trainer.optimizer import Sgd
from trainer.settings import Precision, Recipe

PARTS = ("step", "time", "accuracy")
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "mixed")

STEPS, ROUNDS = 200, 9

FAST = {
    "epochs": 2,
    "rate": 0.3,
    "rotation": 0.0,
    "scale": 0.0,
    "shear": 0.0,
    "shift": 0.0,
    "elastic": 0.0,
    "smoothing": 0.0,
}
"""The run to 99 % differs from the default recipe in these; chosen on the validation images."""


def recipe(precision: Precision, seed: int, **fields: Any) -> Recipe:
    """The default recipe on a GPU with `fields` replaced."""
    return Recipe(precision=precision, seed=seed, **fields).resolved("cuda")


def step_us(precision: Precision, batch: int, rounds: int = ROUNDS) -> tuple[list[float], int]:
    """(time of a captured step of lenet in us in each round, device memory in bytes).

    The step includes the choice of images, augmentation, forward, backward and update.
    """
    import cupy

    from trainer.loop import run_of
    from trainer.ops_cuda.ops import CudaOps

    random = np.random.default_rng(1)
    images = random.integers(0, 256, (60_000, 28, 28), np.uint8)
    digits = Digits(images, random.integers(0, 10, 60_000).astype(np.uint8))
    # Every step needs a learning rate: at least as many epochs as the steps taken below.
    epochs = max(60, -(-(1 + rounds) * STEPS // (len(digits) // batch)))
    fit = recipe(precision, 1, batch=batch, epochs=epochs)
    model = named("lenet")
    with CudaOps(precision, cache=EngineCache(default_cache())) as ops:
        network = Network(model, initial_tensors(model, random), ops)
        optimizer = Sgd(
            model, network.parameters, ops, fit.momentum, fit.weight_decay, fit.nesterov
        )
        state = ops.start(run_of(fit, digits))
        repeat = ops.capture(lambda: take_step(network, optimizer, state))
        for _ in range(STEPS):
            repeat()
        time_us = cupy_timer(cupy.cuda.get_current_stream())
        times = [time_us(repeat, STEPS) / STEPS for _ in range(rounds)]
        memory = ops.memory_bytes
    cupy.get_default_memory_pool().free_all_blocks()
    return times, memory


def run_step(batch: int, modes: Sequence[str], result: dict[str, Any]) -> int:
    """Time steps of both, ours before and after PyTorch's; 1 if PyTorch was not measured."""
    rounds: dict[Precision, list[float]] = {precision: [] for precision in PRECISIONS}

    def ours() -> None:
        for precision in PRECISIONS:
            times, memory = step_us(precision, batch)
            rounds[precision] += times
            result.setdefault("peak_bytes", {})[precision] = memory

    ours()
    code = 0
    try:
        torch = measure("lenet", batch, "tf32", modes, report=lambda line: print(line, flush=True))
        result["torch"] = {f"{mode}_us": torch[f"{mode}_us"] for mode in modes}
        result["torch"]["details"] = torch
    except BaselineUnavailable as exc:
        print(exc, file=sys.stderr)
        code = 1
    ours()
    result["step_us"] = {name: statistics.median(times) for name, times in rounds.items()}
    result["step_spread_us"] = {name: [min(times), max(times)] for name, times in rounds.items()}
    for name, us in result["step_us"].items():
        low, high = result["step_spread_us"][name]
        line = f"step, batch {batch}, {name:5} {us:7.1f} us ({low:.1f}..{high:.1f})"
        line += f", {result['peak_bytes'][name] / 1e6:.0f} MB"
        if code == 0:
            graph = result["torch"].get("graph_us")
            line += f", {us / graph:.2f} of PyTorch's CUDA graph" if graph else ""
        print(line, flush=True)
    return code


def run_time(data: Path, seeds: int, result: dict[str, Any]) -> None:
    """Time the short recipe in mixed precision."""
    runs = [trained(recipe("mixed", seed, **FAST), data) for seed in range(1, seeds + 1)]
    seconds = spread([run.seconds for run in runs])
    accuracies = spread([run.test_accuracy for run in runs])
    result["time_to_99"] = {
        "mean_s": seconds["mean"],
        "sd_s": seconds["sd"],
        "n": seeds,
        "mean_accuracy": accuracies["mean"],
        "sd_accuracy": accuracies["sd"],
        "seconds": seconds["values"],
        "accuracies": accuracies["values"],
        "command": recipe("mixed", 1, **FAST).command(),
    }
    print(
        f"to 99 %: {seconds['mean']:.3f} s (sd {seconds['sd']:.3f}) for "
        f"{accuracies['mean']:.3f} % (sd {accuracies['sd']:.3f}), n {seeds}",
        flush=True,
    )


def run_accuracy(data: Path, seeds: int, result: dict[str, Any]) -> None:
    """Evaluate the default recipe in float32 and in mixed precision."""
    for precision, key in (("fp32", "accuracy"), ("mixed", "accuracy_mixed")):
        chosen: Precision = "fp32" if precision == "fp32" else "mixed"
        runs = [trained(recipe(chosen, seed), data) for seed in range(1, seeds + 1)]
        result[key] = spread([run.test_accuracy for run in runs])
        result[key]["seconds"] = [run.seconds for run in runs]
        result[key]["command"] = recipe(chosen, 1).command()
        print(
            f"default recipe, {precision}: {result[key]['mean']:.3f} % (sd "
            f"{result[key]['sd']:.3f}), n {seeds}, at most {max(result[key]['seconds']):.1f} s",
            flush=True,
        )


@explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = _parser().parse_args(arguments)
    from lenet.cuda.device import devices

    devices()
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    result: dict[str, Any] = {
        "device": name,
        "batch": options.batch,
    }
    if options.json and options.json.exists():
        result = json.loads(options.json.read_text()) | result
    code = 0
    for part in options.only:
        if part == "step":
            code = run_step(options.batch, options.modes, result)
        elif part == "time":
            run_time(options.data, options.time_seeds, result)
        else:
            run_accuracy(options.data, options.seeds, result)
        measured(result, part, options.commit or commit())
        if options.json:  # after each part: the next one may take minutes
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description="Measure training on this GPU, compared with PyTorch.",
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--batch", type=positive_int, default=256, help="images per step")
    add(
        *("--modes", "--ways"),
        nargs="+",
        choices=MODES,
        default=MODES,
        help="PyTorch's execution modes to measure; compile takes minutes",
    )
    add("--time-seeds", type=positive_int, default=30, help="runs to 99 %%")
    add("--seeds", type=positive_int, default=10, help="runs of the default recipe per precision")
    add("--data", type=Path, default=Path("data/mnist"), help="folder of the MNIST files")
    add("--commit", help="commit to record where there is no repository")
    add("--json", type=Path, help="file to update with the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
