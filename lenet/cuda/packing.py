"""Canonical tensors to the layout in which cuDNN's kernels are fast, and back. Pure NumPy.

    canonical                              packed
    convolution (k, c, r, s)               (K, r, s, C)
    dense (units, inputs)                  (U, I)
    dense after an image (c, h, w)         (U, h w C): an image lies channels last
    vector (k,)                            (K,)

Capitals are channel counts rounded up by `padded`, but the image that a network is given keeps
its one channel. What is added is zero, and stays zero in training, as every gradient there is
zero. The weight file keeps the true shapes. It refuses to choose a dtype.

`first_fragments` and `whole_fragments` are for `conv1.cu` and `fused_network.cu`, serving only:
half matrices, taken apart so that each lane of a warp finds what the tensor cores ask of it side
by side. There the 1/255 of a pixel is folded in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lenet.model import ConvBlock, DenseBlock, Model

PIXEL_SCALE = 256 / 255
"""What the first weights are multiplied by: the kernels take a pixel as its value / 256."""

CLUSTER = 8
"""Blocks that share the work of an image in `fused_network.cu`."""

_WARPS = 16  # of each of these blocks

Halves: TypeAlias = NDArray[np.float16]
Floats: TypeAlias = NDArray[np.float32]


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


def first_fragments(weight: ArrayLike, parts: int) -> Halves:
    """The filters of `conv1.cu`, (k, 1, r, s), with `padded` channels.

    Args:
        weight: canonical, of pixels from 0 to 1.
        parts: halves whose sum a weight is: 1 for half storage, 2 for float.

    Returns:
        float16 (chunks, parts, steps, 32 lanes, tiles, 4), C-contiguous: a warp has a chunk of up
        to four tiles of 8 channels, and of each step of 16 taps a lane has four weights a tile. The
        instruction deals a tile's columns out two a lane; all of a lane's channels are neighbours.
    """
    matrix = _taps(weight, padded(len(np.asarray(weight))))
    channels = matrix.shape[1]
    tiles = 4 if channels % 32 == 0 else 2 if channels % 16 == 0 else 1
    dealt = matrix.reshape(-1, channels // tiles // 8, 4, tiles, 2).transpose(0, 1, 3, 2, 4)
    right = _right(dealt.reshape(matrix.shape))
    split = right.reshape(len(right), -1, tiles, 32, 4).transpose(1, 0, 3, 2, 4)
    found: list[Halves] = []
    for _ in range(parts):
        found.append(split.astype(np.float16))
        split = split - found[-1]
    return np.ascontiguousarray(np.stack(found, axis=1))


def whole_fragments(model: Model, tensors: Mapping[str, ArrayLike]) -> dict[str, Halves | Floats]:
    """The weights of `fused_network.cu` by the names of its arguments, in their order.

    Args:
        model: without batch norm; two convolutions or none, then two dense blocks.
        tensors: canonical, by the names of `model.parameters()`.

    Returns:
        first, with convolutions: float16 (C / 8, steps, 32 lanes, 4);
        second, with convolutions: float16 (C2 / 8, steps, 32, 4), by the block that computes it;
        hidden: float16 (CLUSTER, 16 warps or fewer, steps, 32, 8), likewise;
        last: float16 (CLUSTER, classes, share), by the block that has these units;
        after each its bias, float32, with zeros for the channels and units that pad it.
    """
    names = [shape.name for shape in model.shapes()]
    kinds = [type(block) for block in model.blocks]
    assert kinds in ([DenseBlock] * 2, [ConvBlock] * 2 + [DenseBlock] * 2), f"bug: {names}"
    weights = [np.asarray(tensors[f"{name}.weight"], np.float32) for name in names]
    biases = [np.asarray(tensors[f"{name}.bias"], np.float32) for name in names]
    found: dict[str, Halves | Floats] = {}
    *_, hidden, last = weights
    units, classes = len(hidden), len(last)
    if len(weights) == 4:
        first, second = weights[:2]
        c, c2 = _up(len(first), 8), _up(len(second), 8)
        found["first"] = _right(_taps(first, c)).swapaxes(0, 1).astype(np.float16)
        found["first_bias"] = _corner(biases[0], (c,))
        r, s = second.shape[2:]
        matrix = _corner(second.transpose(2, 3, 1, 0), (r, s, c, c2)).reshape(-1, c2)
        matrix = _corner(matrix, (_up(len(matrix), 16), c2))
        found["second"] = _right(matrix).swapaxes(0, 1).astype(np.float16)
        found["second_bias"] = _corner(biases[1], (c2,))
        _, h, w = model.shapes()[1].output
        inside = hidden.reshape(units, -1, h, w).transpose(0, 2, 3, 1)
        hidden = _corner(inside, (units, h, w, c2)).reshape(units, -1)
    else:
        hidden = hidden * np.float32(PIXEL_SCALE)
    share = _up(units, 16 * CLUSTER) // CLUSTER
    tiles = share // 16
    splits = _WARPS // tiles
    left = _left(_corner(hidden, (CLUSTER * share, _up(hidden.shape[1], 16 * splits))))
    by_warp = left.reshape(CLUSTER, tiles, splits, -1, 32, 8).swapaxes(1, 2)
    found["hidden"] = by_warp.reshape(CLUSTER, tiles * splits, -1, 32, 8).astype(np.float16)
    found["hidden_bias"] = _corner(biases[-2], (CLUSTER * share,))
    by_block = _corner(last, (classes, CLUSTER * share)).reshape(classes, CLUSTER, share)
    found["last"] = by_block.swapaxes(0, 1).astype(np.float16)
    found["last_bias"] = biases[-1]
    return dict(zip(found, map(np.ascontiguousarray, found.values()), strict=True))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _corner(array: Floats, shape: tuple[int, ...]) -> Floats:
    """`array` in the first corner of zeros."""
    wide = np.zeros(shape, array.dtype)
    wide[tuple(map(slice, array.shape))] = array
    return wide


def _taps(weight: ArrayLike, channels: int) -> Floats:
    """The first filters (k, 1, r, s) as a matrix (taps, channels); of an even number in a row."""
    weight = np.asarray(weight, np.float32) * np.float32(PIXEL_SCALE)
    _, _, r, s = weight.shape
    matrix = _corner(weight[:, 0].transpose(1, 2, 0), (r, _up(s, 2), channels))
    return _corner(matrix.reshape(-1, channels), (_up(r * _up(s, 2), 16), channels))


def _right(matrix: Floats) -> Floats:
    """(k, n) -> (steps, tiles, 32 lanes, 4): the right side of the product in `ptx.cuh`."""
    k, n = matrix.shape
    parted = matrix.reshape(k // 16, 2, 4, 2, n // 8, 8)  # k is step, half, t, e; n is tile, g
    return parted.transpose(0, 4, 5, 2, 1, 3).reshape(k // 16, n // 8, 32, 4)


def _left(matrix: Floats) -> Floats:
    """(m, k) -> (tiles, steps, 32 lanes, 8): the left side, with another order of the 16 k.

    The order is free if both sides have the same one. In this, where t comes before the half, a
    lane's four of the other side are neighbours.
    """
    m, k = matrix.shape
    parted = matrix.reshape(m // 16, 2, 8, k // 16, 4, 2, 2)  # m is tile, v, g; k step, t, half, e
    return parted.transpose(0, 3, 2, 4, 5, 1, 6).reshape(m // 16, k // 16, 32, 8)
