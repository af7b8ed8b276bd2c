r"""Exports trained tensors to a weight file, verified before it appears under its name.

Batch norm is folded, the file is written to a temporary folder, read back as the service reads it,
run through the serving backend and compared with the trained network, which has batch norm. Then it
is published under the next free version, unless the last one is the same; an existing version is
never overwritten.

Folding: outside training, batch norm knows the mean m and variance v of each channel. After
x' = w x (the convolution has no bias of its own) it is

    y = gamma (x' - m) / sqrt(v + eps) + beta
      = s x' + (beta - s m)            with s = gamma / sqrt(v + eps)

and as the layer is linear in w, s (w x) = (s w) x. Hence, per output channel or unit,

    w_folded = s w
    b_folded = beta - s m

Computed in float64 and rounded once, so that the folded network differs by rounding alone.

Source: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", section 3.2.
"""

from __future__ import annotations

import errno
import filecmp
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lenet.backend import Backend, Plan
from lenet.cpu import CpuBackend
from lenet.errors import InvalidSettings
from lenet.files import write_atomically
from lenet.model import Model
from lenet.onnx_graph import IMAGES, LOGITS, onnx_model
from lenet.pixels import HEIGHT, WIDTH, Images
from lenet.weightfile import GOLDEN_IMAGES, Golden, Training, WeightFile
from trainer.errors import ExportRefused, InvalidDataset
from trainer.mnist import Digits
from trainer.network import EVALUATION_BATCH, Network
from trainer.ops import Norm, Tensor
from trainer.ops_cpu.batch_norm import scale_and_shift

TOLERANCE = 1e-4
"""The largest |served - trained| / max |trained| of an image's logits: float32 sums in another
order, and weights that folding rounded once more."""


_WITHOUT_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What a file system without hard links answers, as exFAT or a network share."""


def fold(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `model.folded` from those of `model`, in the dtype of the weights."""
    folded: dict[str, Tensor] = {}
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        weight = tensors[f"{shape.name}.weight"]
        if block.batch_norm:
            norm = (tensors[f"{shape.name}.{part}"] for part in Norm._fields)
            scale, bias = scale_and_shift(*norm)
            per_channel = scale.reshape(-1, *[1] * (weight.ndim - 1))
            folded[f"{shape.name}.weight"] = (weight * per_channel).astype(weight.dtype)
            folded[f"{shape.name}.bias"] = bias.astype(weight.dtype)
        else:
            folded[f"{shape.name}.weight"] = weight.copy()
            folded[f"{shape.name}.bias"] = tensors[f"{shape.name}.bias"].copy()
    return folded


@dataclass(frozen=True, slots=True)
class Exported:
    """The file, whether it is new, its content, and how many test images are served wrong, if any.

    A file is not new if the last version had the same bytes already.
    """

    path: Path
    new: bool
    errors: int
    weights: WeightFile
    logits: Tensor | None = None
    """Logits of the test images, as served."""


def export_weights(
    network: Network,
    test: Digits | None,
    training: Training,
    folder: Path,
    backend: Backend,
) -> Exported:
    """Fold, write, verify through `backend`, and publish as the next free version.

    If the last version has the same bytes already, it is returned and nothing is written.

    `training.accuracy` is replaced by the share of `test` that `backend` classifies correctly.
    Without `test` the golden images are noise, and their labels those that `network` gives them.

    Raises:
        ExportRefused: the file computes other logits than `network`; no file is left.
        InvalidDataset: `test` has fewer images than a weight file holds.
        OSError: `folder` cannot be written.
    """
    model = network.model.folded
    tensors = fold(network.model, network.tensors)
    folded = Network(model, tensors, network.ops)
    golden = _golden(folded, _noise(folded) if test is None else test)
    draft = WeightFile(model, tensors, golden, training)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unverified-") as temporary:
        path = Path(temporary) / "weights.safetensors"
        weights, plan = _write_and_read_back(draft, path, backend)
        errors, served = 0, None
        if test is not None:
            served = served_logits(plan, test.images)
            _compare("test", network.logits(test.images), served)
            errors = int(np.count_nonzero(served.argmax(axis=1) != test.labels))
            accuracy = (len(test) - errors) / len(test)
            verified = replace(draft, training=replace(training, accuracy=accuracy))
            weights, _ = _write_and_read_back(verified, path, backend)
        final, new = _publish(path, folder)
    return Exported(final, new, errors, weights, served)


def export_onnx(weights: WeightFile, path: Path, backend: CpuBackend) -> None:
    """Write `weights` as an ONNX model, after `backend` ran it on the golden images.

    Raises:
        ExportRefused: the model computes other logits; no file is written.
        OSError: `path` cannot be written.
    """
    content = onnx_model(weights).SerializeToString()
    (logits,) = backend.open(content).run([LOGITS], {IMAGES: weights.golden.images})
    _compare("golden", weights.golden.logits, logits)
    write_atomically(path, content)


def _write_and_read_back(
    weights: WeightFile, path: Path, backend: Backend
) -> tuple[WeightFile, Plan]:
    weights.write(path)
    read = WeightFile.read(path)
    plan = backend.plan(read, EVALUATION_BATCH)
    _compare("golden", weights.golden.logits, served_logits(plan, weights.golden.images))
    return read, plan


def _noise(network: Network) -> Digits:
    images = np.random.default_rng(0).integers(0, 256, (GOLDEN_IMAGES, HEIGHT, WIDTH), np.uint8)
    return Digits(images, network.logits(images).argmax(axis=1).astype(np.uint8))


def _golden(network: Network, test: Digits) -> Golden:
    """Test images with the logits of the folded network: the first of each class, then seconds."""
    if len(test) < GOLDEN_IMAGES:
        raise InvalidDataset(
            f"the test set has {len(test)} images, expected at least {GOLDEN_IMAGES}"
        )
    # The place of each image among those of its class.
    places = np.empty(len(test), np.int64)
    for label in np.unique(test.labels):
        own = np.flatnonzero(test.labels == label)
        places[own] = np.arange(len(own))
    chosen = np.lexsort((test.labels, places))[:GOLDEN_IMAGES]
    images = test.images[chosen]
    return Golden(images, test.labels[chosen], network.logits(images).astype(np.float32))


def served_logits(plan: Plan, images: Images) -> Tensor:
    """The logits of any number of `images`."""
    starts = range(0, len(images), plan.rows)
    return np.concatenate([plan.logits(images[start : start + plan.rows]) for start in starts])


def _compare(which: str, trained: Tensor, served: Tensor) -> None:
    difference = np.abs(served - trained).max(axis=1) / np.abs(trained).max(axis=1)
    # Not `difference > TOLERANCE`: a NaN must be refused too.
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


def check_classes_of_last(folder: Path, names: tuple[str, ...]) -> None:
    """Check that the last version in `folder`, if any, has the classes `names`.

    A service that is started with a version of other classes answers clients with these.

    Raises:
        InvalidSettings: it has others.
    """
    if versions := _versions(folder):
        path = versions[max(versions)]
        before = WeightFile.read(path).training.labels
        if before != names:
            raise InvalidSettings(
                f"--out: {path} has the classes {', '.join(before[:12])}"
                f"{', ...' if before[12:] else ''}, and the next version would have "
                f"{', '.join(names[:12])}{', ...' if names[12:] else ''}; name another folder"
            )


def _versions(folder: Path) -> dict[int, Path]:
    return {int(path.stem): path for path in folder.glob("*.safetensors") if path.stem.isdecimal()}


def _publish(verified: Path, folder: Path) -> tuple[Path, bool]:
    """Link the file as the next free version, unless the last one has the same bytes.

    Unlike a rename, a link overwrites nothing. Returns: the path, and whether it is new.
    """
    while True:
        versions = _versions(folder)
        last = max(versions, default=0)
        if versions and filecmp.cmp(versions[last], verified, shallow=False):
            return versions[last], False
        final = folder / f"{last + 1}.safetensors"
        try:
            final.hardlink_to(verified)
        except FileExistsError:
            continue  # another run took this version meanwhile
        except OSError as exc:
            if exc.errno not in _WITHOUT_LINKS:
                raise
            final = _move(verified, folder, last + 1)
        return final, True


def _move(verified: Path, folder: Path, version: int) -> Path:
    """Rename the file as the first free version from `version` on, which a lock file reserves.

    A version that another run has reserved is skipped, as is one whose run was killed.
    """
    while True:
        lock, final = folder / f".{version}.lock", folder / f"{version}.safetensors"
        version += 1
        try:
            lock.open("xb").close()
        except FileExistsError:
            continue
        try:
            if not final.exists():
                return verified.replace(final)
        finally:
            lock.unlink()
