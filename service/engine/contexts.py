"""An event loop that does not sleep at once: the next request often follows the last answer.

A core that goes to sleep takes tens of microseconds to wake. It refuses to run for longer than it
is told, so an idle service sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeAlias, TypeVar

from lenet import backend
from lenet.context import ExecutionContext
from lenet.errors import DeviceError
from lenet.nvtx import span
from lenet.pixels import Images, Probabilities
from lenet.weightfile import WeightFile
from service.metrics import LossReason


class BusyPoll:
    """Keeps the running event loop turning until `seconds` after the last `extend`."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._until_s = 0.0
        self._turning = False

    def extend(self) -> None:
        """Something was answered: more may follow."""
        self._until_s = time.perf_counter() + self._seconds
        if not self._turning and self._seconds:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if time.perf_counter() < self._until_s:
            self._loop.call_soon(self._turn)
        else:
            self._turning = False


_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""A context that takes longer to finish its batch and close hangs in its library."""

MakeContext: TypeAlias = Callable[[], ExecutionContext]
OnLost: TypeAlias = Callable[[LossReason, str], None]
"""Called on the event loop: the process cannot compute any more; why, in a closed set and words."""

T = TypeVar("T")

_Job: TypeAlias = tuple[Callable[[ExecutionContext], Any], asyncio.Future[Any]]


@dataclass(slots=True)
class BatchResult:
    """What a context made of one batch, and how long it took.

    `device_s` is what the device says of that, None where it was not asked.
    """

    probabilities: Probabilities
    compute_s: float
    device_s: float | None
    padding_rows: int
    graph_hit: bool


class Worker:
    """One thread and its context, on the device of number `device`.

    `begun` and `done` count what was taken on and finished, `opening_s` and `warm_up_s` say
    how long the two halves of its start took.
    """

    def __init__(self, make_context: MakeContext, name: str, device: int, on_lost: OnLost) -> None:
        self.device = device
        self.begun = self.done = 0
        self.opening_s = self.warm_up_s = 0.0
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.context: ExecutionContext | None = None
        self._landed = asyncio.Event()  # no batch that was launched is on its way
        self._landed.set()
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
        context = self.context
        assert context is not None, "bug: not warmed up"
        if context.weights is not weights:
            return self._do(partial(_run, images=images, weights=weights))
        started_s = time.perf_counter()
        try:
            launched = context.launch(images)
        except DeviceError as exc:
            if exc.sticky:
                self._on_lost(*self._loss(exc))
            raise
        if launched is None:
            return self._do(partial(_run, images=images, weights=weights))
        assert self._landed.is_set(), "bug: two batches at once on one context"
        self.begun += 1
        self._landed.clear()
        future: asyncio.Future[BatchResult] = self._loop.create_future()
        self._loop.call_soon(self._look, launched, len(images), started_s, future)
        return future

    def stage(self, weights: WeightFile) -> asyncio.Future[None]:
        """Prove `weights` between two batches; the served ones stay what they were."""
        return self._do(lambda context: context.stage(weights))

    def replace_weights(self, weights: WeightFile) -> asyncio.Future[None]:
        """Let the context rest on `weights`, between two batches."""
        return self._do(lambda context: context.replace_weights(weights))

    @property
    def name(self) -> str:
        """Of its thread."""
        return self._thread.name

    async def close(self) -> None:
        """Close the context on its thread and end the thread, or leave it behind if it hangs."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._landed.wait(), CLOSE_TIMEOUT_S)
        if self._landed.is_set():
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("%s hangs: not closed after %g s", self._thread.name, CLOSE_TIMEOUT_S)

    def _look(
        self,
        launched: backend.Pending,
        rows: int,
        started_s: float,
        future: asyncio.Future[BatchResult],
    ) -> None:
        """Look whether the batch is done, in every turn of the event loop until it is."""
        outcome: BatchResult | Exception
        try:
            if not launched.done():
                self._loop.call_soon(self._look, launched, rows, started_s, future)
                return
            outcome = _timed(launched.result(), rows, started_s)
        except Exception as exc:  # noqa: BLE001 - the batch's answer: callers get it
            if isinstance(exc, DeviceError) and exc.sticky:
                self._on_lost(*self._loss(exc))
            outcome = exc
        self._landed.set()
        self.done += 1
        _settle(future, outcome)

    def _loss(self, error: DeviceError) -> tuple[LossReason, str]:
        return "sticky", f"{self.name}: {error}"

    def _do(self, work: Callable[[ExecutionContext], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((work, future))
        return future

    def _drive(self) -> None:
        started = time.perf_counter()
        try:
            context = self._make_context()
        except Exception as exc:  # noqa: BLE001 - the context's thread: the error is for `start`
            self._tell(self.ready, exc)
            return
        self.opening_s = time.perf_counter() - started
        try:
            with context:
                self._work(context)
        except DeviceError as exc:
            _log.error("%s: its context cannot be closed: %s", self.name, exc)

    def _work(self, context: ExecutionContext) -> None:
        started = time.perf_counter()
        try:
            context.warm_up()
        except Exception as exc:  # noqa: BLE001 - the context's thread: the error is for `start`
            self._tell(self.ready, exc)
            return
        self.warm_up_s = time.perf_counter() - started
        self.context = context
        self._tell(self.ready, None)
        while (job := self._jobs.get()) is not None:
            work, future = job
            self.begun += 1
            try:
                outcome = work(context)
            except Exception as exc:  # noqa: BLE001 - the context's thread: callers get it
                if isinstance(exc, DeviceError) and exc.sticky:
                    self._call(self._on_lost, *self._loss(exc))
                self._tell(future, exc)
            else:
                self._tell(future, outcome)
            self.done += 1

    def _tell(self, future: asyncio.Future[T], outcome: T | Exception) -> None:
        self._call(_settle, future, outcome)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        # A loop that is gone has nobody left to tell.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)


@span("batch")
def _run(context: ExecutionContext, images: Images, weights: WeightFile) -> BatchResult:
    if context.weights is not weights:
        context.replace_weights(weights)
    started_s = time.perf_counter()
    return _timed(context.run(images), len(images), started_s)


def _timed(result: backend.BatchResult, rows: int, started_s: float) -> BatchResult:
    return BatchResult(
        result.probabilities,
        time.perf_counter() - started_s,
        result.device_s,
        result.computed_rows - rows,
        result.captured,
    )


def _settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


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

    def contexts(self) -> tuple[ExecutionContext, ...]:
        """Those that are warmed up."""
        return tuple(worker.context for worker in self._workers if worker.context is not None)

    def start_s(self) -> tuple[float, float]:
        """Seconds that opening the contexts and warming them up took, on the slowest device."""

        def slowest(seconds: Callable[[Worker], float]) -> float:
            of_devices = [0.0 for _ in self._makers]
            for worker in self._workers:
                of_devices[worker.device] += seconds(worker)
            return max(of_devices)

        return slowest(lambda worker: worker.opening_s), slowest(lambda worker: worker.warm_up_s)
