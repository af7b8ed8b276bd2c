"""The times of single calls of a training step, and what the GPU reaches at best.

A call is captured several times into one CUDA graph, so that neither Python nor launches are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import cupy
import numpy as np

from lenet.cuda.capture import Launch, captured, time_us
from lenet.cuda.kernels import storage_dtype
from trainer.ops_cuda.ops import CudaOps

_REPEATS = 20  # of a call in one graph, or of a step
_FEW = 4  # repeats of what takes hundreds of microseconds
_ROUNDS = 5
_COPY_BYTES = 512 << 20  # ten times the largest L2 cache there is
_SIDE = 8192  # of the square matrices that are multiplied
_BLOCK = 1 << 20  # random values that are drawn, then repeated


def times_alone_us(ops: CudaOps, calls: Sequence[Callable[[], object]]) -> list[float]:
    """The time of each of `calls`, which were recorded in a step that has not ended.

    Their arrays are in the arena, so new ones are taken behind them.
    """
    mark = ops.arena.mark()

    def alone_us(call: Callable[[], object]) -> float:
        def run() -> None:
            ops.arena.rewind(mark)
            # Weight gradients run on the second stream, which must be a part of the capture.
            ops.wgrad_handle.join(ops.handle)
            call()
            ops.handle.join(ops.wgrad_handle)

        def repeat() -> None:
            for _ in range(_REPEATS):
                run()

        run()  # loads kernels and allocates memory, which a capture forbids
        ops.handle.synchronize()
        return _warm_us(captured(repeat, ops.handle.stream), 1) / _REPEATS

    return [alone_us(call) for call in calls]


def replay_us(ops: CudaOps, step: Callable[[], None]) -> float:
    """The time of one of many replays of the captured `step`, back to back."""
    ops.arena.rewind()
    return _warm_us(ops.capture(step), _REPEATS)


def copy_bytes_per_s(ops: CudaOps) -> float:
    """Bytes read and written by a large copy.

    Not captured: a copy in a graph ran at 2.76 TB/s, the same one queued at 4.21 (H200, CUDA 13.0,
    2026-11-20).
    """
    values = np.random.default_rng(0).integers(0, 256, _BLOCK, np.uint8)
    source = cupy.tile(cupy.asarray(values), _COPY_BYTES // _BLOCK)
    target = cupy.empty_like(source)
    stream = ops.handle.stream
    copy = partial(target.data.copy_from_device_async, source.data, _COPY_BYTES, stream)
    return 2 * _COPY_BYTES / (1e-6 * _warm_us(copy, _FEW))


def product_flop_per_s(ops: CudaOps) -> float:
    """Multiplications and additions of a large product in the arithmetic of `ops`."""
    # Random, because a GPU multiplies zeros faster.
    values = np.random.default_rng(0).uniform(-1, 1, _BLOCK).astype(storage_dtype(ops.arithmetic))
    a = cupy.tile(cupy.asarray(values), _SIDE**2 // _BLOCK).reshape(_SIDE, _SIDE)
    out = cupy.empty_like(a)
    product = partial(ops.handle.cublas.product, a, a.copy(), out, ops.arithmetic)
    return 2 * _SIDE**3 / (1e-6 * _warm_us(product, _FEW))


def _warm_us(launch: Launch, launches: int) -> float:
    launch()
    return time_us(launch, _ROUNDS, launches)
