"""Canonical tensors to the layout in which cuDNN's kernels are fast, and back. Pure NumPy.

    canonical                              packed
    convolution (k, c, r, s)               (K, r, s, C)
    dense (units, inputs)                  (U, I)
    dense after an image (c, h, w)         (U, h w C): images are channels last
    vector (k,)                            (K,)

Capitals are channel counts rounded up by `padded`; only the input image keeps its one channel. The
padding is zero, and stays zero in training, as every gradient there is zero. The weight file keeps
the true shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet.model import Model

PIXEL_SCALE = 256 / 255
"""Factor of the first layer's weights in serving: the kernels store a pixel as its value / 256,
which is exact in half and keeps the weights clear of the subnormals."""


def padded(channels: int) -> int:
    """The channel count that the kernels get: 8, 16, or a multiple of 32.

    With 32 -> 64 channels instead of 20 -> 50 a 5x5 convolution over 8192 images took 119 us
    instead of 438 (fp16, H200, 2026-11-20): alignment is worth more than twice the arithmetic.
    """
    if channels <= 16:
        return 8 if channels <= 8 else 16
    return round_up(channels, 32)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def zero_pad_to(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """`array`, zero-padded to `shape` at the end of each axis."""
    wide = np.zeros(shape, array.dtype)
    wide[tuple(map(slice, array.shape))] = array
    return wide


@dataclass(frozen=True, slots=True)
class Packed:
    """The layout of one tensor.

    `split` is the canonical shape with a flattened image split into its axes, `order` the order of
    these axes in the packed tensor, `size` its shape before flattening, `shape` after it.
    """

    canonical: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]

    def pack(self, tensor: NDArray[np.generic]) -> NDArray[np.generic]:
        """(canonical) -> (shape), with zeros in the padding."""
        axes = tensor.reshape(self.split).transpose(self.order)
        return zero_pad_to(axes, self.size).reshape(self.shape)

    def unpack(self, packed: NDArray[np.generic]) -> NDArray[np.generic]:
        """(shape) -> (canonical), a copy without the padding."""
        inside = tuple(slice(self.split[axis]) for axis in self.order)
        axes = packed.reshape(self.size)[inside].transpose(np.argsort(self.order))
        return np.array(axes, order="C").reshape(self.canonical)


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
    """`source` is the layer's input shape, `channels` how many it has in memory."""
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
