"""Pooling of images (c, h, w, n), batch innermost, with its gradient, on NumPy.

Also the geometry of kernels and windows: loops run over their r s taps only, never over pixels or
images. Padding is never a maximum and counts as zeros in an average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from lenet.model import Pair, Pool, window_count
from lenet.reference import Array


def taps(kernel: Pair, stride: Pair, dilation: Pair, size: Pair) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns that each tap of a kernel covers at `size` output positions."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            yield (
                slice(top, top + (size[0] - 1) * stride[0] + 1, stride[0]),
                slice(left, left + (size[1] - 1) * stride[1] + 1, stride[1]),
            )


def pad(x: Array, padding: Pair, value: float) -> Array:
    """The images with a border of `value`."""
    if padding == (0, 0):
        return x
    (rows, columns) = padding
    edges = ((0, 0), (rows, rows), (columns, columns), (0, 0))
    return np.pad(x, edges, constant_values=value)


def crop(x: Array, padding: Pair) -> Array:
    """The images without their padding."""
    rows, columns = padding
    return x[:, rows : x.shape[1] - rows, columns : x.shape[2] - columns]


class MaxPooled(NamedTuple):
    """Saved for the gradient of max pooling."""

    x: Array  # padded
    y: Array
    window: Pool


class AveragePooled(NamedTuple):
    """Saved for the gradient of average pooling."""

    shape: tuple[int, ...]  # of x
    window: Pool


Pooled: TypeAlias = MaxPooled | AveragePooled


def pool(x: Array, window: Pool) -> tuple[Array, Pooled]:
    """(c, h, w, n) -> (c, oh, ow, n); a global average gives (c, 1, 1, n)."""
    if window.kind == "global_average":
        return x.mean(axis=(1, 2), keepdims=True), AveragePooled(x.shape, window)
    geometry = zip(x.shape[1:3], window.size, window.stride, window.padding, strict=True)
    height, width = (window_count(*axis) for axis in geometry)
    windows = taps(window.size, window.stride, (1, 1), (height, width))
    border = -np.inf if window.kind == "max" else 0.0
    padded = pad(x, window.padding, border)
    y = np.full((len(x), height, width, x.shape[3]), border, x.dtype)
    if window.kind == "average":
        for rows, cols in windows:
            y += padded[:, rows, cols]
        y /= math.prod(window.size)
        return y, AveragePooled(x.shape, window)
    for rows, cols in windows:
        np.maximum(y, padded[:, rows, cols], out=y)
    return y, MaxPooled(padded, y, window)


def pool_backward(dy: Array, saved: Pooled) -> Array:
    """Each window's gradient goes to the first tap that holds its maximum, or evenly to all."""
    if isinstance(saved, AveragePooled):
        return _spread(dy, *saved)
    x, y, window = saved
    dx = np.zeros_like(x)
    unassigned = np.ones(y.shape, bool)
    for rows, cols in taps(window.size, window.stride, (1, 1), (y.shape[1], y.shape[2])):
        is_max = x[:, rows, cols] == y
        is_max &= unassigned
        unassigned ^= is_max
        dx[:, rows, cols] += dy * is_max
    return crop(dx, window.padding)


def _spread(dy: Array, shape: tuple[int, ...], window: Pool) -> Array:
    """The gradient of an average: every tap of a window receives the same share."""
    (c, h, w, n) = shape
    if window.kind == "global_average":
        return np.full(shape, dy / (h * w))
    (pr, pc) = window.padding
    dx = np.zeros((c, h + 2 * pr, w + 2 * pc, n), dy.dtype)
    share = dy / math.prod(window.size)
    for rows, cols in taps(window.size, window.stride, (1, 1), (dy.shape[1], dy.shape[2])):
        dx[:, rows, cols] += share
    return crop(dx, window.padding)
