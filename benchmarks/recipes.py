"""`python -m benchmarks.recipes`: what each part of the trainer's recipe is worth.

--only selects parts. `alternatives` (of a GPU): the default recipe with one setting changed, and
likewise for the other architectures, by the mistakes on the held-out training images, which are
what the recipe is chosen by. `architectures`: parameters, time and accuracy on the test images of
each named architecture, with the recipe of the device and, on a GPU, also with the CPU's.

Seeds are 1, 2, 3, ... `--processes` runs are trained at a time, on a GPU under MPS; their times are
not reported then. Results are written after each run, so that nothing is lost when it is stopped.
Exit code: 0, or 2 when there is no GPU or no data.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.command import commit, explained, measured, positive_int
from lenet.model import ARCHITECTURES, named
from service.process.mps import shared_gpu
from trainer.checkpoint import Checkpoint
from trainer.devices import choose, on_devices
from trainer.mnist import Dataset, load
from trainer.network import Network, initial_tensors
from trainer.ops import Tensor, TrainingOps
from trainer.settings import Device, Recipe

PARTS = ("alternatives", "architectures")

ALTERNATIVES: Mapping[str, Sequence[dict[str, Any]]] = {
    "lenet": (
        {},
        {"smoothing": 0.0, "elastic": 0.0},
        *({"smoothing": value} for value in (0.0, 0.03, 0.2)),
        *({"elastic": value} for value in (0.0, 2.0)),
        *({"rate": value} for value in (0.1, 0.4)),
        *({"weight_decay": value} for value in (5e-5, 5e-4)),
        {"dropout": 0.3},
        *({"rotation": value} for value in (5.0, 8.0, 16.0)),
        *(
            {"rotation": 8.0, **other}
            for other in ({"smoothing": 0.05}, {"elastic": 2.0}, {"shear": 4.0})
        ),
        {"schedule": "step"},
        *({"epochs": value} for value in (60, 240)),
    ),
    **{
        model: (
            {},
            {"smoothing": 0.0, "elastic": 0.0},
            {"smoothing": 0.0},
            {"elastic": 0.0},
            *({"rate": value} for value in (0.05, 0.1)),
        )
        for model in ARCHITECTURES
        if model != "lenet"
    },
}


class Result(NamedTuple):
    """The results of one run."""

    seconds: float
    """Time from the first step to the last, validation after each epoch included."""

    mistakes: int
    """Mistakes on the held-out training images."""

    test_accuracy: float
    """Accuracy on the test images in percent."""


def trained(recipe: Recipe, data: Path) -> Result:
    """Train a resolved `recipe` on MNIST; nothing is written.

    Raises:
        TrainerError, LeNetError: the data or the device cannot be used.
    """
    from trainer.loop import accuracy, train

    model, dataset = named(recipe.model), _dataset(data)
    training, validation = dataset.hold_out(recipe.validation_images)

    def work(ops: TrainingOps, _rank: int) -> tuple[dict[str, Tensor], float, int]:
        tensors = initial_tensors(model, np.random.default_rng(recipe.seed))
        network = Network(model, tensors, ops, recipe.dropout)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Checkpoint(Path(folder), recipe, dataset.sha256, validation)
            epochs, seconds = train(network, recipe, training, validation, checkpoint, leader=False)
        wrong = round((1 - epochs[-1].validation_accuracy) * len(validation))
        return network.tensors, seconds, wrong

    tensors, seconds, wrong = on_devices(recipe, 1, work)
    # Evaluated in float32, as the weight file stores them.
    exact = recipe.model_copy(update={"precision": "fp32"})
    right = on_devices(
        exact, 1, lambda ops, _: accuracy(Network(model, tensors, ops), dataset.test)
    )
    return Result(seconds, wrong, 100 * right)


@lru_cache(maxsize=1)
def _dataset(data: Path) -> Dataset:
    return load(data)


def runs(recipes: Sequence[Recipe], data: Path, processes: int) -> Iterator[tuple[Recipe, Result]]:
    """Train `recipes`, so many at a time; each as it is done."""
    # One thread for each, as in the trainer; NumPy reads it when it is loaded.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[variable] = "1"
    spawn = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        futures = {pool.submit(trained, recipe, data): recipe for recipe in recipes}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _recipe(**fields: Any) -> Recipe:
    return Recipe(**fields)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation, number and the values themselves."""
    return {
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "n": len(values),
        "values": list(values),
    }


class _Table:
    """Results by name, in the order in which the names were given, written as they come."""

    def __init__(self, document: dict[str, Any], key: str, options: argparse.Namespace) -> None:
        self._document, self._path = document, options.json
        self._rows: dict[str, dict[str, Any]] = {}
        document[key] = self._rows
        measured(document, key, options.commit or commit())
        self._found: dict[str, list[tuple[int, Result]]] = {}

    def expect(self, name: str, recipe: Recipe, **more: Any) -> None:
        self._rows[name] = {**more, "command": recipe.command()}

    def add(self, name: str, seed: int, result: Result, fields: Sequence[str]) -> None:
        found = self._found.setdefault(name, [])
        found.append((seed, result))
        found.sort()
        for field in fields:
            self._rows[name][field] = spread([getattr(one, field) for _, one in found])
        if self._path is not None:
            self._path.write_text(json.dumps(self._document, indent=1) + "\n", encoding="utf-8")

    def show(self, name: str, fields: Sequence[str]) -> None:
        row = self._rows[name]
        numbers = (
            f"{field} {row[field]['mean']:.3f} (sd {row[field]['sd']:.3f})"
            for field in fields
            if field in row
        )
        print(f"{name}: {', '.join(numbers)}, n {len(self._found[name])}", flush=True)


def run_alternatives(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """The default recipe of each architecture, and what one changed setting makes of it."""
    table = _Table(document, "alternatives", options)
    names: dict[Recipe, str] = {}
    for seed in range(1, options.seeds + 1):
        for model in options.models:
            for changed in ALTERNATIVES[model]:
                recipe = _recipe(model=model, seed=seed, **changed).resolved("cuda")
                settings = " ".join(f"{field}={value}" for field, value in changed.items())
                names[recipe] = f"{model} {settings or 'default'}"
                if seed == 1:
                    table.expect(names[recipe], recipe)
    for recipe, result in runs(list(names), options.data, options.processes):
        table.add(names[recipe], recipe.seed, result, ("mistakes",))
    for name in dict.fromkeys(names.values()):
        table.show(name, ("mistakes",))


def run_architectures(
    options: argparse.Namespace, device: Device, document: dict[str, Any]
) -> None:
    """Each architecture on `device`."""
    table = _Table(document, f"architectures_{device}", options)
    cpu = _recipe().resolved("cpu")
    short: dict[str, Any] = {"epochs": cpu.epochs, "batch": cpu.batch, "precision": "fp32"}
    fields = ("test_accuracy", "seconds")
    names: dict[Recipe, str] = {}
    recipes: list[tuple[dict[str, Any], str]] = [({}, ""), (short, f", {cpu.epochs} epochs")]
    for changed, suffix in recipes if device == "cuda" else recipes[:1]:
        for model in options.models:
            shapes = named(model).parameters()
            for seed in range(1, options.seeds + 1):
                recipe = _recipe(model=model, seed=seed, **changed).resolved(device)
                names[recipe] = name = f"{model}{suffix}"
                if seed == 1:
                    # The served network: batch norm is folded, a bias is left.
                    served = (".weight", ".bias", ".beta")
                    parameters = sum(
                        math.prod(shape) for name, shape in shapes.items() if name.endswith(served)
                    )
                    table.expect(name, recipe, parameters=parameters)
    for recipe, result in runs(list(names), options.data, options.processes):
        table.add(names[recipe], recipe.seed, result, fields)
        table.show(names[recipe], fields)


@explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print, write; the exit code."""
    options = _parser().parse_args(arguments)
    device = choose(options.device, print)
    document: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        document = json.loads(options.json.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        if device == "cuda" and options.processes > 1:
            stack.enter_context(shared_gpu())
        if "alternatives" in options.only:
            run_alternatives(options, document)
        if "architectures" in options.only:
            run_architectures(options, device, document)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes",
        description="Measure what each part of the trainer's recipe is worth.",
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--models", nargs="+", choices=ARCHITECTURES, default=tuple(ARCHITECTURES))
    add("--seeds", type=positive_int, default=8, help="runs of each recipe")
    add("--processes", type=positive_int, default=1, help="runs at a time")
    add("--data", type=Path, default=Path("data/mnist"), help="folder of the MNIST files")
    add("--commit", help="commit to record where there is no repository")
    add("--json", type=Path, help="file to update with the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
