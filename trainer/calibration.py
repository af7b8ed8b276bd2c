"""Makes the probabilities of a trained network honest: one temperature for all its logits.

Label smoothing keeps a network from ever saying more than 1 - smoothing, however sure it may be.
Dividing its logits by a temperature T brings its confidence back to its accuracy and changes no
answer. T goes into the weights of the last layer, so that serving knows nothing of it.

Sources: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2; for the targets
Platt 1999, "Probabilistic Outputs for Support Vector Machines", section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet.model import Model
from trainer.ops import Tensor

_LOWEST, _HIGHEST = 0.25, 4.0
"""The limits of T."""


def temperature(logits: NDArray[Any], labels: NDArray[np.uint8]) -> float:
    """The T from 0.25 to 4 for which softmax(logits / T) has the least loss.

    The target of a label is (n + 1) / (n + 2), and the rest is the other classes': n right answers
    say no more. With targets of 1 the network would be the surer, the fewer images there are.

    logits: (n, classes), finite, of images that the network was not trained on; labels: (n,).
    """
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    of_label = values[np.arange(len(labels)), labels]
    others = (values.sum(axis=1) - of_label) / (logits.shape[1] - 1)
    of_target = of_label + (others - of_label) / (len(labels) + 2)
    low, high = 1 / _HIGHEST, 1 / _LOWEST
    # The loss is convex in 1 / T: its slope, the mean of E[z] - z of the target, changes sign once.
    for _ in range(50):
        middle = (low + high) / 2
        e = np.exp(middle * values)
        slope = ((e * values).sum(axis=1) / e.sum(axis=1) - of_target).mean()
        low, high = (middle, high) if slope < 0 else (low, middle)
    return 1 / high


def limit_reached(divisor: float) -> float | None:
    """The limit at which a temperature ended; None if it is between them."""
    ends = (_LOWEST, _HIGHEST)
    return next((one for one in ends if math.isclose(divisor, one, rel_tol=1e-6)), None)


def cooled(model: Model, tensors: Mapping[str, Tensor], divisor: float) -> dict[str, Tensor]:
    """`tensors` of `model`, with a last layer that gives the logits divided by `divisor`."""
    last = model.shapes()[-1].name
    return {
        name: (value / divisor).astype(value.dtype) if name.startswith(f"{last}.") else value
        for name, value in tensors.items()
    }
