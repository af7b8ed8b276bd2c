"""The layers of a network: each a forward directly followed by its backward.

A layer owns its parameters under their names in the weight file and leaves, after `backward`, a
gradient under each of these names. Between a forward and its backward it keeps what the operation
saved. The arithmetic is all in `TrainingOps`; a layer refuses to look inside an activation.

`random` is the generator that a training step draws from; None means outside training.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from lenet.blocks import Activation, ConvBlock, Pool
from trainer.fold import EPSILON, scale_and_shift
from trainer.ops import Array, Saved, TrainingOps

Random: TypeAlias = np.random.Generator

RUNNING_SHARE = 0.1
"""How much of a batch's mean and variance enters the running ones, as in PyTorch."""


class Layer(Protocol):
    """`parameters` are trained in place; `gradients` has the same keys once backward has run."""

    name: str
    parameters: dict[str, Array]
    gradients: dict[str, Array]

    def forward(self, x: Array, random: Random | None) -> Array:
        """The layer's output; keeps what `backward` needs if `random` is given."""
        ...

    def backward(self, dy: Array) -> Array | None:
        """The gradient of the input of the latest forward; None into the first layer's input."""
        ...


class _Plain:
    """A layer without parameters."""

    def __init__(self, name: str, ops: TrainingOps) -> None:
        self.name = name
        self.parameters: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self._ops = ops
        self._saved: Saved = None

    def _keep(self, saved: Saved, random: Random | None) -> None:
        self._saved = None if random is None else saved

    def _take(self) -> Saved:
        saved, self._saved = self._saved, None
        return saved


class _Linear(_Plain):
    """Weight and, unless batch norm follows, bias."""

    def __init__(
        self, name: str, ops: TrainingOps, weight: Array, bias: Array | None, first: bool
    ) -> None:
        super().__init__(name, ops)
        self.parameters[f"{name}.weight"] = weight
        if bias is not None:
            self.parameters[f"{name}.bias"] = bias
        self._weight, self._bias, self._first = weight, bias, first

    def _leave(self, dweight: Array, dbias: Array) -> None:
        self.gradients[f"{self.name}.weight"] = dweight
        if self._bias is not None:
            self.gradients[f"{self.name}.bias"] = dbias


class Convolution(_Linear):
    """Cross-correlation."""

    def __init__(
        self,
        name: str,
        ops: TrainingOps,
        weight: Array,
        bias: Array | None,
        first: bool,
        block: ConvBlock,
    ) -> None:
        super().__init__(name, ops, weight, bias, first)
        self._block = block

    def forward(self, x: Array, random: Random | None) -> Array:
        """Images of c channels to images of k channels."""
        y, saved = self._ops.convolution(x, self._weight, self._bias, self._block)
        self._keep(saved, random)
        return y

    def backward(self, dy: Array) -> Array | None:
        """Skips the input's gradient in the first layer: nobody asks for it."""
        dx, dweight, dbias = self._ops.convolution_backward(dy, self._take(), not self._first)
        self._leave(dweight, dbias)
        return dx


class Dense(_Linear):
    """Matrix product."""

    def forward(self, x: Array, random: Random | None) -> Array:
        """Flattens an image first."""
        y, saved = self._ops.dense(x, self._weight, self._bias)
        self._keep(saved, random)
        return y

    def backward(self, dy: Array) -> Array | None:
        """Skips the input's gradient in the first layer."""
        dx, dweight, dbias = self._ops.dense_backward(dy, self._take(), not self._first)
        self._leave(dweight, dbias)
        return dx


class BatchNorm(_Plain):
    """Normalises by the batch in training and by the running mean and variance outside it."""

    def __init__(
        self, name: str, ops: TrainingOps, gamma: Array, beta: Array, mean: Array, variance: Array
    ) -> None:
        super().__init__(f"{name}.batch_norm", ops)
        self._gamma_name, self._beta_name = f"{name}.gamma", f"{name}.beta"
        self.parameters = {self._gamma_name: gamma, self._beta_name: beta}
        self._mean, self._variance = mean, variance

    def forward(self, x: Array, random: Random | None) -> Array:
        """In training, moves the running values, in place, a tenth of the way to the batch's."""
        gamma, beta = self.parameters.values()
        if random is None:
            scale, shift = scale_and_shift(gamma, beta, self._mean, self._variance)
            return self._ops.affine(x, scale.astype(x.dtype), shift.astype(x.dtype))
        y, mean, variance, self._saved = self._ops.batch_norm(x, gamma, beta, EPSILON)
        self._mean += RUNNING_SHARE * (mean - self._mean)
        self._variance += RUNNING_SHARE * (variance - self._variance)
        return y

    def backward(self, dy: Array) -> Array:
        """Through the batch's mean and variance too."""
        dx, dgamma, dbeta = self._ops.batch_norm_backward(dy, self._take())
        self.gradients = {self._gamma_name: dgamma, self._beta_name: dbeta}
        return dx


class Activate(_Plain):
    """The elementwise function of a block."""

    def __init__(self, name: str, ops: TrainingOps, activation: Activation) -> None:
        super().__init__(f"{name}.{activation.kind}", ops)
        self._activation = activation

    def forward(self, x: Array, random: Random | None) -> Array:
        """Elementwise."""
        y, saved = self._ops.activation(x, self._activation)
        self._keep(saved, random)
        return y

    def backward(self, dy: Array) -> Array:
        """Elementwise."""
        return self._ops.activation_backward(dy, self._take())


class Pooling(_Plain):
    """The pooling of a block."""

    def __init__(self, name: str, ops: TrainingOps, window: Pool) -> None:
        super().__init__(f"{name}.pool", ops)
        self._window = window

    def forward(self, x: Array, random: Random | None) -> Array:
        """One value for each window."""
        y, saved = self._ops.pool(x, self._window)
        self._keep(saved, random)
        return y

    def backward(self, dy: Array) -> Array:
        """Back to where each value came from."""
        return self._ops.pool_backward(dy, self._take())


class Dropout(_Plain):
    """Zeroes a random share of a hidden layer's units in training; nothing outside it."""

    def __init__(self, name: str, ops: TrainingOps, rate: float) -> None:
        super().__init__(f"{name}.dropout", ops)
        self._rate = rate

    def forward(self, x: Array, random: Random | None) -> Array:
        """The kept units are scaled up, so their expected sum stays."""
        if random is None:
            return x
        y, self._saved = self._ops.dropout(x, self._rate, random)
        return y

    def backward(self, dy: Array) -> Array:
        """Through the kept units."""
        return self._ops.dropout_backward(dy, self._take())
