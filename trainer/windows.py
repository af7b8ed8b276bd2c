"""Where the taps of a kernel or a pooling window lie on images (c, h, w, n), batch innermost.

Python loops run over the r s taps only, never over pixels or images. It refuses to compute.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lenet.model import Pair
from lenet.reference import Array


def taps(kernel: Pair, stride: Pair, dilation: Pair, size: Pair) -> Iterator[tuple[slice, slice]]:
    """For each tap of a kernel the rows and columns it meets when laid on `size` places."""
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            top, left = i * dilation[0], j * dilation[1]
            yield (
                slice(top, top + (size[0] - 1) * stride[0] + 1, stride[0]),
                slice(left, left + (size[1] - 1) * stride[1] + 1, stride[1]),
            )


def pad(x: Array, padding: Pair, value: float) -> Array:
    """The images within a frame of `value`."""
    if padding == (0, 0):
        return x
    (rows, columns) = padding
    edges = ((0, 0), (rows, rows), (columns, columns), (0, 0))
    return np.pad(x, edges, constant_values=value)


def crop(x: Array, padding: Pair) -> Array:
    """The images without their frame."""
    rows, columns = padding
    return x[:, rows : x.shape[1] - rows, columns : x.shape[2] - columns]
