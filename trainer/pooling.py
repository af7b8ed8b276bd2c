"""Pooling of images (c, h, w, n), batch innermost, with its gradient, on NumPy.

Padding is never the largest and counts as zeros in a mean.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np

from lenet.model import Pool, window_count
from lenet.reference import Array
from trainer.windows import crop, pad, taps


class Largest(NamedTuple):
    """What the gradient of a maximum needs."""

    x: Array  # padded
    y: Array
    window: Pool


class Averaged(NamedTuple):
    """What the gradient of a mean needs."""

    shape: tuple[int, ...]  # of x
    window: Pool


Pooled: TypeAlias = Largest | Averaged


def pool(x: Array, window: Pool) -> tuple[Array, Pooled]:
    """(c, h, w, n) -> (c, oh, ow, n), of the global average (c, 1, 1, n)."""
    if window.kind == "global_average":
        return x.mean(axis=(1, 2), keepdims=True), Averaged(x.shape, window)
    geometry = zip(x.shape[1:3], window.size, window.stride, window.padding, strict=True)
    height, width = (window_count(*axis) for axis in geometry)
    places = taps(window.size, window.stride, (1, 1), (height, width))
    outside = -np.inf if window.kind == "max" else 0.0
    padded = pad(x, window.padding, outside)
    y = np.full((len(x), height, width, x.shape[3]), outside, x.dtype)
    if window.kind == "average":
        for rows, cols in places:
            y += padded[:, rows, cols]
        y /= math.prod(window.size)
        return y, Averaged(x.shape, window)
    for rows, cols in places:
        np.maximum(y, padded[:, rows, cols], out=y)
    return y, Largest(padded, y, window)


def pool_backward(dy: Array, saved: Pooled) -> Array:
    """Each window's gradient goes to the first tap that holds its maximum, or to all alike."""
    if isinstance(saved, Averaged):
        return _spread(dy, *saved)
    x, y, window = saved
    dx = np.zeros_like(x)
    free = np.ones(y.shape, bool)
    for rows, cols in taps(window.size, window.stride, (1, 1), (y.shape[1], y.shape[2])):
        largest = x[:, rows, cols] == y
        largest &= free
        free ^= largest
        dx[:, rows, cols] += dy * largest
    return crop(dx, window.padding)


def _spread(dy: Array, shape: tuple[int, ...], window: Pool) -> Array:
    """The gradient of an average: every place of a window receives the same share."""
    (c, h, w, n) = shape
    if window.kind == "global_average":
        return np.full(shape, dy / (h * w))
    (pr, pc) = window.padding
    dx = np.zeros((c, h + 2 * pr, w + 2 * pc, n), dy.dtype)
    share = dy / math.prod(window.size)
    for rows, cols in taps(window.size, window.stride, (1, 1), (dy.shape[1], dy.shape[2])):
        dx[:, rows, cols] += share
    return crop(dx, window.padding)
