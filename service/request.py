"""One request on its way through batches: its rows leave in parts, its answer is joined of them.

All parts are computed with one model, the one that was served when the request came. It refuses to
know when anything happens: that is the batcher's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lenet import nvtx
from lenet.pixels import Images, Probabilities
from service.model_files import ModelFile
from service.policy import Entry, Segment


@dataclass(slots=True)
class Answer:
    """Probabilities of one request's rows, the model that computed all of them, and their time.

    `queue_s` until its first rows were cut, `compute_s` from then until the last were answered.
    """

    probabilities: Probabilities
    model: ModelFile
    queue_s: float
    compute_s: float


@dataclass(slots=True, eq=False)
class Request(Entry):
    """An entry with its images and the future that its caller waits on."""

    model: ModelFile
    images: Images
    answer: asyncio.Future[Answer]
    parts: dict[int, Probabilities] = field(default_factory=dict, init=False)
    missing_rows: int = field(init=False)
    first_cut_s: float = field(default=0.0, init=False)
    waiting: Any = field(default=None, init=False)
    """A profiler's range, open while rows wait; None otherwise, and where there is no profiler."""

    def __post_init__(self) -> None:
        self.missing_rows = self.rows

    def leave(self) -> None:
        """Its first rows wait no more: cut, late or cancelled."""
        nvtx.end(self.waiting)
        self.waiting = None

    def deliver(self, start: int, probabilities: Probabilities, now_s: float) -> None:
        """The rows from `start` on were answered; with the last of them the caller is."""
        if self.answer.done():
            return  # cancelled, late or failed in another batch
        self.parts[start] = probabilities
        self.missing_rows -= len(probabilities)
        if not self.missing_rows:
            # Batches of one request can finish in any order on several contexts.
            parts = [self.parts[start] for start in sorted(self.parts)]
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
            queue_s = self.first_cut_s - self.arrived_s
            self.answer.set_result(Answer(joined, self.model, queue_s, now_s - self.first_cut_s))


def images_of(segments: tuple[Segment[Request], ...]) -> Images:
    """The images of a batch, uint8 (n, 28, 28)."""
    parts = [segment.entry.images[segment.start : segment.stop] for segment in segments]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
