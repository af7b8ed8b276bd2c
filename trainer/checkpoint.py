"""The state after the last good epoch, kept on the device and in a file that a run resumes from.

The state is parameters, running statistics, velocities and the loss scale, and with --patience the
tensors of the best epoch; random numbers are functions of the step. The copy on the device is
updated after each epoch, the file less often and when a run ends.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lenet.files import temporary_prefix, write_atomically
from trainer.errors import InvalidCheckpoint
from trainer.mnist import Digits
from trainer.network import Network
from trainer.ops import LossScale, Tensor
from trainer.optimizer import Sgd
from trainer.settings import Recipe


@dataclass(frozen=True, slots=True)
class Epoch:
    """The results of an epoch; accuracies from 0 to 1, `loss` and `accuracy` of training steps."""

    loss: float
    accuracy: float
    validation_accuracy: float


def best_epoch(epochs: Sequence[Epoch]) -> int:
    """The number, from 1, of the first epoch with the highest validation accuracy; 0 of none."""
    accuracies = [epoch.validation_accuracy for epoch in epochs]
    return accuracies.index(max(accuracies)) + 1 if accuracies else 0


class Snapshot:
    """A second copy, on the device, of what training changes, as it was after `epochs`.

    With `keeps_best`, also a copy, on the host, of the network's tensors after the best epoch.
    """

    def __init__(self, network: Network, optimizer: Sgd, keeps_best: bool = False) -> None:
        self.epochs: tuple[Epoch, ...] = ()
        self.loss_scale: LossScale = (1.0, 0)
        """The loss scale for the step after an epoch."""
        self._model, self._ops = network.model, network.ops
        self._network = network
        self._best: dict[str, Tensor] = network.tensors if keeps_best else {}
        self._live = {"": network.arrays, "velocity.": optimizer.velocities}
        self._kept = {
            prefix: self._ops.upload(
                self._model, self._ops.download(self._model, live), operands=False
            )
            for prefix, live in self._live.items()
        }

    def take(self, epochs: Sequence[Epoch], loss_scale: LossScale) -> None:
        """Copy the state of network and optimizer."""
        self.epochs = ()  # an interrupted copy must not be resumed from
        for prefix, live in self._live.items():
            self._ops.copy(live, self._kept[prefix])
        if self._best and best_epoch(epochs) == len(epochs):
            self._best = self._network.tensors
        self.epochs, self.loss_scale = tuple(epochs), loss_scale

    def restore(self) -> None:
        """Copy the state back into network and optimizer."""
        for prefix, live in self._live.items():
            self._ops.copy(self._kept[prefix], live)

    def restore_best(self) -> None:
        """Copy the best epoch's tensors, if they are kept, into the network."""
        if self._best:
            best = self._ops.upload(self._model, self._best, operands=False)
            self._ops.copy(best, self._network.arrays)

    def read(self) -> dict[str, Tensor]:
        """Host copies; of conv1.weight the velocity is velocity.conv1.weight, the best best.*."""
        return {
            f"{prefix}{name}": value
            for prefix, kept in self._kept.items()
            for name, value in self._ops.download(self._model, kept).items()
        } | {f"best.{name}": value for name, value in self._best.items()}

    def write(
        self, tensors: Mapping[str, Tensor], epochs: Sequence[Epoch], loss_scale: LossScale
    ) -> None:
        """Restore the state that `read` returned, also in network and optimizer."""
        for prefix, kept in self._kept.items():
            values = {name: tensors[f"{prefix}{name}"] for name in kept}
            self._kept[prefix] = self._ops.upload(self._model, values, operands=False)
        self._best = {name: tensors[f"best.{name}"] for name in self._best}
        self.restore()
        self.epochs, self.loss_scale = tuple(epochs), loss_scale


class Checkpoint:
    """The file of one run's snapshot; its name identifies the run: a recipe on a dataset.

    `origin` identifies what else it depends on: the content of files that the recipe only names.
    The file also identifies the images that are held out, `validation`: a later version of the
    trainer may hold out others.

    A resumed run has the same bytes as an uninterrupted one.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        dataset_sha256: str,
        validation: Digits,
        origin: str = "",
    ) -> None:
        held_out = hashlib.sha256(validation.images.tobytes() + validation.labels.tobytes())
        self._held_out = held_out.hexdigest()
        self._run = f"{recipe.command()} on {dataset_sha256} {origin}".rstrip()
        name = hashlib.sha256(self._run.encode()).hexdigest()[:12]
        self.path = folder / f"{Path(recipe.model).stem}-{name}.safetensors"

    def save(self, snapshot: Snapshot) -> None:
        """Replace the file, atomically.

        Raises:
            OSError: the folder cannot be written.
        """
        state = {name: np.ascontiguousarray(value) for name, value in snapshot.read().items()}
        history = [[one.loss, one.accuracy, one.validation_accuracy] for one in snapshot.epochs]
        texts = {"epochs": json.dumps(history), "loss_scale": json.dumps(snapshot.loss_scale)}
        content = save(state, {"run": self._run, "held_out": self._held_out, **texts})
        write_atomically(self.path, content)

    def resume(self, snapshot: Snapshot) -> None:
        """Load the saved state, if there is one, into `snapshot`, its network and its optimizer.

        Raises:
            InvalidCheckpoint: the file is broken, of another run, or of other held-out images.
        """
        if not self.path.exists():
            return
        try:
            with safe_open(self.path, "numpy") as file:
                metadata = file.metadata() or {}
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            history = json.loads(metadata["epochs"])
            epochs = [Epoch(*(float(number) for number in one)) for one in history]
            scale, steps = json.loads(metadata["loss_scale"])
            loss_scale = float(scale), int(steps)
        except (
            *(SafetensorError, OSError, ValueError, KeyError, TypeError),
            *(RecursionError, OverflowError),  # of the JSON
        ) as exc:
            raise InvalidCheckpoint(self._refusal(f"cannot be read ({exc})")) from exc
        if metadata.get("run") != self._run:
            raise InvalidCheckpoint(self._refusal("belongs to another run"))
        if metadata.get("held_out") != self._held_out:
            raise InvalidCheckpoint(
                self._refusal("is of an earlier version, or of a run that held out other images")
            )
        expected = {name: (value.shape, value.dtype) for name, value in snapshot.read().items()}
        if expected != {name: (value.shape, value.dtype) for name, value in saved.items()}:
            raise InvalidCheckpoint(self._refusal("holds other tensors than the network"))
        snapshot.write(saved, epochs, loss_scale)

    def discard(self) -> None:
        """Remove the file of a finished run, and what is left of its killed processes' writes."""
        self.path.unlink(missing_ok=True)
        for unfinished in self.path.parent.glob(f"{glob.escape(temporary_prefix(self.path))}*"):
            unfinished.unlink(missing_ok=True)

    def _refusal(self, what: str) -> str:
        return f"{self.path}: the checkpoint {what}; delete it to train from the start"
