"""A `Model` made trainable: its layers in order, forward directly followed by its backward.

The network trains arrays of its operations in place; `tensors` reads them back under the names of
`Model.parameters`, which is what folding and checkpoints work on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from lenet.model import ConvBlock, Model
from lenet.nvtx import span
from lenet.pixels import Images
from trainer.layers import BlockTail, Convolution, Dense, Dropout, Layer
from trainer.loss import SoftmaxCrossEntropy
from trainer.ops import Array, Norm, Progress, Tail, Tensor, TrainingOps

EVALUATION_BATCH = 1000
"""Rows of one forward pass outside training; bounds the memory, changes no result that counts."""

Watch: TypeAlias = Callable[[str, Array], None]
"""Is shown each output and each gradient, with its name, as it is made."""


def look_away(_name: str, _value: Array) -> None:
    """Watch nothing."""


def initial_tensors(
    model: Model, random: np.random.Generator, dtype: DTypeLike = np.float32
) -> dict[str, Tensor]:
    """Where training starts: weights normal with variance 2 / fan_in; batch norm that does nothing.

    Source: He et al. 2015, eq. 10.
    """
    tensors: dict[str, Tensor] = {}
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
    """The layers of `model` on `ops`, over copies of `tensors`, which training changes in place.

    `dropout` is the share of units zeroed after each hidden dense block, 0 for none. `placed`
    holds all tensors as `ops` keeps them, `parameters` those of them that are trained: the
    running means and variances are not.
    """

    def __init__(
        self,
        model: Model,
        tensors: Mapping[str, Tensor],
        ops: TrainingOps,
        dropout: float = 0.0,
    ) -> None:
        self.model = model
        self.ops = ops
        self.placed = ops.place(model, tensors)
        self.layers = tuple(_layers(model, self.placed, ops, dropout))
        self.parameters: dict[str, Array] = {
            name: value for layer in self.layers for name, value in layer.parameters.items()
        }
        self._loss = SoftmaxCrossEntropy(ops)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Copies in NumPy of all that the model has now; waits for the device."""
        return self.ops.read(self.model, self.placed)

    @property
    def gradients(self) -> dict[str, Array]:
        """The gradient of each parameter after `backward`."""
        return {name: value for layer in self.layers for name, value in layer.gradients.items()}

    def forward(
        self, x: Array, labels: Array, progress: Progress, watch: Watch = look_away
    ) -> None:
        """The step of `progress`, whose loss and hits it notes there."""
        for layer in self.layers:
            with span(layer.name):
                x = layer.forward(x, progress)
            watch(f"{layer.name}'s output", x)
        self._loss.forward(x, labels, progress)

    def backward(self, watch: Watch = look_away) -> None:
        """Leave in `gradients` what the latest `forward` calls for."""
        dy: Array | None = self._loss.backward()
        for layer in reversed(self.layers):
            assert dy is not None, f"bug: no gradient reaches {layer.name}"
            with span(layer.name):
                dy = layer.backward(dy)
            for made in (*layer.gradients.values(), *(() if dy is None else (dy,))):
                watch(f"{layer.name}'s gradient", made)
            if layer.gradients:
                self.ops.share(layer.gradients)

    def logits(self, images: Images) -> Tensor:
        """Logits (n, classes) outside training, for any number of images from 1."""
        batches = (
            images[start : start + EVALUATION_BATCH]
            for start in range(0, len(images), EVALUATION_BATCH)
        )
        return np.concatenate([self._logits(batch) for batch in batches])

    def _logits(self, images: Images) -> Tensor:
        x = self.ops.enter(images)
        for layer in self.layers:
            with span(layer.name):
                x = layer.forward(x, None)
        return self.ops.leave(x)


def _layers(
    model: Model, placed: Mapping[str, Array], ops: TrainingOps, dropout: float
) -> Iterator[Layer]:
    for index, (block, shape) in enumerate(zip(model.blocks, model.shapes(), strict=True)):
        name, first, last = shape.name, index == 0, index == len(model.blocks) - 1
        weight, norm, pool = placed[f"{name}.weight"], None, None
        if isinstance(block, ConvBlock):
            yield Convolution(name, ops, weight, first, block)
            pool = block.pool
        else:
            yield Dense(name, ops, weight, first)
        if block.batch_norm:
            norm = Norm(*(placed[f"{name}.{part}"] for part in Norm._fields))
        yield BlockTail(name, ops, Tail(norm, placed.get(f"{name}.bias"), block.activation, pool))
        if dropout and not isinstance(block, ConvBlock) and not last:
            yield Dropout(name, ops, block.units, dropout, index)
