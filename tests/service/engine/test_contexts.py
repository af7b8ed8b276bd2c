"""The pool on real threads, with contexts that note who drives them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenet import backend
from lenet.errors import DeviceError, OutOfDeviceMemory
from service.engine.contexts import HANG_LOOKS, BatchResult, ContextPool, Worker

LONG_S = 20.0
"""How long a test may hang before it fails; nothing waits for it when all is well."""


class FakeContext:
    """Answers with the number of its batch; fails where it is told to."""

    def __init__(self, stage: Stage, device: int = 0) -> None:
        self.theatre = stage
        self.device = device
        self.number = len(stage.made)
        self.threads = [threading.get_ident()]
        self.closed = False
        self.rows = 0
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

    def run(self, images: np.ndarray) -> backend.BatchResult:
        self.note()
        self.theatre.running.set()
        assert self.theatre.may_finish.wait(LONG_S)
        if images[0, 0, 0] == 13:
            raise ZeroDivisionError("unlucky")
        self.rows += len(images)
        answers = np.full((len(images), 10), images[0, 0, 0], np.float32)
        return backend.BatchResult(answers, len(images), captured=False)

    def launch(self, images: np.ndarray) -> FakeLaunched | None:
        """As on a CPU where the stage says nothing else: a batch runs on the context's thread."""
        if not self.theatre.launches:
            return None
        self.theatre.called("launch")
        return FakeLaunched(self, images)

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


@dataclass
class FakeLaunched:
    """A batch on a device that computes by itself: all of eight rows, by a captured graph."""

    context: FakeContext
    images: np.ndarray
    until_s: float = field(default_factory=lambda: time.monotonic() + LONG_S)

    def done(self) -> bool:
        assert time.monotonic() < self.until_s, "nobody lets it finish"
        self.context.theatre.called("done")
        return self.context.theatre.may_finish.is_set()

    def result(self) -> backend.BatchResult:
        self.context.theatre.called("result")
        answers = np.full((len(self.images), 10), self.images[0, 0, 0], np.float32)
        return backend.BatchResult(answers, 8, captured=True, device_s=0.25)


class Stage:
    def __init__(self) -> None:
        self.launches = False
        self.calls: list[tuple[str, int]] = []  # of launched batches, each with its thread
        self.fails: dict[str, Exception] = {}  # at which of those calls, once
        self.made: list[FakeContext] = []
        self.attempts = 0
        self.make_fails_at = self.warm_up_fails_at = -1
        self.running = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.losses: list[tuple[str, ...]] = []

    def make_context(self, device: int = 0) -> FakeContext:
        self.attempts += 1
        if self.attempts - 1 == self.make_fails_at:
            raise MemoryError("no context any more")
        return FakeContext(self, device)

    def called(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))
        if name in self.fails:
            raise self.fails.pop(name)

    def on_lost(self, *story: str) -> None:
        self.losses.append(story)

    def pool(self, size: int, devices: int = 1, hang_timeout_s: float = LONG_S) -> ContextPool:
        makers = [partial(self.make_context, device) for device in range(devices)]
        return ContextPool(makers, size, "puppet", self.on_lost, hang_timeout_s)


@pytest.fixture
def stage():
    return Stage()


@pytest.fixture
def launching(stage):
    """The stage, with devices that compute by themselves."""
    stage.launches = True
    return stage


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


async def test_batches_spread_over_devices_before_two_share_one(stage):
    async with stage.pool(2, devices=3) as pool:
        workers = [pool.acquire() for _ in range(6)]
        assert [worker.device for worker in workers] == [0, 1, 2, 0, 1, 2]
        assert len(set(workers)) == 6
        assert pool.acquire() is None
        assert pool.busy == 6
        for worker in (workers[4], workers[3], workers[1]):
            pool.release(worker)
        assert pool.acquire() is workers[1], "the idle device's, and there the one used last"
        assert pool.acquire() is workers[3], "the first of those that are as busy"
        assert pool.acquire() is workers[4]


@given(size=st.integers(1, 3), devices=st.integers(1, 4), data=st.data())
def test_no_device_gets_a_second_batch_while_another_is_idle(size, devices, data):
    pool = ContextPool([lambda: None] * devices, size, "puppet", lambda *_: None, LONG_S)
    pool._workers = [Puppet(number // size) for number in range(devices * size)]
    pool._free = [pool._workers[first : first + size] for first in range(0, devices * size, size)]
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


async def test_devices_are_warmed_side_by_side_and_one_devices_contexts_one_by_one(stage):
    both = threading.Barrier(2)
    order = []

    class Meeting(FakeContext):
        def warm_up(self) -> None:
            both.wait(LONG_S)
            order.append(self.device)

    makers = [partial(Meeting, stage, device) for device in (0, 1)]
    async with ContextPool(makers, 2, "puppet", stage.on_lost, LONG_S) as pool:
        assert [worker.name for worker in sorted(pool.workers, key=lambda w: w.name)] == [
            f"puppet-{number}" for number in range(4)
        ]
        assert sorted(order[:2]) == sorted(order[2:]) == [0, 1]
        opening_s, warm_up_s = pool.start_s()
        assert 0 <= opening_s < LONG_S
        assert 0 < warm_up_s < LONG_S
        with_most = max(
            sum(worker.warm_up_s for worker in pool.workers if worker.device == device)
            for device in (0, 1)
        )
        assert warm_up_s == with_most


async def test_the_other_devices_contexts_are_closed_when_one_cannot_be_made(stage):
    made = []

    class Failing(FakeContext):
        def warm_up(self) -> None:
            made.append(self)
            if self.device == 1:
                raise ValueError("this GPU is the wrong one")

    makers = [partial(Failing, stage, device) for device in (0, 1)]
    with pytest.raises(ValueError, match="this GPU is the wrong one"):
        async with ContextPool(makers, 50, "puppet", stage.on_lost, LONG_S):
            pass
    assert len(made) < 100
    assert all(context.closed for context in stage.made)
    assert threads() == []


async def test_a_batch_tells_what_the_device_did_for_it_alone(stage):
    class Padding(FakeContext):
        def run(self, images: np.ndarray) -> np.ndarray:
            missed = len(images) == 3
            answers = np.zeros((len(images), 10), np.float32)
            return backend.BatchResult(answers, 8, not missed, None if missed else 0.25)

    async with ContextPool([lambda: Padding(stage)], 1, "puppet", stage.on_lost, LONG_S) as pool:
        worker = pool.acquire()
        found = [await worker.run(batch(1, rows), "served") for rows in (5, 8, 3)]
    assert [(one.device_s, one.padding_rows, one.graph_hit) for one in found] == [
        (0.25, 3, True),
        (0.25, 0, True),
        (None, 5, False),
    ]


async def test_a_device_is_reported_lost_before_its_caller_is_told(stage):
    lost = DeviceError("illegal address", sticky=True)
    told = []

    class Broken(FakeContext):
        def run(self, images: np.ndarray) -> np.ndarray:
            raise lost

        stage = replace_weights = run

    pool = ContextPool(
        [lambda: Broken(stage)], 1, "puppet", lambda *story: told.append(story), LONG_S
    )
    async with pool:
        worker = pool.acquire()
        jobs = (
            lambda: worker.run(batch(1), "served"),
            lambda: worker.stage("new"),
            lambda: worker.replace_weights("new"),
        )
        for number, job in enumerate(jobs, 1):
            future = job()
            future.add_done_callback(lambda _: told.append("caller"))
            with pytest.raises(DeviceError, match="illegal address"):
                await future
            assert told == [("sticky", "puppet-0: illegal address"), "caller"] * number


async def test_a_device_that_can_go_on_is_not_reported(stage):
    class Full(FakeContext):
        def run(self, images: np.ndarray) -> np.ndarray:
            raise OutOfDeviceMemory("no room for this")

    async with ContextPool([lambda: Full(stage)], 1, "puppet", stage.on_lost, LONG_S) as pool:
        with pytest.raises(OutOfDeviceMemory):
            await pool.acquire().run(batch(1), "served")
    assert not stage.losses


async def test_a_context_that_cannot_be_closed_is_one_line_in_the_log(stage, caplog):
    class Stuck(FakeContext):
        def __exit__(self, *_: object) -> None:
            raise DeviceError("the GPU is gone", sticky=True)

    async with ContextPool([lambda: Stuck(stage)], 1, "puppet", stage.on_lost, LONG_S):
        pass
    (record,) = caplog.records
    assert record.message == "puppet-0: its context cannot be closed: the GPU is gone"
    assert not stage.losses
    assert threads() == []


class Puppet:
    """What the pool sees of a worker."""

    name = "puppet-0"

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.begun = self.done = 0


class Watched:
    """A pool of one puppet, whose looks are at virtual times."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hang_timeout_s: float) -> None:
        self.worker = Puppet()
        self.lost_s: list[float] = []
        self.pool = ContextPool(
            [lambda: None], 1, "puppet", lambda *_: self.lost_s.append(loop.time()), hang_timeout_s
        )
        self.pool._workers = [self.worker]
        self.pool._watch()

    async def work(self, seconds: float) -> None:
        self.worker.begun += 1
        await asyncio.sleep(seconds)
        self.worker.done += 1

    def stop(self) -> None:
        self.pool._timer.cancel()


@given(
    jobs=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 9.99)), max_size=8),
    last_s=st.floats(11.01, 40),
)
def test_only_a_batch_that_takes_longer_than_it_may_is_a_hang_and_it_is_one_once(
    run_virtually, jobs, last_s
):
    async def main(loop):
        watched = Watched(loop, 10.0)
        for rest_s, work_s in jobs:
            await asyncio.sleep(rest_s)
            await watched.work(work_s)
        assert not watched.lost_s
        began_s = loop.time()
        await watched.work(last_s)
        watched.stop()
        (lost_s,) = watched.lost_s
        assert 10 <= lost_s - began_s <= 10 * (1 + 1 / HANG_LOOKS)

    run_virtually(main)


def test_a_process_that_was_stopped_for_long_takes_nobody_for_hung(run_virtually):
    async def main(loop):
        watched = Watched(loop, 10.0)
        working = loop.create_task(watched.work(9.5))
        await asyncio.sleep(5)
        loop._now_s += 3600  # SIGSTOP, and an hour later SIGCONT
        await asyncio.sleep(3)
        watched.worker.done += 1
        watched.stop()
        working.cancel()
        assert not watched.lost_s

    run_virtually(main)


async def test_the_story_of_a_hang_names_the_worker_and_the_time_it_had(stage):
    stage.may_finish.clear()
    async with stage.pool(2, hang_timeout_s=LONG_S) as pool:
        worker = pool.acquire()
        running = worker.run(batch(1), "served")
        assert stage.running.wait(LONG_S)
        for _ in range(HANG_LOOKS + 1):
            pool._look()
        assert stage.losses == [("hang", f"{worker.name} has been at the same work for 20 s")]
        stage.may_finish.set()
        await running


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
            assert len(context.threads) == 2 + context.rows + replaced


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
    monkeypatch.setattr("service.engine.contexts.CLOSE_TIMEOUT_S", 0.05)
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

    pool = ContextPool([lambda: Slow(stage)], 2, "puppet", stage.on_lost, LONG_S)
    start = asyncio.ensure_future(pool.__aenter__())
    await asyncio.to_thread(warming.wait, LONG_S)
    start.cancel()
    may_warm.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert [context.closed for context in stage.made] == [True]
    assert threads() == []


def test_the_thread_ends_in_peace_when_its_loop_is_gone(stage):
    stage.may_finish.clear()

    async def start() -> Worker:
        worker = Worker(stage.make_context, "puppet-orphan", 0, stage.on_lost)
        await worker.ready
        worker.run(batch(1), "served")
        worker._jobs.put(None)
        return worker

    worker = asyncio.run(start())
    stage.may_finish.set()
    worker._thread.join(LONG_S)
    assert not worker._thread.is_alive()
    assert stage.made[0].closed


async def test_the_event_loop_launches_and_collects_and_the_contexts_thread_stays_out(launching):
    async with launching.pool(1) as pool:
        worker = pool.acquire()
        found = [await worker.run(batch(rows, rows), "served") for rows in (5, 8)]
    assert launching.calls == [
        (name, threading.get_ident()) for name in ("launch", "done", "result") * 2
    ]
    assert len(launching.made[0].threads) == 3, "made, warmed up, closed"
    assert [one.probabilities.tolist() for one in found] == [[[5.0] * 10] * 5, [[8.0] * 10] * 8]
    assert [(one.device_s, one.padding_rows, one.graph_hit) for one in found] == [
        (0.25, 3, True),
        (0.25, 0, True),
    ]
    assert all(0 <= one.compute_s < LONG_S for one in found)


async def test_the_loop_looks_once_a_turn_while_a_launched_batch_is_not_done(launching):
    launching.may_finish.clear()
    async with launching.pool(1) as pool:
        worker = pool.acquire()
        future = worker.run(batch(1), "served")
        for turns in range(1, 6):
            await asyncio.sleep(0)
            assert [name for name, _ in launching.calls] == ["launch"] + ["done"] * turns
            assert not future.done()
            assert (worker.begun, worker.done) == (1, 0)
        with pytest.raises(AssertionError, match="bug: two batches at once on one context"):
            worker.run(batch(2), "served")
        launching.may_finish.set()
        assert (await future).probabilities[0, 0] == 1
        assert (worker.begun, worker.done) == (1, 1)


@pytest.mark.parametrize("where", ["launch", "done", "result"])
@pytest.mark.parametrize(
    ("error", "losses"),
    [
        (DeviceError("illegal address", sticky=True), [("sticky", "puppet-0: illegal address")]),
        (OutOfDeviceMemory("no room for this"), []),
        (ZeroDivisionError("unlucky"), []),
    ],
)
async def test_the_error_of_a_launched_batch_is_its_callers_and_the_worker_works_on(
    launching, where, error, losses
):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    launching.fails[where] = error
    async with launching.pool(1) as pool:
        worker = pool.acquire()
        with pytest.raises(type(error)) as caught:
            await asyncio.wait_for(worker.run(batch(1), "served"), LONG_S)
        assert caught.value is error
        assert launching.losses == losses, "told before its caller"
        assert worker.begun == worker.done, "no work that could be taken for a hang"
        assert (await worker.run(batch(5), "served")).probabilities[0, 0] == 5
    assert launching.losses == losses
    assert complaints == []


async def test_other_weights_go_by_the_contexts_thread_and_are_launched_once_it_has_them(launching):
    async with launching.pool(1) as pool:
        worker = pool.acquire()
        (context,) = launching.made
        assert (await worker.run(batch(1), "new")).probabilities[0, 0] == 1
        assert context.weights == "new"
        assert len(context.threads) == 4, "made, warmed up, replaced, run"
        assert launching.calls == []
        assert (await worker.run(batch(2), "new")).probabilities[0, 0] == 2
        assert launching.calls[0] == ("launch", threading.get_ident())
    assert len(set(context.threads)) == 1


async def test_a_launched_batch_that_never_ends_is_a_hang(launching):
    launching.may_finish.clear()
    async with launching.pool(1, hang_timeout_s=LONG_S) as pool:
        future = pool.acquire().run(batch(1), "served")
        for _ in range(HANG_LOOKS + 1):
            assert not launching.losses
            pool._look()
        assert launching.losses == [("hang", "puppet-0 has been at the same work for 20 s")]
        launching.may_finish.set()
        await future


async def test_a_close_waits_for_a_launched_batch_that_nobody_waits_for_any_more(launching):
    launching.may_finish.clear()
    async with launching.pool(1) as pool:
        pool.acquire().run(batch(1), "served").cancel()
        asyncio.get_running_loop().call_later(0.01, launching.may_finish.set)
    assert launching.made[0].closed


async def test_a_launched_batch_is_finished_when_the_pool_closes(launching):
    launching.may_finish.clear()
    pool = await launching.pool(1).__aenter__()
    future = pool.acquire().run(batch(1), "served")
    closing = asyncio.ensure_future(pool.__aexit__())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    assert not launching.made[0].closed
    launching.may_finish.set()
    await closing
    assert future.result().probabilities[0, 0] == 1
    assert launching.made[0].closed
    assert threads() == []


async def test_the_pool_closes_without_a_context_whose_launched_batch_never_ends(
    launching, monkeypatch, caplog
):
    monkeypatch.setattr("service.engine.contexts.CLOSE_TIMEOUT_S", 0.05)
    launching.may_finish.clear()
    async with launching.pool(2) as pool:
        hung = pool.acquire()
        future = hung.run(batch(1), "served")
    (record,) = caplog.records
    assert record.message == f"{hung.name} hangs: not closed after 0.05 s"
    assert threads() == [hung.name], "its context is not closed behind the device's back"
    launching.may_finish.set()
    await future
    await hung.close()
    assert threads() == []


async def test_nothing_happens_when_a_launched_batch_ends_that_nobody_waits_for(launching):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with launching.pool(1) as pool:
        worker = pool.acquire()
        for fails in ({}, {"result": ZeroDivisionError("unlucky")}):
            launching.fails = fails
            worker.run(batch(1), "served").cancel()
            await asyncio.sleep(0)
            assert worker.done == worker.begun
        assert (await worker.run(batch(2), "served")).probabilities[0, 0] == 2
    assert complaints == []
