"""The layers of a network, each with its forward and backward.

A layer names its parameters as the weight file does, and `backward` leaves a gradient under each
of these names. The arithmetic is in `TrainingOps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from lenet.model import IDENTITY, ConvBlock
from trainer.ops import Array, Epilogue, RunState, Saved, TrainingOps


class Layer(ABC):
    """`parameters` are trained in place; `gradients` has the same keys after `backward`."""

    def __init__(self, name: str, ops: TrainingOps) -> None:
        self.name = name
        self.parameters: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self._ops = ops
        self._saved: Saved = None

    @abstractmethod
    def forward(self, x: Array, state: RunState | None) -> Array:
        """The output of x. `state` is None outside training; then nothing is saved."""

    @abstractmethod
    def backward(self, dy: Array) -> Array | None:
        """The gradient of the latest forward's input; None for the first layer of a network."""

    def _save(self, saved: Saved, state: RunState | None) -> None:
        self._saved = None if state is None else saved

    def _take_saved(self) -> Saved:
        saved, self._saved = self._saved, None
        return saved


class Convolution(Layer):
    """Cross-correlation. The `first` layer of a network skips the gradient of its input."""

    def __init__(
        self, name: str, ops: TrainingOps, weight: Array, first: bool, block: ConvBlock
    ) -> None:
        super().__init__(name, ops)
        self.parameters = {f"{name}.weight": weight}
        self._weight, self._first, self._block = weight, first, block

    def forward(self, x: Array, state: RunState | None) -> Array:
        """Images of c channels to images of k channels."""
        y, saved = self._ops.convolution(x, self._weight, self._block)
        self._save(saved, state)
        return y

    def backward(self, dy: Array) -> Array | None:
        """The gradients of weight and input."""
        saved = self._take_saved()
        dweight = self._ops.convolution_weight_gradient(dy, saved)
        self.gradients = {f"{self.name}.weight": dweight}
        return None if self._first else self._ops.convolution_input_gradient(dy, saved)


class Dense(Layer):
    """Matrix product. The `first` layer of a network skips the gradient of its input."""

    def __init__(self, name: str, ops: TrainingOps, weight: Array, first: bool) -> None:
        super().__init__(name, ops)
        self.parameters = {f"{name}.weight": weight}
        self._weight, self._first = weight, first

    def forward(self, x: Array, state: RunState | None) -> Array:
        """Flattens an image first."""
        y, saved = self._ops.dense(x, self._weight)
        self._save(saved, state)
        return y

    def backward(self, dy: Array) -> Array | None:
        """The gradients of weight and input."""
        saved = self._take_saved()
        # What follows waits for the gradient of the input, and nothing for the weight's.
        dx = None if self._first else self._ops.dense_input_gradient(dy, saved)
        self.gradients = {f"{self.name}.weight": self._ops.dense_weight_gradient(dy, saved)}
        return dx


class BlockEpilogue(Layer):
    """The epilogue of `block`, named after its parts, as in conv1.bias+relu+max."""

    def __init__(self, block: str, ops: TrainingOps, epilogue: Epilogue) -> None:
        parts = ["bias" if epilogue.norm is None else "batch_norm"]
        if epilogue.activation != IDENTITY:
            parts.append(epilogue.activation.kind)
        if epilogue.pool is not None:
            parts.append(epilogue.pool.kind)
        super().__init__(f"{block}.{'+'.join(parts)}", ops)
        if epilogue.norm is None:
            self.parameters = {f"{block}.bias": epilogue.bias}
        else:
            self.parameters = {
                f"{block}.gamma": epilogue.norm.gamma,
                f"{block}.beta": epilogue.norm.beta,
            }
        self._epilogue = epilogue

    def forward(self, x: Array, state: RunState | None) -> Array:
        """Compute y. In training, batch norm uses and records the batch's statistics."""
        y, saved = self._ops.epilogue(x, self._epilogue, state is not None)
        self._save(saved, state)
        return y

    def backward(self, dy: Array) -> Array:
        """Includes the gradient through the batch's mean and variance."""
        dx, gradients = self._ops.epilogue_backward(dy, self._take_saved())
        self.gradients = dict(zip(self.parameters, gradients, strict=True))
        return dx


class Dropout(Layer):
    """Zeroes a random share of a hidden layer's units in training.

    `index` selects the layer's random numbers, so that no two layers share them.
    """

    def __init__(self, block: str, ops: TrainingOps, units: int, rate: float, index: int) -> None:
        super().__init__(f"{block}.dropout", ops)
        self._units, self._rate, self._index = units, rate, index

    def forward(self, x: Array, state: RunState | None) -> Array:
        """Kept units are scaled up, so the expected sum stays the same."""
        if state is None:
            return x
        y, self._saved = self._ops.dropout(x, self._units, self._rate, self._index, state)
        return y

    def backward(self, dy: Array) -> Array:
        """The gradient of the kept units."""
        return self._ops.dropout_backward(dy, self._take_saved())


class SoftmaxCrossEntropy:
    """The loss: the mean cross-entropy of softmax(logits).

    Softmax and cross-entropy are one operation: their common gradient is (softmax - onehot) / n,
    and neither can overflow.
    """

    def __init__(self, ops: TrainingOps) -> None:
        self._ops = ops
        self._saved: Saved = None

    def forward(self, logits: Array, labels: Array, state: RunState) -> None:
        """Store the step's mean loss in nats, NaN if a logit is NaN or +inf, and its `correct`."""
        self._saved = self._ops.softmax_cross_entropy(logits, labels, state)

    def backward(self) -> Array:
        """The gradient of the logits of the latest forward."""
        dlogits = self._ops.softmax_cross_entropy_backward(self._saved)
        self._saved = None
        return dlogits
