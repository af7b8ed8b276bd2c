"""The batcher of one model: requests in, batches to its contexts, answers back to the callers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from lenet import nvtx
from lenet.backend import BatchResult
from lenet.pixels import Images
from service.engine.contexts import BusyPoll, ContextPool, Worker
from service.engine.deadlines import Deadlines
from service.engine.queue import BatchAnswer, BatchQueue, Cut, Work
from service.engine.versions import ModelVersion
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    ServiceError,
    Unavailable,
    stopping,
)
from service.observe.metrics import Load, Metrics

_log = logging.getLogger(__name__)

_NOT_FINITE = (
    "the network's answer to an image is NaN or infinite, as activations beyond 65504 are in fp16; "
    "there serve the model with --precision tf32"
)

_LATE = "no answer in time"


class Batcher:
    """Joins requests to batches and hands each caller its own rows, or one error.

    A free context comes first, then the cut, as late as possible: batches grow while all contexts
    are busy. `version` is what the contexts of `pool` were warmed up with. `clock` is monotonic
    and on the time base of the running loop.

    `overlap_rows` is for a device that computes beside the event loop; 0 where a batch may be
    computed on the loop itself. A batch starts beside running ones only if it and they have so many
    rows together; with fewer it waits for an end, also for that of a batch that hangs, and grows.
    And the next batch is started before the answers of the last are written.
    """

    def __init__(
        self,
        queue: BatchQueue,
        pool: ContextPool,
        metrics: Metrics,
        version: ModelVersion,
        busy_poll: BusyPoll | None,
        clock: Callable[[], float],
        overlap_rows: int = 0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self.version = version
        """The version for new requests."""
        self._queue = queue
        self.pool = pool
        self._metrics = metrics
        self._busy_poll = busy_poll
        self._deadlines = Deadlines(self._unanswered, self._expire)
        self._overlap_rows = overlap_rows
        self._older: set[Work] = set()
        self._older_done: asyncio.Future[None] | None = None
        self._dispatching = False
        self._waiting = 0
        """Requests when `_dispatch` looked last, or a batch was cut since."""
        self._timer: asyncio.TimerHandle | None = None
        self._in_flight: set[Cut] = set()
        self.closed = False
        """Whether new requests are refused."""
        self._lost = False
        self._idle: asyncio.Event | None = None

    def load(self) -> Load:
        """Waiting rows and busy contexts."""
        return self._queue.rows, self.pool.busy

    def enqueue(self, request: Work, images: Images) -> None:
        """Classify `images`, uint8 (n, 28, 28), n >= 1, until the deadline of `request`.

        `request.answered` is called once, never from within this call, with None, or with
        DeadlineExceeded, InferenceFailed (a batch with these rows failed) or Unavailable (the
        service stops, or lost its device).

        Raises:
            Overloaded: the queue is full.
            Unavailable: the service is stopping, or has lost its device.
        """
        if self.closed:
            raise _device_lost() if self._lost else stopping()
        self._queue.push(request, images, self.version, self._clock())
        if nvtx.active:
            request.queue_range = nvtx.begin("queue")
        if request.deadline_s < self._deadlines.look_s:
            self._deadlines.note(request.deadline_s)
        # Not at once: every request that arrives in this turn of the loop joins the batch.
        if not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def cancel(self, request: Work) -> None:
        """Nobody waits for `request` any more: take its waiting rows out of the queue."""
        if request.waits:
            self._end(request)
            if dropped := self._queue.discard(request):
                self._metrics.rows_dropped(dropped, "cancelled")
            self._note_idle()

    async def replace(self, version: ModelVersion) -> Exception | None:
        """Compute requests that come from some moment on with `version`, of the same architecture.

        Nothing changes until every context has validated it, one after another and each between
        two batches. Returns when every request that came before that moment is answered. One call
        at a time.

        Returns:
            What a context found wrong with `version`, which then is never served; None if nothing.
        """
        for worker in self.pool.workers:
            async with self._claimed(worker):
                staged = worker.stage(version.weights)
                error = await _outcome(staged)
            if error is not None:
                return error
        self.version = version
        if older := self._unanswered():
            self._older = older
            self._older_done = self._loop.create_future()
            await self._older_done
        for worker in self.pool.workers:
            async with self._claimed(worker):
                replaced = worker.replace_weights(version.weights)
                error = await _outcome(replaced)
            if error is not None:  # the context switches before its next batch, or fails
                _log.error("%s did not switch its weights: %s", worker.name, error)
        return None

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish the waiting ones, fail what is left after `timeout_s`."""
        self._close()
        self._schedule()
        self._idle = asyncio.Event()
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            for request in self._unanswered():
                self._fail(request, stopping())
        self._deadlines.close()

    def fail_all(self) -> None:
        """The device is lost: refuse new requests and fail all others, in flight or not."""
        self._lost = True
        self._close()
        for request in self._unanswered():
            self._fail(request, _device_lost())

    def _unanswered(self) -> set[Work]:
        cut = {request for cut in self._in_flight for request in cut.requests if request.waits}
        return cut.union(self._queue)

    def _close(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()

    @asynccontextmanager
    async def _claimed(self, worker: Worker) -> AsyncIterator[None]:
        try:
            async with self.pool.claimed(worker):
                yield
        finally:
            self._schedule()  # rows may have waited for this context

    def _schedule(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        queue, self._dispatching = self._queue, False
        before, self._waiting = self._waiting, queue.requests
        has_room = queue.rows < queue.max_batch_rows
        if self._waiting > before + 1 and not self._overlap_rows and has_room:
            # Nothing is read while a batch is computed on the loop: those that arrived while these
            # were read come first. 5 % more requests a second from 32 connections. Not if as many
            # left again: then this could go on for ever.
            self._schedule()
            return
        while queue.rows:
            if queue.max_wait_s and not self.closed and (due := queue.cut_due_s()) > self._clock():
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(due, self._dispatch)
                return
            if self._in_flight and self._overlap_rows:
                running = sum(cut.rows for cut in self._in_flight)
                if running + queue.rows < self._overlap_rows:
                    return  # the end of one dispatches again
            if not self._start():
                return  # the release of a context schedules the next cut

    def _start(self) -> bool:
        """Start a batch. Returns: whether a context was free for it."""
        worker = self.pool.acquire()
        if worker is None:
            return False
        cut = self._queue.cut(self._clock(), draining=self.closed)
        self._waiting = self._queue.requests
        if cut.segments:
            self._in_flight.add(cut)
        parts = [  # before the late are answered: that may cancel requests of the batch
            work.images if stop - start == work.rows else work.images[start:stop]
            for work, start, stop in cut.segments
        ]
        for request in cut.late:
            self._answer(request, DeadlineExceeded(_LATE))
            self._metrics.rows_dropped(request.rows - request.cut_rows, "late")
        if not cut.segments:
            self.pool.release(worker)
            self._note_idle()
            return True
        weights, finish = cut.segments[0][0].version.weights, partial(self._finish, worker, cut)
        try:
            result = worker.run(parts, weights, finish)
        except Exception as exc:  # noqa: BLE001 - the batch's answer: its callers get it
            finish(exc)
            return True
        if result is not None:
            self._loop.call_soon(finish, result)
        if nvtx.active:
            for request in cut.requests:
                request.end_wait()
        return True

    def _finish(self, worker: Worker, cut: Cut, outcome: BatchResult | Exception) -> None:
        self._in_flight.discard(cut)
        self.pool.release(worker)
        if self._queue.rows and (not self._overlap_rows or isinstance(outcome, Exception)):
            self._schedule()
        now, result = self._clock(), None
        key = cut.segments[0][0].version.key
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if self._overlap_rows and self._queue.rows:
                self._dispatch()  # the device computes while the answers are written
            answered = len(outcome.probabilities)
            assert answered == cut.rows, f"bug: {answered} answers to {cut.rows} rows"
            result, row = outcome, 0
            batch = BatchAnswer(outcome.probabilities, outcome, cut.reason)
            # One sum: each row is looked at only where it is not finite.
            finite = math.isfinite(np.add.reduce(outcome.probabilities, axis=None))
            if not finite:
                _log.error("a batch of model %s version %s: %s", *key, _NOT_FINITE)
            for request, start, stop in cut.segments:
                rows = stop - start
                if not finite and not np.isfinite(outcome.probabilities[row : row + rows]).all():
                    self._fail(request, InferenceFailed(_NOT_FINITE))
                elif request.waits:
                    self._deliver(request, start, rows, batch, row, now)
                row += rows
            if self._busy_poll is not None:
                self._busy_poll.extend()
        except Exception as exc:  # noqa: BLE001 - the batch's answer: its callers get it
            self._fail_batch(cut, exc)
        try:
            self._metrics.batch_ended(key, cut.rows, cut.reason, now - cut.now_s, result)
        except Exception:  # noqa: BLE001 - its requests are answered all the same
            _log.exception("a batch was not counted")
        if self._idle is not None:
            self._note_idle()

    def _deliver(
        self, request: Work, start: int, rows: int, batch: BatchAnswer, row: int, now_s: float
    ) -> None:
        """Answer `request` if `rows` rows of `batch` from `row` on are the last that it lacks.

        They answer its rows from `start` on.
        """
        request.batch_rows = len(batch.probabilities)
        if rows < request.rows:
            parts = request.parts = request.parts or {}
            parts[start] = batch.probabilities[row : row + rows]
            request.answered_rows += rows
            if request.answered_rows < request.rows:
                return
            batch, row = BatchAnswer(np.concatenate([parts[start] for start in sorted(parts)])), 0
        request.batch, request.row = batch, row
        request.compute_s = now_s - request.arrived_s - request.queue_s
        self._answer(request, None)

    def _expire(self, request: Work) -> None:
        dropped = self._queue.discard(request)
        self._answer(request, DeadlineExceeded(_LATE))
        self._note_idle()
        if dropped:
            self._metrics.rows_dropped(dropped, "late")

    def _fail_batch(self, cut: Cut, cause: Exception) -> None:
        if self._lost:  # which is logged
            for request in cut.requests:
                self._fail(request, _device_lost())
            return
        # Once a batch: once a request would flood the log.
        _log.error("a batch of %d rows failed", cut.rows, exc_info=cause)
        cause.__traceback__ = None  # its frames would keep the images until a collection
        for request in cut.requests:
            error = InferenceFailed(
                "the batch with this request failed; it is safe to send it again"
            )
            error.__cause__ = cause
            self._fail(request, error)

    def _fail(self, request: Work, error: ServiceError) -> None:
        self._queue.discard(request)
        self._answer(request, error)

    def _answer(self, request: Work, error: ServiceError | None) -> None:
        if not request.waits:
            return
        self._end(request)
        try:
            request.answered(error)
        except Exception:  # noqa: BLE001 - a transport's fault must not reach its batch mates
            _log.exception("an answer was not delivered")

    def _end(self, request: Work) -> None:
        request.waits = False
        del request.images
        if nvtx.active:
            request.end_wait()
        if self._older:
            self._older.discard(request)
            if not self._older and self._older_done is not None and not self._older_done.done():
                self._older_done.set_result(None)

    def _note_idle(self) -> None:
        if self._idle is not None and not self._queue.rows and not self._in_flight:
            self._idle.set()


async def _outcome(job: asyncio.Future[None]) -> Exception | None:
    """The error of what a context's thread does, if any.

    A caller that is cancelled waits for its end, too: until then the context is not free.
    """
    try:
        await asyncio.wait({job})
    except asyncio.CancelledError:
        await asyncio.gather(job, return_exceptions=True)
        raise
    error = job.exception()
    assert error is None or isinstance(error, Exception), f"bug: {error!r}"
    return error


def _device_lost() -> ServiceError:
    return Unavailable(
        "the service lost its device and starts again; send this to another instance or try again",
        retry_after_s=1,
    )
