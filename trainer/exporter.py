"""From trained tensors to a weight file that has been proven, or to no file.

Batch norm is folded, the file written to a temporary place, read back as the service reads it,
run through the serving backend and compared with the network as it was trained, batch norm and
all. Only then does it appear under its name. It refuses to overwrite a version.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lenet.backend import Backend, Plan
from lenet.cpu import CpuBackend
from lenet.files import write_atomically
from lenet.onnx_graph import onnx_model
from lenet.pixels import Images
from lenet.weightfile import Golden, Training, WeightFile
from trainer.errors import ExportRefused, InvalidDataset
from trainer.fold import fold
from trainer.mnist import CLASSES, Digits
from trainer.network import EVALUATION_BATCH, Network
from trainer.ops import Tensor

TOLERANCE = 1e-4
"""The largest |served - trained| / max |trained| of an image's logits: float32, summed in another
order, and weights rounded once more by folding."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The file, how many test images it gets wrong as served, and what it holds."""

    path: Path
    errors: int
    weights: WeightFile


def export_weights(
    network: Network,
    test: Digits,
    training: Training,
    folder: Path,
    backend: Backend,
) -> Exported:
    """Fold, write, read back through `backend`, compare, and move to the next free version.

    `training.accuracy` is replaced by the share of `test` that `backend` classifies correctly.

    Raises:
        ExportRefused: what is read back computes something else than `network`; no file is left.
        InvalidDataset: `test` lacks a digit, so there can be no golden images.
        OSError: `folder` cannot be written.
    """
    model = network.model.folded
    tensors = fold(network.model, network.tensors)
    folded = Network(model, tensors, network.ops)
    golden = _golden(folded, test)
    draft = WeightFile(model, tensors, golden, training)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unproven-") as temporary:
        path = Path(temporary) / "weights.safetensors"
        _, plan = _write_and_read_back(draft, path, backend)
        served = _served(plan, test.images)
        _compare("test", network.logits(test.images), served)
        right = int(np.count_nonzero(served.argmax(axis=1) == test.labels))
        proven = replace(draft, training=replace(training, accuracy=right / len(test)))
        weights, _ = _write_and_read_back(proven, path, backend)
        final = _publish(path, folder)
    return Exported(final, len(test) - right, weights)


def export_onnx(weights: WeightFile, path: Path, backend: CpuBackend) -> None:
    """Write `weights` as an ONNX model that reproduces the golden logits, or write nothing.

    `backend` runs the very model that is written.

    Raises:
        ExportRefused: the model computes something else than the trainer saw.
        OSError: `path` cannot be written.
    """
    images = weights.golden.images
    plan = backend.plan(weights, len(images))
    _compare("golden", weights.golden.logits, _served(plan, images))
    write_atomically(path, onnx_model(weights).SerializeToString())


def _write_and_read_back(
    weights: WeightFile, path: Path, backend: Backend
) -> tuple[WeightFile, Plan]:
    weights.write(path)
    read = WeightFile.read(path)
    plan = backend.plan(read, EVALUATION_BATCH)
    _compare("golden", weights.golden.logits, _served(plan, weights.golden.images))
    return read, plan


def _golden(network: Network, test: Digits) -> Golden:
    """The first test image of each digit with the logits of the folded network."""
    firsts: list[int] = []
    for digit in range(CLASSES):
        places = np.flatnonzero(test.labels == digit)
        if not len(places):
            raise InvalidDataset(f"the test set has no {digit}, expected each of 0 to 9")
        firsts.append(int(places[0]))
    images = test.images[firsts]
    return Golden(images, test.labels[firsts], network.logits(images).astype(np.float32))


def _served(plan: Plan, images: Images) -> Tensor:
    starts = range(0, len(images), plan.rows)
    return np.concatenate([plan.logits(images[start : start + plan.rows]) for start in starts])


def _compare(which: str, trained: Tensor, served: Tensor) -> None:
    difference = np.abs(served - trained).max(axis=1) / np.abs(trained).max(axis=1)
    # Written so that NaN is refused too.
    if not (difference <= TOLERANCE).all():
        worst = int(difference.argmax())
        raise ExportRefused(
            f"{which} image {worst}: the served logits differ by {difference[worst]:.2g} relative "
            f"from the trained ones, expected at most {TOLERANCE:g}; no file was written"
        )
    other = np.flatnonzero(served.argmax(axis=1) != trained.argmax(axis=1))
    if len(other):
        raise ExportRefused(
            f"{which} image {other[0]}: served as {served[other[0]].argmax()}, trained as "
            f"{trained[other[0]].argmax()}; no file was written"
        )


def _publish(proven: Path, folder: Path) -> Path:
    """Give the file the next free version; a link, unlike a rename, overwrites nothing."""
    while True:
        taken = [int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdecimal()]
        final = folder / f"{max(taken, default=0) + 1}.safetensors"
        try:
            final.hardlink_to(proven)
        except FileExistsError:
            continue  # another run took it in between
        return final
