"""The training loop: epochs of steps, an evaluation after each, checkpoints.

Everything random in a step is a function of the seed and the step, so an interrupted and resumed
run ends with the same bytes as an uninterrupted one. The result is the state after the last epoch;
test images are never used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from trainer.augment import WarpLimits
from trainer.checkpoint import Checkpoint, Epoch, Snapshot, best_epoch
from trainer.errors import InvalidDataset, TrainingDiverged
from trainer.mnist import Digits
from trainer.network import Network, take_step
from trainer.ops import Array, LossScale, Run, RunState, TrainingOps
from trainer.optimizer import Sgd, rates
from trainer.runs import Phases
from trainer.settings import Recipe

if TYPE_CHECKING:
    from tqdm import tqdm

CHECKPOINT_S = 10.0
"""The first epoch that ends this long after the last checkpoint writes the next one."""

MAX_LOSS = 100.0
"""Maximum loss of a step, in nats. A network that begins to diverge may stay finite and useless:
mlp at a rate of 5 had a mean loss of 92 in its first epoch, and ended with one class for all."""


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
    limits = WarpLimits(recipe.rotation, recipe.scale, recipe.shear, recipe.shift, recipe.elastic)
    learning = rates(recipe.schedule, steps, recipe.rate)
    weights = None
    if recipe.class_weights == "balanced":
        counts = np.bincount(digits.labels)
        weights = (len(digits) / (np.count_nonzero(counts) * np.maximum(counts, 1))).astype(
            np.float32
        )
    return Run(digits, recipe.batch, limits, recipe.seed, learning, recipe.smoothing, weights)


def train(
    network: Network,
    recipe: Recipe,
    training: Digits,
    validation: Digits,
    checkpoint: Checkpoint,
    *,
    target: float | None = None,
    patience: int | None = None,
    capture: bool = True,
    leader: bool = True,
    clock: Callable[[], float] = time.monotonic,
    phases: Phases | None = None,
    record: Callable[[dict[str, float]], None] = lambda _: None,
) -> tuple[list[Epoch], float]:
    """Train `network` in place, from its checkpoint if there is one; print a line per epoch.

    `target`: the validation accuracy, in percent, after which training stops. `patience`: the
    epochs without a better one after which it stops; the network ends as it was after the best
    epoch. `capture`: whether
    the step may be captured and replayed, which hides its layers from a profiler. `leader`: of
    several ranks only one prints and writes checkpoints. `phases` takes the times. `record` is
    called with the metrics of each epoch, those before the checkpoint first.

    Returns: the results of all epochs, those before the checkpoint included, and the seconds that
    the steps of this call took.

    Raises:
        TrainingDiverged: the loss is NaN, infinite or above `MAX_LOSS`; the checkpoint
            holds the last good epoch.
        InvalidCheckpoint: the checkpoint cannot be resumed from.
        InvalidDataset: fewer training images than one batch has.
        OSError: the checkpoint cannot be written.
    """
    from tqdm import tqdm  # of which only training has use

    phases = phases or Phases()
    run = run_of(recipe, training)
    ops = network.ops
    with phases("set-up"):
        optimizer = Sgd(
            network.model,
            network.parameters,
            ops,
            recipe.momentum,
            recipe.weight_decay,
            recipe.nesterov,
        )
        snapshot = Snapshot(network, optimizer, keeps_best=patience is not None)
        checkpoint.resume(snapshot)
        epochs = list(snapshot.epochs)
        loss_scale = snapshot.loss_scale if epochs else None
        state = ops.start(run, len(epochs) * run.steps_per_epoch, loss_scale)
        step: Callable[[], None] = partial(take_step, network, optimizer, state)
        # Capturing runs a step, which needs a learning rate: there is none after the last epoch.
        if capture and len(epochs) < recipe.epochs:
            step = ops.capture(step)
        # Warms up the evaluation, so that the epochs' times are alike.
        accuracy(network, validation)
        # Without it a rank that still allocates memory and one that waits in its all-reduce would
        # deadlock.
        ops.barrier()
    for number, one in enumerate(epochs, 1):
        record({"epoch": number, **asdict(one)})
    images = run.steps_per_epoch * run.batch
    with tqdm(
        total=recipe.epochs * images,
        initial=len(epochs) * images,
        unit="images",
        unit_scale=True,
        disable=None if leader else True,  # None: only on a terminal
    ) as bar:
        if epochs and leader:
            bar.write(f"resumed after epoch {len(epochs)} from {checkpoint.path}")
        resumed = written = len(epochs)
        skipped_before = 0
        seconds, start = 0.0, clock()
        saved = start
        try:
            while len(epochs) < recipe.epochs and not (
                _reached(target, epochs) or _stalled(patience, epochs)
            ):
                first = len(epochs) * run.steps_per_epoch
                with phases("steps"):
                    losses, correct = _epoch(ops, step, state, run, first, bar)
                now = clock()
                seconds = now - start
                if not np.isfinite(losses).all():
                    snapshot.restore()
                    loss_scale = snapshot.loss_scale if snapshot.epochs else None
                    raise _diverged(network, optimizer, run, recipe, first, losses, loss_scale)
                if losses.max() > MAX_LOSS:
                    snapshot.restore()
                    raise _exploded(run, recipe, first, losses)
                with phases("validation"):
                    validated = accuracy(network, validation)
                epoch = Epoch(float(losses.mean()), int(correct.sum()) / images, validated)
                epochs.append(epoch)
                loss_scale, skipped = ops.loss_scale(state), ops.skipped(state)
                skipped, skipped_before = skipped - skipped_before, skipped
                with phases("checkpoints"):
                    snapshot.take(epochs, loss_scale)
                    if leader and now - saved >= CHECKPOINT_S:
                        checkpoint.save(snapshot)
                        written, saved = len(epochs), now
                rate = float(run.rates[first + run.steps_per_epoch - 1])
                metrics = {"epoch": len(epochs), **asdict(epoch), "rate": rate}
                scaling = {"skipped_steps": skipped, "loss_scale": loss_scale[0]}
                record({**metrics, "seconds": round(seconds, 3), **scaling})
                if leader:
                    bar.write(
                        f"epoch {len(epochs)} of {recipe.epochs}: loss {epoch.loss:.4f}, accuracy "
                        f"{epoch.accuracy:.2%}, validation {epoch.validation_accuracy:.2%}"
                        f"{_skipped(skipped, loss_scale[0])}"
                        f"{_left(recipe.epochs - len(epochs), seconds / (len(epochs) - resumed))}"
                    )
        finally:
            # After the last epoch, too: a failed export must not cost the training.
            if leader and len(snapshot.epochs) > written:
                checkpoint.save(snapshot)
    snapshot.restore_best()
    return epochs, seconds


def _skipped(steps: int, scale: float) -> str:
    """The steps of an epoch that changed nothing; "" if there were none."""
    if not steps:
        return ""
    return f", {steps} steps skipped: a gradient overflowed, the loss scale is now {scale:g}"


def _left(epochs: int, epoch_s: float) -> str:
    """The time that so many epochs will take, rounded up; "" where none are left."""
    seconds = math.ceil(epochs * epoch_s)
    if not epochs:
        return ""
    if seconds <= 60:
        return f", {seconds} s left"
    minutes = math.ceil(seconds / 60)
    return f", {minutes} min left" if minutes <= 120 else f", {minutes / 60:.1f} h left"


def _reached(target: float | None, epochs: Sequence[Epoch]) -> bool:
    if target is None or not epochs:
        return False
    # 100 times 0.57 is a little less than 57.
    return 100 * epochs[-1].validation_accuracy >= target - 1e-9


def _stalled(patience: int | None, epochs: Sequence[Epoch]) -> bool:
    return patience is not None and len(epochs) - best_epoch(epochs) >= patience


def _epoch(
    ops: TrainingOps,
    step: Callable[[], None],
    state: RunState,
    run: Run,
    first: int,
    bar: tqdm[NoReturn],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Losses and correct answers of an epoch's steps, up to the first loss that is not finite."""
    count = run.steps_per_epoch
    losses, correct, seen = np.zeros(count), np.zeros(count, np.int64), 0
    # A diverging step may overflow before its loss is read and reported.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for taken in range(1, count + 1):
            step()
            if taken - seen < ops.readback_steps and taken < count:
                continue
            new = slice(seen, taken)
            losses[new], correct[new] = ops.losses(state, first + seen, first + taken)
            bar.set_postfix(
                loss=f"{losses[:taken].mean():.4f}",
                accuracy=f"{correct[:taken].sum() / (taken * run.batch):.2%}",
                refresh=False,
            )
            bar.update((taken - seen) * run.batch)
            seen = taken
            if not np.isfinite(losses[new]).all():
                break
    return losses[:seen], correct[:seen]


def _diverged(
    network: Network,
    optimizer: Sgd,
    run: Run,
    recipe: Recipe,
    first: int,
    losses: NDArray[np.float64],
    loss_scale: LossScale | None,
) -> TrainingDiverged:
    """The error for the epoch that begins at step `first`; the state before it is restored."""
    bad = int(np.flatnonzero(~np.isfinite(losses))[0])
    if network.ops.ranks > 1:
        where = "train on one GPU to see in which layer first"
    else:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            fault = find_fault(network, optimizer, run, first, first + bad + 1, loss_scale)
        where = f"first in {fault}" if fault else "it was finite when the epoch was repeated"
    return TrainingDiverged(
        f"the loss is {losses[bad]} at step {first + bad + 1} of {run.steps}, expected a finite "
        f"number; {where}; try a --rate lower than {recipe.rate}"
    )


def _exploded(
    run: Run, recipe: Recipe, first: int, losses: NDArray[np.float64]
) -> TrainingDiverged:
    """The error for the finite losses of the epoch that begins at step `first`."""
    worst = int(losses.argmax())
    return TrainingDiverged(
        f"the loss is {losses[worst]:.0f} at step {first + worst + 1} of {run.steps}, expected at "
        f"most {MAX_LOSS:.0f}; try a --rate lower than {recipe.rate}"
    )


class _FirstFault:
    """The name of the first array that is not finite."""

    def __init__(self, ops: TrainingOps) -> None:
        self.name: str | None = None
        self._ops = ops

    def __call__(self, name: str, value: Array) -> None:
        if self.name is None and not self._ops.finite(value):
            self.name = name


def find_fault(
    network: Network,
    optimizer: Sgd,
    run: Run,
    start: int,
    stop: int,
    loss_scale: LossScale | None = None,
) -> str | None:
    """The first array that is not finite, as in "conv2's gradient at step 7", counted from 1.

    A NaN spreads: when the loss shows it, it is everywhere. So the steps `start` to `stop` - 1 are
    run again from the state before them, `loss_scale` with it, and every output, gradient and
    parameter is checked. A gradient counts only if the loss or a parameter of its step is not
    finite either: mixed precision skips a step whose gradient overflows. None: all arrays are
    finite.
    """
    ops = network.ops
    state = ops.start(run, start, loss_scale)
    for step in range(start, stop):
        first = _FirstFault(ops)
        take_step(network, optimizer, state, first)
        updated = _FirstFault(ops)
        for name, parameter in network.parameters.items():
            updated(name, parameter)
        (loss,), _ = ops.losses(state, step, step + 1)
        if not np.isfinite(loss) or updated.name:
            return f"{first.name or updated.name or 'the loss itself'} at step {step + 1}"
    return None
