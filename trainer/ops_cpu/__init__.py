"""The training operations on NumPy: training on a CPU, and the reference for gradients.

Activations are (c, h, w, n), batch innermost, flat ones (units, n). With n = 128 the copies of
im2col, the pooling windows and the sums of batch norm run over long contiguous ranges, and no
product needs a transposition. Python loops run over the r s taps of a kernel or window only, never
over pixels or images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lenet.model import ConvBlock, Model, window_count
from lenet.pixels import SCALE, Images
from lenet.reference import Array
from trainer.augment import warp
from trainer.ops import RUNNING_SHARE, Epilogue, LossScale, Norm, Run, Update, check_stop
from trainer.ops_cpu.activations import Activated, activate, activate_backward
from trainer.ops_cpu.batch_norm import (
    Standardized,
    affine,
    batch_norm,
    batch_norm_backward,
    scale_and_shift,
)
from trainer.ops_cpu.pooling import Pooled, crop, pad, pool, pool_backward, taps
from trainer.random import Purpose, permutation, philox, uniform


@dataclass(slots=True)
class CpuRunState:
    """`step` is the next one; `losses` and `correct` (steps,) hold those that ran."""

    run: Run
    step: int
    losses: Array
    correct: NDArray[np.int64]


class _SavedConvolution(NamedTuple):
    columns: Array  # (c r s, oh ow n)
    weight: Array
    block: ConvBlock
    shape: tuple[int, ...]  # of x


class _SavedEpilogue(NamedTuple):
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
    """`TrainingOps` on NumPy arrays of `dtype`, one thread, without state of its own.

    Once `stopping` is set, reading losses fails with a DeviceError.
    """

    name: str = "cpu"
    readback_steps: int = 1
    memory_bytes: int = 0
    ranks: int = 1

    def __init__(self, dtype: DTypeLike = np.float32, stopping: Event | None = None) -> None:
        self._dtype = np.dtype(dtype)
        self._stopping = stopping

    def barrier(self) -> None:
        """Returns at once: there is one rank."""

    def upload(
        self, model: Model, tensors: Mapping[str, Array], operands: bool = True
    ) -> dict[str, Array]:
        return {name: np.array(value, self._dtype, order="C") for name, value in tensors.items()}

    def download(self, model: Model, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {name: value.copy() for name, value in arrays.items()}

    def copy(self, source: Mapping[str, Array], target: Mapping[str, Array]) -> None:
        for name, value in source.items():
            target[name][...] = value

    def start(self, run: Run, step: int = 0, loss_scale: LossScale | None = None) -> CpuRunState:
        """Uploads nothing: the digits are on the host."""
        return CpuRunState(
            run, step, np.zeros(run.steps, self._dtype), np.zeros(run.steps, np.int64)
        )

    def skipped(self, state: CpuRunState) -> int:
        """0: precision is not mixed."""
        return 0

    def loss_scale(self, state: CpuRunState) -> LossScale:
        """1: precision is not mixed."""
        return 1.0, 0

    def batch(self, state: CpuRunState) -> tuple[Array, NDArray[np.uint8]]:
        """Images as `input_from_images` returns them, and labels (n,)."""
        run, step = state.run, state.step
        epoch, index = divmod(step, run.steps_per_epoch)
        positions = index * run.batch + np.arange(run.batch)
        chosen = permutation(run.seed, epoch, len(run.digits), positions)
        images = warp(run.digits.images[chosen], run.limits, run.seed, step)
        return self.input_from_images(images), run.digits.labels[chosen]

    def prefetch(self, state: CpuRunState) -> None:
        """Do nothing: `batch` draws it."""

    def input_from_images(self, images: Images) -> Array:
        """Uint8 (n, h, w) -> (1, h, w, n), times 1/255."""
        x = np.ascontiguousarray(images.transpose(1, 2, 0)[np.newaxis]).astype(self._dtype)
        x *= SCALE
        return x

    def to_numpy(self, x: Array) -> Array:
        """(units, n) -> (n, units)."""
        return np.ascontiguousarray(x.T)

    def convolution(
        self, x: Array, weight: Array, block: ConvBlock
    ) -> tuple[Array, _SavedConvolution]:
        """(c, h, w, n) -> (k, oh, ow, n): im2col, then one matrix product."""
        padded = pad(x, block.padding, 0)
        (c, h, w, n) = x.shape
        geometry = zip(
            (h, w), block.kernel, block.stride, block.padding, block.dilation, strict=True
        )
        height, width = (window_count(*axis) for axis in geometry)
        columns = np.empty((c, *block.kernel, height, width, n), x.dtype)
        flat = columns.reshape(c, -1, height, width, n)
        positions = taps(block.kernel, block.stride, block.dilation, (height, width))
        for tap, (rows, cols) in enumerate(positions):
            flat[:, tap] = padded[:, rows, cols]
        matrix = columns.reshape(weight[0].size, -1)
        y = (_rows(weight) @ matrix).reshape(len(weight), height, width, n)
        return y, _SavedConvolution(matrix, weight, block, x.shape)

    def convolution_weight_gradient(self, dy: Array, saved: _SavedConvolution) -> Array:
        """One product: dW = dy columns^T."""
        return (_rows(dy) @ saved.columns.T).reshape(saved.weight.shape)

    def convolution_input_gradient(self, dy: Array, saved: _SavedConvolution) -> Array:
        """One product, dcolumns = W^T dy, then col2im: each tap adds its part."""
        _, weight, block, (c, h, w, n) = saved
        size = dy.shape[1], dy.shape[2]
        dcolumns = (_rows(weight).T @ _rows(dy)).reshape(c, -1, *size, n)
        (pr, pc) = block.padding
        dx = np.zeros((c, h + 2 * pr, w + 2 * pc, n), dy.dtype)
        for tap, (rows, cols) in enumerate(taps(block.kernel, block.stride, block.dilation, size)):
            dx[:, rows, cols] += dcolumns[:, tap]
        return crop(dx, block.padding)

    def dense(self, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
        """(c, h, w, n) or (inputs, n) -> (units, n)."""
        return weight @ x.reshape(weight.shape[1], -1), (x, weight)

    def dense_weight_gradient(self, dy: Array, saved: tuple[Array, Array]) -> Array:
        """One product: dW = dy x^T."""
        x, weight = saved
        return dy @ x.reshape(weight.shape[1], -1).T

    def dense_input_gradient(self, dy: Array, saved: tuple[Array, Array]) -> Array:
        """One product: dx = W^T dy."""
        x, weight = saved
        return (weight.T @ dy).reshape(x.shape)

    def epilogue(
        self, x: Array, epilogue: Epilogue, training: bool
    ) -> tuple[Array, _SavedEpilogue]:
        """Epilogue of images (k, h, w, n) or units (k, n)."""
        if epilogue.norm is None:
            assert epilogue.bias is not None, "bug: a block has neither batch norm nor bias"
            z, norm = (_rows(x) + epilogue.bias[:, np.newaxis]).reshape(x.shape), None
        else:
            z, norm = _normalize(x, epilogue.norm, training)
        y, activated = activate(z, epilogue.activation)
        if epilogue.pool is None:
            return y, _SavedEpilogue(norm, activated, None)
        y, pooled = pool(y, epilogue.pool)
        return y, _SavedEpilogue(norm, activated, pooled)

    def epilogue_backward(
        self, dy: Array, saved: _SavedEpilogue
    ) -> tuple[Array, tuple[Array, ...]]:
        """Pooling, activation, then norm or bias."""
        if saved.pooled is not None:
            dy = pool_backward(dy, saved.pooled)
        dz = activate_backward(dy, saved.activated)
        if saved.norm is None:
            return dz, (_rows(dz).sum(axis=1),)
        dx, dgamma, dbeta = batch_norm_backward(dz, saved.norm)
        return dx, (dgamma, dbeta)

    def dropout(
        self, x: Array, units: int, rate: float, layer: int, state: CpuRunState
    ) -> tuple[Array, Array]:
        """Saves the factors (units, n), 0 or 1 / (1 - rate)."""
        n = x.shape[1]
        words = philox(
            state.run.seed,
            np.arange(-(-units * n // 4)),
            state.step,
            Purpose.DROPOUT,
            layer,
        )
        numbers = uniform(words).ravel()[: n * units].reshape(n, units).T
        factors = (numbers >= np.float32(rate)) * x.dtype.type(1 / (1 - rate))
        return x * factors, factors

    def dropout_backward(self, dy: Array, saved: Array) -> Array:
        return dy * saved

    def softmax_cross_entropy(
        self, logits: Array, labels: NDArray[np.uint8], state: CpuRunState
    ) -> tuple[Array, NDArray[np.uint8], float, Array | None]:
        """Logits (classes, n); shifted by the maximum, so exp cannot overflow."""
        shifted = logits - logits.max(axis=0)
        e = np.exp(shifted)
        total = e.sum(axis=0)
        smoothing = state.run.smoothing
        of_target = (1 - smoothing) * shifted[labels, np.arange(len(labels))]
        if smoothing:
            of_target += smoothing * shifted.mean(axis=0)
        losses = np.log(total) - of_target
        weights = state.run.class_weights
        if weights is not None:
            weights = weights[labels].astype(losses.dtype)
            losses *= weights
        state.losses[state.step] = losses.mean()
        state.correct[state.step] = np.count_nonzero(logits.argmax(axis=0) == labels)
        return e / total, labels, smoothing, weights

    def softmax_cross_entropy_backward(
        self, saved: tuple[Array, NDArray[np.uint8], float, Array | None]
    ) -> Array:
        """The class weight times (probabilities - target) / n."""
        probabilities, labels, smoothing, weights = saved
        n = len(labels)
        kind = probabilities.dtype.type
        dlogits: Array = (probabilities - kind(smoothing / len(probabilities))) / n
        dlogits[labels, np.arange(n)] -= kind(1 - smoothing) / n
        return dlogits if weights is None else dlogits * weights

    def all_reduce(self, gradients: Mapping[str, Array]) -> None:
        """Nothing to sum: there is one rank."""

    def sgd_step(
        self,
        updates: Sequence[Update],
        state: CpuRunState,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        rate = float(state.run.rates[state.step])
        for name, parameter, gradient, velocity in updates:
            if weight_decay and name.endswith(".weight"):
                gradient = gradient + weight_decay * parameter
            velocity *= momentum
            velocity += gradient
            if nesterov:
                parameter -= rate * (gradient + momentum * velocity)
            else:
                parameter -= rate * velocity

    def end_step(self, state: CpuRunState) -> None:
        state.step += 1

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step itself: a CPU has no graphs."""
        return step

    def losses(
        self, state: CpuRunState, start: int, stop: int
    ) -> tuple[NDArray[np.floating[Any]], NDArray[np.int64]]:
        check_stop(self._stopping)
        return state.losses[start:stop].copy(), state.correct[start:stop].copy()

    def finite(self, x: Array) -> bool:
        return bool(np.isfinite(x).all())
