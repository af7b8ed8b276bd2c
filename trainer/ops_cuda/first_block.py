"""The first block of a network in mixed precision, without its convolution's output.

`first_block.cu` computes batch norm's moments and all gradients from the moments of the patches. A
convolution that may be followed by such an epilogue is therefore not computed before the epilogue
is known: `Unwritten` stands for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy
import numpy as np

from lenet.cuda.conv1 import is_plain
from lenet.cuda.device import Handle
from lenet.cuda.kernels import Kernels, Macros
from lenet.cuda.memory import Arena
from lenet.cuda.packing import round_up
from lenet.model import RELU, ConvBlock, window_count
from trainer.ops import EPSILON, RUNNING_SHARE, Epilogue
from trainer.ops_cuda.parameters import Parameter
from trainer.ops_cuda.state import FOLDER

_SOURCE = FOLDER / "first_block.cu"
_THREADS = 512
_IMAGES = 2  # that a block processes at a time
_GROUP = 12  # blocks whose sums are added first
_MAX_BLOCKS = 132  # one on a multiprocessor of an H200; at most _GROUP ** 2
_COUNTERS = _MAX_BLOCKS // _GROUP + 1
_MAX_CHANNELS = _MAX_TAPS = 32  # the constant 1 is a tap, too
_PARTIAL = 1024  # floats of a block
_MAX_PIXELS = 4096  # of a padded image: in shared memory there are two images twice


@dataclass(slots=True, eq=False)
class Unwritten:
    """The output (n, oh, ow, c) of a convolution that was not computed."""

    x: Any
    weight: Parameter
    block: ConvBlock
    shape: tuple[int, int, int, int]
    saved: Any = None
    """For the gradients, once it was computed after all."""


class SavedFirst(NamedTuple):
    """Saved for the gradients of the block."""

    of: Unwritten
    epilogue: Epilogue
    y: Any
    index: Any
    mean: Any
    variance: Any
    patches: Any


class FirstGradient(NamedTuple):
    """Stands for the gradient of the convolution's output; that of its filters is known."""

    dweight: Any


class FirstBlock:
    """Launches the kernels on the handle's stream, with buffers from the arena."""

    def __init__(self, handle: Handle, kernels: Kernels, arena: Arena) -> None:
        self._handle, self._kernels, self._arena = handle, kernels, arena
        # Zeros between any two launches.
        self._counters = cupy.zeros(_COUNTERS, cupy.uint32)

    def convolution(self, x: Any, weight: Parameter, block: ConvBlock) -> Unwritten | None:
        """None if the kernels do not support it."""
        n, h, w, c = x.shape
        r, s = block.kernel
        oh, ow = (
            window_count(side, k, 1, p)
            for side, k, p in zip((h, w), (r, s), block.padding, strict=True)
        )
        channels = weight.master.shape[0]
        if (
            x.dtype == cupy.float16
            and c == 1
            and is_plain(block)
            and r * s < _MAX_TAPS
            and channels <= _MAX_CHANNELS
            and (h + 2 * block.padding[0]) * round_up(w + 2 * block.padding[1], 16) <= _MAX_PIXELS
            and oh % 2 == ow % 2 == 0
            and w % 4 == 0
        ):
            return Unwritten(x, weight, block, (n, oh, ow, channels))
        return None

    @staticmethod
    def supports(of: Unwritten, epilogue: Epilogue) -> bool:
        """Whether the block ends with batch norm, ReLU and the maximum of 2 x 2."""
        pool = epilogue.pool
        return (
            epilogue.norm is not None
            and epilogue.activation == RELU
            and pool is not None
            and pool == of.block.pool
            and pool.kind == "max"
        )

    def forward(self, of: Unwritten, epilogue: Epilogue) -> tuple[Any, SavedFirst]:
        """The pooled output (n, oh / 2, ow / 2, c); moves the running moments."""
        norm = epilogue.norm
        assert norm is not None, "bug: not supported"
        n, oh, ow, c = of.shape
        y = self._arena.take((n, oh // 2, ow // 2, c), cupy.float16)
        index = self._arena.take(y.shape, cupy.uint8)
        mean, variance = (self._arena.take((c,), cupy.float32) for _ in range(2))
        patches = self._arena.take((c + 1, math.prod(of.block.kernel)), cupy.float32)
        partial = self._arena.take((self._blocks(n) * _PARTIAL,), cupy.float32)
        rows = np.int32(n)
        running = norm.mean.master, norm.variance.master
        weight = of.weight.master
        self._launch(
            of,
            "first_block_moments",
            (of.x, weight, partial, self._counters, patches, mean, variance, *running, rows),
        )
        scaled = mean, variance, norm.gamma.master, norm.beta.master
        self._launch(of, "first_block_forward", (of.x, weight, *scaled, y, index, rows))
        return y, SavedFirst(of, epilogue, y, index, mean, variance, patches)

    def backward(self, dy: Any, saved: SavedFirst) -> tuple[FirstGradient, tuple[Any, Any]]:
        """The gradient of the filters, float32 (c, r, s, 1), and (dgamma, dbeta)."""
        of, epilogue, y, index, mean, variance, patches = saved
        assert epilogue.norm is not None, "bug: not supported"
        n, c = len(y), of.shape[3]
        dweight = self._arena.take(of.weight.master.shape, cupy.float32)
        dgamma, dbeta = (self._arena.take((c,), cupy.float32) for _ in range(2))
        partial = self._arena.take((self._blocks(n) * _PARTIAL,), cupy.float32)
        moments = mean, variance, epilogue.norm.gamma.master, patches
        sums = partial, self._counters, dweight, dgamma, dbeta
        arguments = (of.x, y, dy, index, of.weight.master, *moments, *sums, np.int32(n))
        self._launch(of, "first_block_backward", arguments)
        return FirstGradient(dweight), (dgamma, dbeta)

    def _blocks(self, rows: int) -> int:
        return min(-(-rows // _IMAGES), _MAX_BLOCKS)

    def _launch(self, of: Unwritten, kernel: str, arguments: tuple[Any, ...]) -> None:
        n, h, w, _ = of.x.shape
        macros: Macros = {
            "H": h,
            "W": w,
            "R": of.block.kernel[0],
            "S": of.block.kernel[1],
            "PAD_H": of.block.padding[0],
            "PAD_W": of.block.padding[1],
            "POOL": "MAX",
            "C": of.shape[3],
            "CHANNELS": of.weight.channels,
            "EPSILON": float(EPSILON),
            "RUNNING_SHARE": float(RUNNING_SHARE),
        }
        function = self._kernels.get(_SOURCE, kernel, macros)
        function((self._blocks(n),), (_THREADS,), arguments)
