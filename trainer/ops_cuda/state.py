"""The state of a run of training steps on the device, so that a step needs no data from the host.

Kernels read and write it; the host reads losses and correct answers now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, WIDTH
from trainer.ops import LossScale, Run
from trainer.ops_cuda.ranks import Ranks

FOLDER = Path(__file__).parent
"""The folder of the CUDA sources of training."""

GROWTH_INTERVAL = 1000
"""Steps without overflow after which the loss scale is doubled."""

_INITIAL_SCALE = 2.0**13


@dataclass(eq=False, slots=True)
class RunState:
    """A run and its arrays on the device.

    `images` uint8 (size, 28, 28), `labels` uint8 (size,), `class_weights` float32, one for each
    label that a byte may be, `rates` and `losses` float32 (steps,),
    `correct` int32 (steps,), `step` int32 (1,), `scale` float32 (2,): the loss scale and the steps
    since it changed, `overflow` int32 (1,), `skipped` int32 (1,): the steps that overflowed.

    `rows` of each batch, from `first_row` on, belong to this rank: their images (rows, 28, 28, 1),
    divided by 255, and labels uint8 (rows,) are `batch`; those of the next step may be drawn into
    `next_batch` beside this step. `is_drawn` and `is_next_drawn`, on the host, say which are there.
    """

    run: Run
    scaled: bool
    first_row: int
    rows: int
    images: Any
    labels: Any
    class_weights: Any
    rates: Any
    losses: Any
    correct: Any
    step: Any
    scale: Any
    overflow: Any
    skipped: Any
    batch: tuple[Any, Any]
    next_batch: tuple[Any, Any]
    is_drawn: bool = False
    is_next_drawn: bool = False

    @classmethod
    def upload(
        cls,
        run: Run,
        step: int,
        scaled: bool,
        dtype: Any,
        loss_scale: LossScale | None,
        rank: int,
        ranks: int,
    ) -> RunState:
        """The state before `step`, on the current GPU; the loss is scaled only if `scaled`.

        `dtype`: that of a batch's images.
        """
        first = (_INITIAL_SCALE if scaled else 1.0, 0) if loss_scale is None else loss_scale
        rows = run.batch // ranks
        weights = np.ones(256, np.float32)
        if run.class_weights is not None:
            weights[: len(run.class_weights)] = run.class_weights
        steps = len(run.rates)
        return cls(
            run=run,
            scaled=scaled,
            first_row=rank * rows,
            rows=rows,
            images=cupy.asarray(run.digits.images),
            labels=cupy.asarray(run.digits.labels),
            class_weights=cupy.asarray(weights),
            rates=cupy.asarray(run.rates, cupy.float32),
            losses=cupy.zeros(steps, cupy.float32),
            correct=cupy.zeros(steps, cupy.int32),
            step=cupy.full(1, step, cupy.int32),
            scale=cupy.asarray(first, cupy.float32),
            overflow=cupy.zeros(1, cupy.int32),
            skipped=cupy.zeros(1, cupy.int32),
            batch=_rows(rows, dtype),
            next_batch=_rows(rows, dtype),
        )

    def advance(self) -> None:
        """Take the next batch for the current one; `step` is counted on the device."""
        self.batch, self.next_batch = self.next_batch, self.batch
        self.is_drawn, self.is_next_drawn = self.is_next_drawn, False

    @property
    def steps_left(self) -> int:
        """The steps from the next to the run's last; waits for the device."""
        return len(self.losses) - int(self.step[0])

    @property
    def changing(self) -> list[Any]:
        """The arrays that a step changes."""
        return [self.losses, self.correct, self.step, self.scale, self.overflow, self.skipped]

    def download(
        self, start: int, stop: int, ranks: Ranks | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """(losses, correct) of steps start to stop - 1, over all ranks; waits for the device.

        Raises:
            DeviceError: the ranks were stopped or aborted.
        """
        losses, correct = self.losses[start:stop], self.correct[start:stop]
        if ranks is not None:
            ranks.check_stop()
            losses, correct = ranks.all_reduce(losses), ranks.all_reduce(correct)
        found = cupy.asnumpy(losses), cupy.asnumpy(correct)
        if ranks is not None:
            ranks.check_abort()
        return found


def _rows(rows: int, dtype: Any) -> tuple[Any, Any]:
    return cupy.empty((rows, HEIGHT, WIDTH, 1), dtype), cupy.empty(rows, cupy.uint8)
