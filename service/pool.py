"""The pooled contexts: N threads, each making, driving and closing its own ExecutionContext.

A context is bound to its thread for life, so the pool hands out threads. It refuses to queue:
`acquire` gives a free worker or none, and one batch at a time runs on a worker.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self, TypeAlias, TypeVar

from lenet.context import ContextStatistics, ExecutionContext
from lenet.pixels import Images, Probabilities

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""A context that takes longer to finish its batch and close hangs in its library."""

MakeContext: TypeAlias = Callable[[], ExecutionContext]
T = TypeVar("T")


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
        self._jobs: SimpleQueue[tuple[Images, asyncio.Future[BatchResult]] | None] = SimpleQueue()
        self._make_context = make_context
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
        self._thread.start()

    def run(self, images: Images) -> asyncio.Future[BatchResult]:
        """Start a batch, uint8 (n, 28, 28); the future carries its result or its error."""
        future: asyncio.Future[BatchResult] = self._loop.create_future()
        self._jobs.put((images, future))
        return future

    async def close(self) -> None:
        """Close the context on its thread and end the thread, or leave it behind if it hangs."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("%s hangs: not closed after %g s", self._thread.name, CLOSE_TIMEOUT_S)

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
                images, future = job
                started = time.perf_counter()
                try:
                    probabilities = context.run(images)
                except Exception as exc:  # noqa: BLE001 - the context's thread: callers get it
                    self._tell(future, exc)
                else:
                    elapsed = time.perf_counter() - started
                    self._tell(future, BatchResult(probabilities, elapsed))

    def _tell(self, future: asyncio.Future[T], outcome: T | Exception) -> None:
        # A loop that is gone has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, future, outcome)


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
    def busy(self) -> int:
        """Contexts with a batch in flight."""
        return len(self._workers) - len(self._free)

    def acquire(self) -> Worker | None:
        """A free worker, the one used last (its caches are warm), or None."""
        return self._free.pop() if self._free else None

    def release(self, worker: Worker) -> None:
        """Give a worker back after its batch."""
        assert worker not in self._free, "bug: a worker was released twice"
        self._free.append(worker)

    def statistics(self) -> tuple[ContextStatistics, ...]:
        """One for each context."""
        return tuple(worker.statistics for worker in self._workers)
