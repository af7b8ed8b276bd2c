"""The first convolution with bias, activation and pooling, from uint8 pixels: `conv1.cu`.

It is used for serving where `convolutions` does not support the network or the GPU. Here are the
networks that the kernel supports, its macros, the packing of its weights and its launch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lenet.cuda.capture import Launch
from lenet.cuda.graphs import Precision
from lenet.cuda.kernels import FOLDER, Kernels, Macros, scalar
from lenet.cuda.packing import PIXEL_SCALE, padded, round_up, zero_pad_to
from lenet.model import Block, BlockShape, ConvBlock
from lenet.pixels import HEIGHT, WIDTH

Fragments: TypeAlias = NDArray[np.float16]

_SOURCE = FOLDER / "conv1.cu"
_THREADS = 128
_MAX_FILTER_STEPS = 8  # of 16 taps: the filter is kept in registers
_RESIDENT_BLOCKS = 4  # on a multiprocessor
_TWO_IMAGES_FROM_ROWS = 512  # a block takes two images from here on


def is_plain(block: Block) -> bool:
    """Whether it is a convolution with stride and dilation 1, and any pooling is 2x2, stride 2."""
    return (
        isinstance(block, ConvBlock)
        and block.stride == block.dilation == (1, 1)
        and (
            block.pool is None
            or (
                block.pool.kind != "global_average"
                and block.pool.size == block.pool.stride == (2, 2)
                and block.pool.padding == (0, 0)
            )
        )
    )


def is_supported(block: Block, precision: Precision) -> bool:
    """Whether the kernel computes `block` as the first of a network."""
    if not isinstance(block, ConvBlock) or not is_plain(block):
        return False
    r, s = block.kernel
    steps = -(-r * -(-s // 2) // 8)
    sides = zip((HEIGHT, WIDTH), block.padding, block.kernel, strict=True)
    return (
        all(side + 2 * padding - k >= 1 for side, padding, k in sides)
        and parts(precision) * steps <= _MAX_FILTER_STEPS
    )


def parts(precision: Precision) -> int:
    """The number of halves whose sum is one weight."""
    return 1 if precision == "fp16" else 2


def macros(block: ConvBlock, shape: BlockShape) -> Macros:
    """The macros of the kernel, except for SCALAR and IMAGES."""
    _, oh, ow = shape.output
    return {
        "H": shape.input[1],
        "W": shape.input[2],
        "R": block.kernel[0],
        "S": block.kernel[1],
        "PAD_H": block.padding[0],
        "PAD_W": block.padding[1],
        "OH": oh,
        "OW": ow,
        "C": padded(block.channels),
        "CHANNELS": block.channels,
        "POOL": block.pool.kind.upper() if block.pool else "NONE",
        "ACTIVATION": block.activation.kind,
        "PARAMETER": float(block.activation.parameter),
    }


def filter_matrix(weight: ArrayLike, channels: int) -> NDArray[np.float32]:
    """The filters (k, 1, r, s) as a matrix (taps, channels), for pixels divided by 256.

    Each row of a filter has an even number of taps, and their number is a multiple of 16.
    """
    weight = np.asarray(weight, np.float32) * np.float32(PIXEL_SCALE)
    _, _, r, s = weight.shape
    matrix = zero_pad_to(weight[:, 0].transpose(1, 2, 0), (r, round_up(s, 2), channels))
    taps = matrix.reshape(-1, channels)
    return zero_pad_to(taps, (round_up(len(taps), 16), channels))


def mma_b(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """(k, n) -> (steps, tiles, 32 lanes, 4): the right operand of `multiply` in `ptx.cuh`."""
    k, n = matrix.shape
    axes = matrix.reshape(k // 16, 2, 4, 2, n // 8, 8)  # k is step, half, t, e; n is tile, g
    return axes.transpose(0, 4, 5, 2, 1, 3).reshape(k // 16, n // 8, 32, 4)


def fragments(weight: ArrayLike, parts: int) -> Fragments:
    """The filters (k, 1, r, s) as the lanes of a warp read them.

    Args:
        weight: canonical, for pixels from 0 to 1.
        parts: halves whose sum is one weight.

    Returns:
        float16 (chunks, parts, steps, 32 lanes, tiles, 4), C-contiguous. A warp computes a chunk of
        up to four tiles of 8 channels; in each step of 16 taps a lane has four weights a tile. The
        instruction gives each lane two columns of a tile; the columns are ordered so that all
        channels of a lane are neighbours in the output.
    """
    matrix = filter_matrix(weight, padded(len(np.asarray(weight))))
    channels = matrix.shape[1]
    tiles = 4 if channels % 32 == 0 else 2 if channels % 16 == 0 else 1
    columns = matrix.reshape(-1, channels // tiles // 8, 4, tiles, 2).transpose(0, 1, 3, 2, 4)
    b = mma_b(columns.reshape(matrix.shape))
    rest = b.reshape(len(b), -1, tiles, 32, 4).transpose(1, 0, 3, 2, 4)
    halves: list[Fragments] = []
    for _ in range(parts):
        halves.append(rest.astype(np.float16))
        rest = rest - halves[-1]
    return np.ascontiguousarray(np.stack(halves, axis=1))


def launch(  # pragma: no cover - needs a GPU
    kernels: Kernels,
    multiprocessors: int,
    block: ConvBlock,
    shape: BlockShape,
    pixels: Any,
    weight: Any,
    bias: Any,
    y: Any,
) -> Launch:
    """Prepare the launch from `pixels`, uint8 (n, 28, 28), to `y`, (n, oh, ow, C)."""
    rows = len(y)
    images = 2 if rows >= _TWO_IMAGES_FROM_ROWS else 1
    sizes: Macros = {"SCALAR": scalar(y.dtype), "IMAGES": images}
    kernel = kernels.get(_SOURCE, "first_convolution", {**macros(block, shape), **sizes})
    grid = min(-(-rows // images), _RESIDENT_BLOCKS * multiprocessors), len(weight)
    arguments = (pixels, weight, bias, y, np.int32(rows))
    return lambda: kernel(grid, (_THREADS,), arguments)
