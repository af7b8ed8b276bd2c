"""What follows a block's convolution or product, fused: batch norm or bias, activation, pooling.

One read and one quarter of a write where cuDNN and single operations would go through memory six
times. The kernels are in `lenet/cuda/tail.cu`; here are their shapes, buffers and order. With
several GPUs the moments, and the sums of the backward pass, are those of the whole batch: what
N GPUs compute is what one would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cupy
import numpy as np

from lenet.blocks import Activation, Pool
from lenet.cuda import kernels
from lenet.cuda.handle import Handle
from lenet.cuda.kernels import Kernels, Macros
from lenet.cuda.memory import Arena
from lenet.model import window_count
from trainer.fold import EPSILON
from trainer.ops import RUNNING_SHARE, Tail
from trainer.ops_cuda.ranks import Ranks

_SOURCE = kernels.FOLDER / "tail.cu"
_THREADS = 256
_SUM_THREADS = 512
# Of a grid, at most: the best of those tried for lenet at batch 256 on an H200 (2026-11-20), though
# 396 suited the backward kernel better on halves. What the last block of a sum must add up grows
# with their number.
_MAX_BLOCKS = 528
_MAX_SUM_BLOCKS = 132
_MAX_TILES = 1 << 14


@dataclass(frozen=True, slots=True)
class _Shape:
    """The geometry of one tail; images (rows, h, w, c) in, windows of them out."""

    h: int
    w: int
    c: int
    channels: int
    pool: Pool | None
    activation: Activation
    norm: bool
    scalar: str

    @property
    def window(self) -> tuple[tuple[int, int], ...]:
        """(size, stride, padding)."""
        if self.pool is None:
            return (1, 1), (1, 1), (0, 0)
        if self.pool.kind == "global_average":
            return (self.h, self.w), (1, 1), (0, 0)
        return self.pool.size, self.pool.stride, self.pool.padding

    @property
    def output(self) -> tuple[int, int]:
        """(oh, ow)."""
        size, stride, padding = self.window
        return (
            window_count(self.h, size[0], stride[0], padding[0]),
            window_count(self.w, size[1], stride[1], padding[1]),
        )

    @property
    def index(self) -> str | None:
        """The type that counts a window's taps, where a maximum must be found again."""
        if self.pool is None or self.pool.kind != "max":
            return None
        return "uint8" if math.prod(self.pool.size) <= 256 else "uint16"

    @property
    def lanes(self) -> int:
        """Channels in 16 bytes."""
        return 8 if self.scalar == "__half" else 4

    def tiles(self) -> tuple[int, int]:
        """(tiles, channels of one), as `tail.cuh` cuts the channels."""
        vectors = self.c // self.lanes
        width = vectors if vectors < 3 else 4
        return -(-vectors // width), width * self.lanes

    def macros(self) -> Macros:
        """What `tail.cu` is compiled with."""
        (window, stride, padding), (oh, ow) = self.window, self.output
        kind = "NONE" if self.pool is None else ("MAX" if self.pool.kind == "max" else "AVERAGE")
        return {
            "SCALAR": self.scalar,
            "C": self.c,
            "CHANNELS": self.channels,
            "H": self.h,
            "W": self.w,
            "OH": oh,
            "OW": ow,
            "WINDOW_H": window[0],
            "WINDOW_W": window[1],
            "STRIDE_H": stride[0],
            "STRIDE_W": stride[1],
            "PAD_H": padding[0],
            "PAD_W": padding[1],
            "POOL": kind,
            "NORM": int(self.norm),
            "ACTIVATION": self.activation.kind,
            "PARAMETER": float(self.activation.parameter),
            "EPSILON": float(EPSILON),
            "RUNNING_SHARE": float(RUNNING_SHARE),
            "INDEX": self.index or "uint8",
        }


class Saved(NamedTuple):
    """What the backward of one tail needs; `index` says where each maximum was."""

    shape: _Shape
    tail: Tail
    x: Any
    mean: Any
    variance: Any
    index: Any


class Tails:
    """Launches the kernels of `tail.cu` on the handle's stream, with buffers from the arena."""

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

    def _moments(self, shape: _Shape, x: Any, running_mean: Any, running_variance: Any) -> Any:
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
            kernel = self._kernels.get(_SOURCE, "tail_moments", shape.macros())
            kernel((-(-shape.c // 128),), (128,), (sums, count, *moved))
        return mean, variance

    def _sums(
        self,
        shape: _Shape,
        kernel: str,
        pixels: int,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        planes: int,
    ) -> Any:
        """Launch a kernel that sums over a grid: float32 (planes, c)."""
        tiles, tile_channels = shape.tiles()
        blocks = _blocks(pixels, tiles, tile_channels // shape.lanes, _SUM_THREADS, _MAX_SUM_BLOCKS)
        partial = self._arena.take((tiles * blocks * planes * tile_channels,), cupy.float32)
        sums = self._arena.take((planes, shape.c), cupy.float32)
        function = self._kernels.get(_SOURCE, kernel, shape.macros())
        arguments = (*before, partial, self._counters, sums, *after)
        function((blocks, tiles), (_SUM_THREADS,), _pointers(arguments))
        return sums

    def _launch(self, shape: _Shape, kernel: str, pixels: int, arguments: tuple[Any, ...]) -> None:
        tiles, tile_channels = shape.tiles()
        blocks = _blocks(pixels, tiles, tile_channels // shape.lanes, _THREADS, _MAX_BLOCKS)
        function = self._kernels.get(_SOURCE, kernel, shape.macros())
        function((blocks, tiles), (_THREADS,), _pointers(arguments))

    def _sum_over_ranks(self, sums: Any) -> None:
        if self.ranks is not None:
            self.ranks.start_sum([sums], self._handle.stream)
            self.ranks.finish(self._handle.stream)

    def _count(self, shape: _Shape, rows: int) -> int:
        """Elements of a channel in the whole batch."""
        return rows * (self.ranks.size if self.ranks else 1) * shape.h * shape.w


def _shape(x: Any, tail: Tail) -> _Shape:
    h, w = x.shape[1:3] if x.ndim == 4 else (1, 1)
    scalar = "__half" if x.dtype == cupy.float16 else "float"
    return _Shape(
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


def _blocks(pixels: int, tiles: int, vectors: int, threads: int, most: int) -> int:
    """Blocks along the pixels: enough for the whole GPU, none without work."""
    return max(1, min(-(-pixels * vectors // threads), -(-most // tiles)))
