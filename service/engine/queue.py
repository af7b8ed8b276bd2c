"""When to cut a batch, whom to drop, how to split: the queue's policy without I/O.

Pure: time is an argument, nothing waits, nothing is called back. It refuses to know what an image
or an answer is; it counts rows.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from lenet import nvtx
from lenet.pixels import Images, Probabilities
from service.engine.versions import ModelFile
from service.errors import Overloaded

CutReason = Literal["full", "idle", "waited", "drain"]


@dataclass(slots=True, eq=False)
class Entry:
    """One waiting request of `rows` rows; `deadline_s` is on the queue's clock.

    `model` is what all of them are to be computed with: entries of two models share no batch.
    `cut_rows` of them have left in batches. Subclassed by whoever hangs an answer on it.
    """

    rows: int
    deadline_s: float
    arrived_s: float
    model: object
    cut_rows: int = field(default=0, init=False)


E = TypeVar("E", bound=Entry)


# Not frozen, as all that is made for each request: freezing takes most of the time of making.
@dataclass(slots=True)
class Segment(Generic[E]):
    """Rows `start` to `stop` of one entry, in one batch."""

    entry: E
    start: int
    stop: int


@dataclass(slots=True)
class Cut(Generic[E]):
    """A batch for one model, and the entries found late, which are in the queue no more."""

    segments: tuple[Segment[E], ...]
    late: tuple[E, ...]
    rows: int
    reason: CutReason

    @property
    def entries(self) -> list[E]:
        """Whose rows are in it."""
        return [segment.entry for segment in self.segments]


class BatchQueue(Generic[E]):
    """First come, first served, by rows.

    A request larger than a batch is split; after each of its parts it goes to the back, so that
    those behind it wait for one batch of it and not for all of them. A batch ends before the first
    entry of another model: while one replaces another, a few batches are smaller, and nobody
    waits.

    Args:
        max_batch_rows: the most rows in one batch.
        max_queue_rows: the most rows waiting; one more request is refused, be it of one row or
            of many.
        max_wait_s: how long a batch that is not full may wait for more rows.
    """

    def __init__(self, max_batch_rows: int, max_queue_rows: int, max_wait_s: float = 0.0) -> None:
        assert max_batch_rows > 0, "bug: a batch must hold a row"
        self._max_batch_rows = max_batch_rows
        self._max_queue_rows = max_queue_rows
        self._max_wait_s = max_wait_s
        self._entries: OrderedDict[E, None] = OrderedDict()
        self._rows = 0

    @property
    def rows(self) -> int:
        """Rows waiting."""
        return self._rows

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, entry: E) -> None:
        """Let `entry` wait.

        Raises:
            Overloaded: its rows do not fit beside those that wait.
        """
        if self._rows + entry.rows > self._max_queue_rows:
            raise Overloaded(
                f"{self._rows} rows wait and {entry.rows} more would pass the limit of "
                f"{self._max_queue_rows}; try again later or send fewer at a time",
                retry_after_s=1,
            )
        self._entries[entry] = None
        self._rows += entry.rows

    def discard(self, entry: E) -> int:
        """Forget what still waits of `entry`; returns how many rows that was."""
        if entry not in self._entries:
            return 0
        del self._entries[entry]
        waiting = entry.rows - entry.cut_rows
        self._rows -= waiting
        return waiting

    def cut_due_s(self) -> float | None:
        """From when on `cut` is due; None if nothing waits. In the past means now."""
        if not self._entries:
            return None
        first = next(iter(self._entries)).arrived_s
        return first if self._rows >= self._max_batch_rows else first + self._max_wait_s

    def cut(self, now_s: float, *, draining: bool = False) -> Cut[E]:
        """Take the next batch out, of at most `max_batch_rows` rows, dropping the late."""
        reason: CutReason = "idle" if self._max_wait_s == 0 else "waited"
        if draining:
            reason = "drain"
        segments: list[Segment[E]] = []
        late: list[E] = []
        room = self._max_batch_rows
        while self._entries and room:
            entry = next(iter(self._entries))
            if entry.deadline_s <= now_s:
                self.discard(entry)
                late.append(entry)
                continue
            if segments and entry.model is not segments[0].entry.model:
                break
            start = entry.cut_rows
            stop = min(entry.rows, start + room)
            segments.append(Segment(entry, start, stop))
            entry.cut_rows = stop
            room -= stop - start
            self._rows -= stop - start
            if stop == entry.rows:
                del self._entries[entry]
            else:
                self._entries.move_to_end(entry)
        if not room:
            reason = "full"
        return Cut(tuple(segments), tuple(late), self._max_batch_rows - room, reason)


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
