"""The batcher: a free context first, then cut the batch, then answer.

The asyncio shell around `BatchQueue` and `ContextPool`. Batches grow by themselves exactly while
every context is busy, and an idle service adds no wait. There is no task that could die: a cut
happens in a callback, when rows and a free context are both there. It refuses to know transports
and reads time only from its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np

from lenet.nvtx import span
from lenet.pixels import Images, Probabilities
from service.errors import DeadlineExceeded, InferenceFailed, ServiceError, Unavailable
from service.policy import BatchQueue, Cut, CutReason, Entry, Segment
from service.pool import BatchResult, ContextPool, Worker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """Probabilities of one request's rows, and where its time went.

    `queue_s` until its first rows were cut, `compute_s` from then until the last were answered.
    """

    probabilities: Probabilities
    queue_s: float
    compute_s: float


@dataclass(slots=True, eq=False)
class Request(Entry):
    """An entry with its images and the future that its caller waits on."""

    images: Images
    answer: asyncio.Future[Answer]
    parts: dict[int, Probabilities] = field(default_factory=dict, init=False)
    missing_rows: int = field(init=False)
    first_cut_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.missing_rows = self.rows


class BatchObserver(Protocol):
    """Told of batches, never of single rows; `service.metrics` is the real one."""

    def batch_cut(self, rows: int, reason: CutReason, waiting_rows: int, busy: int) -> None:
        """A batch of `rows` left the queue; `waiting_rows` stay, `busy` contexts work."""
        ...

    def batch_done(self, rows: int, compute_s: float, busy: int) -> None:
        """A context finished a batch of `rows` rows."""
        ...

    def rows_dropped(self, rows: int, reason: Literal["cancelled", "late"]) -> None:
        """Waiting rows were forgotten."""
        ...


class Batcher:
    """Joins requests to batches and hands each caller exactly its own rows, or one error."""

    def __init__(
        self, queue: BatchQueue[Request], pool: ContextPool, observer: BatchObserver
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = queue
        self._pool = pool
        self._observer = observer
        self._dispatching = False
        self._timer: asyncio.TimerHandle | None = None
        self._in_flight: dict[asyncio.Future[BatchResult], Cut[Request]] = {}
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def submit(self, images: Images, timeout_s: float) -> Answer:
        """The answer to `images`, uint8 (n, 28, 28), n >= 1.

        Cancelling the caller takes its waiting rows out of the queue.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: `timeout_s` passed first.
            InferenceFailed: a batch with these rows failed.
            Unavailable: the service stops.
        """
        if self._closing:
            raise _stopping()
        now = self._loop.time()
        deadline = now + timeout_s
        request = Request(len(images), deadline, now, images, self._loop.create_future())
        self._queue.push(request)
        self._idle.clear()
        timer = self._loop.call_at(deadline, self._expire, request)
        self._schedule()
        try:
            return await request.answer
        finally:
            timer.cancel()
            dropped = self._queue.discard(request)
            self._note_idle()
            if dropped:
                self._observer.rows_dropped(dropped, "cancelled")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish the waiting ones, fail what is left after `timeout_s`."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._schedule()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            while len(self._queue):
                cut = self._queue.cut(self._loop.time(), draining=True)
                self._fail([*_owners(cut), *cut.late], _stopping)
            for cut in self._in_flight.values():
                self._fail(_owners(cut), _stopping)

    def _schedule(self) -> None:
        # Not at once: every request that arrives in this turn of the loop joins the batch.
        if not self._dispatching and len(self._queue):
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        while (due := self._queue.cut_due_s()) is not None:
            if due > self._loop.time() and not self._closing:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(due, self._dispatch)
                return
            worker = self._pool.acquire()
            if worker is None:
                return  # the release of one schedules the next cut
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        now = self._loop.time()
        cut = self._queue.cut(now, draining=self._closing)
        for request in cut.late:
            self._fail_late(request)
        future: asyncio.Future[BatchResult] | None = None
        try:
            if cut.segments:
                future = worker.run(_rows(cut.segments))
                for segment in cut.segments:
                    if segment.start == 0:
                        segment.entry.first_cut_s = now
                self._in_flight[future] = cut
                future.add_done_callback(partial(self._finish, worker, cut))
                self._observer.batch_cut(cut.rows, cut.reason, self._queue.rows, self._pool.busy)
            for request in cut.late:
                self._observer.rows_dropped(request.rows - request.cut_rows, "late")
        except Exception as exc:  # noqa: BLE001 - the batch's answer: its callers get it
            self._fail_batch(cut, exc)
        finally:
            if future is None:
                self._pool.release(worker)
                self._note_idle()

    def _finish(
        self, worker: Worker, cut: Cut[Request], future: asyncio.Future[BatchResult]
    ) -> None:
        del self._in_flight[future]
        self._pool.release(worker)
        self._schedule()
        try:
            result = future.result()
            answered = len(result.probabilities)
            assert answered == cut.rows, f"bug: {answered} answers to {cut.rows} rows"
            self._observer.batch_done(cut.rows, result.compute_s, self._pool.busy)
            now = self._loop.time()
            row = 0
            for segment in cut.segments:
                rows = segment.stop - segment.start
                _deliver(segment, result.probabilities[row : row + rows], now)
                row += rows
        except Exception as exc:  # noqa: BLE001 - the batch's answer: its callers get it
            self._fail_batch(cut, exc)
        self._note_idle()

    def _expire(self, request: Request) -> None:
        dropped = self._queue.discard(request)
        self._fail_late(request)
        if dropped:
            self._observer.rows_dropped(dropped, "late")

    def _fail_late(self, request: Request) -> None:
        timeout_ms = 1e3 * (request.deadline_s - request.arrived_s)
        self._fail([request], lambda: DeadlineExceeded(f"no answer within {timeout_ms:.0f} ms"))

    def _fail_batch(self, cut: Cut[Request], cause: Exception) -> None:
        # Once a batch: once a request would flood the log.
        _log.error("a batch of %d rows failed", cut.rows, exc_info=cause)
        self._fail(_owners(cut), _batch_failed, cause)

    def _fail(
        self,
        requests: Iterable[Request],
        make_error: Callable[[], ServiceError],
        cause: Exception | None = None,
    ) -> None:
        for request in requests:
            self._queue.discard(request)
            if not request.answer.done():
                error = make_error()
                error.__cause__ = cause
                request.answer.set_exception(error)

    def _note_idle(self) -> None:
        if not len(self._queue) and not self._in_flight:
            self._idle.set()


def _owners(cut: Cut[Request]) -> list[Request]:
    return [segment.entry for segment in cut.segments]


def _stopping() -> ServiceError:
    return Unavailable("the service is stopping; send this to another instance", retry_after_s=1)


def _batch_failed() -> ServiceError:
    return InferenceFailed("the batch with this request failed; it is safe to send it again")


@span("batch")
def _rows(segments: tuple[Segment[Request], ...]) -> Images:
    parts = [segment.entry.images[segment.start : segment.stop] for segment in segments]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _deliver(segment: Segment[Request], probabilities: Probabilities, now_s: float) -> None:
    request = segment.entry
    if request.answer.done():
        return  # cancelled, late or failed in another batch
    request.parts[segment.start] = probabilities
    request.missing_rows -= len(probabilities)
    if not request.missing_rows:
        # Batches of one request can finish in any order on several contexts.
        parts = [request.parts[start] for start in sorted(request.parts)]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        queue_s = request.first_cut_s - request.arrived_s
        request.answer.set_result(Answer(joined, queue_s, now_s - request.first_cut_s))
