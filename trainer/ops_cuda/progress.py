"""Where a run of training steps stands, all of it on the device, so that a step needs no host.

The digits as uint8, the learning rate of every step, the loss and hits of every step so far, the
step's number, the loss scale: kernels read and write them, and the host looks when it wants to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from trainer.ops import Run
from trainer.ops_cuda.ranks import Ranks

FOLDER = Path(__file__).parent
"""Where the CUDA sources of training are."""

GROWTH_INTERVAL = 1000
"""Steps without overflow after which the loss scale is doubled."""

_FIRST_SCALE = 2.0**13


@dataclass(eq=False, slots=True)
class Progress:
    """A run and its arrays on the device.

    `images` uint8 (size, 28, 28), `labels` uint8 (size,), `rates` and `losses` float32 (steps,),
    `hits` int32 (steps,), `step` int32 (1,), `scale` float32 (2,): the loss scale and the steps
    since it changed, `overflow` int32 (1,).

    `rows` of the batch, from `first_row` on, are this rank's.
    """

    run: Run
    scaled: bool
    first_row: int
    rows: int
    images: Any
    labels: Any
    rates: Any
    losses: Any
    hits: Any
    step: Any
    scale: Any
    overflow: Any

    @classmethod
    def begin(cls, run: Run, step: int, scaled: bool, rank: int, ranks: int) -> Progress:
        """Onto the current GPU; the loss is scaled only if `scaled`."""
        rows = run.batch // ranks
        steps = len(run.rates)
        return cls(
            run=run,
            scaled=scaled,
            first_row=rank * rows,
            rows=rows,
            images=cupy.asarray(run.digits.images),
            labels=cupy.asarray(run.digits.labels),
            rates=cupy.asarray(run.rates, cupy.float32),
            losses=cupy.zeros(steps, cupy.float32),
            hits=cupy.zeros(steps, cupy.int32),
            step=cupy.full(1, step, cupy.int32),
            scale=cupy.asarray([_FIRST_SCALE if scaled else 1, 0], cupy.float32),
            overflow=cupy.zeros(1, cupy.int32),
        )

    @property
    def left(self) -> int:
        """The steps from the next to the run's last; waits for the device."""
        return len(self.losses) - int(self.step[0])

    @property
    def state(self) -> list[Any]:
        """The arrays that a step changes."""
        return [self.losses, self.hits, self.step, self.scale, self.overflow]

    def read(
        self, start: int, stop: int, ranks: Ranks | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """(losses, hits) of steps start to stop - 1, over all ranks; waits for the device.

        Raises:
            DeviceError: the ranks were asked to end, or told to stop.
        """
        losses, hits = self.losses[start:stop], self.hits[start:stop]
        if ranks is not None:
            ranks.agree()
            losses, hits = ranks.sum(losses), ranks.sum(hits)
        found = cupy.asnumpy(losses), cupy.asnumpy(hits)
        if ranks is not None:
            ranks.check()
        return found
