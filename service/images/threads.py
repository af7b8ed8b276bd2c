"""Threads for decoding that would block the event loop for long: pictures and large bodies."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

from service.errors import DeadlineExceeded, Overloaded

MAX_WAITING = 1024
"""Requests that wait for a thread; further ones are rejected as `Overloaded`."""

Result = TypeVar("Result")


class Job:
    """One piece of work: waiting for a thread, running, or ended."""

    __slots__ = ("ended", "on_done", "work")

    def __init__(
        self,
        work: Callable[[], Any],
        on_done: Callable[[Any], None] | None,
        ended: Callable[[], None],
    ) -> None:
        self.work, self.on_done, self.ended = work, on_done, ended


class DecodingThreads:
    """A bounded number of decoding threads, shared by all transports of one event loop.

    A context manager; leaving it waits for work that has begun, a second at most.
    """

    def __init__(self, count: int | None = None) -> None:
        self._free = count or min(8, max(2, os.cpu_count() or 1))
        self._executor = ThreadPoolExecutor(self._free, "decode")
        self._waiting: OrderedDict[Job, None] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()

    def start(
        self,
        work: Callable[[], Result],
        on_done: Callable[[Result | Exception], None],
        ended: Callable[[], None] = lambda: None,
    ) -> Job:
        """Run `work` on one of the threads, then `on_done` on the event loop with what came of it.

        `ended` is called once, on the event loop, when `work` has ended or been dropped.

        Raises:
            Overloaded: `MAX_WAITING` requests are waiting already.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded("too many requests wait to be decoded", retry_after_s=1)
        job = Job(work, on_done, ended)
        if self._free:
            self._run(job)
        else:
            self._waiting[job] = None
        return job

    def cancel(self, job: Job) -> None:
        """Do not call `on_done`. Work that has begun keeps its thread until its end."""
        job.on_done = None
        if job in self._waiting:
            del self._waiting[job]
            job.ended()

    async def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """As `start`, for a task.

        Raises:
            Overloaded: `MAX_WAITING` requests are waiting already.
            DeadlineExceeded: the result was not there after `timeout_s`.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def resolve(outcome: Result | Exception) -> None:
            if future.done():  # the timeout passed in the same turn
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        if timeout_s <= 0:
            raise DeadlineExceeded("not decoded in time")
        job = self.start(work, resolve)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as exc:
            raise DeadlineExceeded("not decoded in time") from exc
        finally:
            self.cancel(job)

    def _run(self, job: Job) -> None:
        self._free -= 1
        loop = asyncio.get_running_loop()
        self._executor.submit(job.work).add_done_callback(
            lambda future: loop.call_soon_threadsafe(partial(self._end, job, future))
        )

    def _end(self, job: Job, future: Future[Any]) -> None:
        self._free += 1
        job.ended()
        while self._free and self._waiting:
            self._run(self._waiting.popitem(last=False)[0])
        if job.on_done is not None:
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            job.on_done(future.result() if error is None else error)
