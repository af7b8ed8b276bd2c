"""What a network needs in order to be trained: each operation forward, then its backward.

A forward returns its result and what its own backward will need; that second value is opaque to
everyone else. Parameters have the shapes of `lenet.model.Model.parameters` and all values share
one floating dtype, that of the parameters. How activations lie in memory is the implementation's
own affair: `enter` and `leave` are the only doors, and the layers never look inside.

The protocol refuses to know about layers, names or optimisers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lenet.blocks import Activation, ConvBlock, Pool
from lenet.pixels import Images

Array: TypeAlias = NDArray[Any]
"""A float32 or float64 array of the implementation."""

Saved: TypeAlias = Any
"""What a forward keeps for its backward."""

Labels: TypeAlias = NDArray[np.uint8]
"""uint8 (n,), the true classes."""


class Normalized(NamedTuple):
    """What batch norm gives: y, and the data's mean and variance (k,) as this batch suggests them.

    `variance` is the unbiased estimate, a sum divided by m - 1, while y was divided by the root of
    the batch's own, a sum divided by m.
    """

    y: Array
    mean: Array
    variance: Array
    saved: Saved


class TrainingOps(Protocol):
    """The operations of `lenet`'s blocks with their gradients."""

    def enter(self, images: Images, dtype: DTypeLike) -> Array:
        """Pixels times 1/255, as activations of one channel: uint8 (n, h, w) in."""
        ...

    def leave(self, x: Array) -> Array:
        """Flat activations as a NumPy array (n, units)."""
        ...

    def convolution(
        self, x: Array, weight: Array, bias: Array | None, block: ConvBlock
    ) -> tuple[Array, Saved]:
        """Cross-correlation with `weight` (k, c, r, s), stride, padding and dilation of `block`."""
        ...

    def convolution_backward(
        self, dy: Array, saved: Saved, input_gradient: bool
    ) -> tuple[Array | None, Array, Array]:
        """(dx, dweight, dbias); dx is None unless `input_gradient`."""
        ...

    def batch_norm(self, x: Array, gamma: Array, beta: Array, epsilon: float) -> Normalized:
        """Normalise each channel or unit over the batch. Source: Ioffe & Szegedy 2015, alg. 1."""
        ...

    def batch_norm_backward(self, dy: Array, saved: Saved) -> tuple[Array, Array, Array]:
        """(dx, dgamma, dbeta)."""
        ...

    def affine(self, x: Array, scale: Array, shift: Array) -> Array:
        """Scale and shift each channel or unit: batch norm outside training."""
        ...

    def activation(self, x: Array, activation: Activation) -> tuple[Array, Saved]:
        """The elementwise function, any of `lenet.blocks.Activation`; finite for any finite x."""
        ...

    def activation_backward(self, dy: Array, saved: Saved) -> Array:
        """The gradient dx.

        At a kink: zero where ReLU or clipped ReLU meets its floor or ceiling, alpha for ELU at 0.
        """
        ...

    def pool(self, x: Array, window: Pool) -> tuple[Array, Saved]:
        """Pooling of each channel; padding is never the largest and counts as zeros in a mean."""
        ...

    def pool_backward(self, dy: Array, saved: Saved) -> Array:
        """The gradient dx; the first of equal maxima, in reading order, receives all of it."""
        ...

    def dense(self, x: Array, weight: Array, bias: Array | None) -> tuple[Array, Saved]:
        """Matrix product with `weight` (units, inputs); an image is flattened (c, h, w) first."""
        ...

    def dense_backward(
        self, dy: Array, saved: Saved, input_gradient: bool
    ) -> tuple[Array | None, Array, Array]:
        """(dx, dweight, dbias); dx has the shape that `dense` was given."""
        ...

    def dropout(self, x: Array, rate: float, random: np.random.Generator) -> tuple[Array, Saved]:
        """Zero a share `rate` of x, 0 < rate < 1, and divide the rest by 1 - rate."""
        ...

    def dropout_backward(self, dy: Array, saved: Saved) -> Array:
        """The gradient dx."""
        ...

    def softmax_cross_entropy(self, logits: Array, labels: Labels) -> tuple[float, Saved]:
        """The mean of -log softmax(logits)[label]; finite for any finite logits."""
        ...

    def softmax_cross_entropy_backward(self, saved: Saved) -> Array:
        """The gradient of the logits: (softmax - onehot) / n."""
        ...
