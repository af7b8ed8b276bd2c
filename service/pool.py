"""The pooled contexts: N threads, each making, driving and closing its own ExecutionContext.

A context is bound to its thread for life, so the pool hands out threads. It refuses to queue
batches: `acquire` gives a free worker or none, and one batch at a time runs on a worker.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeAlias, TypeVar

from lenet.context import ContextStatistics, ExecutionContext
from lenet.pixels import Images, Probabilities
from lenet.weightfile import WeightFile

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""A context that takes longer to finish its batch and close hangs in its library."""

MakeContext: TypeAlias = Callable[[], ExecutionContext]
T = TypeVar("T")

_Job: TypeAlias = tuple[Callable[[ExecutionContext], Any], asyncio.Future[Any]]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a context made of one batch, and how long it took."""

    probabilities: Probabilities
    compute_s: float


class Worker:
    """One thread and its context."""

    def __init__(self, make_context: MakeContext, name: str) -> None:
        self.statistics = ContextStatistics()
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._make_context = make_context
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
        self._thread.start()

    def run(self, images: Images, weights: WeightFile) -> asyncio.Future[BatchResult]:
        """Start a batch, uint8 (n, 28, 28); the future carries its result or its error.

        It is computed with `weights`, which are to be proven on this context: then going from
        others to them is no work.
        """
        return self._do(partial(_run, images=images, weights=weights))

    def stage(self, weights: WeightFile) -> asyncio.Future[None]:
        """Prove `weights` between two batches; the served ones stay what they were."""
        return self._do(lambda context: context.stage(weights))

    def replace_weights(self, weights: WeightFile) -> asyncio.Future[None]:
        """Let the context rest on `weights`, between two batches."""
        return self._do(lambda context: context.replace_weights(weights))

    async def close(self) -> None:
        """Close the context on its thread and end the thread, or leave it behind if it hangs."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("%s hangs: not closed after %g s", self._thread.name, CLOSE_TIMEOUT_S)

    def _do(self, work: Callable[[ExecutionContext], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((work, future))
        return future

    def _drive(self) -> None:
        try:
            context = self._make_context()
        except Exception as exc:  # noqa: BLE001 - the context's thread: the error is for `start`
            self._tell(self.ready, exc)
            return
        with context:
            try:
                context.warm_up()
            except Exception as exc:  # noqa: BLE001 - as above
                self._tell(self.ready, exc)
                return
            self.statistics = context.statistics
            self._tell(self.ready, None)
            while (job := self._jobs.get()) is not None:
                work, future = job
                try:
                    outcome = work(context)
                except Exception as exc:  # noqa: BLE001 - the context's thread: callers get it
                    self._tell(future, exc)
                else:
                    self._tell(future, outcome)

    def _tell(self, future: asyncio.Future[T], outcome: T | Exception) -> None:
        # A loop that is gone has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, future, outcome)


def _run(context: ExecutionContext, images: Images, weights: WeightFile) -> BatchResult:
    if context.weights is not weights:
        context.replace_weights(weights)
    started = time.perf_counter()
    probabilities = context.run(images)
    return BatchResult(probabilities, time.perf_counter() - started)


def _settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class ContextPool:
    """`size` workers over contexts made by `make_context`.

    Use it as an async context manager: entering warms the contexts one after another, leaving
    closes them.
    """

    def __init__(self, make_context: MakeContext, size: int, name: str) -> None:
        self._make_context = make_context
        self._size = size
        self._name = name
        self._workers: list[Worker] = []
        self._free: list[Worker] = []
        self._claims: dict[Worker, asyncio.Future[None]] = {}

    async def __aenter__(self) -> Self:
        try:
            for number in range(self._size):
                worker = Worker(self._make_context, f"{self._name}-{number}")
                self._workers.append(worker)
                await worker.ready
        except BaseException:
            await self.__aexit__()
            raise
        self._free = list(self._workers)
        return self

    async def __aexit__(self, *_: object) -> None:
        # All at once: contexts of one device hang together, and each is waited for.
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers, self._free = [], []

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them, free or not."""
        return tuple(self._workers)

    @property
    def busy(self) -> int:
        """Contexts with a batch in flight, or taken."""
        return len(self._workers) - len(self._free)

    def acquire(self) -> Worker | None:
        """A free worker, the one used last (its caches are warm), or None."""
        return self._free.pop() if self._free else None

    def release(self, worker: Worker) -> None:
        """Give a worker back after its batch."""
        assert worker not in self._free, "bug: a worker was released twice"
        claim = self._claims.pop(worker, None)
        if claim is None or claim.done():  # done: whoever claimed it gave up
            self._free.append(worker)
        else:
            claim.set_result(None)

    @asynccontextmanager
    async def taken(self, worker: Worker) -> AsyncIterator[None]:
        """`worker` as soon as its batch is done, and until the block ends, for the caller alone."""
        assert worker not in self._claims, "bug: a worker is claimed twice"
        claim: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if worker in self._free:
            self._free.remove(worker)
            claim.set_result(None)
        else:
            self._claims[worker] = claim
        try:
            await claim
            yield
        finally:
            if claim.cancelled():
                self._claims.pop(worker, None)
            else:  # also when the caller was cancelled just after it got the worker
                self.release(worker)

    def statistics(self) -> tuple[ContextStatistics, ...]:
        """One for each context."""
        return tuple(worker.statistics for worker in self._workers)
