"""The elementwise functions of a block with their gradients, on NumPy arrays of any layout.

Forward is the reference's own. A slope is written so that it neither overflows nor cancels: where
a function saturates, what is left of its slope is small, but right to the last digits of float32,
which y (1 - y) or 1 - y^2 would have lost. It refuses to know of layers and of gradients of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lenet import reference
from lenet.model import Activation, ActivationKind
from lenet.reference import Array


class Activated(NamedTuple):
    """What the slope is computed from: y where that is enough, so that no x is kept alive."""

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
    """The function, and what its backward needs."""
    y = reference.activate(x, activation)
    return y, Activated(x if activation.kind in _OF_X else y, activation)


def activate_backward(dy: Array, saved: Activated) -> Array:
    """The slope times dy; `TrainingOps.tail_backward` says which slope a kink has."""
    kept, activation = saved
    if activation.kind == "identity":
        return dy
    return dy * _SLOPES[activation.kind](kept, activation.parameter)
