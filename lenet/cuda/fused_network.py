"""The strategy "fused network": the whole network in one kernel, for small batches.

A cluster of eight blocks computes each image. The kernel reads pixels from page-locked host memory
and writes probabilities there, so a batch is a single launch without copies. It uses neither cuDNN
nor cuBLAS. Here are the networks that `fused_network.cu` supports, its macros, the packing of its
weights and its launch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lenet.cuda.conv1 import filter_matrix, is_plain, mma_b
from lenet.cuda.graphs import Precision
from lenet.cuda.kernels import FOLDER, NULL, Kernels, Macros, activation_parameters
from lenet.cuda.packing import PIXEL_SCALE, round_up, zero_pad_to
from lenet.model import ConvBlock, DenseBlock, Model

if TYPE_CHECKING:  # these import CuPy, which packing does not need
    from lenet.cuda.memory import Buffers
    from lenet.cuda.weights import DeviceWeights

Halves: TypeAlias = NDArray[np.float16]
Floats: TypeAlias = NDArray[np.float32]

MAX_ROWS = 8
"""The largest bucket that it computes. From host to host 8 images took 13.6 us and 14.0 layer by
layer; 16 images took 23.5 and 14.7 (H100, 2026-11-25, decision 13)."""

CLUSTER = 8
"""Blocks that compute one image together."""

_SOURCE = FOLDER / "fused_network.cu"
_THREADS = 512
_WARPS = _THREADS // 32
_HOPPER = 90
_DENSE_ONLY = (DenseBlock,) * 2
_CONVOLUTIONAL = (ConvBlock,) * 2 + (DenseBlock,) * 2


def is_supported(model: Model, precision: Precision, capability: int) -> bool:
    """Whether the kernel supports `model` on this compute capability (90 is 9.0).

    The network may still be too large for a block's memory: then the kernel does not compile.
    """
    return (
        precision == "fp16"
        and capability >= _HOPPER
        and tuple(map(type, model.blocks)) in (_DENSE_ONLY, _CONVOLUTIONAL)
        and all(
            isinstance(block, ConvBlock) and is_plain(block) and block.pool is not None
            for block in model.blocks[:-2]
        )
        and math.prod(model.shapes()[-2].output) <= 16 * _WARPS * CLUSTER  # a tile for each warp
        and len(activation_parameters(model.blocks)) <= 1
    )


def macros(model: Model) -> Macros:
    """The macros of the kernel."""
    *convolutions, hidden, last = model.blocks
    assert isinstance(hidden, DenseBlock), "bug: the network is not supported"
    assert isinstance(last, DenseBlock), "bug: the network is not supported"
    found: dict[str, str | int | float] = {
        "CONVOLUTIONS": len(convolutions),
        "H": model.input[1],
        "W": model.input[2],
        "UNITS": hidden.units,
        "CLASSES": last.units,
        "ACTIVATION": hidden.activation.kind,
        "PARAMETER": next(iter(activation_parameters(model.blocks)), 1.0),
    }
    for block, n in zip(convolutions, ("", "2"), strict=False):
        assert isinstance(block, ConvBlock), "bug: the network is not supported"
        assert block.pool is not None, "bug: the network is not supported"
        found |= {
            f"R{n}": block.kernel[0],
            f"S{n}": block.kernel[1],
            f"PAD{n}_H": block.padding[0],
            f"PAD{n}_W": block.padding[1],
            f"POOL{n}": block.pool.kind.upper(),
            f"C{n}": round_up(block.channels, 8),
            f"ACTIVATION_{n or 1}": block.activation.kind,
        }
    return found


def pack(model: Model, tensors: Mapping[str, ArrayLike]) -> dict[str, Halves | Floats]:
    """The weights by the names of the kernel's arguments, in their order, C-contiguous.

    Args:
        model: a supported network without batch norm.
        tensors: canonical, by the names of `model.parameters()`.

    Returns:
        first, with convolutions: float16 (C / 8, steps, 32 lanes, 4);
        second, with convolutions: float16 (C2 / 8, steps, 32, 4), by the block that computes it;
        hidden: float16 (CLUSTER, 16 warps or fewer, steps, 32, 8), likewise;
        last: float16 (CLUSTER, classes, units of a block), likewise;
        after each its bias, float32, with zeros for padding channels and units.
    """
    names = [shape.name for shape in model.shapes()]
    assert tuple(map(type, model.blocks)) in (_DENSE_ONLY, _CONVOLUTIONAL), f"bug: {names}"
    weights = [np.asarray(tensors[f"{name}.weight"], np.float32) for name in names]
    biases = [np.asarray(tensors[f"{name}.bias"], np.float32) for name in names]
    found: dict[str, Halves | Floats] = {}
    *_, hidden, last = weights
    units, classes = len(hidden), len(last)
    if len(weights) == 4:
        first, second = weights[:2]
        c, c2 = round_up(len(first), 8), round_up(len(second), 8)
        found["first"] = mma_b(filter_matrix(first, c)).swapaxes(0, 1).astype(np.float16)
        found["first_bias"] = zero_pad_to(biases[0], (c,))
        r, s = second.shape[2:]
        matrix = zero_pad_to(second.transpose(2, 3, 1, 0), (r, s, c, c2)).reshape(-1, c2)
        matrix = zero_pad_to(matrix, (round_up(len(matrix), 16), c2))
        found["second"] = mma_b(matrix).swapaxes(0, 1).astype(np.float16)
        found["second_bias"] = zero_pad_to(biases[1], (c2,))
        _, h, w = model.shapes()[1].output
        channels_last = hidden.reshape(units, -1, h, w).transpose(0, 2, 3, 1)
        hidden = zero_pad_to(channels_last, (units, h, w, c2)).reshape(units, -1)
    else:
        hidden = hidden * np.float32(PIXEL_SCALE)
    block_units = round_up(units, 16 * CLUSTER) // CLUSTER
    tiles = block_units // 16
    splits = _WARPS // tiles
    inputs = round_up(hidden.shape[1], 16 * splits)
    a = mma_a(zero_pad_to(hidden, (CLUSTER * block_units, inputs)))
    by_warp = a.reshape(CLUSTER, tiles, splits, -1, 32, 8).swapaxes(1, 2)
    found["hidden"] = by_warp.reshape(CLUSTER, tiles * splits, -1, 32, 8).astype(np.float16)
    found["hidden_bias"] = zero_pad_to(biases[-2], (CLUSTER * block_units,))
    wide = zero_pad_to(last, (classes, CLUSTER * block_units))
    by_block = wide.reshape(classes, CLUSTER, block_units).swapaxes(0, 1)
    found["last"] = by_block.astype(np.float16)
    found["last_bias"] = biases[-1]
    return dict(zip(found, map(np.ascontiguousarray, found.values()), strict=True))


def mma_a(matrix: Floats) -> Floats:
    """(m, k) -> (tiles, steps, 32 lanes, 8): the left operand of `multiply` in `ptx.cuh`.

    The order of the 16 k of a step is free, if both operands have the same. Here t comes before the
    half, so that the four values of a lane in the other operand are neighbours.
    """
    m, k = matrix.shape
    axes = matrix.reshape(m // 16, 2, 8, k // 16, 4, 2, 2)  # m is tile, v, g; k step, t, half, e
    return axes.transpose(0, 3, 2, 4, 5, 1, 6).reshape(m // 16, k // 16, 32, 8)


class FusedNetwork:  # pragma: no cover - needs a GPU
    """The kernel for `model`, which reads `weights` as `pack` makes them.

    Raises:
        DeviceError: the network is too large.
    """

    def __init__(self, model: Model, weights: DeviceWeights, kernels: Kernels) -> None:
        self.layers = dict.fromkeys((shape.name for shape in model.shapes()), "fused_network")
        """Who computes each layer."""
        self._kernel = kernels.get(_SOURCE, "fused_network", macros(model))
        names = ("first", "first_bias", "second", "second_bias")
        convolutional = len(model.blocks) == 4
        tensors: list[Any] = [weights[name] if convolutional else NULL for name in names]
        tensors += [weights[name] for name in ("hidden", "hidden_bias", "last", "last_bias")]
        self._tensors = tuple(tensors)

    def queue(self, buffers: Buffers) -> None:
        """Compute all rows, from device memory to device memory."""
        self._queue(buffers.rows, buffers.pixels, buffers.logits, buffers.probabilities)

    def queue_from_host(self, buffers: Buffers) -> None:
        """Compute all rows, from page-locked host memory to page-locked host memory."""
        pixels, probabilities = buffers.pixels_on_host, buffers.probabilities_on_host
        self._queue(buffers.rows, pixels, buffers.logits, probabilities)

    def _queue(self, rows: int, pixels: Any, logits: Any, probabilities: Any) -> None:
        arguments = (pixels, *self._tensors, logits, probabilities)
        self._kernel((CLUSTER * rows,), (_THREADS,), arguments)
