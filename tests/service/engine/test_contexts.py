"""The pool on real threads, with contexts that note which thread drives them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenet.backend import BatchResult
from lenet.errors import DeviceError, OutOfDeviceMemory
from service.engine import contexts
from service.engine.contexts import HANG_CHECKS, BusyPoll, ContextPool, Worker
from tests.service_process import PATIENCE_S


class FakeContext:
    """Answers with the first pixel of its batch; fails where the stage says so."""

    def __init__(self, stage: Stage, device: int) -> None:
        self.stage_ = stage
        self.device = device
        self.number = len(stage.made)
        self.threads = [threading.get_ident()]
        self.closed = False
        self.weights = "served"
        stage.made.append(self)

    def called(self, name: str) -> None:
        self.threads.append(threading.get_ident())
        if (error := self.stage_.fails.pop((name, self.number), None)) is not None:
            raise error

    def warm_up(self) -> None:
        beside = [made for made in self.stage_.made if made.device == self.device]
        assert all(len(made.threads) >= 2 for made in beside if made is not self), "one by one"
        self.called("warm_up")

    def run(self, images: np.ndarray) -> BatchResult:
        self.stage_.running.set()
        assert self.stage_.may_finish.wait(PATIENCE_S)
        self.called("run")
        return self.result(images)

    def result(self, images: np.ndarray) -> BatchResult:
        probabilities = np.full((len(images), 10), images[0, 0, 0], np.float32)
        return BatchResult(probabilities, 8, True, 0.25)

    def launch(self, parts: list[np.ndarray]) -> FakePending | None:
        """None as on a CPU, where a batch runs on the context's thread, unless the stage launches.

        Called, as what it returns, on the event loop's thread.
        """
        if not self.stage_.launches:
            return None
        self.stage_.launch_called("launch")
        return FakePending(self, np.concatenate(parts), time.monotonic() + PATIENCE_S)

    def stage(self, weights: str) -> None:
        self.called("stage")

    def replace_weights(self, weights: str) -> None:
        self.called("replace_weights")
        self.weights = weights

    def __enter__(self) -> FakeContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.called("close")
        self.closed = True


@dataclass
class FakePending:
    """A batch on a device that computes by itself."""

    context: FakeContext
    images: np.ndarray
    until_s: float

    def done(self) -> bool:
        assert time.monotonic() < self.until_s, "nobody lets it finish"
        self.context.stage_.launch_called("done")
        return self.context.stage_.may_finish.is_set()

    def result(self) -> BatchResult:
        self.context.stage_.launch_called("result")
        return self.context.result(self.images)


class Stage:
    def __init__(self) -> None:
        self.launches = False
        self.launched: list[str] = []  # calls for launched batches
        self.fails: dict[object, Exception] = {}  # once, by call or by (call, number of context)
        self.made: list[FakeContext] = []
        self.make_fails_at = -1
        self.running = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.losses: list[tuple[str, str]] = []
        self.main = threading.get_ident()

    def make_context(self, device: int) -> FakeContext:
        if len(self.made) == self.make_fails_at:
            raise MemoryError("no context any more")
        return FakeContext(self, device)

    def launch_called(self, name: str) -> None:
        assert threading.get_ident() == self.main
        self.launched.append(name)
        if (error := self.fails.pop(name, None)) is not None:
            raise error

    def on_lost(self, reason: str, story: str) -> None:
        self.losses.append((reason, story))

    def pool(self, size: int, devices: int = 1, hang_timeout_s: float = PATIENCE_S) -> ContextPool:
        workers = [
            Worker(
                partial(self.make_context, device),
                f"fake-{device * size + number}",
                device,
                self.on_lost,
            )
            for device in range(devices)
            for number in range(size)
        ]
        return ContextPool(workers, self.on_lost, hang_timeout_s)


@asynccontextmanager
async def opened(pool: ContextPool) -> AsyncIterator[ContextPool]:
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def stage():
    return Stage()


@pytest.fixture(params=["thread", "launch"])
def either(request, stage):
    """The stage, whose batches run on the context's thread or are launched by the event loop."""
    stage.launches = request.param == "launch"
    return stage


@pytest.fixture(autouse=True)
async def complaints():
    """Fails if anything reaches the event loop's exception handler."""
    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    yield found
    assert found == []


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fake-")]


def start(worker: Worker, value: int, weights: str = "served"):
    """A future of the batch's result."""
    future = asyncio.get_running_loop().create_future()

    def on_done(outcome):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    worker.run([np.full((1, 28, 28), value, np.uint8)], weights, on_done)
    return future


async def value(worker: Worker, *arguments: object) -> float:
    return (await asyncio.wait_for(start(worker, *arguments), PATIENCE_S)).probabilities[0, 0]


# The pool


class FakeWorker:
    """A fake worker, with the attributes that the pool uses."""

    name = "fake-0"

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.begun = self.done = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def work(self, seconds: float) -> None:
        self.begun += 1
        await asyncio.sleep(seconds)
        self.done += 1


@given(size=st.integers(1, 3), devices=st.integers(1, 4), data=st.data())
def test_no_device_gets_a_second_batch_while_another_is_idle(run_virtually, size, devices, data):
    async def main(loop):
        workers = [FakeWorker(device) for device in range(devices) for _ in range(size)]
        async with opened(ContextPool(workers, lambda *_: None, PATIENCE_S)) as pool:
            taken = []
            for _ in range(data.draw(st.integers(1, 20))):
                if taken and data.draw(st.booleans()):
                    pool.release(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
                    continue
                before = [sum(one.device == device for one in taken) for device in range(devices)]
                worker = pool.acquire()
                if worker is None:
                    assert len(taken) == devices * size
                else:
                    assert worker not in taken
                    assert before[worker.device] == min(before)
                    taken.append(worker)
                assert pool.busy == len(taken)

    run_virtually(main)


@pytest.mark.parametrize("released", [False, True])
async def test_a_worker_is_free_again_when_whoever_waited_for_it_gave_up(stage, released):
    async with opened(stage.pool(1)) as pool:
        worker = pool.acquire()

        async def claim():
            async with pool.claimed(worker):
                raise AssertionError

        claiming = asyncio.create_task(claim())
        await asyncio.sleep(0)
        if released:
            pool.release(worker)
        claiming.cancel()
        if not released:
            pool.release(worker)
        with pytest.raises(asyncio.CancelledError):
            await claiming
        assert pool.acquire() is worker
        pool.release(worker)
        async with pool.claimed(worker):
            assert pool.busy == 1


# Opening and closing


async def test_devices_are_warmed_side_by_side_and_one_devices_contexts_one_by_one(
    stage, monkeypatch
):
    both = threading.Barrier(2)
    warm_up = FakeContext.warm_up

    def meet(context):
        both.wait(PATIENCE_S)
        warm_up(context)

    monkeypatch.setattr(FakeContext, "warm_up", meet)
    async with opened(stage.pool(2, devices=2)) as pool:
        assert [worker.name for worker in pool.workers] == [f"fake-{n}" for n in range(4)]
        opening_s, warm_up_s = pool.start_s()
        assert 0 <= opening_s < PATIENCE_S
        of_device = [0.0, 0.0]
        for worker in pool.workers:
            of_device[worker.device] += worker.warm_up_s
        assert 0 < warm_up_s == max(of_device)


async def test_the_other_devices_contexts_are_closed_when_one_fails_its_warm_up(stage, monkeypatch):
    def fail(context):
        context.called("warm_up")
        if context.device == 1:
            raise ValueError("this GPU is the wrong one")

    monkeypatch.setattr(FakeContext, "warm_up", fail)
    pool = stage.pool(50, devices=2)
    with pytest.raises(ValueError, match="this GPU is the wrong one"):
        await pool.open()
    assert len(stage.made) < 100
    assert all(context.closed for context in stage.made)
    assert threads() == []
    assert pool.acquire() is None


# Batches


@pytest.mark.parametrize(
    ("launches", "where"),
    [(False, ("run", 0)), (True, "launch"), (True, "done"), (True, "result")],
)
@pytest.mark.parametrize(
    ("error", "losses"),
    [
        (DeviceError("illegal address", sticky=True), [("sticky", "fake-0: illegal address")]),
        (OutOfDeviceMemory("no room for this"), []),
        (ZeroDivisionError("unlucky"), []),
    ],
)
async def test_the_error_of_a_batch_is_its_callers_and_the_worker_works_on(
    stage, launches, where, error, losses
):
    stage.launches = launches
    stage.fails[where] = error
    async with opened(stage.pool(1)) as pool:
        worker = pool.acquire()
        with pytest.raises(type(error)) as caught:
            await value(worker, 1)
        assert caught.value is error
        assert stage.losses == losses, "reported before its caller is answered"
        assert await value(worker, 5) == 5
        assert worker.begun == worker.done, "no work that could be taken for a hang"
    assert stage.losses == losses


@pytest.mark.parametrize("job", ["stage", "replace_weights"])
async def test_a_device_that_is_lost_beside_a_batch_is_reported_before_its_caller(stage, job):
    stage.fails[job, 0] = DeviceError("illegal address", sticky=True)
    async with opened(stage.pool(1)) as pool:
        with pytest.raises(DeviceError, match="illegal address"):
            await getattr(pool.acquire(), job)("new")
        assert stage.losses == [("sticky", "fake-0: illegal address")]


async def test_a_batch_is_computed_with_its_weights_when_the_context_rests_on_others(either):
    async with opened(either.pool(1)) as pool:
        worker = pool.acquire()
        (context,) = either.made
        for weights in ("served", "new", "new", "served"):
            assert await value(worker, 1, weights) == 1
            assert context.weights == weights
        assert len(set(context.threads)) == 1


async def test_the_loop_runs_on_while_a_batch_is_computed_and_polls_once_a_turn(either):
    either.may_finish.clear()
    async with opened(either.pool(1)) as pool:
        worker = pool.acquire()
        future = start(worker, 1)
        if not either.launches:
            assert either.running.wait(PATIENCE_S)
        for turns in range(1, 6):
            await asyncio.sleep(0)
            assert not future.done()
            assert (worker.begun, worker.done) == (1, 0)
            if either.launches:
                assert either.launched == ["launch"] + ["done"] * turns
        if either.launches:
            with pytest.raises(AssertionError, match="bug: two batches at once on one context"):
                start(worker, 2)
        either.may_finish.set()
        assert (await future).probabilities[0, 0] == 1
        assert worker.done == 1


# Hung workers


@given(
    jobs=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 9.99)), max_size=8),
    last_s=st.floats(11.01, 40),
)
def test_only_a_batch_that_takes_longer_than_it_may_is_a_hang_and_it_is_one_once(
    run_virtually, jobs, last_s
):
    async def main(loop):
        worker, lost_s = FakeWorker(), []
        async with opened(ContextPool([worker], lambda *_: lost_s.append(loop.time()), 10.0)):
            for rest_s, work_s in jobs:
                await asyncio.sleep(rest_s)
                await worker.work(work_s)
            assert not lost_s
            began_s = loop.time()
            await worker.work(last_s)
        assert len(lost_s) == 1
        assert 10 <= lost_s[0] - began_s <= 10 * (1 + 1 / HANG_CHECKS)
        assert loop.pending_timers() == []

    run_virtually(main)


def test_a_process_that_was_stopped_for_long_takes_no_worker_for_hung(run_virtually):
    async def main(loop):
        worker, losses = FakeWorker(), []
        async with opened(ContextPool([worker], lambda *story: losses.append(story), 10.0)):
            working = loop.create_task(worker.work(9.5))
            await asyncio.sleep(5)
            loop.advance(3600)  # SIGSTOP, and an hour later SIGCONT
            await asyncio.sleep(3)
            working.cancel()
            worker.done += 1
        assert not losses

    run_virtually(main)


# Busy polling

TURN_S = 1e-5
STAY_S = 20.5 * TURN_S


class Clock:
    """Goes on by `TURN_S` whenever it is read, which `BusyPoll` does once a turn."""

    def __init__(self) -> None:
        self.reads = 0

    def perf_counter(self) -> float:
        self.reads += 1
        return 50.0 + self.reads * TURN_S


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(contexts, "time", clock)
    return clock


@pytest.mark.parametrize("answers", [1, 2, 5])
def test_the_loop_turns_until_the_time_after_the_last_answer_and_then_rests(
    run_virtually, clock, answers
):
    rests = []

    async def main(loop):
        loop.before_jump = lambda: rests.append(clock.reads)
        busy_poll = BusyPoll(STAY_S)
        for _ in range(2):  # it wakes again
            for _ in range(answers):
                busy_poll.extend()
                last = clock.reads
                for _ in range(3):
                    await asyncio.sleep(0)
            assert clock.reads == last + 3, "once a turn, however many answers"
            await asyncio.sleep(1)
            assert rests.pop() == last + 21, "the first read that is past the time"
            assert not rests

    run_virtually(main)
