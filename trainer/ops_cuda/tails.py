"""What follows a block's convolution or product, fused: batch norm or bias, activation, pooling.

One read and one quarter of a write where cuDNN and single operations would go through memory six
times. The kernels are in `lenet/cuda/epilogue.cu`; here are their shapes, buffers and order. With
several GPUs the moments, and the sums of the backward pass, are those of the whole batch: what
N GPUs compute is what one would.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cupy
import numpy as np

from lenet.cuda import kernels
from lenet.cuda.device import Handle
from lenet.cuda.epilogue import THREADS, TailShape
from lenet.cuda.kernels import Kernels
from lenet.cuda.memory import Arena
from trainer.fold import EPSILON
from trainer.ops import RUNNING_SHARE, Tail
from trainer.ops_cuda.ranks import Ranks

_SOURCE = kernels.FOLDER / "epilogue.cu"
_CONSTANTS = {"EPSILON": float(EPSILON), "RUNNING_SHARE": float(RUNNING_SHARE)}
_SUM_THREADS = 512
_MAX_SUM_BLOCKS = 132  # what the last block must add up grows with their number
_MAX_TILES = 1 << 14


class Saved(NamedTuple):
    """What the backward of one tail needs; `index` says where each maximum was."""

    shape: TailShape
    tail: Tail
    x: Any
    mean: Any
    variance: Any
    index: Any


class Tails:
    """Launches the kernels of `epilogue.cu` on the handle's stream, with buffers from the arena."""

    def __init__(self, handle: Handle, kernels: Kernels, arena: Arena) -> None:
        self._handle, self._kernels, self._arena = handle, kernels, arena
        self.ranks: Ranks | None = None
        # Zeros that each sum over a grid leaves as zeros: one for each tile of channels.
        self._counters = cupy.zeros(_MAX_TILES, cupy.uint32)

    def forward(self, x: Any, tail: Tail, training: bool) -> tuple[Any, Saved]:
        """From x (n, h, w, c) or (n, c) to y (n, oh, ow, c) or (n, c)."""
        norm = tail.norm
        mean = variance = None
        shape = _shape(x, tail)
        if norm is not None:
            mean, variance = norm.mean.master, norm.variance.master
            if training:
                mean, variance = self._moments(shape, x, mean, variance)
        rows = len(x)
        y = self._arena.take((rows, *shape.output, shape.c), x.dtype)
        index = self._arena.take(y.shape, shape.index) if training and shape.index else None
        gamma, beta = _gamma_beta(tail)
        self._launch(
            shape,
            "tail_forward",
            rows * math.prod(shape.output),
            (x, mean, variance, gamma, beta, y, index, np.int32(rows)),
        )
        if x.ndim == 2:
            y = y.reshape(rows, shape.c)
        return y, Saved(shape, tail, x, mean, variance, index)

    def backward(self, dy: Any, saved: Saved) -> tuple[Any, tuple[Any, ...]]:
        """(dx, (dgamma, dbeta) or (dbias,)), the latter float32."""
        shape, tail, x, mean, variance, index = saved
        gamma, beta = _gamma_beta(tail)
        rows = len(x)
        sums = self._sums(
            shape,
            "tail_backward_sums",
            rows * math.prod(shape.output if shape.index else (shape.h, shape.w)),
            (x, dy, index, mean, variance, gamma, beta),
            (np.int32(rows),),
            planes=2 if shape.norm else 1,
        )
        if not shape.norm and shape.pool is None and shape.activation.kind == "identity":
            return dy, (sums[0],)
        if shape.norm:
            self._sum_over_ranks(sums)
        dx = self._arena.take(x.shape, x.dtype)
        self._launch(
            shape,
            "tail_backward",
            rows * shape.h * shape.w,
            (
                *(x, dy, index, mean, variance, gamma, beta, sums, dx),
                np.int32(rows),
                np.int32(self._count(shape, rows)),
            ),
        )
        return dx, (sums[1], sums[0]) if shape.norm else (sums[0],)

    def _moments(self, shape: TailShape, x: Any, running_mean: Any, running_variance: Any) -> Any:
        """The batch's (mean, variance), over all ranks; the running ones have moved towards it."""
        rows = len(x)
        mean, variance = (self._arena.take((shape.c,), cupy.float32) for _ in range(2))
        moved = (mean, variance, running_mean, running_variance)
        alone = self.ranks is None
        sums = self._sums(
            shape,
            "tail_statistics",
            rows * shape.h * shape.w,
            (x,),
            (*moved, np.int32(rows), np.int32(alone)),
            planes=2,
        )
        if not alone:
            self._sum_over_ranks(sums)
            count = np.int32(self._count(shape, rows))
            kernel = self._get(shape, "tail_moments")
            kernel((-(-shape.c // 128),), (128,), (sums, count, *moved))
        return mean, variance

    def _sums(
        self,
        shape: TailShape,
        kernel: str,
        pixels: int,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        planes: int,
    ) -> Any:
        """Launch a kernel that sums over a grid: float32 (planes, c)."""
        tiles, tile_channels = shape.tiles()
        blocks = shape.blocks(pixels, _SUM_THREADS, _MAX_SUM_BLOCKS)
        partial = self._arena.take((tiles * blocks * planes * tile_channels,), cupy.float32)
        sums = self._arena.take((planes, shape.c), cupy.float32)
        function = self._get(shape, kernel)
        arguments = (*before, partial, self._counters, sums, *after)
        function((blocks, tiles), (_SUM_THREADS,), _pointers(arguments))
        return sums

    def _launch(
        self, shape: TailShape, kernel: str, pixels: int, arguments: tuple[Any, ...]
    ) -> None:
        tiles, _ = shape.tiles()
        blocks = shape.blocks(pixels)
        function = self._get(shape, kernel)
        function((blocks, tiles), (THREADS,), _pointers(arguments))

    def _get(self, shape: TailShape, kernel: str) -> Any:
        return self._kernels.get(_SOURCE, kernel, {**shape.macros(), **_CONSTANTS})

    def _sum_over_ranks(self, sums: Any) -> None:
        if self.ranks is not None:
            self.ranks.start_sum([sums], self._handle.stream)
            self.ranks.finish(self._handle.stream)

    def _count(self, shape: TailShape, rows: int) -> int:
        """Elements of a channel in the whole batch."""
        return rows * (self.ranks.size if self.ranks else 1) * shape.h * shape.w


def _shape(x: Any, tail: Tail) -> TailShape:
    h, w = x.shape[1:3] if x.ndim == 4 else (1, 1)
    scalar = "__half" if x.dtype == cupy.float16 else "float"
    return TailShape(
        h,
        w,
        x.shape[-1],
        _beta(tail).channels,
        tail.pool,
        tail.activation,
        tail.norm is not None,
        scalar,
    )


def _gamma_beta(tail: Tail) -> tuple[Any, Any]:
    gamma = None if tail.norm is None else tail.norm.gamma.master
    return gamma, _beta(tail).master


def _beta(tail: Tail) -> Any:
    """The shift of batch norm, or the bias: a tail has one of them."""
    return tail.bias if tail.norm is None else tail.norm.beta


def _pointers(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """CuPy takes no None: a null pointer is the integer 0."""
    return tuple(np.uintp(0) if argument is None else argument for argument in arguments)
