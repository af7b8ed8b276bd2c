"""The training loop: epochs of steps, evaluation after each, a checkpoint now and then.

A step asks nothing of the host, so the operations may record it once and repeat it. Everything
random in it is a function of the seed and the step, so a run that was interrupted and resumed
ends with the same bytes as one that was not. It refuses to look at test images and to choose
among epochs: what the recipe ends with is the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from trainer.augment import Limits
from trainer.checkpoint import Checkpoint, Epoch, Snapshot
from trainer.errors import InvalidDataset, TrainingDiverged
from trainer.mnist import Digits
from trainer.network import Network
from trainer.ops import Progress, Run, TrainingOps
from trainer.optimizer import Sgd, rates
from trainer.settings import Recipe
from trainer.step import find_fault, take_step

CHECKPOINT_S = 10.0
"""How much training may be lost: an epoch that ends this long after the last checkpoint writes
the next one."""


def accuracy(network: Network, digits: Digits) -> float:
    """The share of `digits` that the network classifies correctly, 0 to 1."""
    right = network.logits(digits.images).argmax(axis=1) == digits.labels
    return float(np.count_nonzero(right)) / len(digits)


def run_of(recipe: Recipe, digits: Digits) -> Run:
    """The steps that `recipe` takes on `digits`.

    Raises:
        InvalidDataset: fewer images than one batch has.
    """
    if len(digits) < recipe.batch:
        raise InvalidDataset(
            f"the training set has {len(digits)} images, expected at least one batch of "
            f"{recipe.batch}; lower --batch"
        )
    steps = recipe.epochs * (len(digits) // recipe.batch)
    limits = Limits(recipe.rotation, recipe.scale, recipe.shear, recipe.shift, recipe.elastic)
    learning = rates(recipe.schedule, steps, recipe.rate)
    return Run(digits, recipe.batch, limits, recipe.seed, learning)


def train(
    network: Network,
    recipe: Recipe,
    training: Digits,
    validation: Digits,
    checkpoint: Checkpoint,
    *,
    target: float | None = None,
    record: bool = True,
    leader: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Epoch], float]:
    """Train `network` in place, from its checkpoint if it has one; a bar and a line per epoch.

    `target`: the validation accuracy, in percent, after which no further epoch is begun. `record`:
    whether a step may be recorded and repeated, which hides its layers from a profiler. `leader`:
    of several ranks that train one network only one shows and writes anything.

    Returns: how each epoch went, those before the checkpoint included, and the seconds from before
    the first step of this call to after its last.

    Raises:
        TrainingDiverged: the loss is no longer finite; the checkpoint holds the last good epoch.
        InvalidCheckpoint: the checkpoint cannot be resumed from.
        InvalidDataset: fewer training images than one batch has.
        OSError: the checkpoint cannot be written.
    """
    run = run_of(recipe, training)
    ops = network.ops
    optimizer = Sgd(
        network.model,
        network.parameters,
        ops,
        recipe.momentum,
        recipe.weight_decay,
        recipe.nesterov,
    )
    snapshot = Snapshot(network, optimizer)
    checkpoint.resume(snapshot)
    epochs = list(snapshot.epochs)
    progress = ops.start(run, len(epochs) * run.steps_per_epoch)
    step = partial(take_step, network, optimizer, progress)
    # Recording takes a step, and after the last one there is none to take.
    left = len(epochs) < recipe.epochs
    repeat = ops.record(step) if record and left else step
    accuracy(network, validation)  # whatever its first time costs is no training
    ops.meet()  # a rank that is still taking memory would wait for one that waits for its sum
    images = run.steps_per_epoch * run.batch
    with tqdm(
        total=recipe.epochs * images,
        initial=len(epochs) * images,
        unit="images",
        unit_scale=True,
        disable=None if leader else True,  # on a terminal only
    ) as bar:
        if epochs and leader:
            bar.write(f"resumed after epoch {len(epochs)} from {checkpoint.path}")
        written, seconds, start = len(epochs), 0.0, clock()
        saved = start
        try:
            while len(epochs) < recipe.epochs and not _reached(target, epochs):
                first = len(epochs) * run.steps_per_epoch
                losses, hits = _epoch(ops, repeat, progress, run, first, bar)
                now = clock()
                seconds = now - start
                if not np.isfinite(losses).all():
                    snapshot.restore()
                    raise _diverged(network, optimizer, run, recipe, first, losses)
                epoch = Epoch(
                    float(losses.mean()), int(hits.sum()) / images, accuracy(network, validation)
                )
                epochs.append(epoch)
                snapshot.take(epochs)
                if leader and now - saved >= CHECKPOINT_S:
                    checkpoint.save(snapshot)
                    written, saved = len(epochs), now
                if leader:
                    bar.write(
                        f"epoch {len(epochs)} of {recipe.epochs}: loss {epoch.loss:.4f}, accuracy "
                        f"{epoch.accuracy:.2%}, validation {epoch.validation_accuracy:.2%}"
                    )
        finally:
            # However it ends: an export that fails must not cost the training either.
            if leader and len(snapshot.epochs) > written:
                checkpoint.save(snapshot)
    return epochs, seconds


def _reached(target: float | None, epochs: Sequence[Epoch]) -> bool:
    if target is None or not epochs:
        return False
    # 100 times 0.57 is a little less than 57.
    return 100 * epochs[-1].validation_accuracy >= target - 1e-9


def _epoch(
    ops: TrainingOps,
    repeat: Callable[[], None],
    progress: Progress,
    run: Run,
    first: int,
    bar: tqdm[NoReturn],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Losses and hits of an epoch's steps; it ends early when it sees a loss that is not finite."""
    count = run.steps_per_epoch
    losses, hits, looked = np.zeros(count), np.zeros(count, np.int64), 0
    # A diverging step may overflow before the loss says so, in one clear sentence.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for taken in range(1, count + 1):
            repeat()
            if taken - looked < ops.readback_steps and taken < count:
                continue
            new = slice(looked, taken)
            losses[new], hits[new] = ops.losses(progress, first + looked, first + taken)
            bar.set_postfix(
                loss=f"{losses[:taken].mean():.4f}",
                accuracy=f"{hits[:taken].sum() / (taken * run.batch):.2%}",
                refresh=False,
            )
            bar.update((taken - looked) * run.batch)
            looked = taken
            if not np.isfinite(losses[new]).all():
                break
    return losses[:looked], hits[:looked]


def _diverged(
    network: Network,
    optimizer: Sgd,
    run: Run,
    recipe: Recipe,
    first: int,
    losses: NDArray[np.float64],
) -> TrainingDiverged:
    """The error for an epoch from step `first` on; network and optimiser are as before it."""
    bad = int(np.flatnonzero(~np.isfinite(losses))[0])
    if network.ops.ranks > 1:
        where = "one GPU alone would tell in which layer first"
    else:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            fault = find_fault(network, optimizer, run, first, first + bad + 1)
        where = f"first in {fault}" if fault else "not so when the epoch was repeated"
    return TrainingDiverged(
        f"the loss is {losses[bad]} at step {first + bad + 1} of {run.steps}, expected a finite "
        f"number; {where}; try a --rate lower than {recipe.rate}"
    )
