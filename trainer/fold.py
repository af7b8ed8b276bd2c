r"""Batch norm folded into the convolution or dense layer before it: what is served has none.

Outside training, batch norm knows the mean m and variance v of each channel, so after
x' = w x (the convolution has no bias of its own, b = 0) it is one multiplication and one addition:

    y = gamma (x' - m) / sqrt(v + eps) + beta
      = s x' + (beta - s m)            with s = gamma / sqrt(v + eps)

and as the layer is linear in w, s (w x) = (s w) x. Hence, per output channel or unit,

    w_folded = s w
    b_folded = beta - s m

Computed in float64 and rounded once, so that the folded network differs from the other by
rounding alone. Pure NumPy; it refuses to know how a network is trained.

Source: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lenet.model import Model
from lenet.reference import Array

EPSILON = 1e-5
"""Added to every variance, in training as in folding."""


def scale_and_shift(gamma: Array, beta: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Give s and beta - s m of the module's docstring, in float64; all of shape (k,)."""
    wide = [np.asarray(value, np.float64) for value in (gamma, beta, mean, variance)]
    scale = wide[0] / np.sqrt(wide[3] + EPSILON)
    return scale, wide[1] - scale * wide[2]


def fold(model: Model, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of `model.folded` from those of `model`, in the dtype of the weights."""
    folded: dict[str, Array] = {}
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        weight = tensors[f"{shape.name}.weight"]
        if block.batch_norm:
            parts = (tensors[f"{shape.name}.{part}"] for part in ("gamma", "beta"))
            moments = (tensors[f"{shape.name}.{part}"] for part in ("mean", "variance"))
            scale, bias = scale_and_shift(*parts, *moments)
            per_channel = scale.reshape(-1, *[1] * (weight.ndim - 1))
            folded[f"{shape.name}.weight"] = (weight * per_channel).astype(weight.dtype)
            folded[f"{shape.name}.bias"] = bias.astype(weight.dtype)
        else:
            folded[f"{shape.name}.weight"] = weight.copy()
            folded[f"{shape.name}.bias"] = tensors[f"{shape.name}.bias"].copy()
    return folded
