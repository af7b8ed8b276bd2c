"""The validation accuracy that training prints, beside those of the network and of its file.

    python -m tests.gpu.accuracies --data FOLDER

trains the five networks in each precision with the default number of epochs, and prints a line of
JSON for each. It ends with 1 if one of them differs by more than 0.1 points.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lenet import reference
from lenet.cpu import CpuBackend
from lenet.model import ARCHITECTURES, named
from lenet.weightfile import Training, WeightFile
from trainer.checkpoint import Checkpoint
from trainer.devices import on_devices
from trainer.export import export_weights
from trainer.loop import train
from trainer.mnist import Dataset, Digits, load
from trainer.network import Network, initial_tensors
from trainer.ops import TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.settings import Fit, Precision

MOST = 0.1
"""Points: of 5,000 images five may lie so near a border that the precision decides."""


def of_file(path: Path, digits: Digits) -> float:
    """The accuracy of a weight file in float32 on NumPy, in percent."""
    weights = WeightFile.read(path)
    logits = [
        reference.logits(weights.model, weights.tensors, digits.images[start : start + 500])
        for start in range(0, len(digits), 500)
    ]
    return 100 * float((np.concatenate(logits).argmax(axis=1) == digits.labels).mean())


def accuracies(
    model: str, precision: Precision, dataset: Dataset, folder: Path, **recipe: float
) -> dict[str, Any]:
    """Train `model`; its accuracies on the held-out images, in percent, and the epochs taken.

    `recipe`: further settings of `fit`, such as `epochs` and `rate`.
    """
    settings = Fit(model=model, precision=precision, checkpoints=folder, **recipe)
    settings = settings.resolved("cuda")
    training, validation = dataset.hold_out(settings.validation_images)
    network = named(model)

    def work(ops: TrainingOps, _rank: int) -> tuple[dict[str, Any], float]:
        tensors = initial_tensors(network, np.random.default_rng(settings.seed))
        trained = Network(network, tensors, ops)
        checkpoint = Checkpoint(settings.checkpoints, settings, dataset.sha256, validation)
        train(trained, settings, training, validation, checkpoint)
        right = trained.logits(validation.images).argmax(axis=1) == validation.labels
        return trained.tensors, 100 * float(right.mean())

    with contextlib.redirect_stdout(io.StringIO()) as output:
        tensors, after = on_devices(settings, 1, work)
    *_, printed = re.findall(r"epoch \d+ of .* validation ([\d.]+)%", output.getvalue())
    provenance = Training(
        dataset_sha256=dataset.sha256,
        seed=settings.seed,
        command=settings.command(),
        epochs=settings.epochs,
        accuracy=None,
        labels=tuple(map(str, range(10))),
    )
    trained = Network(network, tensors, CpuOps())
    exported = export_weights(trained, dataset.test, provenance, folder / "out", CpuBackend())
    return {
        "model": model,
        "precision": precision,
        "epochs": settings.epochs,
        "printed": float(printed),
        "network": after,
        "file": of_file(exported.path, validation),
    }


def spread(found: dict[str, Any]) -> float:
    """The largest difference of the three, in points."""
    three = [found[name] for name in ("printed", "network", "file")]
    return max(three) - min(three)


def main() -> int:
    """Train all and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=list(ARCHITECTURES))
    settings = parser.parse_args()
    dataset, wrong = load(settings.data), 0
    for model in settings.models:
        for precision in get_args(Precision):
            with tempfile.TemporaryDirectory() as folder:
                found = accuracies(model, precision, dataset, Path(folder), epochs=settings.epochs)
            wrong += spread(found) > MOST
            print(json.dumps(found), flush=True)  # noqa: T201 - a command
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
