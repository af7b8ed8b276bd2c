"""`python -m benchmarks.fine_tuning`: a network trained on few images of another hand.

The hand is MNIST slanted, with a thicker pen, crossed sevens and ones with an upstroke; the 10,000
test images are written in it, too. For each number of images and each seed, which also draws the
images: the accuracy of the weight file as it is, of a network trained afresh, and of one trained
from the file, each with the trainer's defaults. `--epochs` and `--rates` (of --from) try others.

Exit code: 0, 1 where the fine-tuned network is not better than both, or 2 without data.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import commit, explained, measured, positive_int
from lenet.model import named
from lenet.pixels import Images
from lenet.weightfile import WeightFile
from trainer.checkpoint import Checkpoint
from trainer.devices import choose, on_devices
from trainer.mnist import Dataset, Digits, load
from trainer.network import Network, initial_tensors
from trainer.ops import TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.settings import Fit
from trainer.start import MOMENT_IMAGES, taken, with_moments

LEAST = 300
"""Images from which on the fine-tuned network has to be the best of the three."""

SLANT = 0.5
"""Pixels by which a row is shifted to the right for each row above the middle."""

UPSTROKE = 8
"""Pixels of a one's upstroke, down to the left from its top."""


def hand(digits: Digits) -> Digits:
    """The images in another hand: sevens crossed, ones with an upstroke, all thick and slanted."""
    images = digits.images.copy()
    for image, label in zip(images, digits.labels, strict=True):
        rows, columns = np.nonzero(image > 127)
        if label == 7:
            row = round(0.5 * rows.min() + 0.5 * rows.max())
            middle = round(columns[abs(rows - row) <= 1].mean())
            image[row : row + 2, max(0, middle - 4) : middle + 4] = 255
        elif label == 1:
            top, left = rows.min(), columns[rows == rows.min()].min()
            for step in range(min(UPSTROKE, left + 1)):
                image[top + step, left - step] = 255
    thick = images.copy()
    np.maximum(thick[:, 1:], images[:, :-1], out=thick[:, 1:])
    np.maximum(thick[:, :, 1:], images[:, :, :-1], out=thick[:, :, 1:])
    return Digits(_slanted(thick), digits.labels)


def _slanted(images: Images) -> Images:
    height, width = images.shape[1:]
    wide = np.pad(images, ((0, 0), (0, 0), (width, width)))
    rows = []
    for row in range(height):
        left = width - round(SLANT * (height / 2 - row))
        rows.append(wide[:, row, left : left + width])
    return np.stack(rows, axis=1)


@lru_cache(maxsize=1)
def _mnist(data: Path) -> Dataset:
    mnist = load(data)
    return Dataset(hand(mnist.train), hand(mnist.test), mnist.sha256)


def trained(settings: Fit, count: int) -> float:
    """The accuracy on the test images, in percent, after training on `count` images."""
    from trainer.loop import accuracy, train

    mnist, model = _mnist(settings.data), named(settings.model)
    order = np.random.default_rng(settings.seed).permutation(len(mnist.train))
    by_class = [order[mnist.train.labels[order] == label] for label in range(10)]
    chosen = np.concatenate([own[: count // 10] for own in by_class])
    few = Digits(mnist.train.images[chosen], mnist.train.labels[chosen])
    dataset = Dataset(few, mnist.test, f"{count} of {mnist.sha256}")
    settings = settings.resolved(choose(settings.device, lambda _: None), count)
    training, validation = dataset.hold_out(settings.validation_images)
    first = initial_tensors(model, np.random.default_rng(settings.seed))
    if settings.from_ is not None:
        found, _ = taken(WeightFile.read(settings.from_), model)
        first = with_moments(model, first | found, found, training.images[:MOMENT_IMAGES], 0)

    def work(ops: TrainingOps, _rank: int) -> float:
        network = Network(model, first, ops, settings.dropout)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Checkpoint(Path(folder), settings, dataset.sha256, validation)
            train(network, settings, training, validation, checkpoint, leader=False)
        return 100 * accuracy(network, dataset.test)

    return on_devices(settings, 1, work)


def of_file(path: Path, data: Path) -> float:
    """The accuracy of the weight file on the test images, in percent."""
    from trainer.loop import accuracy

    weights = WeightFile.read(path)
    return 100 * accuracy(Network(weights.model, weights.tensors, CpuOps()), _mnist(data).test)


def kinds(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is trained, by name: settings of `fit` other than the seed."""
    common: dict[str, Any] = {"model": options.model, "data": options.data}
    common["device"] = options.device
    found = {"afresh": common, "fine-tuned": {**common, "from_": options.weights}}
    for epochs in options.epochs:
        found[f"afresh, {epochs} epochs"] = common | {"epochs": epochs}
        for rate in options.rates:
            changed = {"rate": rate, "epochs": epochs}
            found[f"fine-tuned, rate {rate:g}, {epochs} epochs"] = found["fine-tuned"] | changed
    return found


@explained
def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print, write; the exit code."""
    options = _parser().parse_args(arguments)
    # One thread for each process; NumPy reads it when it is loaded.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[variable] = "1"
    rows: dict[str, Any] = {"file": of_file(options.weights, options.data)}
    document: dict[str, Any] = {"percent of the test images": rows}
    measured(document, "percent of the test images", options.commit or commit())
    print(f"the file: {rows['file']:.2f} %", flush=True)
    worse, settings = False, kinds(options)
    spawn = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        jobs = {
            (name, count, seed): pool.submit(trained, Fit(**fields, seed=seed), count)
            for (name, fields), count, seed in product(
                settings.items(), options.images, range(1, options.seeds + 1)
            )
        }
        for name, count in product(settings, options.images):
            found = [jobs[name, count, seed].result() for seed in range(1, options.seeds + 1)]
            row = {"mean": statistics.fmean(found), "values": found}
            rows[f"{name}, {count} images"] = row
            print(f"{name}, {count} images: {row['mean']:.2f} % ({_values(found)})", flush=True)
            best_other = [rows["file"], rows[f"afresh, {count} images"]["mean"]]
            worse |= name == "fine-tuned" and count >= LEAST and row["mean"] <= max(best_other)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(worse)


def _values(found: Sequence[float]) -> str:
    return " ".join(f"{one:.2f}" for one in found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.fine_tuning", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/mnist"), help="the folder of MNIST")
    add("--model", default="lenet-6-16")
    add("--weights", type=Path, default=Path("weights/lenet-6-16/1.safetensors"))
    add("--images", type=positive_int, nargs="+", default=[100, 300, 1000])
    add("--seeds", type=positive_int, default=5)
    add("--device", default="cpu")
    add("--processes", type=positive_int, default=1, help="runs at a time")
    add("--epochs", type=positive_int, nargs="+", default=[], help="other numbers of epochs")
    add("--rates", type=float, nargs="+", default=[], help="with these, other rates of --from")
    add("--json", type=Path, help="write the results there")
    add("--commit", help="the commit that is measured, where there is no git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
