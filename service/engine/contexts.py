"""The execution contexts of one model: a thread for each, a pool that hands out free ones.

A hung context, one that works at the same batch for too long, is reported by the pool.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from lenet.backend import BatchResult, Pending
from lenet.context import ExecutionContext
from lenet.errors import DeviceError
from lenet.nvtx import span
from lenet.pixels import Images, joined
from lenet.weightfile import WeightFile
from service.observe.metrics import LossReason

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""A context that takes longer to finish its batch and close hangs in its library."""

MakeContext: TypeAlias = Callable[[], ExecutionContext]
OnLost: TypeAlias = Callable[[LossReason, str], None]
"""Called on the event loop when the process cannot compute any more, with the reason in words."""

OnDone: TypeAlias = Callable[[BatchResult | Exception], None]
"""Called on the event loop with the result of a batch, or its error."""

T = TypeVar("T")

_Job: TypeAlias = tuple[Callable[[ExecutionContext], Any], Callable[[Any], None]]
"""Work for the context's thread, and what the event loop calls with its result or error."""


class Worker:
    """One thread and the context that `make_context` makes on it, on device number `device`.

    `context` is there once it is open, to be read only. `begun` and `done` count batches and other
    work; `opening_s` and `warm_up_s` are the times of the two halves of `open`.
    """

    context: ExecutionContext

    def __init__(self, make_context: MakeContext, name: str, device: int, on_lost: OnLost) -> None:
        self.name = name
        self.device = device
        self.begun = self.done = 0
        self.opening_s = self.warm_up_s = 0.0
        self._make_context = make_context
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()  # no launched batch is in flight
        self._idle.set()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
        self._opened: asyncio.Future[None] = self._loop.create_future()

    async def open(self) -> None:
        """Start the thread, make the context and warm it up."""
        self._thread.start()
        await self._opened

    def run(
        self, images: Sequence[Images], weights: WeightFile, on_done: OnDone
    ) -> BatchResult | None:
        """Start a batch, computed with `weights`, which this context validated.

        `images`: its parts, each uint8 (n, 28, 28).

        The event loop launches and polls where the device computes by itself; otherwise the batch
        runs on the context's thread.

        Returns: the result of a batch that was computed at once, of which `on_done` is not called.

        Raises:
            DeviceError: the batch cannot be started; `on_done` is not called.
        """
        context = self.context
        pending: BatchResult | Pending | None = None
        if context.weights is weights:
            try:
                pending = context.launch(images)
            except DeviceError as exc:
                self._report_loss(exc)
                raise
        if pending is None:
            self._jobs.put((partial(_run, images=images, weights=weights), on_done))
            return None
        if isinstance(pending, BatchResult):
            return pending
        assert self._idle.is_set(), "bug: two batches at once on one context"
        self.begun += 1
        self._idle.clear()
        self._loop.call_soon(self._poll, pending, on_done)
        return None

    def stage(self, weights: WeightFile) -> asyncio.Future[None]:
        """Validate `weights` between two batches; the served ones stay."""
        return self._do(lambda context: context.stage(weights))

    def replace_weights(self, weights: WeightFile) -> asyncio.Future[None]:
        """Switch the context to `weights` between two batches."""
        return self._do(lambda context: context.replace_weights(weights))

    async def close(self) -> None:
        """Close the context and end its thread; one that hangs or warms up is left behind."""
        if self._thread.ident is None:
            return  # not opened
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), CLOSE_TIMEOUT_S)
        if self._idle.is_set():
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            state = "hangs" if self._opened.done() else "is still warming up"
            _log.error("%s %s: not closed after %g s", self.name, state, CLOSE_TIMEOUT_S)

    def _poll(self, pending: Pending, on_done: OnDone) -> None:
        """Poll in every turn of the event loop until the batch is done."""
        outcome: BatchResult | Exception
        try:
            if not pending.done():
                self._loop.call_soon(self._poll, pending, on_done)
                return
            outcome = pending.result()
        except Exception as exc:  # noqa: BLE001 - the batch's answer: its callers get it
            self._report_loss(exc)
            outcome = exc
        self._idle.set()
        self.done += 1
        on_done(outcome)

    def _report_loss(self, error: Exception) -> None:
        if isinstance(error, DeviceError) and error.sticky:
            self._on_lost("sticky", f"{self.name}: {error}")

    def _do(self, work: Callable[[ExecutionContext], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((work, partial(_resolve, future)))
        return future

    def _drive(self) -> None:
        try:
            with ExitStack() as stack:
                try:
                    started = time.perf_counter()
                    context = stack.enter_context(self._make_context())
                    made = time.perf_counter()
                    context.warm_up()
                except Exception as exc:  # noqa: BLE001 - the thread's top: `open` raises it
                    self._post(partial(_resolve, self._opened), exc)
                    return
                self.opening_s, self.warm_up_s = made - started, time.perf_counter() - made
                self.context = context
                self._post(partial(_resolve, self._opened), None)
                self._work(context)
        except DeviceError as exc:
            _log.error("%s: its context cannot be closed: %s", self.name, exc)

    def _work(self, context: ExecutionContext) -> None:
        while (job := self._jobs.get()) is not None:
            work, deliver = job
            self.begun += 1
            try:
                outcome = work(context)
            except Exception as exc:  # noqa: BLE001 - the thread's top: callers get it
                self._post(self._report_loss, exc)
                outcome = exc
            self.done += 1
            self._post(deliver, outcome)

    def _post(self, callback: Callable[[Any], None], argument: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, argument)


@span("batch")
def _run(context: ExecutionContext, images: Sequence[Images], weights: WeightFile) -> BatchResult:
    if context.weights is not weights:
        context.replace_weights(weights)
    return context.run(joined(images))


def _resolve(future: asyncio.Future[T], outcome: T | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


HANG_CHECKS = 10
"""A worker that is at the same work in so many checks, spread over the hang timeout, is hung.

Not by a clock: in a process that was stopped for a while every worker would be late.
"""


class ContextPool:
    """Hands out `workers`, the least busy device first.

    The workers of one device are opened one after another. Until `close`, `on_lost` is called when
    one of them is at the same work for longer than `hang_timeout_s`.
    """

    def __init__(self, workers: Sequence[Worker], on_lost: OnLost, hang_timeout_s: float) -> None:
        self.workers = tuple(workers)
        self._on_lost = on_lost
        self._check_every_s = hang_timeout_s / HANG_CHECKS
        self._free: dict[int, list[Worker]] = {worker.device: [] for worker in workers}
        self._claims: dict[Worker, asyncio.Future[None]] = {}
        self._stalls: dict[Worker, tuple[int, int]] = {}  # at which work, in how many checks
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Open the workers; all are closed if one fails."""
        # Side by side: the warm-up of one device leaves the host time for others.
        opening = [asyncio.create_task(self._open(device)) for device in self._free]
        try:
            await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            await self.close()
            raise
        for worker in self.workers:
            self._free[worker.device].append(worker)
        self._check()

    async def close(self) -> None:
        """Close the workers; one that hangs is left behind."""
        if self._timer is not None:
            self._timer.cancel()
        # All at once: contexts of one device hang together, and each is waited for.
        await asyncio.gather(*(worker.close() for worker in self.workers))
        for free in self._free.values():
            free.clear()

    async def _open(self, device: int) -> None:
        for worker in self.workers:
            if worker.device == device:
                await worker.open()

    def _check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._check_every_s, self._check)
        for worker in self.workers:
            begun = worker.begun
            work, checks = self._stalls.get(worker, (0, 0))
            checks = checks + 1 if begun == work and worker.done < begun else 0
            self._stalls[worker] = begun, checks
            if checks == HANG_CHECKS:
                timeout_s = self._check_every_s * HANG_CHECKS
                story = f"{worker.name} has been at the same work for {timeout_s:g} s"
                self._on_lost("hang", story)

    @property
    def busy(self) -> int:
        """Workers with a batch in flight, or claimed."""
        return len(self.workers) - sum(map(len, self._free.values()))

    def acquire(self) -> Worker | None:
        """A free worker of the least busy device, or None.

        The one used last, since its caches are warm; the first device where several are as busy.
        """
        free = max(self._free.values(), key=len)
        return free.pop() if free else None

    def release(self, worker: Worker) -> None:
        """Give a worker back after its batch."""
        free = self._free[worker.device]
        assert worker not in free, "bug: a worker was released twice"
        claim = self._claims.pop(worker, None)
        if claim is None or claim.done():  # done: the claim was given up
            free.append(worker)
        else:
            claim.set_result(None)

    @asynccontextmanager
    async def claimed(self, worker: Worker) -> AsyncIterator[None]:
        """Reserve `worker` from the end of its batch to the end of the block."""
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

    def golden_error(self) -> float:
        """Largest deviation of a context from the golden logits."""
        return max(worker.context.golden_error for worker in self.workers)

    def start_s(self) -> tuple[float, float]:
        """Seconds that opening the contexts and warming them up took, on the slowest device."""
        opening_s = dict.fromkeys(self._free, 0.0)
        warm_up_s = dict.fromkeys(self._free, 0.0)
        for worker in self.workers:
            opening_s[worker.device] += worker.opening_s
            warm_up_s[worker.device] += worker.warm_up_s
        return max(opening_s.values()), max(warm_up_s.values())


class BusyPoll:
    """Keeps the running event loop turning until `seconds` after the last `extend`.

    The next request often follows the last answer, and a core that went to sleep takes tens of
    microseconds to wake.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._until_s = 0.0
        self._turning = False

    def extend(self) -> None:
        """Restart the time: a request was answered, and more may follow."""
        self._until_s = time.perf_counter() + self._seconds
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if time.perf_counter() < self._until_s:
            self._loop.call_soon(self._turn)
        else:
            self._turning = False
