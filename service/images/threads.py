"""Threads for decoding that would block the event loop for long: pictures and large bodies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

from service.errors import DeadlineExceeded, Overloaded

MAX_WAITING = 1024
"""Requests that wait for a thread; further ones are rejected as `Overloaded`."""

Result = TypeVar("Result")


class DecodingThreads:
    """A bounded number of decoding threads, shared by all transports of one event loop.

    A context manager; leaving it waits for work that has begun, a second at most.
    """

    def __init__(self, count: int | None = None) -> None:
        count = count or min(8, max(2, os.cpu_count() or 1))
        self._free = asyncio.Semaphore(count)
        self._executor = ThreadPoolExecutor(count, "decode")
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()

    async def run(
        self,
        work: Callable[[], Result],
        timeout_s: float,
        *,
        ended: Callable[[], None] = lambda: None,
    ) -> Result:
        """The result of `work` on one of the threads.

        After the timeout, or when the caller is cancelled, work that waits for a thread is dropped
        and work that has begun keeps its thread until its end. `ended` is called once, when `work`
        has ended or been dropped.

        Raises:
            Overloaded: `MAX_WAITING` requests are waiting already.
            DeadlineExceeded: the result was not there after `timeout_s`.
        """
        future: asyncio.Future[Result] | None = None
        self._waiting += 1
        try:
            if timeout_s <= 0:
                raise TimeoutError
            if self._waiting > MAX_WAITING:
                raise Overloaded("too many requests wait to be decoded", retry_after_s=1)
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
                future = asyncio.get_running_loop().run_in_executor(self._executor, work)
                future.add_done_callback(partial(self._end, ended))
                await asyncio.wait([future])  # which leaves the future alone on a cancellation
        except TimeoutError as exc:
            raise DeadlineExceeded("not decoded in time") from exc
        finally:
            self._waiting -= 1
            if future is None:
                ended()
        return future.result()

    def _end(self, ended: Callable[[], None], future: asyncio.Future[Result]) -> None:
        self._free.release()
        ended()
        if not future.cancelled():
            future.exception()  # retrieved here in case the caller has gone
