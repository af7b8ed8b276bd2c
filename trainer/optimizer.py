"""Stochastic gradient descent, and the learning rate as a pure function of the step.

A rate that is multiplied by something at every step can vanish without anyone noticing; here
`one_cycle` and `step_decay` say what the rate is at any step, and a test can draw them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from trainer.ops import Array

WARM_UP = 0.3
"""The share of a one-cycle run in which the rate rises."""

_START = 1 / 25
_END = 1e-4
_DROPS = (0.5, 0.75)
_FACTOR = 0.1


def one_cycle(step: int, steps: int, peak: float) -> float:
    """Half a cosine up from peak / 25, then half a cosine down to peak / 10,000.

    0 <= step < steps. Source: Smith & Topin 2018, "Super-Convergence"; the cosines are fastai's.
    """
    top = WARM_UP * steps
    if step < top:
        return _cosine(_START * peak, peak, step / top)
    return _cosine(peak, _END * peak, (step - top) / (steps - top))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def step_decay(step: int, steps: int, peak: float) -> float:
    """`peak`, a tenth of it from half of the run on, a hundredth from three quarters on."""
    return peak * _FACTOR ** sum(step >= drop * steps for drop in _DROPS)


class Sgd:
    """Gradient descent with momentum; Nesterov's unless told otherwise.

    v <- momentum v + g, then w <- w - rate (g + momentum v) with Nesterov or w - rate v without,
    where g is the gradient plus weight_decay w. Weight decay pulls on `*.weight` only: biases and
    batch norm's gamma and beta do not overfit, and pulling gamma to zero would only undo itself.

    `parameters` are updated in place. Source: Sutskever et al. 2013, in the form of PyTorch's SGD.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = True,
    ) -> None:
        self.parameters = parameters
        self.velocities = {name: np.zeros_like(value) for name, value in parameters.items()}
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._nesterov = nesterov

    def step(self, gradients: Mapping[str, Array], rate: float) -> None:
        """One update of every parameter by its gradient."""
        for name, parameter in self.parameters.items():
            gradient = gradients[name]
            if self._weight_decay and name.endswith(".weight"):
                gradient = gradient + self._weight_decay * parameter
            velocity = self.velocities[name]
            velocity *= self._momentum
            velocity += gradient
            if self._nesterov:
                parameter -= rate * (gradient + self._momentum * velocity)
            else:
                parameter -= rate * velocity
