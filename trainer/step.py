"""One step of training, and the search for where a run first broke.

A NaN spreads: by the time a loss shows it, it is everywhere. So the steps of the epoch are taken
once more from the last good state, and every output, gradient and parameter is looked at.
"""

from __future__ import annotations

import numpy as np

from lenet.nvtx import span
from trainer.network import Network, Watch, look_away
from trainer.ops import Array, Progress, Run, TrainingOps
from trainer.optimizer import Sgd


def take_step(
    network: Network, optimizer: Sgd, progress: Progress, watch: Watch = look_away
) -> None:
    """The step of `progress`, and on to the next."""
    ops = network.ops
    with span("step"):
        x, labels = ops.batch(progress)
        with span("forward"):
            network.forward(x, labels, progress, watch)
        with span("backward"):
            network.backward(watch)
        with span("update"):
            optimizer.step(network.gradients, progress)
        ops.tick(progress)


class _First:
    """Remembers the name of the first array that is not finite."""

    def __init__(self, ops: TrainingOps) -> None:
        self.name: str | None = None
        self._ops = ops

    def __call__(self, name: str, value: Array) -> None:
        if self.name is None and not self._ops.finite(value):
            self.name = name


def find_fault(network: Network, optimizer: Sgd, run: Run, start: int, stop: int) -> str | None:
    """What was not finite first, as in "conv2's gradient at step 7", counted from 1.

    Takes the steps from `start` to before `stop`; network and optimiser have to be in the state
    before them. A gradient counts only if the loss or a parameter of its step is not finite
    either: with 16-bit values an overflow is met by taking no step. None: all was finite.
    """
    ops = network.ops
    progress = ops.start(run, start)
    for step in range(start, stop):
        first = _First(ops)
        take_step(network, optimizer, progress, first)
        updated = _First(ops)
        for name, parameter in network.parameters.items():
            updated(name, parameter)
        (loss,), _ = ops.losses(progress, step, step + 1)
        if not np.isfinite(loss) or updated.name:
            return f"{first.name or updated.name or 'the loss itself'} at step {step + 1}"
    return None
