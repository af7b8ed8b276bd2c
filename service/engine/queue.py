"""The queue of one model: which requests wait, when a batch is due, which rows are in it.

Pure: time is an argument, and nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from lenet import nvtx
from lenet.pixels import Images, Probabilities
from service.engine.versions import ModelVersion
from service.errors import Overloaded, ServiceError
from service.observe.metrics import CutReason

_PATIENCE = 1 / 8
"""How much later than in strict order a split request may be, as a part of the queue's limit. Of
the default limit it lets single images that take 30 % of the time pass a request of 10,000."""


_FEW = 1 / 8
"""A batch with at most this part of the most rows has few."""


@dataclass(slots=True, eq=False)
class BatchAnswer:
    """The probabilities of a batch, float32 (n, classes).

    A transport keeps in `encoded` what it makes of the whole batch, for the batch's other requests.
    """

    probabilities: Probabilities
    encoded: dict[str, Any] = field(default_factory=dict)


OnAnswer: TypeAlias = Callable[["Request", ServiceError | None], None]
"""Called on the event loop once a request is answered, or with its error, unless it was cancelled.
"""


class Request:
    """Images that wait, uint8 (n, 28, 28), and whom to call with their answer.

    A request is split across batches; its answer is reassembled from the parts. All of them are
    computed with `version`. Times are on the batcher's clock.
    """

    # Initial values, all immutable; setting each of them in every instance would take time.
    done = False
    """Answered or cancelled: what its batches still compute is dropped."""
    cut_rows = 0
    """How many of its rows have left the queue in batches."""
    expected_rows = 0
    """How many rows the queue will have cut, ever, when all of it is, in strict order."""
    answered_rows = 0
    first_cut_s = 0.0
    parts: dict[int, Probabilities] | None = None
    """Results by first row: batches of one request finish in any order."""
    batch: BatchAnswer
    """The batch that holds the complete answer, from row `row` on."""
    row = 0
    batch_rows = 0
    """The rows of the batch that completed it, those of other requests included."""
    answered_s = 0.0
    waiting: Any = None
    """A profiler's range, open until the first rows leave; None without a profiler."""

    def __init__(
        self,
        images: Images,
        deadline_s: float,
        arrived_s: float,
        version: ModelVersion,
        on_answer: OnAnswer,
    ) -> None:
        self.images, self.deadline_s, self.arrived_s = images, deadline_s, arrived_s
        self.version, self.on_answer = version, on_answer
        self.rows = len(images)

    def end_wait(self) -> None:
        """Close the profiler's open range: the first rows were cut, or the request has ended."""
        nvtx.end(self.waiting)
        self.waiting = None

    def deliver(self, start: int, rows: int, batch: BatchAnswer, row: int, now_s: float) -> bool:
        """Take the answers to its rows from `start` on, `rows` rows of `batch` from `row` on.

        Returns: whether they were the last.
        """
        self.batch_rows = len(batch.probabilities)
        if rows < self.rows:
            parts = self.parts = self.parts or {}
            parts[start] = batch.probabilities[row : row + rows]
            self.answered_rows += rows
            if self.answered_rows < self.rows:
                return False
            batch, row = BatchAnswer(np.concatenate([parts[start] for start in sorted(parts)])), 0
        self.batch, self.row, self.answered_s = batch, row, now_s
        return True

    @property
    def queue_us(self) -> int:
        """Microseconds until the first rows were cut."""
        return round(1e6 * (self.first_cut_s - self.arrived_s))

    @property
    def compute_us(self) -> int:
        """Microseconds from then until the last were answered."""
        return round(1e6 * (self.answered_s - self.first_cut_s))


@dataclass(slots=True)
class Segment:
    """Rows `start` to `stop` of one request, in one batch."""

    request: Request
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Cut:
    """A batch for one version of the model, cut at `now_s`.

    `late` are the requests that were past their deadline; they have left the queue.
    """

    segments: list[Segment]
    late: list[Request]
    rows: int
    reason: CutReason
    now_s: float

    @property
    def version(self) -> ModelVersion:
        """The version that computes the batch."""
        return self.segments[0].request.version

    @property
    def requests(self) -> list[Request]:
        """The requests with rows in the batch."""
        return [segment.request for segment in self.segments]

    def images(self) -> list[Images]:
        """The batch in parts, uint8 (n, 28, 28), one of each request."""
        return [
            segment.request.images
            if segment.stop - segment.start == segment.request.rows
            else segment.request.images[segment.start : segment.stop]
            for segment in self.segments
        ]


class BatchQueue:
    """First come, first served, counted in rows.

    Whole requests come before the rest of one that was split, and few rows are not filled up to a
    batch with it: requests behind a large one wait for a batch of it and not for all. But
    once the rest is later than in strict order by `_PATIENCE` of the queue's limit, it comes first:
    under overload nothing waits much longer than a full queue takes. A batch ends before the first
    request for another version: batches are smaller while one version replaces another, and no
    request waits longer.

    Args:
        max_batch_rows: the most rows in one batch.
        max_queue_rows: the most rows that wait; a request of one row or of many that would pass it
            is refused.
        max_wait_s: how long a batch that is not full may wait for more rows.
    """

    def __init__(self, max_batch_rows: int, max_queue_rows: int, max_wait_s: float = 0.0) -> None:
        assert max_batch_rows > 0, "bug: a batch must hold a row"
        self._max_batch_rows = max_batch_rows
        self._max_queue_rows = max_queue_rows
        self._max_wait_s = max_wait_s
        self._patience_rows = int(_PATIENCE * max_queue_rows)
        self._few_rows = int(_FEW * max_batch_rows)
        self._whole: OrderedDict[Request, None] = OrderedDict()
        self._split: OrderedDict[Request, None] = OrderedDict()  # of which parts have left
        self._rows = 0
        self._cut_rows = 0  # ever

    @property
    def rows(self) -> int:
        """Rows waiting."""
        return self._rows

    @property
    def is_full(self) -> bool:
        """Whether the rows that wait fill a batch."""
        return self._rows >= self._max_batch_rows

    def __len__(self) -> int:
        return len(self._whole) + len(self._split)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._split, self._whole)

    def push(self, request: Request) -> None:
        """Add `request` at the back.

        Raises:
            Overloaded: there is no room for its rows.
        """
        if self._rows + request.rows > self._max_queue_rows:
            raise Overloaded(
                f"{self._rows} rows wait and {request.rows} more would pass the limit of "
                f"{self._max_queue_rows}; try again later or send fewer at a time",
                retry_after_s=1,
            )
        self._whole[request] = None
        self._rows += request.rows
        request.expected_rows = self._cut_rows + self._rows

    def discard(self, request: Request) -> int:
        """Remove what still waits of `request`; returns how many rows that was."""
        waiting_in = self._split if request.cut_rows else self._whole
        if request not in waiting_in:
            return 0
        del waiting_in[request]
        waiting = request.rows - request.cut_rows
        self._rows -= waiting
        return waiting

    def cut_due_s(self) -> float | None:
        """Time from which `cut` is due, perhaps in the past; None if nothing waits."""
        if not self._rows:
            return None
        first = next(iter(self)).arrived_s
        return first if self.is_full else first + self._max_wait_s

    def cut(self, now_s: float, *, draining: bool = False) -> Cut:
        """Take the next batch out, of at most `max_batch_rows` rows, and drop the late requests."""
        reason: CutReason = "idle" if self._max_wait_s == 0 else "waited"
        if draining:
            reason = "drain"
        segments: list[Segment] = []
        late: list[Request] = []
        room = self._max_batch_rows
        while self._rows and room:
            request = self._next()
            if request.deadline_s <= now_s:
                self.discard(request)
                late.append(request)
                continue
            if segments and (
                request.version is not segments[0].request.version
                or (
                    request.rows > self._max_batch_rows
                    and self._max_batch_rows - room <= self._few_rows
                )
            ):
                break
            start = request.cut_rows
            stop = min(request.rows, start + room)
            segments.append(Segment(request, start, stop))
            if start == 0:
                request.first_cut_s = now_s
            request.cut_rows = stop
            room -= stop - start
            self._rows -= stop - start
            self._cut_rows += stop - start
            if not start:
                del self._whole[request]
            if stop < request.rows:
                self._split[request] = None
            elif start:
                del self._split[request]
        if not room:
            reason = "full"
        return Cut(segments, late, self._max_batch_rows - room, reason, now_s)

    def _next(self) -> Request:
        if self._split:
            oldest = next(iter(self._split))
            overdue = self._cut_rows >= oldest.expected_rows + self._patience_rows
            if overdue or not self._whole:
                return oldest
        return next(iter(self._whole))
