"""The queue of one model: which requests wait, when a batch is due, which rows are in it.

Pure: time is an argument, and nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from lenet import nvtx
from lenet.backend import BatchResult
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

    What is made of the whole batch is kept in `encoded` for its other requests. `result` is None,
    and `reason` not known, where the rows of one request are of several batches.
    """

    probabilities: Probabilities
    result: BatchResult | None = None
    reason: CutReason = "full"
    encoded: dict[str, Any] = field(default_factory=dict)


class Work:
    """Images that wait to be computed, uint8 (n, 28, 28), and then their answer.

    They are split across batches, all of one version, and the answer is reassembled from the parts.
    Times are on the batcher's clock. A subclass sets `deadline_s`, and `waits` to False.
    """

    __slots__ = (
        *("answered_rows", "arrived_s", "batch", "batch_rows", "compute_s", "cut_rows"),
        *("deadline_s", "expected_rows", "images", "parts", "queue_range", "queue_s", "row"),
        *("rows", "version", "waits"),
    )

    waits: bool
    """Whether it is in the queue or in a batch. What is computed for one that left is dropped."""
    deadline_s: float
    images: Images
    """Released when it leaves: they may lie in memory that is handed out again."""
    rows: int
    version: ModelVersion
    arrived_s: float
    cut_rows: int
    """How many of its rows have left the queue in batches."""
    expected_rows: int
    """How many rows the queue will have cut, ever, when all of it is, in strict order."""
    answered_rows: int
    queue_s: float
    """Seconds until the first rows were cut."""
    compute_s: float
    """Seconds from then until the last were answered."""
    parts: dict[int, Probabilities] | None
    """Results by first row: batches of one request finish in any order."""
    batch: BatchAnswer
    """The batch that holds the complete answer, from row `row` on."""
    row: int
    batch_rows: int
    """The rows of the batch that completed it, those of other requests included."""
    queue_range: Any
    """A profiler's range, open until the first rows leave; None without a profiler."""

    def answered(self, error: ServiceError | None) -> None:
        """Called on the event loop with the answer or an error, unless it was cancelled."""
        raise NotImplementedError

    def begin(self, images: Images, version: ModelVersion, now_s: float) -> None:
        """Wait from now on for `images` to be computed with `version`."""
        self.images, self.version, self.arrived_s = images, version, now_s
        self.rows = len(images)
        self.waits = True
        self.cut_rows = self.answered_rows = self.row = 0
        self.parts = self.queue_range = None

    def end_wait(self) -> None:
        """Close the profiler's open range: the first rows were cut, or the request has ended."""
        if self.queue_range is not None:
            nvtx.end(self.queue_range)
            self.queue_range = None


Segment: TypeAlias = tuple[Work, int, int]
"""Rows of one request in a batch: from the first to before the second number."""


@dataclass(slots=True, eq=False)
class Cut:
    """A batch for one version of the model, cut at `now_s`.

    `late` are the requests that were past their deadline; they have left the queue.
    """

    segments: list[Segment]
    late: list[Work]
    rows: int
    reason: CutReason
    now_s: float

    @property
    def requests(self) -> list[Work]:
        """The requests with rows in the batch."""
        return [work for work, _, _ in self.segments]


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
        self.max_batch_rows = max_batch_rows
        self._max_queue_rows = max_queue_rows
        self.max_wait_s = max_wait_s
        self._patience_rows = int(_PATIENCE * max_queue_rows)
        self._few_rows = int(_FEW * max_batch_rows)
        self._whole: OrderedDict[Work, None] = OrderedDict()
        self._split: OrderedDict[Work, None] = OrderedDict()  # of which parts have left
        self.rows = self.requests = 0
        """Those that wait."""
        self._cut_rows = 0  # ever

    def __iter__(self) -> Iterator[Work]:
        return chain(self._split, self._whole)

    def push(self, request: Work, images: Images, version: ModelVersion, now_s: float) -> None:
        """Add `request`, with what is to be computed, at the back.

        Raises:
            Overloaded: there is no room for its rows.
        """
        rows = len(images)
        if self.rows + rows > self._max_queue_rows:
            raise Overloaded(
                f"{self.rows} images wait and {rows} more would pass the limit of "
                f"{self._max_queue_rows}; try again later or send fewer at a time",
                retry_after_s=1,
            )
        request.begin(images, version, now_s)
        self._whole[request] = None
        self.rows += rows
        self.requests += 1
        request.expected_rows = self._cut_rows + self.rows

    def discard(self, request: Work) -> int:
        """Remove what still waits of `request`; returns how many rows that was."""
        waiting_in = self._split if request.cut_rows else self._whole
        if request not in waiting_in:
            return 0
        del waiting_in[request]
        self.requests -= 1
        waiting = request.rows - request.cut_rows
        self.rows -= waiting
        return waiting

    def cut_due_s(self) -> float:
        """Time from which `cut` is due, perhaps in the past. Something must wait."""
        first_s = next(iter(self._split or self._whole)).arrived_s
        return first_s if self.rows >= self.max_batch_rows else first_s + self.max_wait_s

    def cut(self, now_s: float, *, draining: bool = False) -> Cut:
        """Take the next batch out, of at most `max_batch_rows` rows, and drop the late requests."""
        reason: CutReason = "idle" if self.max_wait_s == 0 else "waited"
        if draining:
            reason = "drain"
        segments: list[Segment] = []
        late: list[Work] = []
        most, whole, split = self.max_batch_rows, self._whole, self._split
        room = most
        while self.rows and room:
            request = self._next() if split else next(iter(whole))
            if request.deadline_s <= now_s:
                self.discard(request)
                late.append(request)
                continue
            rows = request.rows
            if segments and (
                request.version is not segments[0][0].version
                or (rows > most and most - room <= self._few_rows)
            ):
                break
            start = request.cut_rows
            stop = min(rows, start + room)
            segments.append((request, start, stop))
            request.cut_rows = stop
            cut_rows = stop - start
            room -= cut_rows
            self.rows -= cut_rows
            self._cut_rows += cut_rows
            if not start:
                request.queue_s = now_s - request.arrived_s
                del whole[request]
            if stop < rows:
                split[request] = None
            else:
                self.requests -= 1
                split.pop(request, None)
        if not room:
            reason = "full"
        return Cut(segments, late, self.max_batch_rows - room, reason, now_s)

    def _next(self) -> Work:
        """The request that comes next, where one is split."""
        oldest = next(iter(self._split))
        overdue = self._cut_rows >= oldest.expected_rows + self._patience_rows
        return oldest if overdue or not self._whole else next(iter(self._whole))
