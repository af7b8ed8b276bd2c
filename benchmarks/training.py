"""`python -m benchmarks.training`: training on this GPU, beside PyTorch in the same process.

Three questions, each asked for with --only: what one step costs in each precision and in PyTorch;
how long a network takes to 99 % of the test images; how good the default recipe is, in float32
and in mixed precision. Seeds are 1, 2, 3, ...; the test images are looked at after a run, never
to choose anything. Exit code: 0, 1 when PyTorch was not measured, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import positive_int
from benchmarks.machine import commit
from benchmarks.peers.torch_training import PeerMissing, measure
from benchmarks.stopwatch import cupy_timer
from lenet.cuda.engine_cache import PlanCache, default_cache
from lenet.errors import LeNetError
from lenet.model import named
from trainer.checkpoint import Checkpoint
from trainer.errors import TrainerError
from trainer.loop import run_of, train
from trainer.mnist import Dataset, Digits, load
from trainer.network import Network, initial_tensors
from trainer.optimizer import Sgd
from trainer.settings import Fit, Precision
from trainer.step import take_step

QUESTIONS = ("step", "time", "accuracy")
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "mixed")

STEPS, ROUNDS = 200, 9

FAST = {
    "epochs": 2,
    "rate": 0.3,
    "rotation": 0.0,
    "scale": 0.0,
    "shear": 0.0,
    "shift": 0.0,
}
"""What differs from the default recipe in a run to 99 %; chosen on the validation images."""


def recipe(precision: Precision, seed: int, **fields: Any) -> Fit:
    """The default recipe of a GPU, but for `fields`."""
    return Fit(precision=precision, seed=seed, **fields).resolved("cuda")


def step_us(precision: Precision, batch: int, rounds: int = ROUNDS) -> tuple[list[float], int]:
    """(the time of a captured step of lenet in each round, device memory in bytes).

    Everything is in the step: the choice of images, augmentation, forward, backward, update.
    """
    import cupy

    from trainer.ops_cuda.ops import CudaOps

    random = np.random.default_rng(1)
    images = random.integers(0, 256, (60_000, 28, 28), np.uint8)
    digits = Digits(images, random.integers(0, 10, 60_000).astype(np.uint8))
    # A step beyond the last would have no rate: as many epochs as the steps taken below need.
    epochs = max(60, -(-(1 + rounds) * STEPS // (len(digits) // batch)))
    wanted = recipe(precision, 1, batch=batch, epochs=epochs)
    model = named("lenet")
    with CudaOps(precision, cache=PlanCache(default_cache())) as ops:
        network = Network(model, initial_tensors(model, random), ops)
        optimizer = Sgd(
            model, network.parameters, ops, wanted.momentum, wanted.weight_decay, wanted.nesterov
        )
        progress = ops.start(run_of(wanted, digits))
        repeat = ops.record(lambda: take_step(network, optimizer, progress))
        for _ in range(STEPS):
            repeat()
        time_us = cupy_timer(cupy.cuda.get_current_stream())
        times = [time_us(repeat, STEPS) / STEPS for _ in range(rounds)]
        memory = ops.memory_bytes
    cupy.get_default_memory_pool().free_all_blocks()
    return times, memory


def trained(dataset: Dataset, wanted: Fit) -> tuple[float, float]:
    """(seconds from the first step to the last, accuracy on the test images in percent)."""
    from trainer.ops_cuda.ops import CudaOps

    training, validation = dataset.hold_out(wanted.validation_images)
    model = named(wanted.model)
    assert wanted.precision != "auto", "bug: the recipe is not resolved"
    cache = PlanCache(default_cache())
    with tempfile.TemporaryDirectory() as folder, CudaOps(wanted.precision, cache=cache) as ops:
        tensors = initial_tensors(model, np.random.default_rng(wanted.seed))
        network = Network(model, tensors, ops, wanted.dropout)
        checkpoint = Checkpoint(Path(folder), wanted, dataset.sha256)
        _, seconds = train(network, wanted, training, validation, checkpoint, leader=False)
        tensors = network.tensors
    # What is served is float32: so is what is counted.
    with CudaOps("fp32", cache=cache) as ops:
        logits = Network(model, tensors, ops).logits(dataset.test.images)
    right = np.count_nonzero(logits.argmax(axis=1) == dataset.test.labels)
    return seconds, 100 * float(right) / len(dataset.test)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation, number and the values themselves."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "n": len(values),
        "values": list(values),
    }


def ask_step(batch: int, ways: Sequence[str], result: dict[str, Any]) -> int:
    """Steps of both, ours before and after PyTorch's; 1 if PyTorch was not measured."""
    rounds: dict[Precision, list[float]] = {precision: [] for precision in PRECISIONS}

    def ours() -> None:
        for precision in PRECISIONS:
            times, memory = step_us(precision, batch)
            rounds[precision] += times
            result.setdefault("peak_bytes", {})[precision] = memory

    ours()
    code = 0
    try:
        peer = measure("lenet", batch, "tf32", ways, report=lambda line: print(line, flush=True))
        result["torch"] = {f"{way}_us": peer[f"{way}_us"] for way in ways}
        result["torch"]["details"] = peer
    except PeerMissing as exc:
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


def ask_time(dataset: Dataset, seeds: int, result: dict[str, Any]) -> None:
    """Short runs in mixed precision."""
    runs = [trained(dataset, recipe("mixed", seed, **FAST)) for seed in range(1, seeds + 1)]
    seconds, accuracies = spread([run[0] for run in runs]), spread([run[1] for run in runs])
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


def ask_accuracy(dataset: Dataset, seeds: int, result: dict[str, Any]) -> None:
    """The default recipe in float32 and mixed precision."""
    for precision, key in (("fp32", "accuracy"), ("mixed", "accuracy_mixed")):
        chosen: Precision = "fp32" if precision == "fp32" else "mixed"
        runs = [trained(dataset, recipe(chosen, seed)) for seed in range(1, seeds + 1)]
        result[key] = spread([run[1] for run in runs])
        result[key]["seconds"] = [run[0] for run in runs]
        result[key]["command"] = recipe(chosen, 1).command()
        print(
            f"default recipe, {precision}: {result[key]['mean']:.3f} % (sd "
            f"{result[key]['sd']:.3f}), n {seeds}, at most {max(result[key]['seconds']):.1f} s",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    asked = _parser().parse_args(arguments)
    try:
        import cupy

        from lenet.cuda.device import devices

        devices()
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        result: dict[str, Any] = {
            "device": name,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": asked.commit or commit(),
            "batch": asked.batch,
        }
        if asked.json and asked.json.exists():
            result = json.loads(asked.json.read_text()) | result
        code = 0
        dataset = load(asked.data) if {"time", "accuracy"} & set(asked.only) else None
        for question in asked.only:
            if question == "step":
                code = ask_step(asked.batch, asked.ways, result)
            elif question == "time":
                ask_time(dataset, asked.time_seeds, result)
            else:
                ask_accuracy(dataset, asked.seeds, result)
            if asked.json:  # at once: the next question may take minutes
                asked.json.parent.mkdir(parents=True, exist_ok=True)
                asked.json.write_text(json.dumps(result, indent=1) + "\n")
    except (ImportError, LeNetError, TrainerError) as exc:
        print(exc, file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS)
    parser.add_argument("--batch", type=positive_int, default=256, help="images in a step")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=("eager", "graph", "compile"),
        default=("eager", "graph", "compile"),
        help="of PyTorch; compile takes minutes",
    )
    parser.add_argument("--time-seeds", type=positive_int, default=30, help="runs to 99 %%")
    parser.add_argument("--seeds", type=positive_int, default=10, help="runs of the recipe")
    parser.add_argument("--data", type=Path, default=Path("data/mnist"), help="the MNIST files")
    parser.add_argument("--commit", help="what to note where there is no repository")
    parser.add_argument("--json", type=Path, help="write everything measured, kept what is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
