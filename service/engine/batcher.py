"""What a batcher tells of its batches, as it sees it. It refuses to know who listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, Protocol

from lenet import nvtx
from lenet.pixels import Images
from service.engine.contexts import BatchResult, BusyPoll, ContextPool, Worker
from service.engine.queue import Answer, BatchQueue, Cut, CutReason, Request, images_of
from service.engine.versions import ModelFile
from service.errors import DeadlineExceeded, InferenceFailed, ServiceError, Unavailable


class BatchObserver(Protocol):
    """Told of batches, never of single rows; `service.metrics` is the real one."""

    def batch_cut(self, rows: int, reason: CutReason, waiting_rows: int, busy: int) -> None:
        """A batch of `rows` left the queue; `waiting_rows` stay, `busy` contexts work."""
        ...

    def batch_done(
        self,
        rows: int,
        compute_s: float,
        busy: int,
        *,
        device_s: float | None,
        padding_rows: int,
        graph_hit: bool,
    ) -> None:
        """A context finished a batch of `rows` rows; see `service.engine.contexts.BatchResult`."""
        ...

    def rows_dropped(self, rows: int, reason: Literal["cancelled", "late"]) -> None:
        """Waiting rows were forgotten."""
        ...


_log = logging.getLogger(__name__)


class Batcher:
    """Joins requests to batches and hands each caller exactly its own rows, or one error.

    `model` is what the contexts of `pool` were warmed with.
    """

    def __init__(
        self,
        queue: BatchQueue[Request],
        pool: ContextPool,
        observer: BatchObserver,
        model: ModelFile,
        awake: BusyPoll,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._requests: set[Request] = set()
        self._queue = queue
        self._pool = pool
        self._observer = observer
        self._awake = awake
        self._dispatching = False
        self._timer: asyncio.TimerHandle | None = None
        self._in_flight: dict[asyncio.Future[BatchResult], Cut[Request]] = {}
        self._closing = False
        self._abandoned = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model(self) -> ModelFile:
        """What a request that comes now is computed with."""
        return self._model

    async def submit(self, images: Images, timeout_s: float) -> Answer:
        """The answer to `images`, uint8 (n, 28, 28), n >= 1.

        Cancelling the caller takes its waiting rows out of the queue.

        Raises:
            Overloaded: the queue is full.
            DeadlineExceeded: `timeout_s` passed first.
            InferenceFailed: a batch with these rows failed.
            Unavailable: the service stops, or lost its device.
        """
        if self._closing:
            raise _lost() if self._abandoned else _stopping()
        now = self._loop.time()
        deadline = now + timeout_s
        answer: asyncio.Future[Answer] = self._loop.create_future()
        request = Request(len(images), deadline, now, self._model, images, answer)
        self._queue.push(request)
        request.waiting = nvtx.begin("queue")
        self._requests.add(request)
        self._idle.clear()
        timer = self._loop.call_at(deadline, self._expire, request)
        self._schedule()
        try:
            return await answer
        finally:
            self._requests.discard(request)
            timer.cancel()
            if request.waiting is not None:
                request.leave()
            dropped = self._queue.discard(request)
            self._note_idle()
            if dropped:
                self._observer.rows_dropped(dropped, "cancelled")

    async def replace(self, model: ModelFile) -> Exception | None:
        """Compute requests that come from some moment on with `model`, of the same architecture.

        Until every context has proven it, one after another and each between two batches, nothing
        changes. Ends when every request is answered that came before that moment. One at a time.

        Returns:
            What a context found wrong with `model`, which then is never served; None if nothing.
        """
        for worker in self._pool.workers:
            async with self._taken(worker):
                staged = worker.stage(model.weights)
                (error,) = await asyncio.gather(staged, return_exceptions=True)
            if isinstance(error, Exception):
                return error
        self._model = model
        if older := [request.answer for request in self._requests]:
            await asyncio.wait(older)
        for worker in self._pool.workers:
            async with self._taken(worker):
                await worker.replace_weights(model.weights)
        return None

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, finish the waiting ones, fail what is left after `timeout_s`."""
        self._close()
        self._schedule()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            while len(self._queue):
                cut = self._queue.cut(self._loop.time(), draining=True)
                self._fail([*cut.entries, *cut.late], _stopping)
            for cut in self._in_flight.values():
                self._fail(cut.entries, _stopping)

    def abandon(self) -> None:
        """Refuse new requests and fail all others now, also those in a batch that may not end."""
        self._abandoned = True
        self._close()
        self._fail(list(self._requests), _lost)

    def _close(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()

    @asynccontextmanager
    async def _taken(self, worker: Worker) -> AsyncIterator[None]:
        try:
            async with self._pool.taken(worker):
                yield
        finally:
            self._schedule()  # rows may have waited for this context

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
                weights = cut.segments[0].entry.model.weights
                future = worker.run(images_of(cut.segments), weights)
                for segment in cut.segments:
                    if segment.start == 0:
                        segment.entry.first_cut_s = now
                        if segment.entry.waiting is not None:
                            segment.entry.leave()
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
            self._observer.batch_done(
                cut.rows,
                result.compute_s,
                self._pool.busy,
                device_s=result.device_s,
                padding_rows=result.padding_rows,
                graph_hit=result.graph_hit,
            )
            now = self._loop.time()
            row = 0
            for segment in cut.segments:
                rows = segment.stop - segment.start
                part = result.probabilities[row : row + rows]
                segment.entry.deliver(segment.start, part, now)
                row += rows
            self._awake.extend()
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
        if self._abandoned:
            return  # all that could be said was said
        # Once a batch: once a request would flood the log.
        _log.error("a batch of %d rows failed", cut.rows, exc_info=cause)
        self._fail(cut.entries, _batch_failed, cause)

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


def _stopping() -> ServiceError:
    return Unavailable("the service is stopping; send this to another instance", retry_after_s=1)


def _lost() -> ServiceError:
    return Unavailable(
        "the service lost its device and starts again; send this to another instance or try again",
        retry_after_s=1,
    )


def _batch_failed() -> ServiceError:
    return InferenceFailed("the batch with this request failed; it is safe to send it again")
