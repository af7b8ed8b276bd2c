"""Canonical tensors to the layout in which cuDNN's kernels are fast, and back. Pure NumPy.

    canonical                              packed
    convolution (k, c, r, s)               (K, r, s, C)
    dense (units, inputs)                  (U, I)
    dense after an image (c, h, w)         (U, h w C): an image lies channels last
    vector (k,)                            (K,)

Capitals are channel counts rounded up by `padded`, but the image that a network is given keeps
its one channel. What is added is zero, and stays zero in training, as every gradient there is
zero. The weight file keeps the true shapes. It refuses to choose a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lenet.model import Model


def padded(channels: int) -> int:
    """The channel count that the kernels are given: 8, 16, or a multiple of 32.

    With 32 -> 64 channels instead of 20 -> 50 a 5x5 convolution over 8192 images took 119 us
    instead of 438 (fp16, H200, 2026-11-20): alignment is worth more than twice the arithmetic.
    """
    if channels <= 16:
        return 8 if channels <= 8 else 16
    return -(-channels // 32) * 32


@dataclass(frozen=True, slots=True)
class Packed:
    """Where one canonical tensor lies in its packed one.

    `split` is the canonical shape with a flattened image taken apart, `order` the axes of the
    packed tensor, `size` its shape before flattening, `shape` after it.
    """

    canonical: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]

    def pack(self, tensor: NDArray[np.generic]) -> NDArray[np.generic]:
        """(canonical) -> (shape), zeros where there was nothing."""
        packed = np.zeros(self.size, tensor.dtype)
        packed[self._inside()] = tensor.reshape(self.split).transpose(self.order)
        return packed.reshape(self.shape)

    def unpack(self, packed: NDArray[np.generic]) -> NDArray[np.generic]:
        """(shape) -> (canonical), a copy; what lies in the padding is dropped."""
        inside = packed.reshape(self.size)[self._inside()]
        back = inside.transpose(np.argsort(self.order))
        return np.array(back, order="C").reshape(self.canonical)

    def _inside(self) -> tuple[slice, ...]:
        return tuple(slice(self.split[axis]) for axis in self.order)


def layout(model: Model) -> Mapping[str, Packed]:
    """A `Packed` for every name of `model.parameters()`."""
    shapes = {shape.name: shape for shape in model.shapes()}
    first = next(iter(shapes))
    packed: dict[str, Packed] = {}
    for name, shape in model.parameters().items():
        owner = name.partition(".")[0]
        source = shapes[owner].input
        channels = source[0] if owner == first else padded(source[0])
        packed[name] = _layout(shape, source, channels)
    return packed


def _layout(shape: tuple[int, ...], source: tuple[int, ...], channels: int) -> Packed:
    """`source` is the input that a weight of `shape` meets, `channels` what it has in memory."""
    k = padded(shape[0])
    if len(shape) == 1:
        return Packed(shape, shape, (0,), (k,), (k,))
    if len(shape) == 4:
        size: tuple[int, ...] = (k, *shape[2:], channels)
        return Packed(shape, shape, (0, 2, 3, 1), size, size)
    if len(source) == 1:
        return Packed(shape, shape, (0, 1), (k, channels), (k, channels))
    c, h, w = source
    size = (k, h, w, channels)
    return Packed(shape, (shape[0], c, h, w), (0, 2, 3, 1), size, (k, math.prod(size[1:])))
