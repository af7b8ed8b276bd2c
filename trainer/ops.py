"""What a network needs in order to be trained: each operation forward, then its backward.

A forward returns its result and what its own backward will need; that second value is opaque to
everyone else. So are arrays: where they lie, how, and in which precision is the implementation's
own affair. `place` and `enter` are the doors in, `read`, `leave` and `losses` the doors out, and
what passes through them has the shapes of `lenet.model.Model.parameters`.

A step asks nothing of the host. Its number, its learning rate and all that is random in it come
from a `Progress` that lives where the arrays do, so that a step recorded once can be run again
and again. The protocol refuses to know about networks and optimisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.model import Activation, ConvBlock, Model, Pool
from lenet.pixels import Images
from trainer.augment import Limits
from trainer.mnist import Digits

Array: TypeAlias = Any
"""An array of the implementation; opaque."""

Tensor: TypeAlias = NDArray[Any]
"""A float32 or float64 NumPy array, shaped as `lenet.model.Model.parameters` says."""

Saved: TypeAlias = Any
"""What a forward keeps for its backward."""

Progress: TypeAlias = Any
"""How far a run has come: its digits, step, rates, losses and hits, on the device."""

RUNNING_SHARE = 0.1
"""How much of a batch's mean and variance enters the running ones, as in PyTorch."""


class Norm(NamedTuple):
    """A batch norm's arrays (k,); training moves the running mean and variance in place."""

    gamma: Array
    beta: Array
    mean: Array
    variance: Array


class Tail(NamedTuple):
    """What follows a block's linear map, in this order: norm or bias, activation, pooling."""

    norm: Norm | None
    bias: Array | None
    activation: Activation
    pool: Pool | None


class Update(NamedTuple):
    """One parameter's part of a step of descent; `parameter` and `velocity` change in place."""

    name: str
    parameter: Array
    gradient: Array
    velocity: Array


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """All that a run of steps depends on, but for the network.

    `rates` (steps,) holds the learning rate of each step, `batch` the images of one. A step takes
    the next `batch` images of its epoch's order; what is left over at the end of an epoch waits
    for the next.
    """

    digits: Digits
    batch: int
    limits: Limits
    seed: int
    rates: NDArray[np.floating[Any]]

    @property
    def steps(self) -> int:
        """The steps of the whole run."""
        return len(self.rates)

    @property
    def steps_per_epoch(self) -> int:
        """The whole batches among the digits."""
        return len(self.digits) // self.batch


class TrainingOps(Protocol):
    """The operations of `lenet`'s blocks with their gradients, and the steps made of them."""

    name: str
    """The device: cpu or cuda."""

    readback_steps: int
    """How many steps may run before their losses are looked at, which waits for the device."""

    @property
    def ranks(self) -> int:
        """How many GPUs train together, each with a part of every batch; 1 on the CPU."""
        ...

    def meet(self) -> None:
        """Wait until every rank has come this far; at once where there is one."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What has been taken of a GPU's memory, 0 on the CPU."""
        ...

    def place(self, model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Array]:
        """Copies of any of `model`'s tensors, or of tensors shaped like them, on the device."""
        ...

    def read(self, model: Model, placed: Mapping[str, Array]) -> dict[str, Tensor]:
        """Copies of what `place` gave, back in NumPy."""
        ...

    def write(
        self, model: Model, placed: Mapping[str, Array], tensors: Mapping[str, Tensor]
    ) -> None:
        """Put the values of `tensors` into the memory of `placed`, name by name."""
        ...

    def copy(self, source: Mapping[str, Array], target: Mapping[str, Array]) -> None:
        """Put the values of `source` into the memory of `target`, both placed, on the device."""
        ...

    def start(self, run: Run, step: int = 0) -> Progress:
        """Bring all that `run` needs to the device; the next step is `step`."""
        ...

    def batch(self, progress: Progress) -> tuple[Array, Array]:
        """The step's images, shuffled and warped, as activations, and their labels.

        Which images and which warps, `trainer.random.permutation` and `trainer.augment` say.
        """
        ...

    def enter(self, images: Images) -> Array:
        """Pixels times 1/255, as activations of one channel: uint8 (n, h, w) in."""
        ...

    def leave(self, x: Array) -> Tensor:
        """Flat activations as a NumPy array (n, units)."""
        ...

    def convolution(self, x: Array, weight: Array, block: ConvBlock) -> tuple[Array, Saved]:
        """Cross-correlation with `weight` (k, c, r, s), stride, padding and dilation of `block`."""
        ...

    def convolution_backward(
        self, dy: Array, saved: Saved, input_gradient: bool
    ) -> tuple[Array | None, Array]:
        """(dx, dweight); dx is None unless `input_gradient`."""
        ...

    def dense(self, x: Array, weight: Array) -> tuple[Array, Saved]:
        """Matrix product with `weight` (units, inputs); an image is flattened (c, h, w) first."""
        ...

    def dense_backward(
        self, dy: Array, saved: Saved, input_gradient: bool
    ) -> tuple[Array | None, Array]:
        """(dx, dweight); dx has the shape that `dense` was given."""
        ...

    def tail(self, x: Array, tail: Tail, training: bool) -> tuple[Array, Saved]:
        """Norm or bias, activation, pooling; finite for any finite x but for norm's overflow.

        In training, batch norm normalises each channel or unit over the whole batch, with
        `trainer.fold.EPSILON`, and moves the running mean and unbiased variance by RUNNING_SHARE
        towards the batch's; outside it, it uses those. Padding is never the largest of a window
        and counts as zeros in a mean. Source: Ioffe & Szegedy 2015, alg. 1.
        """
        ...

    def tail_backward(self, dy: Array, saved: Saved) -> tuple[Array, tuple[Array, ...]]:
        """(dx, (dgamma, dbeta)) with batch norm, (dx, (dbias,)) without.

        The first of equal maxima, in reading order, receives the whole gradient of its window. At
        a kink the slope is zero where ReLU or clipped ReLU meets its floor or ceiling, alpha for
        ELU at 0.
        """
        ...

    def dropout(
        self, x: Array, units: int, rate: float, layer: int, progress: Progress
    ) -> tuple[Array, Saved]:
        """Zero a share `rate` of flat x, 0 < rate < 1, and divide the rest by 1 - rate.

        Of u `units`, unit j in row i of the batch is kept if word e mod 4 of the counter
        (e // 4, step, purpose, layer), as a number from 0 to 1, is at least `rate`; e = i u + j.
        """
        ...

    def dropout_backward(self, dy: Array, saved: Saved) -> Array:
        """The gradient dx."""
        ...

    def softmax_cross_entropy(self, logits: Array, labels: Array, progress: Progress) -> Saved:
        """Note the step's loss, the mean of -log softmax(logits)[label], and its hits.

        A hit is a row whose first maximum is its label. The loss is finite for any finite logits
        whose differences are.
        """
        ...

    def softmax_cross_entropy_backward(self, saved: Saved) -> Array:
        """The gradient of the logits: (softmax - onehot) / n."""
        ...

    def share(self, gradients: Mapping[str, Array]) -> None:
        """Start to sum them over all GPUs, behind the rest of the backward pass."""
        ...

    def descend(
        self,
        updates: Sequence[Update],
        progress: Progress,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        """One step of `trainer.optimizer.Sgd`, at the step's own rate."""
        ...

    def tick(self, progress: Progress) -> None:
        """The step is over."""
        ...

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What does what `step` does, perhaps faster; it may run later than it is called."""
        ...

    def losses(
        self, progress: Progress, start: int, stop: int
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.integer[Any]]]:
        """The mean losses and the hits of the steps from `start` to before `stop`, which ran."""
        ...

    def finite(self, x: Array) -> bool:
        """Whether it holds neither NaN nor infinity."""
        ...
