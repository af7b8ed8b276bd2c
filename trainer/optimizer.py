"""Stochastic gradient descent, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from lenet.model import Model
from trainer.ops import Array, RunState, TrainingOps, Update
from trainer.settings import Schedule

WARM_UP = 0.3
"""The share of a one-cycle run in which the rate rises."""

_START = 1 / 25
_END = 1e-4
_DROPS = (0.5, 0.75)
_FACTOR = 0.1


def rates(schedule: Schedule, steps: int, peak: float) -> NDArray[np.float32]:
    """The learning rate of each of `steps` steps, at most `peak`: float32 (steps,)."""
    return _SCHEDULES[schedule](steps, peak).astype(np.float32)


def one_cycle(steps: int, peak: float) -> NDArray[np.float64]:
    """Half a cosine up from peak / 25, then half a cosine down to peak / 10,000.

    Source: Smith & Topin 2018, "Super-Convergence"; the cosines are fastai's.
    """
    step, top = np.arange(steps, dtype=np.float64), WARM_UP * steps
    up = _cosine(_START * peak, peak, step / top)
    return np.where(step < top, up, _cosine(peak, _END * peak, (step - top) / (steps - top)))


def _cosine(start: float, end: float, share: NDArray[np.float64]) -> NDArray[np.float64]:
    return end + (start - end) * (1 + np.cos(math.pi * share)) / 2


def step_decay(steps: int, peak: float) -> NDArray[np.float64]:
    """`peak`, a tenth of it from half of the run on, a hundredth from three quarters on."""
    drops = np.arange(steps) >= steps * np.array(_DROPS)[:, np.newaxis]
    decayed: NDArray[np.float64] = peak * _FACTOR ** drops.sum(axis=0)
    return decayed


_SCHEDULES: Mapping[Schedule, Callable[[int, float], NDArray[np.float64]]] = {
    "one-cycle": one_cycle,
    "step": step_decay,
}


class Sgd:
    """Gradient descent with momentum, Nesterov's by default.

    v <- momentum v + g, then w <- w - rate (g + momentum v) with Nesterov or w - rate v without,
    where g is the gradient plus weight_decay w. Weight decay applies to `*.weight` only: biases,
    gamma and beta do not overfit, and a smaller gamma would be undone by the next layer.

    `parameters` are uploaded tensors of `model`, updated in place; `velocities` are uploaded
    likewise. Source: Sutskever et al. 2013, in the form of PyTorch's SGD.
    """

    def __init__(
        self,
        model: Model,
        parameters: Mapping[str, Array],
        ops: TrainingOps,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = True,
    ) -> None:
        self.parameters = parameters
        shapes = model.parameters()
        zeros = {name: np.zeros(shapes[name], np.float32) for name in parameters}
        self.velocities = ops.upload(model, zeros, operands=False)
        self._ops = ops
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._nesterov = nesterov

    def step(self, gradients: Mapping[str, Array], state: RunState) -> None:
        """Update every parameter by its gradient, at the learning rate of the current step."""
        updates = [
            Update(name, parameter, gradients[name], self.velocities[name])
            for name, parameter in self.parameters.items()
        ]
        self._ops.sgd_step(updates, state, self._momentum, self._weight_decay, self._nesterov)
