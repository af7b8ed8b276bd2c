"""The ends of a step's forward pass: its images and labels, dropout, and the loss.

The kernels draw random numbers from (seed, step, row) as `trainer.random` does, so a captured step
draws new ones each time it is replayed, and the same ones as NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from lenet.cuda import kernels
from lenet.cuda.kernels import Kernels, Macros, scalar
from lenet.cuda.memory import Arena
from lenet.pixels import SCALE, Images
from trainer.ops_cuda.state import FOLDER, RunState

_THREADS = 256
_ROWS = 4  # of a block of training_batch


class BatchKernels:
    """Launches `batch.cu`, `unpack.cu`, `dropout.cu` and `loss.cu` on the current stream."""

    def __init__(self, kernels: Kernels, arena: Arena, dtype: Any) -> None:
        self._kernels, self._arena, self._dtype = kernels, arena, dtype
        self._scalar = {"SCALAR": scalar(dtype)}

    def batch(self, state: RunState) -> tuple[Any, Any]:
        """This rank's rows of the step: (rows, 28, 28, 1) and uint8 (rows,)."""
        if not state.is_drawn:
            self._draw(state, 0, *state.batch)
        return state.batch

    def prefetch(self, state: RunState) -> None:
        """Draw the rows of the next step."""
        self._draw(state, 1, *state.next_batch)
        state.is_next_drawn = True

    def _draw(self, state: RunState, ahead: int, x: Any, labels: Any) -> None:
        run, limits = state.run, state.run.limits
        self._kernels.get(FOLDER / "batch.cu", "training_batch", self._scalar)(
            (-(-state.rows // _ROWS),),
            (_ROWS * _THREADS,),
            (
                state.images,
                state.labels,
                state.step,
                x,
                labels,
                np.uint64(run.seed),
                np.int32(ahead),
                np.int32(len(run.digits)),
                np.int32(run.batch),
                np.int32(state.first_row),
                np.int32(state.rows),
                np.float32(math.radians(limits.rotation)),
                np.float32(limits.scale),
                np.float32(math.radians(limits.shear)),
                np.float32(limits.shift),
                np.float32(limits.elastic),
            ),
        )

    def input_from_images(self, images: Images) -> Any:
        """Uint8 (n, 28, 28) from the host -> (n, 28, 28, 1), times 1/255."""
        pixels = cupy.asarray(np.ascontiguousarray(images))
        x = self._arena.take((*images.shape, 1), self._dtype)
        blocks = -(-images.size // (16 * _THREADS))  # a thread takes 16 pixels
        macros: Macros = {**self._scalar, "SCALE": SCALE}
        kernel = self._kernels.get(kernels.FOLDER / "unpack.cu", "unpack", macros)
        kernel((blocks,), (_THREADS,), (pixels, x, np.int32(len(images))))
        return x

    def dropout(self, x: Any, units: int, rate: float, layer: int, state: RunState) -> Any:
        """Forward for x (rows, units), backward for its gradient."""
        y = self._arena.take(x.shape, x.dtype)
        macros = {**self._scalar, "C": x.shape[1], "UNITS": units}
        threads = y.nbytes // 16
        self._kernels.get(FOLDER / "dropout.cu", "dropout", macros)(
            (-(-threads // _THREADS),),
            (_THREADS,),
            (
                x,
                y,
                state.step,
                np.uint64(state.run.seed),
                np.int32(state.first_row),
                np.int32(len(x)),
                np.int32(layer),
                np.float32(rate),
            ),
        )
        return y

    def softmax_cross_entropy(self, logits: Any, classes: int, labels: Any, state: RunState) -> Any:
        """The gradient of the logits, times the loss scale; loss and `correct` go into `state`."""
        dlogits = self._arena.take(logits.shape, logits.dtype)
        macros = {**self._scalar, "CLASSES": classes, "PADDED": logits.shape[1]}
        self._kernels.get(FOLDER / "loss.cu", "softmax_cross_entropy", macros)(
            (1,),
            (1024,),
            (
                logits,
                labels,
                state.class_weights,
                dlogits,
                state.losses,
                state.correct,
                state.step,
                state.scale,
                np.int32(state.rows),
                np.int32(state.run.batch),
                np.float32(state.run.smoothing),
            ),
        )
        return dlogits
