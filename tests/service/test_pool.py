"""The pool on real threads, with contexts that note who drives them."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from lenet.context import ContextStatistics
from service.pool import BatchResult, ContextPool, Worker

LONG_S = 20.0
"""How long a test may hang before it fails; nothing waits for it when all is well."""


class FakeContext:
    """Answers with the number of its batch; fails where it is told to."""

    def __init__(self, stage: Stage) -> None:
        self.theatre = stage
        self.number = len(stage.made)
        self.threads = [threading.get_ident()]
        self.closed = False
        self.statistics = ContextStatistics()
        self.weights = "served"
        stage.made.append(self)

    def note(self) -> None:
        self.threads.append(threading.get_ident())

    def warm_up(self) -> None:
        self.note()
        assert self.number == 0 or len(self.theatre.made[self.number - 1].threads) >= 2, (
            "one by one"
        )
        if self.number == self.theatre.warm_up_fails_at:
            raise ValueError(f"context {self.number} has the wrong weights")

    def run(self, images: np.ndarray) -> np.ndarray:
        self.note()
        self.theatre.running.set()
        assert self.theatre.may_finish.wait(LONG_S)
        if images[0, 0, 0] == 13:
            raise ZeroDivisionError("unlucky")
        self.statistics.rows += len(images)
        return np.full((len(images), 10), images[0, 0, 0], np.float32)

    def stage(self, weights: str) -> None:
        self.note()
        if weights == "wrong":
            raise ValueError("these are the wrong weights")

    def replace_weights(self, weights: str) -> None:
        self.note()
        self.weights = weights

    def __enter__(self) -> FakeContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.note()
        self.closed = True


class Stage:
    def __init__(self) -> None:
        self.made: list[FakeContext] = []
        self.attempts = 0
        self.make_fails_at = self.warm_up_fails_at = -1
        self.running = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()

    def make_context(self) -> FakeContext:
        self.attempts += 1
        if self.attempts - 1 == self.make_fails_at:
            raise MemoryError("no context any more")
        return FakeContext(self)

    def pool(self, size: int) -> ContextPool:
        return ContextPool(self.make_context, size, "puppet")


@pytest.fixture
def stage():
    return Stage()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("puppet-")]


def batch(value: int, rows: int = 1) -> np.ndarray:
    return np.full((rows, 28, 28), value, np.uint8)


async def test_each_context_lives_on_one_thread_when_made_driven_and_closed(stage):
    async with stage.pool(3) as pool:
        assert sorted(threads()) == ["puppet-0", "puppet-1", "puppet-2"]
        workers = [pool.acquire() for _ in range(3)]
        results = await asyncio.gather(
            *(worker.run(batch(number + 1, 2), "served") for number, worker in enumerate(workers))
        )
        for number, result in enumerate(results):
            assert isinstance(result, BatchResult)
            np.testing.assert_array_equal(result.probabilities, np.full((2, 10), number + 1))
            assert 0 <= result.compute_s < LONG_S
    assert threads() == []
    used = [set(context.threads) for context in stage.made]
    assert [len(context.threads) for context in stage.made] == [4, 4, 4]
    assert all(len(idents) == 1 for idents in used)
    assert len(set.union(*used)) == 3
    assert threading.get_ident() not in set.union(*used)
    assert all(context.closed for context in stage.made)


async def test_workers_are_counted_when_they_are_taken_and_given_back(stage):
    async with stage.pool(2) as pool:
        assert pool.busy == 0
        first, second = pool.acquire(), pool.acquire()
        assert first is not second
        assert pool.acquire() is None
        assert pool.busy == 2
        pool.release(first)
        assert pool.busy == 1
        with pytest.raises(AssertionError, match="bug: a worker was released twice"):
            pool.release(first)
        pool.release(second)
        assert pool.acquire() is second, "the one used last, its caches are warm"
    assert pool.busy == 0
    assert pool.acquire() is None


async def test_the_earlier_contexts_are_closed_when_one_cannot_be_made(stage):
    stage.make_fails_at = 2
    with pytest.raises(MemoryError, match="no context any more"):
        async with stage.pool(4):
            pass
    assert stage.attempts == 3
    assert [context.closed for context in stage.made] == [True, True]
    assert threads() == []


async def test_every_context_is_closed_when_one_fails_its_warm_up(stage):
    stage.warm_up_fails_at = 1
    pool = stage.pool(3)
    with pytest.raises(ValueError, match="context 1 has the wrong weights"):
        await pool.__aenter__()
    assert [context.closed for context in stage.made] == [True, True]
    assert threads() == []
    assert pool.acquire() is None


async def test_the_error_reaches_its_future_and_the_worker_lives_when_a_batch_fails(stage):
    async with stage.pool(1) as pool:
        worker = pool.acquire()
        with pytest.raises(ZeroDivisionError, match="unlucky"):
            await worker.run(batch(13), "served")
        assert (await worker.run(batch(5), "served")).probabilities[0, 0] == 5


async def test_a_batch_is_computed_with_its_weights_when_the_context_rests_on_others(stage):
    async with stage.pool(1) as pool:
        worker = pool.acquire()
        (context,) = stage.made
        for weights, replaced in (("served", 0), ("new", 1), ("new", 1), ("served", 2)):
            await worker.run(batch(1), weights)
            assert context.weights == weights
            # Made, warmed up; then one run for each batch and one note for each replacement.
            assert len(context.threads) == 2 + int(context.statistics.rows) + replaced


async def test_weights_are_staged_and_replaced_on_the_contexts_thread_in_the_order_asked(stage):
    stage.may_finish.clear()
    async with stage.pool(1) as pool:
        worker = pool.acquire()
        (context,) = stage.made
        jobs = [worker.run(batch(1), "served"), worker.stage("new"), worker.replace_weights("new")]
        assert stage.running.wait(LONG_S)
        assert context.weights == "served"
        stage.may_finish.set()
        await asyncio.gather(*jobs)
        assert context.weights == "new"
        with pytest.raises(ValueError, match="the wrong weights"):
            await worker.stage("wrong")
        assert (await worker.run(batch(5), "new")).probabilities[0, 0] == 5
    assert set(context.threads) == {context.threads[0]}


async def test_a_free_worker_is_taken_at_once_and_no_batch_gets_it(stage):
    async with stage.pool(2) as pool:
        first, second = pool.workers
        async with pool.taken(first):
            assert pool.busy == 1
            assert pool.acquire() is second
            assert pool.acquire() is None
            pool.release(second)
        assert pool.busy == 0


async def test_a_busy_worker_is_taken_after_its_batch_and_before_any_other(stage):
    async with stage.pool(1) as pool:
        worker = pool.acquire()
        inside, may_leave = asyncio.Event(), asyncio.Event()

        async def take():
            async with pool.taken(worker):
                inside.set()
                await may_leave.wait()

        taking = asyncio.create_task(take())
        await asyncio.sleep(0)
        assert not inside.is_set()
        pool.release(worker)
        assert pool.acquire() is None, "it is promised"
        await inside.wait()
        may_leave.set()
        await taking
        assert pool.acquire() is worker


@pytest.mark.parametrize("released", [False, True])
async def test_a_worker_is_free_again_when_whoever_waited_for_it_gave_up(stage, released):
    async with stage.pool(1) as pool:
        worker = pool.acquire()

        async def take():
            async with pool.taken(worker):
                raise AssertionError

        taking = asyncio.create_task(take())
        await asyncio.sleep(0)
        if released:
            pool.release(worker)
        taking.cancel()
        if not released:
            pool.release(worker)
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert pool.acquire() is worker
        assert not pool._claims


async def test_the_loop_runs_on_when_a_batch_is_being_computed(stage):
    stage.may_finish.clear()
    async with stage.pool(1) as pool:
        future = pool.acquire().run(batch(1), "served")
        assert stage.running.wait(LONG_S)
        await asyncio.sleep(0)
        assert not future.done()
        stage.may_finish.set()
        assert (await future).probabilities[0, 0] == 1


async def test_a_running_batch_is_finished_when_the_pool_closes(stage):
    stage.may_finish.clear()
    pool = await stage.pool(1).__aenter__()
    future = pool.acquire().run(batch(1), "served")
    assert stage.running.wait(LONG_S)
    closing = asyncio.ensure_future(pool.__aexit__())
    await asyncio.sleep(0)
    assert not closing.done()
    stage.may_finish.set()
    await closing
    assert future.done()
    assert future.result().probabilities[0, 0] == 1
    assert stage.made[0].closed


async def test_the_pool_closes_without_a_context_that_hangs(stage, monkeypatch, caplog):
    monkeypatch.setattr("service.pool.CLOSE_TIMEOUT_S", 0.05)
    async with stage.pool(2) as pool:
        stage.may_finish.clear()
        hung = pool.acquire()
        hung.run(batch(1), "served").cancel()
        assert stage.running.wait(LONG_S)
    (record,) = caplog.records
    assert record.message == f"{hung._thread.name} hangs: not closed after 0.05 s"
    assert hung._thread.daemon, "the process can end without it"
    assert sorted(context.closed for context in stage.made) == [False, True]
    stage.may_finish.set()
    hung._thread.join(LONG_S)
    assert threads() == []


async def test_nothing_happens_when_a_batch_ends_that_nobody_waits_for(stage):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    stage.may_finish.clear()
    async with stage.pool(1) as pool:
        worker = pool.acquire()
        forgotten = [worker.run(batch(1), "served"), worker.run(batch(13), "served")]
        for future in forgotten:
            future.cancel()
        stage.may_finish.set()
        assert (await worker.run(batch(2), "served")).probabilities[0, 0] == 2
    assert all(future.cancelled() for future in forgotten)
    assert complaints == []


async def test_the_warming_context_is_closed_when_the_start_is_cancelled(stage):
    warming, may_warm = threading.Event(), threading.Event()

    class Slow(FakeContext):
        def warm_up(self) -> None:
            warming.set()
            assert may_warm.wait(LONG_S)

    pool = ContextPool(lambda: Slow(stage), 2, "puppet")
    start = asyncio.ensure_future(pool.__aenter__())
    await asyncio.to_thread(warming.wait, LONG_S)
    start.cancel()
    may_warm.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [context.closed for context in stage.made] == [True]
    assert threads() == []


async def test_the_statistics_are_the_contexts_own_when_the_pool_is_asked(stage):
    async with stage.pool(2) as pool:
        await pool.acquire().run(batch(1, 7), "served")
        assert sorted(statistics.rows for statistics in pool.statistics()) == [0, 7]
        assert {id(context.statistics) for context in stage.made} == {
            id(statistics) for statistics in pool.statistics()
        }


def test_the_thread_ends_in_peace_when_its_loop_is_gone(stage):
    stage.may_finish.clear()

    async def start() -> Worker:
        worker = Worker(stage.make_context, "puppet-orphan")
        await worker.ready
        worker.run(batch(1), "served")
        worker._jobs.put(None)
        return worker

    worker = asyncio.run(start())
    stage.may_finish.set()
    worker._thread.join(LONG_S)
    assert not worker._thread.is_alive()
    assert stage.made[0].closed
