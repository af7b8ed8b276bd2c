"""The training operations on NumPy: the reference gradients, and how a laptop trains.

Activations lie as (c, h, w, n), batch innermost, flat ones as (units, n). With n = 128 every copy
of im2col, every pooling window and every sum of batch norm then walks over long contiguous runs,
and no product needs a transposition before it. Python loops run over the r s taps of a kernel or
window only, never over pixels or images. It refuses to know what is fast on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lenet.model import ConvBlock, Model, window_count
from lenet.pixels import SCALE, Images
from lenet.reference import Array
from trainer.activations import Activated, activate, activate_backward
from trainer.augment import warp
from trainer.batch_norm import Standardized, affine, batch_norm, batch_norm_backward
from trainer.fold import scale_and_shift
from trainer.ops import RUNNING_SHARE, Norm, Run, Tail, Update
from trainer.pooling import Pooled, pool, pool_backward
from trainer.random import Purpose, permutation, philox, uniform
from trainer.windows import crop, pad, taps


@dataclass(slots=True)
class CpuProgress:
    """`step` is the next one; losses and hits (steps,) of those that ran."""

    run: Run
    step: int
    losses: Array
    hits: NDArray[np.int64]


class _Convolved(NamedTuple):
    columns: Array  # (c r s, oh ow n)
    weight: Array
    block: ConvBlock
    shape: tuple[int, ...]  # of x


class _Tailed(NamedTuple):
    norm: Standardized | None
    activated: Activated
    pooled: Pooled | None


def _rows(x: Array) -> Array:
    return x.reshape(len(x), -1)


def _normalize(x: Array, norm: Norm, training: bool) -> tuple[Array, Standardized | None]:
    if not training:
        scale, shift = scale_and_shift(*norm)
        return affine(x, scale.astype(x.dtype), shift.astype(x.dtype)), None
    found = batch_norm(x, norm.gamma, norm.beta)
    for running, now in ((norm.mean, found.mean), (norm.variance, found.variance)):
        running += RUNNING_SHARE * (now - running)
    return found.y, found.saved


class CpuOps:
    """`TrainingOps` on NumPy arrays of `dtype`, one thread; holds nothing else."""

    name: str = "cpu"
    readback_steps: int = 1
    memory_bytes: int = 0
    ranks: int = 1

    def __init__(self, dtype: DTypeLike = np.float32) -> None:
        self._dtype = np.dtype(dtype)

    def meet(self) -> None:
        """At once."""

    def place(self, model: Model, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """As they are shaped, in the dtype of these operations."""
        return {name: np.array(value, self._dtype, order="C") for name, value in tensors.items()}

    def read(self, model: Model, placed: Mapping[str, Array]) -> dict[str, Array]:
        """As they are."""
        return {name: value.copy() for name, value in placed.items()}

    def write(
        self, model: Model, placed: Mapping[str, Array], tensors: Mapping[str, Array]
    ) -> None:
        """As they are."""
        self.copy(tensors, placed)

    def copy(self, source: Mapping[str, Array], target: Mapping[str, Array]) -> None:
        """Every array of `source`."""
        for name, value in source.items():
            target[name][...] = value

    def start(self, run: Run, step: int = 0) -> CpuProgress:
        """Nothing is anywhere else than where it was."""
        return CpuProgress(
            run, step, np.zeros(run.steps, self._dtype), np.zeros(run.steps, np.int64)
        )

    def batch(self, progress: CpuProgress) -> tuple[Array, NDArray[np.uint8]]:
        """Images as `enter` gives them, and labels (n,)."""
        run, step = progress.run, progress.step
        epoch, index = divmod(step, run.steps_per_epoch)
        positions = index * run.batch + np.arange(run.batch)
        chosen = permutation(run.seed, epoch, len(run.digits), positions)
        images = warp(run.digits.images[chosen], run.limits, run.seed, step)
        return self.enter(images), run.digits.labels[chosen]

    def enter(self, images: Images) -> Array:
        """Uint8 (n, h, w) -> (1, h, w, n), times 1/255."""
        x = np.ascontiguousarray(images.transpose(1, 2, 0)[np.newaxis]).astype(self._dtype)
        x *= SCALE
        return x

    def leave(self, x: Array) -> Array:
        """(units, n) -> (n, units)."""
        return np.ascontiguousarray(x.T)

    def convolution(self, x: Array, weight: Array, block: ConvBlock) -> tuple[Array, _Convolved]:
        """(c, h, w, n) -> (k, oh, ow, n): im2col, then one matrix product."""
        padded = pad(x, block.padding, 0)
        (c, h, w, n) = x.shape
        geometry = zip(
            (h, w), block.kernel, block.stride, block.padding, block.dilation, strict=True
        )
        height, width = (window_count(*axis) for axis in geometry)
        columns = np.empty((c, *block.kernel, height, width, n), x.dtype)
        flat = columns.reshape(c, -1, height, width, n)
        places = taps(block.kernel, block.stride, block.dilation, (height, width))
        for tap, (rows, cols) in enumerate(places):
            flat[:, tap] = padded[:, rows, cols]
        matrix = columns.reshape(weight[0].size, -1)
        y = (_rows(weight) @ matrix).reshape(len(weight), height, width, n)
        return y, _Convolved(matrix, weight, block, x.shape)

    def convolution_backward(
        self, dy: Array, saved: _Convolved, input_gradient: bool
    ) -> tuple[Array | None, Array]:
        """Two products, then col2im: each tap adds its share back.

        dW = dy columns^T, dcolumns = W^T dy.
        """
        columns, weight, block, (c, h, w, n) = saved
        flat = _rows(dy)
        dweight = (flat @ columns.T).reshape(weight.shape)
        if not input_gradient:
            return None, dweight
        size = dy.shape[1], dy.shape[2]
        dcolumns = (_rows(weight).T @ flat).reshape(c, -1, *size, n)
        (pr, pc) = block.padding
        dx = np.zeros((c, h + 2 * pr, w + 2 * pc, n), dy.dtype)
        for tap, (rows, cols) in enumerate(taps(block.kernel, block.stride, block.dilation, size)):
            dx[:, rows, cols] += dcolumns[:, tap]
        return crop(dx, block.padding), dweight

    def dense(self, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
        """(c, h, w, n) or (inputs, n) -> (units, n)."""
        return weight @ x.reshape(weight.shape[1], -1), (x, weight)

    def dense_backward(
        self, dy: Array, saved: tuple[Array, Array], input_gradient: bool
    ) -> tuple[Array | None, Array]:
        """Two products: dW = dy x^T, dx = W^T dy."""
        x, weight = saved
        dweight = dy @ x.reshape(weight.shape[1], -1).T
        return (weight.T @ dy).reshape(x.shape) if input_gradient else None, dweight

    def tail(self, x: Array, tail: Tail, training: bool) -> tuple[Array, _Tailed]:
        """Of images (k, h, w, n) or units (k, n)."""
        if tail.norm is None:
            assert tail.bias is not None, "bug: a block has neither batch norm nor bias"
            z, norm = (_rows(x) + tail.bias[:, np.newaxis]).reshape(x.shape), None
        else:
            z, norm = _normalize(x, tail.norm, training)
        y, activated = activate(z, tail.activation)
        if tail.pool is None:
            return y, _Tailed(norm, activated, None)
        y, pooled = pool(y, tail.pool)
        return y, _Tailed(norm, activated, pooled)

    def tail_backward(self, dy: Array, saved: _Tailed) -> tuple[Array, tuple[Array, ...]]:
        """The same three, backwards."""
        if saved.pooled is not None:
            dy = pool_backward(dy, saved.pooled)
        dz = activate_backward(dy, saved.activated)
        if saved.norm is None:
            return dz, (_rows(dz).sum(axis=1),)
        dx, dgamma, dbeta = batch_norm_backward(dz, saved.norm)
        return dx, (dgamma, dbeta)

    def dropout(
        self, x: Array, units: int, rate: float, layer: int, progress: CpuProgress
    ) -> tuple[Array, Array]:
        """Keeps the factors (units, n), 0 or 1 / (1 - rate)."""
        n = x.shape[1]
        words = philox(
            progress.run.seed,
            np.arange(-(-units * n // 4)),
            progress.step,
            Purpose.DROPOUT,
            layer,
        )
        numbers = uniform(words).ravel()[: n * units].reshape(n, units).T
        factors = (numbers >= np.float32(rate)) * x.dtype.type(1 / (1 - rate))
        return x * factors, factors

    def dropout_backward(self, dy: Array, saved: Array) -> Array:
        """The same factors."""
        return dy * saved

    def softmax_cross_entropy(
        self, logits: Array, labels: NDArray[np.uint8], progress: CpuProgress
    ) -> tuple[Array, NDArray[np.uint8]]:
        """Logits (classes, n); shifted by the maximum, so exp cannot overflow."""
        shifted = logits - logits.max(axis=0)
        e = np.exp(shifted)
        total = e.sum(axis=0)
        losses = np.log(total) - shifted[labels, np.arange(len(labels))]
        progress.losses[progress.step] = losses.mean()
        progress.hits[progress.step] = np.count_nonzero(logits.argmax(axis=0) == labels)
        return e / total, labels

    def softmax_cross_entropy_backward(self, saved: tuple[Array, NDArray[np.uint8]]) -> Array:
        """(probabilities - onehot) / n."""
        probabilities, labels = saved
        n = len(labels)
        dlogits = probabilities / n
        dlogits[labels, np.arange(n)] -= dlogits.dtype.type(1) / n
        return dlogits

    def share(self, gradients: Mapping[str, Array]) -> None:
        """There is nobody to share with."""

    def descend(
        self,
        updates: Sequence[Update],
        progress: CpuProgress,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        """One parameter after the other."""
        rate = float(progress.run.rates[progress.step])
        for name, parameter, gradient, velocity in updates:
            if weight_decay and name.endswith(".weight"):
                gradient = gradient + weight_decay * parameter
            velocity *= momentum
            velocity += gradient
            if nesterov:
                parameter -= rate * (gradient + momentum * velocity)
            else:
                parameter -= rate * velocity

    def tick(self, progress: CpuProgress) -> None:
        """One more."""
        progress.step += 1

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step itself."""
        return step

    def losses(
        self, progress: CpuProgress, start: int, stop: int
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.int64]]:
        """In the dtype of these operations, and int64."""
        return progress.losses[start:stop].copy(), progress.hits[start:stop].copy()

    def finite(self, x: Array) -> bool:
        """Every element is looked at."""
        return bool(np.isfinite(x).all())
