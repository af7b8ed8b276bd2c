"""The gradient of the first convolution's filter: our kernel.

For lenet at batch 256 it takes 14 us where cuDNN takes 70 in float32 and has no plan for float16
with float32 sums (H200, cuDNN 9.19, 2026-11-20).
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from lenet.cuda.device import Handle
from lenet.cuda.graphs import Convolution
from lenet.cuda.kernels import Kernels
from lenet.cuda.memory import Arena
from trainer.bounds import FILTER_IMAGES, FILTER_THREADS
from trainer.ops_cuda.progress import FOLDER

_GROUP = 16  # blocks of a first sum, as the kernel has it


class FirstFilter:
    """Launches `first_filter.cu` on the current stream, with buffers from the arena."""

    def __init__(self, handle: Handle, kernels: Kernels, arena: Arena) -> None:
        self._blocks = handle.multiprocessors
        self._kernels, self._arena = kernels, arena
        self._counters = cupy.zeros(4096, cupy.uint32)  # zeros, and left so by the kernel

    def gradient(self, x: Any, dy: Any, forward: Convolution) -> Any:
        """From x (n, h, w, 1) and dy (n, oh, ow, k) to float32 (k, r, s, 1)."""
        n, h, w, _ = forward.image
        k, r, s, _ = forward.filters
        _, oh, ow, _ = forward.output
        macros = {
            "SCALAR": "__half" if x.dtype == cupy.float16 else "float",
            "R": r,
            "S": s,
            "C": k,
            "H": h,
            "W": w,
            "OH": oh,
            "OW": ow,
            "STRIDE_H": forward.stride[0],
            "STRIDE_W": forward.stride[1],
            "PAD_H": forward.padding[0],
            "PAD_W": forward.padding[1],
            "DILATION_H": forward.dilation[0],
            "DILATION_W": forward.dilation[1],
        }
        columns = -(-k // 32)
        blocks = max(1, min(-(-n // FILTER_IMAGES), self._blocks // columns))
        assert (blocks // _GROUP + 2) * columns <= self._counters.size, "bug: too few counters"
        partial = self._arena.take((blocks * columns * r * s * 32,), cupy.float32)
        dweight = self._arena.take(forward.filters, cupy.float32)
        kernel = self._kernels.get(FOLDER / "first_filter.cu", "first_filter_gradient", macros)
        kernel(
            (blocks, columns),
            (FILTER_THREADS,),
            (x, dy, partial, self._counters, dweight, np.int32(n)),
        )
        return dweight
