"""The training loop: epochs of steps, evaluation after each, a checkpoint after each.

Everything random in epoch e comes from one generator seeded with (seed, e), so a run that was
interrupted and resumed ends with the same bytes as one that was not. It refuses to look at test
images and to choose among epochs: what the recipe ends with is the result.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tqdm import tqdm

from lenet.files import write_atomically
from lenet.nvtx import span
from trainer.augment import Limits, random_affine
from trainer.errors import InvalidCheckpoint, InvalidDataset, TrainingDiverged
from trainer.mnist import Digits
from trainer.network import Network
from trainer.ops import Array
from trainer.optimizer import Sgd, one_cycle, step_decay
from trainer.settings import Recipe

_SCHEDULES = {"one-cycle": one_cycle, "step": step_decay}


@dataclass(frozen=True, slots=True)
class Epoch:
    """How one epoch went; accuracies from 0 to 1, `loss` and `accuracy` over its training steps."""

    loss: float
    accuracy: float
    validation_accuracy: float


class Checkpoint:
    """The state after the latest whole epoch of one run, in one file.

    The file's name says which run: a recipe on a dataset. Parameters, running statistics and
    velocities are all there is, as the loop's generators start anew in each epoch.
    """

    def __init__(self, folder: Path, recipe: Recipe, dataset_sha256: str) -> None:
        self._run = f"{recipe.command()} on {dataset_sha256}"
        name = hashlib.sha256(self._run.encode()).hexdigest()[:12]
        self.path = folder / f"{recipe.model}-{name}.safetensors"

    def save(self, network: Network, optimizer: Sgd, epochs: list[Epoch]) -> None:
        """Replace the file, atomically.

        Raises:
            OSError: the folder cannot be written.
        """
        state = {name: np.ascontiguousarray(a) for name, a in _state(network, optimizer).items()}
        history = [[one.loss, one.accuracy, one.validation_accuracy] for one in epochs]
        content = save(state, {"run": self._run, "epochs": json.dumps(history)})
        write_atomically(self.path, content)

    def resume(self, network: Network, optimizer: Sgd) -> list[Epoch]:
        """Put the saved state, if there is one, into both and return the epochs it has behind it.

        Raises:
            InvalidCheckpoint: the file is broken or of another run.
        """
        if not self.path.exists():
            return []
        state = _state(network, optimizer)
        try:
            with safe_open(self.path, "numpy") as file:
                metadata = file.metadata() or {}
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            history = json.loads(metadata["epochs"])
            epochs = [Epoch(*(float(number) for number in one)) for one in history]
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as exc:
            raise InvalidCheckpoint(self._refusal(f"cannot be read ({exc})")) from exc
        if metadata.get("run") != self._run:
            raise InvalidCheckpoint(self._refusal("belongs to another run"))
        shapes = {name: (value.shape, value.dtype) for name, value in state.items()}
        if shapes != {name: (value.shape, value.dtype) for name, value in saved.items()}:
            raise InvalidCheckpoint(self._refusal("holds other tensors than the network"))
        for name, value in state.items():
            value[...] = saved[name]
        return epochs

    def discard(self) -> None:
        """The run is over: remove the file."""
        self.path.unlink(missing_ok=True)

    def _refusal(self, what: str) -> str:
        return f"{self.path}: the checkpoint {what}; delete it to train from the start"


def _state(network: Network, optimizer: Sgd) -> dict[str, Array]:
    velocities = {f"velocity.{name}": value for name, value in optimizer.velocities.items()}
    return {**network.tensors, **velocities}


def accuracy(network: Network, digits: Digits) -> float:
    """The share of `digits` that the network classifies correctly, 0 to 1."""
    right = network.logits(digits.images).argmax(axis=1) == digits.labels
    return float(np.count_nonzero(right)) / len(digits)


def train(
    network: Network,
    recipe: Recipe,
    training: Digits,
    validation: Digits,
    checkpoint: Checkpoint,
) -> list[Epoch]:
    """Train `network` in place, from its checkpoint if it has one; a bar and a line per epoch.

    Raises:
        TrainingDiverged: the loss is no longer finite; the checkpoint holds the last good epoch.
        InvalidCheckpoint: the checkpoint cannot be resumed from.
        InvalidDataset: fewer training images than one batch has.
        OSError: the checkpoint cannot be written.
    """
    if len(training) < recipe.batch:
        raise InvalidDataset(
            f"the training set has {len(training)} images, expected at least one batch of "
            f"{recipe.batch}; lower --batch"
        )
    optimizer = Sgd(network.parameters, recipe.momentum, recipe.weight_decay, recipe.nesterov)
    epochs = checkpoint.resume(network, optimizer)
    images = len(training) // recipe.batch * recipe.batch
    with tqdm(
        total=recipe.epochs * images,
        initial=len(epochs) * images,
        unit="images",
        unit_scale=True,
        disable=None,  # on a terminal only
    ) as bar:
        if epochs:
            bar.write(f"resumed after epoch {len(epochs)} from {checkpoint.path}")
        while len(epochs) < recipe.epochs:
            loss, right = _epoch(network, optimizer, recipe, training, len(epochs), bar)
            epoch = Epoch(loss, right / images, accuracy(network, validation))
            epochs.append(epoch)
            checkpoint.save(network, optimizer, epochs)
            bar.write(
                f"epoch {len(epochs)} of {recipe.epochs}: loss {loss:.4f}, "
                f"accuracy {epoch.accuracy:.2%}, validation {epoch.validation_accuracy:.2%}"
            )
    return epochs


def _epoch(
    network: Network,
    optimizer: Sgd,
    recipe: Recipe,
    training: Digits,
    finished: int,
    bar: tqdm[NoReturn],
) -> tuple[float, int]:
    """(mean loss, how many were right) over the steps of the epoch after `finished` others."""
    # Seeded with one number more than the initial weights: epochs count from 1.
    random = np.random.default_rng([recipe.seed, finished + 1])
    limits = Limits(recipe.rotation, recipe.scale, recipe.shear, recipe.shift)
    rate = _SCHEDULES[recipe.schedule]
    order = random.permutation(len(training))
    steps = len(training) // recipe.batch
    losses, right = 0.0, 0
    for index in range(steps):
        step = finished * steps + index
        rows = order[index * recipe.batch : (index + 1) * recipe.batch]
        # A diverging step may overflow before the loss says so, in one clear sentence.
        with span("step"), np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            images = random_affine(training.images[rows], limits, random)
            with span("forward"):
                loss, hits = network.forward(images, training.labels[rows], random)
            if not math.isfinite(loss):
                raise TrainingDiverged(
                    f"the loss is {loss} at step {step + 1} of {recipe.epochs * steps}, expected "
                    f"a finite number; try a --rate lower than {recipe.rate}"
                )
            with span("backward"):
                network.backward()
            with span("update"):
                now = rate(step, recipe.epochs * steps, recipe.rate)
                optimizer.step(network.gradients, now)
        losses += loss
        right += hits
        seen = (index + 1) * recipe.batch
        bar.set_postfix(
            loss=f"{losses / (index + 1):.4f}", accuracy=f"{right / seen:.2%}", refresh=False
        )
        bar.update(recipe.batch)
    return losses / steps, right
