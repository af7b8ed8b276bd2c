"""A `Model` made trainable: its layers in order, forward directly followed by its backward.

The network trains the arrays it is given in place; `tensors` hands them out under the names of
`Model.parameters`, which is what folding, checkpoints and the optimiser work on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import DTypeLike

from lenet.blocks import IDENTITY, ConvBlock
from lenet.model import Model
from lenet.nvtx import span
from lenet.pixels import Images
from trainer.layers import (
    Activate,
    BatchNorm,
    Convolution,
    Dense,
    Dropout,
    Layer,
    Pooling,
    Random,
)
from trainer.loss import SoftmaxCrossEntropy
from trainer.ops import Array, Labels, TrainingOps

EVALUATION_BATCH = 250
"""Rows of one forward pass outside training; bounds the memory, changes no result that counts."""


def initial_tensors(
    model: Model, random: np.random.Generator, dtype: DTypeLike = np.float32
) -> dict[str, Array]:
    """Where training starts: weights normal with variance 2 / fan_in; batch norm that does nothing.

    Source: He et al. 2015, eq. 10.
    """
    tensors: dict[str, Array] = {}
    for name, shape in model.parameters().items():
        if name.endswith(".weight"):
            deviation = math.sqrt(2 / math.prod(shape[1:]))
            tensors[name] = (random.standard_normal(shape) * deviation).astype(dtype)
        elif name.endswith((".gamma", ".variance")):
            tensors[name] = np.ones(shape, dtype)
        else:
            tensors[name] = np.zeros(shape, dtype)
    return tensors


class Network:
    """The layers of `model` on `ops`, over `tensors`, which training changes in place.

    `dropout` is the share of units zeroed after each hidden dense block, 0 for none.
    """

    def __init__(
        self,
        model: Model,
        tensors: Mapping[str, Array],
        ops: TrainingOps,
        dropout: float = 0.0,
    ) -> None:
        self.model = model
        self.tensors = dict(tensors)
        self.layers = tuple(_layers(model, self.tensors, ops, dropout))
        self._ops = ops
        self._loss = SoftmaxCrossEntropy(ops)

    @property
    def parameters(self) -> dict[str, Array]:
        """The trained tensors by name; the running means and variances are not among them."""
        return {name: value for layer in self.layers for name, value in layer.parameters.items()}

    @property
    def gradients(self) -> dict[str, Array]:
        """The gradient of each parameter after `backward`."""
        return {name: value for layer in self.layers for name, value in layer.gradients.items()}

    def forward(self, images: Images, labels: Labels, random: Random) -> tuple[float, int]:
        """One training batch: (mean loss, how many were right); `random` feeds dropout."""
        x = self._forward(images, random)
        loss = self._loss.forward(x, labels)
        right = self._ops.leave(x).argmax(axis=1) == labels
        return loss, int(np.count_nonzero(right))

    def backward(self) -> None:
        """Leave in `gradients` what the latest `forward` calls for."""
        dy: Array | None = self._loss.backward()
        for layer in reversed(self.layers):
            assert dy is not None, f"bug: no gradient reaches {layer.name}"
            with span(layer.name):
                dy = layer.backward(dy)

    def logits(self, images: Images) -> Array:
        """Logits (n, classes) outside training, for any number of images from 1."""
        batches = (
            images[start : start + EVALUATION_BATCH]
            for start in range(0, len(images), EVALUATION_BATCH)
        )
        return np.concatenate([self._ops.leave(self._forward(batch, None)) for batch in batches])

    def _forward(self, images: Images, random: Random | None) -> Array:
        dtype = next(iter(self.tensors.values())).dtype
        x = self._ops.enter(images, dtype)
        for layer in self.layers:
            with span(layer.name):
                x = layer.forward(x, random)
        return x


def _layers(
    model: Model, tensors: Mapping[str, Array], ops: TrainingOps, dropout: float
) -> Iterator[Layer]:
    for index, (block, shape) in enumerate(zip(model.blocks, model.shapes(), strict=True)):
        name, first, last = shape.name, index == 0, index == len(model.blocks) - 1
        weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
        if isinstance(block, ConvBlock):
            yield Convolution(name, ops, weight, bias, first, block)
        else:
            yield Dense(name, ops, weight, bias, first)
        if block.batch_norm:
            parts = ("gamma", "beta", "mean", "variance")
            yield BatchNorm(name, ops, *(tensors[f"{name}.{part}"] for part in parts))
        if block.activation != IDENTITY:
            yield Activate(name, ops, block.activation)
        if isinstance(block, ConvBlock):
            if block.pool is not None:
                yield Pooling(name, ops, block.pool)
        elif dropout and not last:
            yield Dropout(name, ops, dropout)
