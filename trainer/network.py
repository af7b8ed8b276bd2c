"""A `Model` that can be trained: its layers in order, and one training step.

`Network.tensors` has the names of `Model.parameters`; export and checkpoints work on them.
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
from trainer.layers import (
    BlockEpilogue,
    Convolution,
    Dense,
    Dropout,
    Layer,
    SoftmaxCrossEntropy,
)
from trainer.ops import Array, Epilogue, Norm, RunState, Tensor, TrainingOps
from trainer.optimizer import Sgd

EVALUATION_BATCH = 1000
"""Rows of one forward pass outside training; bounds the memory."""

TensorHook: TypeAlias = Callable[[str, Array], None]
"""Called with each output and each gradient of a step, and its name, when it is computed."""


def no_hook(_name: str, _value: Array) -> None:
    """Do nothing."""


def initial_tensors(
    model: Model, random: np.random.Generator, dtype: DTypeLike = np.float32
) -> dict[str, Tensor]:
    """Initial values: weights normal with variance 2 / fan_in; batch norm the identity.

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
    """The layers of `model` on `ops`, with copies of `tensors` that are trained in place.

    `dropout` is the share of units zeroed after each hidden dense block, 0 for none. The first
    `frozen` blocks compute as outside training and stay as they are. `arrays` holds all tensors on
    the device, `parameters` those that are trained: all others but running means and variances.
    """

    def __init__(
        self,
        model: Model,
        tensors: Mapping[str, Tensor],
        ops: TrainingOps,
        dropout: float = 0.0,
        *,
        frozen: int = 0,
    ) -> None:
        self.model = model
        self.ops = ops
        self.arrays = ops.upload(model, tensors)
        self._frozen = tuple(_layers(model, self.arrays, ops, 0.0, range(frozen)))
        self._trained = tuple(
            _layers(model, self.arrays, ops, dropout, range(frozen, len(model.blocks)))
        )
        self.layers = (*self._frozen, *self._trained)
        self.parameters: dict[str, Array] = {
            name: value for layer in self._trained for name, value in layer.parameters.items()
        }
        self._loss = SoftmaxCrossEntropy(ops)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Host copies of all tensors; waits for the device."""
        return self.ops.download(self.model, self.arrays)

    @property
    def gradients(self) -> dict[str, Array]:
        """The gradient of each parameter after `backward`."""
        return {name: value for layer in self._trained for name, value in layer.gradients.items()}

    def forward(self, x: Array, labels: Array, state: RunState, hook: TensorHook = no_hook) -> None:
        """The forward pass of the current step; loss and correct answers go into `state`."""
        for layer in self._frozen:
            with span(layer.name):
                x = layer.forward(x, None)
        for layer in self._trained:
            with span(layer.name):
                x = layer.forward(x, state)
            hook(f"{layer.name}'s output", x)
        self._loss.forward(x, labels, state)

    def backward(self, hook: TensorHook = no_hook) -> None:
        """Compute the gradients of the latest `forward` into `gradients`."""
        dy: Array | None = self._loss.backward()
        for layer in reversed(self._trained):
            assert dy is not None, f"bug: no gradient reaches {layer.name}"
            with span(layer.name):
                dy = layer.backward(dy)
            for gradient in (*layer.gradients.values(), *(() if dy is None else (dy,))):
                hook(f"{layer.name}'s gradient", gradient)
            if layer.gradients:
                self.ops.all_reduce(layer.gradients)

    def logits(self, images: Images) -> Tensor:
        """Logits (n, classes) outside training, n >= 1."""
        batches = (
            images[start : start + EVALUATION_BATCH]
            for start in range(0, len(images), EVALUATION_BATCH)
        )
        return np.concatenate([self._logits(batch) for batch in batches])

    def _logits(self, images: Images) -> Tensor:
        x = self.ops.input_from_images(images)
        for layer in self.layers:
            with span(layer.name):
                x = layer.forward(x, None)
        return self.ops.to_numpy(x)


def _layers(
    model: Model, arrays: Mapping[str, Array], ops: TrainingOps, dropout: float, blocks: range
) -> Iterator[Layer]:
    """The layers of `blocks`, of which the first one's input needs no gradient."""
    shapes = model.shapes()
    for index in blocks:
        block, name = model.blocks[index], shapes[index].name
        first, last = index == blocks.start, index == len(model.blocks) - 1
        weight, norm, pool = arrays[f"{name}.weight"], None, None
        if isinstance(block, ConvBlock):
            yield Convolution(name, ops, weight, first, block)
            pool = block.pool
        else:
            yield Dense(name, ops, weight, first)
        if block.batch_norm:
            norm = Norm(*(arrays[f"{name}.{part}"] for part in Norm._fields))
        bias = arrays.get(f"{name}.bias")
        yield BlockEpilogue(name, ops, Epilogue(norm, bias, block.activation, pool))
        if dropout and not isinstance(block, ConvBlock) and not last:
            yield Dropout(name, ops, block.units, dropout, index)


def take_step(
    network: Network, optimizer: Sgd, state: RunState, hook: TensorHook = no_hook
) -> None:
    """One training step: batch, forward, backward, update; `state` advances to the next step."""
    ops = network.ops
    with span("step"):
        x, labels = ops.batch(state)
        with span("forward"):
            network.forward(x, labels, state, hook)
        ops.prefetch(state)
        with span("backward"):
            network.backward(hook)
        with span("update"):
            optimizer.step(network.gradients, state)
        ops.end_step(state)
