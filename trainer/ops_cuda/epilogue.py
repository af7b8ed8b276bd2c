"""The epilogue of a block, fused: batch norm or bias, activation, pooling, and its gradient.

The forward kernel is `lenet/cuda/epilogue.cu`, the others are `epilogue_backward.cu`. With several
GPUs the moments of batch norm and the sums of its gradient are those of the whole batch, so N GPUs
compute what one would.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cupy
import numpy as np

from lenet.cuda import kernels
from lenet.cuda.device import Handle
from lenet.cuda.epilogue import ONE_BLOCK_PIXELS, THREADS, EpilogueShape
from lenet.cuda.kernels import Kernels
from lenet.cuda.memory import Arena
from trainer.ops import EPSILON, RUNNING_SHARE, Epilogue
from trainer.ops_cuda.ranks import Ranks
from trainer.ops_cuda.state import FOLDER

_FORWARD = kernels.FOLDER / "epilogue.cu"
_BACKWARD = FOLDER / "epilogue_backward.cu"
_CONSTANTS = {"EPSILON": float(EPSILON), "RUNNING_SHARE": float(RUNNING_SHARE)}
_SUM_THREADS = 512
_MAX_SUM_BLOCKS = 132  # the last block adds the sums of all
_MAX_TILES = 1 << 14


class SavedEpilogue(NamedTuple):
    """Saved for the gradient of an epilogue; `index` is the position of each maximum."""

    shape: EpilogueShape
    epilogue: Epilogue
    x: Any
    mean: Any
    variance: Any
    index: Any


class Epilogues:
    """Launches the epilogue kernels on the handle's stream, with buffers from the arena."""

    def __init__(self, handle: Handle, kernels: Kernels, arena: Arena) -> None:
        self._handle, self._kernels, self._arena = handle, kernels, arena
        self.ranks: Ranks | None = None
        # `ranks` does not say it: a capture's first run leaves them out.
        self.is_alone = True
        # Zeros between any two launches: one for each tile of channels.
        self._counters = cupy.zeros(_MAX_TILES, cupy.uint32)

    def forward(self, x: Any, epilogue: Epilogue, training: bool) -> tuple[Any, SavedEpilogue]:
        """Compute y (n, oh, ow, c) or (n, c) from x (n, h, w, c) or (n, c)."""
        norm = epilogue.norm
        mean = variance = None
        shape = _shape(x, epilogue)
        rows = len(x)
        y = self._arena.take((rows, *shape.output, shape.c), x.dtype)
        index = self._arena.take(y.shape, shape.index) if training and shape.index else None
        gamma, beta = _gamma_beta(epilogue)
        if norm is not None:
            mean, variance = norm.mean.master, norm.variance.master
        if norm is not None and training and self._fits_one_block(shape, rows):
            moved = *(self._arena.take((shape.c,), cupy.float32) for _ in range(2)), mean, variance
            mean, variance, *_ = moved
            arguments = x, gamma, beta, y, *moved, np.int32(rows)
            self._launch_one(shape, "epilogue_normalize", rows, arguments)
        else:
            if norm is not None and training:
                mean, variance = self._moments(shape, x, mean, variance)
            self._launch(
                shape,
                "epilogue_forward",
                rows * math.prod(shape.output),
                (x, mean, variance, gamma, beta, y, index, np.int32(rows)),
            )
        if x.ndim == 2:
            y = y.reshape(rows, shape.c)
        return y, SavedEpilogue(shape, epilogue, x, mean, variance, index)

    def backward(self, dy: Any, saved: SavedEpilogue) -> tuple[Any, tuple[Any, ...]]:
        """(dx, (dgamma, dbeta) or (dbias,)), the latter float32."""
        shape, epilogue, x, mean, variance, index = saved
        gamma, beta = _gamma_beta(epilogue)
        rows = len(x)
        is_plain = not shape.norm and shape.pool is None and shape.activation.kind == "identity"
        if not is_plain and self._fits_one_block(shape, rows):
            sums = self._arena.take((2, shape.c), cupy.float32)
            dx = self._arena.take(x.shape, x.dtype)
            arguments = x, dy, mean, variance, gamma, beta, sums, dx, np.int32(rows)
            self._launch_one(shape, "epilogue_gradients", rows, arguments)
        else:
            given = x, dy, index, mean, variance, gamma, beta
            sums = self._sums(
                shape,
                "epilogue_backward_sums",
                rows * math.prod(shape.output if shape.index else (shape.h, shape.w)),
                given,
                (np.int32(rows),),
                planes=2 if shape.norm else 1,
            )
            if is_plain:
                return dy, (sums[0],)
            if shape.norm:
                self._all_reduce(sums)
            dx = self._arena.take(x.shape, x.dtype)
            count = np.int32(self._count(shape, rows))
            self._launch(
                shape,
                "epilogue_backward",
                rows * shape.h * shape.w,
                (*given, sums, dx, np.int32(rows), count),
            )
        return dx, (sums[1], sums[0]) if shape.norm else (sums[0],)

    def _moments(
        self, shape: EpilogueShape, x: Any, running_mean: Any, running_variance: Any
    ) -> Any:
        """The batch's (mean, variance) over all ranks; also updates the running ones."""
        rows = len(x)
        mean, variance = (self._arena.take((shape.c,), cupy.float32) for _ in range(2))
        moved = (mean, variance, running_mean, running_variance)
        alone = self.ranks is None
        sums = self._sums(
            shape,
            "epilogue_statistics",
            rows * shape.h * shape.w,
            (x,),
            (*moved, np.int32(rows), np.int32(alone)),
            planes=2,
        )
        if not alone:
            self._all_reduce(sums)
            count = np.int32(self._count(shape, rows))
            kernel = self._get(shape, "epilogue_moments")
            kernel((-(-shape.c // 128),), (128,), (sums, count, *moved))
        return mean, variance

    def _sums(
        self,
        shape: EpilogueShape,
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
        self, shape: EpilogueShape, kernel: str, pixels: int, arguments: tuple[Any, ...]
    ) -> None:
        tiles, _ = shape.tiles()
        blocks = shape.blocks(pixels)
        function = self._get(shape, kernel)
        function((blocks, tiles), (THREADS,), _pointers(arguments))

    def _launch_one(
        self, shape: EpilogueShape, kernel: str, rows: int, arguments: tuple[Any, ...]
    ) -> None:
        """One block for each vector of channels, with a thread for each pixel."""
        threads = -(-rows * shape.h * shape.w // 32) * 32
        self._get(shape, kernel)((shape.c // shape.lanes,), (threads,), _pointers(arguments))

    def _fits_one_block(self, shape: EpilogueShape, rows: int) -> bool:
        pixels = rows * shape.h * shape.w
        return self.is_alone and shape.pool is None and pixels <= ONE_BLOCK_PIXELS

    def _get(self, shape: EpilogueShape, kernel: str) -> Any:
        source = _FORWARD if kernel == "epilogue_forward" else _BACKWARD
        return self._kernels.get(source, kernel, {**shape.macros(), **_CONSTANTS})

    def _all_reduce(self, sums: Any) -> None:
        if self.ranks is not None:
            self.ranks.start_all_reduce([sums], self._handle.stream)
            self.ranks.finish_all_reduce(self._handle.stream)

    def _count(self, shape: EpilogueShape, rows: int) -> int:
        """Elements of a channel in the whole batch."""
        return rows * (self.ranks.size if self.ranks else 1) * shape.h * shape.w


def _shape(x: Any, epilogue: Epilogue) -> EpilogueShape:
    h, w = x.shape[1:3] if x.ndim == 4 else (1, 1)
    return EpilogueShape(
        h,
        w,
        x.shape[-1],
        _beta(epilogue).channels,
        epilogue.pool,
        epilogue.activation,
        epilogue.norm is not None,
        kernels.scalar(x.dtype),
    )


def _gamma_beta(epilogue: Epilogue) -> tuple[Any, Any]:
    gamma = None if epilogue.norm is None else epilogue.norm.gamma.master
    return gamma, _beta(epilogue).master


def _beta(epilogue: Epilogue) -> Any:
    """The beta of batch norm, or the bias: an epilogue has one of them."""
    return epilogue.bias if epilogue.norm is None else epilogue.norm.beta


def _pointers(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """CuPy rejects None: a null pointer is the integer 0."""
    return tuple(kernels.NULL if argument is None else argument for argument in arguments)
