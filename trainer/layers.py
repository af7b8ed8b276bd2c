"""The layers of a network: each a forward directly followed by its backward.

A layer owns its parameters under their names in the weight file and leaves, after `backward`, a
gradient under each of these names. Between a forward and its backward it keeps what the operation
saved. The arithmetic is all in `TrainingOps`; a layer refuses to look inside an activation.

`progress` says which step of a run a forward belongs to; None means outside training.
"""

from __future__ import annotations

from typing import Protocol

from lenet.model import IDENTITY, ConvBlock
from trainer.ops import Array, Progress, Saved, Tail, TrainingOps


class Layer(Protocol):
    """`parameters` are trained in place; `gradients` has the same keys once backward has run."""

    name: str
    parameters: dict[str, Array]
    gradients: dict[str, Array]

    def forward(self, x: Array, progress: Progress | None) -> Array:
        """The layer's output; keeps what `backward` needs if it is in training."""
        ...

    def backward(self, dy: Array) -> Array | None:
        """The gradient of the input of the latest forward; None into the first layer's input."""
        ...


class _Base:
    """What every layer has: a name, the operations, something kept."""

    def __init__(self, name: str, ops: TrainingOps) -> None:
        self.name = name
        self.parameters: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self._ops = ops
        self._saved: Saved = None

    def _keep(self, saved: Saved, progress: Progress | None) -> None:
        self._saved = None if progress is None else saved

    def _take(self) -> Saved:
        saved, self._saved = self._saved, None
        return saved


class Convolution(_Base):
    """Cross-correlation; the `first` layer of a network makes no gradient of its input."""

    def __init__(
        self, name: str, ops: TrainingOps, weight: Array, first: bool, block: ConvBlock
    ) -> None:
        super().__init__(name, ops)
        self.parameters = {f"{name}.weight": weight}
        self._first, self._block = first, block

    def forward(self, x: Array, progress: Progress | None) -> Array:
        """Images of c channels to images of k channels."""
        (weight,) = self.parameters.values()
        y, saved = self._ops.convolution(x, weight, self._block)
        self._keep(saved, progress)
        return y

    def backward(self, dy: Array) -> Array | None:
        """Skips the input's gradient in the first layer: nobody asks for it."""
        dx, dweight = self._ops.convolution_backward(dy, self._take(), not self._first)
        self.gradients = {f"{self.name}.weight": dweight}
        return dx


class Dense(_Base):
    """Matrix product; the `first` layer of a network makes no gradient of its input."""

    def __init__(self, name: str, ops: TrainingOps, weight: Array, first: bool) -> None:
        super().__init__(name, ops)
        self.parameters = {f"{name}.weight": weight}
        self._first = first

    def forward(self, x: Array, progress: Progress | None) -> Array:
        """Flattens an image first."""
        (weight,) = self.parameters.values()
        y, saved = self._ops.dense(x, weight)
        self._keep(saved, progress)
        return y

    def backward(self, dy: Array) -> Array | None:
        """Skips the input's gradient in the first layer."""
        dx, dweight = self._ops.dense_backward(dy, self._take(), not self._first)
        self.gradients = {f"{self.name}.weight": dweight}
        return dx


class BlockTail(_Base):
    """What follows the linear map of `block`, named after what it holds: conv1.bias+relu+max."""

    def __init__(self, block: str, ops: TrainingOps, tail: Tail) -> None:
        parts = ["bias" if tail.norm is None else "batch_norm"]
        if tail.activation != IDENTITY:
            parts.append(tail.activation.kind)
        if tail.pool is not None:
            parts.append(tail.pool.kind)
        super().__init__(f"{block}.{'+'.join(parts)}", ops)
        if tail.norm is None:
            self.parameters = {f"{block}.bias": tail.bias}
        else:
            self.parameters = {f"{block}.gamma": tail.norm.gamma, f"{block}.beta": tail.norm.beta}
        self._tail = tail

    def forward(self, x: Array, progress: Progress | None) -> Array:
        """In training, batch norm uses the batch's mean and variance and moves the running ones."""
        y, saved = self._ops.tail(x, self._tail, progress is not None)
        self._keep(saved, progress)
        return y

    def backward(self, dy: Array) -> Array:
        """Through the batch's mean and variance too."""
        dx, gradients = self._ops.tail_backward(dy, self._take())
        self.gradients = dict(zip(self.parameters, gradients, strict=True))
        return dx


class Dropout(_Base):
    """Zeroes a random share of a hidden layer's units in training; nothing outside it.

    `index` tells one such layer's random numbers from another's.
    """

    def __init__(self, block: str, ops: TrainingOps, units: int, rate: float, index: int) -> None:
        super().__init__(f"{block}.dropout", ops)
        self._units, self._rate, self._index = units, rate, index

    def forward(self, x: Array, progress: Progress | None) -> Array:
        """The kept units are scaled up, so their expected sum stays."""
        if progress is None:
            return x
        y, self._saved = self._ops.dropout(x, self._units, self._rate, self._index, progress)
        return y

    def backward(self, dy: Array) -> Array:
        """Through the kept units."""
        return self._ops.dropout_backward(dy, self._take())
