"""The training operations on NumPy: the reference gradients, and how a laptop trains.

Activations lie as (c, h, w, n), batch innermost, flat ones as (units, n). With n = 128 every copy
of im2col, every pooling window and every sum of batch norm then walks over long contiguous runs,
and no product needs a transposition before it. Python loops run over the r s taps of a kernel or
window only, never over pixels or images. It refuses to know what is fast on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from lenet.blocks import Activation, ConvBlock, Pair, Pool
from lenet.model import window_count
from lenet.pixels import SCALE, Images
from trainer.activations import Activated, activate, activate_backward
from trainer.ops import Array, Labels, Normalized


class _Convolved(NamedTuple):
    columns: Array  # (c r s, oh ow n)
    weight: Array
    block: ConvBlock
    shape: tuple[int, ...]  # of x


class _Standardized(NamedTuple):
    normal: Array  # mean 0, variance 1
    scale: Array  # gamma / standard deviation, (k,)


class _Largest(NamedTuple):
    x: Array  # padded
    y: Array
    window: Pool


class _Averaged(NamedTuple):
    shape: tuple[int, ...]  # of x
    window: Pool


def _taps(kernel: Pair, stride: Pair, dilation: Pair, size: Pair) -> Iterator[tuple[slice, slice]]:
    """For each tap of a kernel the rows and columns it meets when laid on `size` places."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            yield (
                slice(top, top + (size[0] - 1) * stride[0] + 1, stride[0]),
                slice(left, left + (size[1] - 1) * stride[1] + 1, stride[1]),
            )


def _pad(x: Array, padding: Pair, value: float) -> Array:
    if padding == (0, 0):
        return x
    (rows, columns) = padding
    edges = ((0, 0), (rows, rows), (columns, columns), (0, 0))
    return np.pad(x, edges, constant_values=value)


def _crop(x: Array, padding: Pair) -> Array:
    rows, columns = padding
    return x[:, rows : x.shape[1] - rows, columns : x.shape[2] - columns]


def _rows(x: Array) -> Array:
    return x.reshape(len(x), -1)


def _spread(dy: Array, shape: tuple[int, ...], window: Pool) -> Array:
    """The gradient of an average: every place of a window receives the same share."""
    (c, h, w, n) = shape
    if window.kind == "global_average":
        return np.full(shape, dy / (h * w))
    (pr, pc) = window.padding
    dx = np.zeros((c, h + 2 * pr, w + 2 * pc, n), dy.dtype)
    share = dy / math.prod(window.size)
    for rows, cols in _taps(window.size, window.stride, (1, 1), (dy.shape[1], dy.shape[2])):
        dx[:, rows, cols] += share
    return _crop(dx, window.padding)


class CpuOps:
    """`TrainingOps` on NumPy arrays; holds nothing, so one instance may serve many networks."""

    def enter(self, images: Images, dtype: DTypeLike) -> Array:
        """Uint8 (n, h, w) -> (1, h, w, n), times 1/255."""
        x = np.ascontiguousarray(images.transpose(1, 2, 0)[np.newaxis]).astype(dtype)
        x *= SCALE
        return x

    def leave(self, x: Array) -> Array:
        """(units, n) -> (n, units)."""
        return np.ascontiguousarray(x.T)

    def convolution(
        self, x: Array, weight: Array, bias: Array | None, block: ConvBlock
    ) -> tuple[Array, _Convolved]:
        """(c, h, w, n) -> (k, oh, ow, n): im2col, then one matrix product."""
        padded = _pad(x, block.padding, 0)
        (c, h, w, n) = x.shape
        geometry = zip(
            (h, w), block.kernel, block.stride, block.padding, block.dilation, strict=True
        )
        height, width = (window_count(*axis) for axis in geometry)
        columns = np.empty((c, *block.kernel, height, width, n), x.dtype)
        flat = columns.reshape(c, -1, height, width, n)
        taps = _taps(block.kernel, block.stride, block.dilation, (height, width))
        for tap, (rows, cols) in enumerate(taps):
            flat[:, tap] = padded[:, rows, cols]
        matrix = columns.reshape(weight[0].size, -1)
        y = _rows(weight) @ matrix
        if bias is not None:
            y += bias[:, np.newaxis]
        saved = _Convolved(matrix, weight, block, x.shape)
        return y.reshape(len(weight), height, width, n), saved

    def convolution_backward(
        self, dy: Array, saved: _Convolved, input_gradient: bool
    ) -> tuple[Array | None, Array, Array]:
        """Two products, then col2im: each tap adds its share back.

        dW = dy columns^T, dcolumns = W^T dy.
        """
        columns, weight, block, (c, h, w, n) = saved
        flat = _rows(dy)
        dweight = (flat @ columns.T).reshape(weight.shape)
        dbias = flat.sum(axis=1)
        if not input_gradient:
            return None, dweight, dbias
        size = dy.shape[1], dy.shape[2]
        dcolumns = (_rows(weight).T @ flat).reshape(c, -1, *size, n)
        (pr, pc) = block.padding
        dx = np.zeros((c, h + 2 * pr, w + 2 * pc, n), dy.dtype)
        for tap, (rows, cols) in enumerate(_taps(block.kernel, block.stride, block.dilation, size)):
            dx[:, rows, cols] += dcolumns[:, tap]
        return _crop(dx, block.padding), dweight, dbias

    def batch_norm(self, x: Array, gamma: Array, beta: Array, epsilon: float) -> Normalized:
        """Over all but the first axis."""
        flat = _rows(x)
        mean = flat.mean(axis=1)
        normal = flat - mean[:, np.newaxis]
        m = flat.shape[1]
        variance = np.vecdot(normal, normal) / m
        inverse = 1 / np.sqrt(variance + epsilon)
        normal *= inverse[:, np.newaxis]
        y = normal * gamma[:, np.newaxis]
        y += beta[:, np.newaxis]
        saved = _Standardized(normal, gamma * inverse)
        return Normalized(y.reshape(x.shape), mean, variance * (m / max(m - 1, 1)), saved)

    def batch_norm_backward(self, dy: Array, saved: _Standardized) -> tuple[Array, Array, Array]:
        """Through the batch's mean and variance, m values in each.

        dx = gamma / sigma (dy - sum(dy) / m - normal sum(dy normal) / m).
        """
        normal, scale = saved
        flat = _rows(dy)
        m = flat.shape[1]
        dbeta = flat.sum(axis=1)
        dgamma = np.vecdot(flat, normal)
        dx = normal * (-dgamma / m)[:, np.newaxis]
        dx += flat
        dx -= (dbeta / m)[:, np.newaxis]
        dx *= scale[:, np.newaxis]
        return dx.reshape(dy.shape), dgamma, dbeta

    def affine(self, x: Array, scale: Array, shift: Array) -> Array:
        """Over the first axis."""
        y = _rows(x) * scale[:, np.newaxis]
        y += shift[:, np.newaxis]
        return y.reshape(x.shape)

    def activation(self, x: Array, activation: Activation) -> tuple[Array, Activated]:
        """Of any shape."""
        return activate(x, activation)

    def activation_backward(self, dy: Array, saved: Activated) -> Array:
        """Of any shape."""
        return activate_backward(dy, saved)

    def pool(self, x: Array, window: Pool) -> tuple[Array, _Largest | _Averaged]:
        """(c, h, w, n) -> (c, oh, ow, n), of the global average (c, 1, 1, n)."""
        if window.kind == "global_average":
            return x.mean(axis=(1, 2), keepdims=True), _Averaged(x.shape, window)
        geometry = zip(x.shape[1:3], window.size, window.stride, window.padding, strict=True)
        height, width = (window_count(*axis) for axis in geometry)
        taps = _taps(window.size, window.stride, (1, 1), (height, width))
        outside = -np.inf if window.kind == "max" else 0.0
        padded = _pad(x, window.padding, outside)
        y = np.full((len(x), height, width, x.shape[3]), outside, x.dtype)
        if window.kind == "average":
            for rows, cols in taps:
                y += padded[:, rows, cols]
            y /= math.prod(window.size)
            return y, _Averaged(x.shape, window)
        for rows, cols in taps:
            np.maximum(y, padded[:, rows, cols], out=y)
        return y, _Largest(padded, y, window)

    def pool_backward(self, dy: Array, saved: _Largest | _Averaged) -> Array:
        """Each window's gradient goes to the first tap that holds its maximum, or to all alike."""
        if isinstance(saved, _Averaged):
            return _spread(dy, *saved)
        x, y, window = saved
        dx = np.zeros_like(x)
        free = np.ones(y.shape, bool)
        size = y.shape[1], y.shape[2]
        for rows, cols in _taps(window.size, window.stride, (1, 1), size):
            largest = x[:, rows, cols] == y
            largest &= free
            free ^= largest
            dx[:, rows, cols] += dy * largest
        return _crop(dx, window.padding)

    def dense(
        self, x: Array, weight: Array, bias: Array | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """(c, h, w, n) or (inputs, n) -> (units, n)."""
        y = weight @ x.reshape(weight.shape[1], -1)
        if bias is not None:
            y += bias[:, np.newaxis]
        return y, (x, weight)

    def dense_backward(
        self, dy: Array, saved: tuple[Array, Array], input_gradient: bool
    ) -> tuple[Array | None, Array, Array]:
        """Two products: dW = dy x^T, dx = W^T dy."""
        x, weight = saved
        dweight = dy @ x.reshape(weight.shape[1], -1).T
        dx = (weight.T @ dy).reshape(x.shape) if input_gradient else None
        return dx, dweight, dy.sum(axis=1)

    def dropout(self, x: Array, rate: float, random: np.random.Generator) -> tuple[Array, Array]:
        """Keeps the factors, 0 or 1 / (1 - rate)."""
        kept = random.random(x.shape, np.float32) >= rate
        factors = kept * x.dtype.type(1 / (1 - rate))
        return x * factors, factors

    def dropout_backward(self, dy: Array, saved: Array) -> Array:
        """The same factors."""
        return dy * saved

    def softmax_cross_entropy(
        self, logits: Array, labels: Labels
    ) -> tuple[float, tuple[Array, Labels]]:
        """Logits (classes, n); shifted by the maximum, so exp cannot overflow."""
        shifted = logits - logits.max(axis=0)
        e = np.exp(shifted)
        total = e.sum(axis=0)
        losses = np.log(total) - shifted[labels, np.arange(len(labels))]
        return float(losses.mean()), (e / total, labels)

    def softmax_cross_entropy_backward(self, saved: tuple[Array, Labels]) -> Array:
        """(probabilities - onehot) / n."""
        probabilities, labels = saved
        n = len(labels)
        dlogits = probabilities / n
        dlogits[labels, np.arange(n)] -= dlogits.dtype.type(1) / n
        return dlogits
