"""The pooled contexts: N threads on each device, handed out one by one.

It spreads batches over devices and looks for threads that do not come back. It refuses to queue
batches: `acquire` gives a free worker or none, and one batch at a time runs on a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from lenet.context_statistics import ContextStatistics
from service.worker import MakeContext, OnLost, Worker

HANG_LOOKS = 10
"""A thread hangs that is seen at the same work this often, spread over the time it may take.

Not by a clock: a process that was stopped for a while and goes on would find all its threads late.
"""


class ContextPool:
    """`size` workers on each device over contexts made by `makers`, one a device.

    Use it as an async context manager: entering warms the contexts, those of one device one after
    another, leaving closes them. In between `on_lost` is called when a device is lost, or when
    anything on a context takes longer than `hang_timeout_s`.
    """

    def __init__(
        self,
        makers: Sequence[MakeContext],
        size: int,
        name: str,
        on_lost: OnLost,
        hang_timeout_s: float,
    ) -> None:
        self._makers = makers
        self._size = size
        self._name = name
        self._on_lost = on_lost
        self._look_every_s = hang_timeout_s / HANG_LOOKS
        self._workers: list[Worker] = []
        self._free: list[list[Worker]] = [[] for _ in makers]  # by device
        self._claims: dict[Worker, asyncio.Future[None]] = {}
        self._seen: dict[Worker, tuple[int, int]] = {}  # at which work, how often
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        # Side by side: what a device does in its warm-up leaves the host time for others.
        opening = [asyncio.create_task(self._open(device)) for device in range(len(self._makers))]
        try:
            await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            await self.__aexit__()
            raise
        for worker in self._workers:
            self._free[worker.device].append(worker)
        self._watch()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # All at once: contexts of one device hang together, and each is waited for.
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers, self._free = [], [[] for _ in self._makers]

    async def _open(self, device: int) -> None:
        for number in range(self._size):
            name = f"{self._name}-{device * self._size + number}"
            worker = Worker(self._makers[device], name, device, self._on_lost)
            self._workers.append(worker)
            await worker.ready

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_every_s, self._watch)
        self._look()

    def _look(self) -> None:
        for worker in self._workers:
            begun = worker.begun
            work, times = self._seen.get(worker, (0, 0))
            times = times + 1 if begun == work and worker.done < begun else 0
            self._seen[worker] = begun, times
            if times == HANG_LOOKS:
                took_s = self._look_every_s * HANG_LOOKS
                self._on_lost("hang", f"{worker.name} has been at the same work for {took_s:g} s")

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them, free or not."""
        return tuple(self._workers)

    @property
    def busy(self) -> int:
        """Contexts with a batch in flight, or taken."""
        return len(self._workers) - sum(map(len, self._free))

    def acquire(self) -> Worker | None:
        """A free worker of the least busy device, or None.

        The one used last, since its caches are warm; the first device where several are as busy.
        """
        free = max(self._free, key=len)
        return free.pop() if free else None

    def release(self, worker: Worker) -> None:
        """Give a worker back after its batch."""
        free = self._free[worker.device]
        assert worker not in free, "bug: a worker was released twice"
        claim = self._claims.pop(worker, None)
        if claim is None or claim.done():  # done: whoever claimed it gave up
            free.append(worker)
        else:
            claim.set_result(None)

    @asynccontextmanager
    async def taken(self, worker: Worker) -> AsyncIterator[None]:
        """`worker` as soon as its batch is done, and until the block ends, for the caller alone."""
        assert worker not in self._claims, "bug: a worker is claimed twice"
        claim: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if worker in self._free[worker.device]:
            self._free[worker.device].remove(worker)
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

    def start_s(self) -> tuple[float, float]:
        """Seconds that opening the contexts and warming them up took, on the slowest device."""

        def slowest(seconds: Callable[[Worker], float]) -> float:
            of_devices = [0.0 for _ in self._makers]
            for worker in self._workers:
                of_devices[worker.device] += seconds(worker)
            return max(of_devices)

        return slowest(lambda worker: worker.opening_s), slowest(lambda worker: worker.warm_up_s)
