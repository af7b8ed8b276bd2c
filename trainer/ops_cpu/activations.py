"""Activations with their gradients, on NumPy arrays of any layout.

The forward is `lenet.reference`'s. Slopes are written so that they neither overflow nor cancel:
where a function saturates, y (1 - y) or 1 - y^2 would lose all digits of a small slope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lenet import reference
from lenet.model import Activation, ActivationKind
from lenet.reference import Array


class Activated(NamedTuple):
    """Saved for the slope: y where that is enough, so that x can be freed."""

    kept: Array
    activation: Activation


def _sigmoid(x: Array, _: float) -> Array:
    e = np.exp(-np.abs(x))
    slope: Array = e / (1 + e) ** 2
    return slope


def _tanh(x: Array, _: float) -> Array:
    e = np.exp(-np.abs(x))
    slope: Array = (2 * e / (1 + e * e)) ** 2  # 1 / cosh^2
    return slope


_SLOPES: Mapping[ActivationKind, Callable[[Array, float], Array]] = {
    "relu": lambda y, _: y > 0,
    "clipped_relu": lambda y, ceiling: (y > 0) & (y < ceiling),
    "elu": lambda x, alpha: np.where(x > 0, 1, alpha * np.exp(np.minimum(x, 0))),
    "sigmoid": _sigmoid,
    "tanh": _tanh,
}
_OF_X: frozenset[ActivationKind] = frozenset({"elu", "sigmoid", "tanh"})


def activate(x: Array, activation: Activation) -> tuple[Array, Activated]:
    """y, and what the gradient needs."""
    y = reference.activate(x, activation)
    return y, Activated(x if activation.kind in _OF_X else y, activation)


def activate_backward(dy: Array, saved: Activated) -> Array:
    """Dy times the slope; `TrainingOps.epilogue_backward` defines the slope at a kink."""
    kept, activation = saved
    if activation.kind == "identity":
        return dy
    return dy * _SLOPES[activation.kind](kept, activation.parameter)
