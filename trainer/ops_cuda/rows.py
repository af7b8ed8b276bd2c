"""Where a batch begins and where it ends: images in, dropout on the way, loss and hits out.

Everything random is drawn in the kernels from (seed, step, row), as `trainer.random` says it, so
that a captured step draws anew each time it runs, and NumPy draws the same.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from lenet.cuda.kernels import Kernels
from lenet.cuda.memory import Arena
from lenet.pixels import HEIGHT, WIDTH, Images
from trainer.ops_cuda.progress import FOLDER, Progress

_THREADS = 256


class Rows:
    """Launches `batch.cu`, `dropout.cu` and `loss.cu` on the current stream."""

    def __init__(self, kernels: Kernels, arena: Arena, dtype: Any) -> None:
        self._kernels, self._arena, self._dtype = kernels, arena, dtype
        self._scalar = "__half" if dtype == cupy.float16 else "float"

    def batch(self, progress: Progress) -> tuple[Any, Any]:
        """This rank's rows of the step: (rows, 28, 28, 1) and uint8 (rows,)."""
        run, rows = progress.run, progress.rows
        x = self._arena.take((rows, HEIGHT, WIDTH, 1), self._dtype)
        labels = self._arena.take((rows,), cupy.uint8)
        limits = run.limits
        self._get("batch.cu", "training_batch")(
            (rows,),
            (_THREADS,),
            (
                progress.images,
                progress.labels,
                progress.step,
                x,
                labels,
                np.uint64(run.seed),
                np.int32(len(run.digits)),
                np.int32(run.batch),
                np.int32(progress.first_row),
                np.float32(math.radians(limits.rotation)),
                np.float32(limits.scale),
                np.float32(math.radians(limits.shear)),
                np.float32(limits.shift),
                np.float32(limits.elastic),
            ),
        )
        return x, labels

    def enter(self, images: Images) -> Any:
        """Uint8 (n, 28, 28) from the host -> (n, 28, 28, 1), times 1/255."""
        pixels = cupy.asarray(np.ascontiguousarray(images))
        x = self._arena.take((*images.shape, 1), self._dtype)
        blocks = -(-images.size // (16 * _THREADS))  # a thread takes 16 pixels
        kernel = self._get("batch.cu", "plain_batch")
        kernel((blocks,), (_THREADS,), (pixels, x, np.int32(len(images))))
        return x

    def dropout(self, x: Any, units: int, rate: float, layer: int, progress: Progress) -> Any:
        """Forward on x (rows, units), backward on its gradient."""
        y = self._arena.take(x.shape, x.dtype)
        macros = {"C": x.shape[1], "UNITS": units}
        threads = y.nbytes // 16
        self._get("dropout.cu", "dropout", **macros)(
            (-(-threads // _THREADS),),
            (_THREADS,),
            (
                x,
                y,
                progress.step,
                np.uint64(progress.run.seed),
                np.int32(progress.first_row),
                np.int32(len(x)),
                np.int32(layer),
                np.float32(rate),
            ),
        )
        return y

    def softmax_cross_entropy(
        self, logits: Any, classes: int, labels: Any, progress: Progress
    ) -> Any:
        """The gradient of the logits, times the loss scale; loss and hits go into `progress`."""
        dlogits = self._arena.take(logits.shape, logits.dtype)
        macros = {"CLASSES": classes, "PADDED": logits.shape[1]}
        self._get("loss.cu", "softmax_cross_entropy", **macros)(
            (1,),
            (1024,),
            (
                logits,
                labels,
                dlogits,
                progress.losses,
                progress.hits,
                progress.step,
                progress.scale,
                np.int32(progress.rows),
                np.int32(progress.run.batch),
            ),
        )
        return dlogits

    def _get(self, source: str, name: str, **macros: int) -> Any:
        return self._kernels.get(FOLDER / source, name, {"SCALAR": self._scalar, **macros})
