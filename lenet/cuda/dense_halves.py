"""A dense layer in float32 for many rows on tensor cores: `dense_halves.cu`.

Here are the layers that the kernel supports, the packing of its weights and its launch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet.cuda.capture import Launch
from lenet.cuda.conv1 import mma_b
from lenet.cuda.device import Limits
from lenet.cuda.graphs import Precision
from lenet.cuda.halves import exponents, halves, scales
from lenet.cuda.kernels import FOLDER, Kernels, Macros
from lenet.cuda.packing import round_up, zero_pad_to
from lenet.model import DenseBlock

_SOURCE = FOLDER / "dense_halves.cu"
_AMPERE = 80
_DEPTH = 64
# The bound of a layer's inputs is looser with each layer before it: of the committed weights up to
# 2^13 times the largest behind three. From 2^17 on low halves lose bits.
_MOST_BEFORE = 3
# Fewer make too few blocks: lenet took 2 us more with 512 rows than by cuBLAS, 11 less with 1,024,
# 81 less with 8,192 (H200, 2026-11-28, docs/benchmarks/dense-halves-h200.txt).
FROM_ROWS = 1024
"""Fewer rows are for other kernels."""
# Rows and units of a block: the larger is faster where most multiprocessors have one.
_SIDES = (128, 64)


def is_supported(precision: Precision, limits: Limits, layers_before: int) -> bool:
    """Whether the kernel computes a hidden dense layer behind so many layers on such a GPU."""
    return (
        precision == "fp32"
        and limits.capability >= _AMPERE
        and layers_before <= _MOST_BEFORE
        and shared_bytes(_SIDES[-1]) <= limits.shared_bytes
    )


def side(rows: int, units: int, limits: Limits) -> int:
    """Rows and units of a block."""
    for one in _SIDES[:-1]:
        blocks = -(-rows // one) * -(-units // one)
        if 4 * blocks >= 3 * limits.multiprocessors and shared_bytes(one) <= limits.shared_bytes:
            return one
    return _SIDES[-1]


def shared_bytes(side: int) -> int:
    """The shared memory of a block: two rounds of inputs and of weights."""
    return 2 * side * (4 * (_DEPTH + 8) + 4 * _DEPTH)


def pack(weight: NDArray[np.float32]) -> NDArray[np.float16]:
    """The weights (units, inputs) as the lanes of a warp read them, scaled as `factors` says.

    Returns:
        float16 (units / 8, steps, 32 lanes, 2, 4), C-contiguous: high and low halves.
    """
    scaled = np.ldexp(weight, exponents(abs(weight).max(1))[:, None])
    units, inputs = weight.shape
    lanes = mma_b(zero_pad_to(scaled.T, (round_up(inputs, _DEPTH), units)))
    return np.ascontiguousarray(np.stack(halves(lanes.transpose(1, 0, 2, 3), 2), axis=3))


def factors(weight: NDArray[np.float32], largest_input: float) -> NDArray[np.float32]:
    """The factors of inputs and sums: float32 (1 + units, 2), powers of two."""
    of_input = int(exponents(largest_input))
    of_sums = scales(of_input, exponents(abs(weight).max(1)), len(weight))
    return np.concatenate([np.ldexp(np.float32(1), [[of_input, 0]]), of_sums], dtype=np.float32)


def macros(block: DenseBlock, inputs: int, units: int, side: int) -> Macros:
    """The macros of the kernel for a layer with so many inputs and units in memory."""
    return {
        "I": inputs,
        "U": units,
        "UNITS": block.units,
        "ROWS": side,
        "COLUMNS": side,
        "ACTIVATION": block.activation.kind,
        "PARAMETER": float(block.activation.parameter),
    }


def launch(  # pragma: no cover - needs a GPU
    kernels: Kernels,
    limits: Limits,
    block: DenseBlock,
    x: Any,
    weight: Any,
    bias: Any,
    of_sums: Any,
    y: Any,
) -> Launch:
    """Prepare the launch from `x` (n, inputs) to `y` (n, units); `of_sums` is by `factors`."""
    (rows, inputs), units = x.shape, y.shape[1]
    own = side(rows, units, limits)
    kernel = kernels.get(_SOURCE, "dense_halves", macros(block, inputs, units, own))
    grid = -(-units // own), -(-rows // own)
    arguments = (x, weight, bias, of_sums, y, np.int32(rows))
    return lambda: kernel(grid, (2 * own,), arguments, shared_bytes(own))
