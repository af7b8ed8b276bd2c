"""A convolution behind another one with bias, activation and pooling in one pass: `convolution.cu`.

It computes on tensor cores, in float32 too. Here are the blocks that the kernel supports, its
macros, the packing of its weights and its launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lenet.cuda.capture import Launch
from lenet.cuda.conv1 import is_plain
from lenet.cuda.device import Limits
from lenet.cuda.graphs import Precision
from lenet.cuda.kernels import FOLDER, Kernels, Macros, scalar, storage_dtype
from lenet.cuda.packing import padded, round_up, zero_pad_to
from lenet.model import Block, BlockShape, ConvBlock

Fragments: TypeAlias = NDArray[np.float16] | NDArray[np.float32]

_SOURCE = FOLDER / "convolution.cu"
_AMPERE = 80
_PRODUCTS: dict[Precision, int] = {"fp16": 0, "tf32": 1, "fp32": 3}
_CHUNK_BYTES = 16
_MANY_IMAGES = 2  # for each multiprocessor: from here on a warp takes whole images
_MOST_TEAMS = 8
_WARPS_OF_AN_IMAGE = 4


@dataclass(frozen=True, slots=True)
class Split:
    """How a block of threads divides its work: `teams` of `team` warps, each with an image.

    A warp computes `groups` times eight quads of one of `parts` parts of the channels.
    """

    teams: int
    team: int
    groups: int
    parts: int


def is_supported(block: Block, shape: BlockShape, precision: Precision, limits: Limits) -> bool:
    """Whether the kernel computes `block`, which is not the first."""
    return (
        limits.capability >= _AMPERE
        and isinstance(block, ConvBlock)
        and is_plain(block)
        and block.pool is not None
        and padded(block.channels) % 16 == 0
        and padded(block.channels) - block.channels < 16
        and shared_bytes(block, shape, precision, 1) <= limits.shared_bytes
    )


def split(
    block: ConvBlock, shape: BlockShape, precision: Precision, rows: int, limits: Limits
) -> Split:
    """How the work of `rows` images is divided."""
    if rows < _MANY_IMAGES * limits.multiprocessors:
        return Split(1, _WARPS_OF_AN_IMAGE, groups=1, parts=2)
    alone = shared_bytes(block, shape, precision, 0)
    image = shared_bytes(block, shape, precision, 1) - alone
    return Split(min(_MOST_TEAMS, (limits.shared_bytes - alone) // image), 1, groups=2, parts=1)


def macros(block: ConvBlock, shape: BlockShape, precision: Precision, split: Split) -> Macros:
    """The macros of the kernel."""
    assert block.pool is not None, "bug: not supported"
    channels, h, w = shape.input
    return {
        "SCALAR": scalar(storage_dtype(precision)),
        "PRODUCTS": _PRODUCTS[precision],
        "H": h,
        "W": w,
        "C": padded(channels),
        "CHANNELS_IN": channels,
        "R": block.kernel[0],
        "S": block.kernel[1],
        "PAD_H": block.padding[0],
        "PAD_W": block.padding[1],
        "K": padded(block.channels),
        "CHANNELS": block.channels,
        "POOL": block.pool.kind.upper(),
        "ACTIVATION": block.activation.kind,
        "PARAMETER": float(block.activation.parameter),
        "TEAMS": split.teams,
        "TEAM": split.team,
        "GROUPS": split.groups,
        "PARTS": split.parts,
    }


def shared_bytes(block: ConvBlock, shape: BlockShape, precision: Precision, teams: int) -> int:
    """The shared memory of a block of threads: filters, offsets and images."""
    channels, h, w = shape.input
    r, s = block.kernel
    (h, ph), (w, pw) = zip((h, w), block.padding, strict=True)
    chunks = -(-channels * storage_dtype(precision).itemsize // _CHUNK_BYTES)
    steps = -(-r * s * chunks // 2)
    pixel, half = (chunks | 1) * _CHUNK_BYTES, (w + 2 * pw + 1) // 2
    quads_w = (w + 2 * pw - s + 1) // 2
    wanted = quads_w * pixel // 2 // 16 * 16 % 64
    pitch = 2 * half * pixel + (wanted - 2 * half * pixel) % 64
    image = (h + 2 * ph) * pitch
    return steps * (256 * tiles(block.channels) + _CHUNK_BYTES) + teams * image


def tiles(channels: int) -> int:
    """The tiles of eight output channels: pairs, but the last may be alone with two channels."""
    rest = channels % 16
    return channels // 16 * 2 + (0 if rest == 0 else 1 if rest <= 2 else 2)


def fragments(weight: ArrayLike, precision: Precision) -> Fragments:
    """The filters (k, c, r, s) as the lanes of a warp read them.

    Returns:
        (steps, tiles, 32 lanes, 2, values in 4 bytes), float16 or float32, C-contiguous. A step
        covers two chunks: 16 bytes of channels each.
    """
    weight = np.asarray(weight, np.float32)
    dtype = storage_dtype(precision)
    k, c, r, s = weight.shape
    values = _CHUNK_BYTES // dtype.itemsize
    inputs = round_up(c, values)
    taps = zero_pad_to(weight.transpose(2, 3, 1, 0), (r, s, inputs, round_up(k, 16)))
    chunks = taps.reshape(-1, values, taps.shape[-1])
    chunks = zero_pad_to(chunks, (round_up(len(chunks), 2), *chunks.shape[1:]))
    # Channel 16 a + 4 t + 2 b + e is column 2 t + e of tile 2 a + b.
    axes = chunks.reshape(-1, 2, 4, values // 4, taps.shape[-1] // 16, 4, 2, 2)
    # step, half, t of k, value; a, t, b, e -> step, a, b, (t, e), t of k, half, value
    ordered = axes.transpose(0, 4, 6, 5, 7, 2, 1, 3)
    lanes = ordered.reshape(len(ordered), -1, 32, 2, values // 4)
    return np.ascontiguousarray(lanes[:, : tiles(k)].astype(dtype))


def launch(  # pragma: no cover - needs a GPU
    kernels: Kernels,
    limits: Limits,
    block: ConvBlock,
    shape: BlockShape,
    precision: Precision,
    x: Any,
    weight: Any,
    bias: Any,
    y: Any,
    divided: Split | None = None,
) -> Launch:
    """Prepare the launch from `x`, (n, h, w, C), to `y`, (n, oh, ow, K)."""
    rows = len(x)
    divided = divided or split(block, shape, precision, rows, limits)
    kernel = kernels.get(_SOURCE, "convolution", macros(block, shape, precision, divided))
    size = shared_bytes(block, shape, precision, divided.teams)
    grid = (min(-(-rows // divided.teams), limits.multiprocessors),)
    threads = (32 * divided.team * divided.teams,)
    arguments = (x, weight, bias, y, np.int32(rows))
    return lambda: kernel(grid, threads, arguments, size)
