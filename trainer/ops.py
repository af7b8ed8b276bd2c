"""`TrainingOps`: the operations that training needs, each forward with its gradients.

Arrays belong to the implementation: where they lie, their layout and their precision. So does what
a forward saves for its gradients. On the host, tensors have the shapes of
`lenet.model.Model.parameters`.

A step needs no data from the host: its number, its learning rate and its random numbers come from
a `RunState` on the device, so a captured step can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.errors import DeviceError
from lenet.model import Activation, ConvBlock, Model, Pool
from lenet.pixels import Images
from trainer.augment import WarpLimits
from trainer.mnist import Digits

Array: TypeAlias = Any
"""An array of the implementation; opaque."""

Tensor: TypeAlias = NDArray[Any]
"""A float32 or float64 NumPy array, shaped as `lenet.model.Model.parameters` says."""

Saved: TypeAlias = Any
"""Values that a forward saves for its gradients."""

RunState: TypeAlias = Any
"""The state of a run on the device: digits, step number, rates, losses, correct answers."""

EPSILON = 1e-5
"""Added to every variance of batch norm, in training and when it is folded."""

RUNNING_SHARE = 0.1
"""The weight of a batch's mean and variance in the running ones, as in PyTorch."""


class Norm(NamedTuple):
    """A batch norm's arrays (k,); training updates the running mean and variance in place."""

    gamma: Array
    beta: Array
    mean: Array
    variance: Array


class Epilogue(NamedTuple):
    """The rest of a block after its convolution or product: norm or bias, activation, pooling."""

    norm: Norm | None
    bias: Array | None
    activation: Activation
    pool: Pool | None


class Update(NamedTuple):
    """One parameter's part of an SGD step; `parameter` and `velocity` change in place."""

    name: str
    parameter: Array
    gradient: Array
    velocity: Array


LossScale: TypeAlias = tuple[float, int]
"""Factor of the loss in mixed precision, and the number of steps since it changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The input of a sequence of steps, without the network.

    `rates` (steps,) holds the learning rate of each step, `batch` the images of a step. A step
    takes the next `batch` images in its epoch's order; an incomplete last batch is dropped.
    """

    digits: Digits
    batch: int
    limits: WarpLimits
    seed: int
    rates: NDArray[np.floating[Any]]
    smoothing: float = 0.0
    """The share of each target that is spread over all classes: label smoothing."""

    class_weights: NDArray[np.float32] | None = None
    """The weight of an image's loss by its label, (classes,); None: 1."""

    @property
    def steps(self) -> int:
        """The steps of the whole run."""
        return len(self.rates)

    @property
    def steps_per_epoch(self) -> int:
        """The complete batches in the digits."""
        return len(self.digits) // self.batch


class TrainingOps(Protocol):
    """The operations of `lenet`'s blocks with their gradients, and what a step needs besides."""

    name: str
    """The device: cpu or cuda."""

    readback_steps: int
    """Steps that may run before their losses are read, which waits for the device."""

    @property
    def ranks(self) -> int:
        """The GPUs that train together, each on a part of every batch; 1 on the CPU."""
        ...

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The device memory in use; 0 on the CPU."""
        ...

    def upload(
        self, model: Model, tensors: Mapping[str, Tensor], operands: bool = True
    ) -> dict[str, Array]:
        """Device copies of tensors that have names and shapes of `model`'s parameters.

        Not `operands`: no convolution or product reads them, so they need no copy in its precision.
        """
        ...

    def download(self, model: Model, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Host copies of uploaded arrays."""
        ...

    def copy(self, source: Mapping[str, Array], target: Mapping[str, Array]) -> None:
        """Copy `source` into the memory of `target`, both uploaded, on the device."""
        ...

    def start(self, run: Run, step: int = 0, loss_scale: LossScale | None = None) -> RunState:
        """Upload what `run` needs; `step` is the next one, and `loss_scale` what it begins with."""
        ...

    def skipped(self, state: RunState) -> int:
        """Steps since `start` that changed nothing, for a gradient overflowed; waits."""
        ...

    def loss_scale(self, state: RunState) -> LossScale:
        """The loss scale of the next step; waits for the device."""
        ...

    def batch(self, state: RunState) -> tuple[Array, Array]:
        """The step's images, shuffled and augmented, as activations, and their labels.

        `trainer.random.permutation` defines the order, `trainer.augment` the augmentation.
        """
        ...

    def prefetch(self, state: RunState) -> None:
        """Begin to draw the next step's batch, where that may go on beside this step."""
        ...

    def input_from_images(self, images: Images) -> Array:
        """Pixels times 1/255, as activations of one channel: uint8 (n, h, w) in."""
        ...

    def to_numpy(self, x: Array) -> Tensor:
        """Flat activations as a NumPy array (n, units)."""
        ...

    def convolution(self, x: Array, weight: Array, block: ConvBlock) -> tuple[Array, Saved]:
        """Cross-correlation with `weight` (k, c, r, s), stride, padding and dilation of `block`."""
        ...

    def convolution_weight_gradient(self, dy: Array, saved: Saved) -> Array:
        """The gradient dweight."""
        ...

    def convolution_input_gradient(self, dy: Array, saved: Saved) -> Array:
        """The gradient dx."""
        ...

    def dense(self, x: Array, weight: Array) -> tuple[Array, Saved]:
        """Matrix product with `weight` (units, inputs); an image is flattened (c, h, w) first."""
        ...

    def dense_weight_gradient(self, dy: Array, saved: Saved) -> Array:
        """The gradient dweight."""
        ...

    def dense_input_gradient(self, dy: Array, saved: Saved) -> Array:
        """The gradient dx, in the shape that `dense` was given."""
        ...

    def epilogue(self, x: Array, epilogue: Epilogue, training: bool) -> tuple[Array, Saved]:
        """Norm or bias, activation, pooling; finite for any finite x unless batch norm overflows.

        In training, batch norm normalizes each channel or unit over the whole batch, with
        EPSILON, and moves the running mean and unbiased variance by RUNNING_SHARE towards the
        batch's; outside training it uses the running ones. Padding is never the maximum of a
        window and counts as zeros in an average. Source: Ioffe & Szegedy 2015, alg. 1.
        """
        ...

    def epilogue_backward(self, dy: Array, saved: Saved) -> tuple[Array, tuple[Array, ...]]:
        """(dx, (dgamma, dbeta)) with batch norm, (dx, (dbias,)) without.

        The first of equal maxima, in reading order, receives the whole gradient of its window.
        The slope at a kink is 0 for ReLU and both ends of clipped ReLU, alpha for ELU.
        """
        ...

    def dropout(
        self, x: Array, units: int, rate: float, layer: int, state: RunState
    ) -> tuple[Array, Saved]:
        """Zero a share `rate` of flat x, 0 < rate < 1, and divide the rest by 1 - rate.

        Of u `units`, unit j in row i of the batch is kept if word e mod 4 of the counter
        (e // 4, step, purpose, layer), as a number from 0 to 1, is at least `rate`; e = i u + j.
        """
        ...

    def dropout_backward(self, dy: Array, saved: Saved) -> Array:
        """The gradient dx."""
        ...

    def softmax_cross_entropy(self, logits: Array, labels: Array, state: RunState) -> Saved:
        """Store in `state` the step's loss and `correct`.

        The loss is the mean of -w sum t log softmax(logits), with the label's weight w of the
        run's `class_weights`, and the target t of 1 - s + s / k for the label and s / k for each
        other of k classes; s is the run's `smoothing` (Szegedy et al. 2016, "Rethinking the
        Inception Architecture", section 7). `correct` counts the rows whose first maximum is their
        label. The loss is finite for finite logits whose differences are finite.
        """
        ...

    def softmax_cross_entropy_backward(self, saved: Saved) -> Array:
        """The gradient of the logits: the class weight times (softmax - target) / n."""
        ...

    def all_reduce(self, gradients: Mapping[str, Array]) -> None:
        """Start to sum the gradients over all ranks while the backward pass goes on."""
        ...

    def sgd_step(
        self,
        updates: Sequence[Update],
        state: RunState,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        """One step of `trainer.optimizer.Sgd`, at the learning rate of the step."""
        ...

    def end_step(self, state: RunState) -> None:
        """Advance to the next step."""
        ...

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """A function with the effect of `step`, possibly faster; it may run asynchronously."""
        ...

    def losses(
        self, state: RunState, start: int, stop: int
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.integer[Any]]]:
        """Mean loss and correct answers of each step from `start` to `stop` - 1.

        Raises:
            DeviceError: the operations were asked to stop.
        """
        ...

    def finite(self, x: Array) -> bool:
        """Whether `x` holds neither NaN nor infinity."""
        ...


def check_stop(stopping: Event | None) -> None:
    """Raises: DeviceError: `stopping` is set."""
    if stopping is not None and stopping.is_set():
        raise DeviceError("training was asked to stop")
