"""The batcher on virtual time over fake workers: by example, then in random scenarios."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lenet.backend import BatchResult
from service.engine.batcher import Batcher
from service.engine.contexts import ContextPool
from service.engine.deadlines import RESOLUTION_S
from service.engine.queue import BatchQueue
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    Overloaded,
    ServiceError,
    Unavailable,
)
from tests.tasks import Asked, Prediction, submit

FOREVER_S = 1e6
"""A caller that waits so long in virtual time waits for ever."""


@pytest.fixture(autouse=True, scope="module")
def checks_take_no_time():
    """Deadlines are on virtual time: the time of a check must not postpone the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.engine.deadlines.time", SimpleNamespace(perf_counter=lambda: 0.0))
        yield


class Boom(Exception):
    """The error of a fake worker."""


@dataclass(frozen=True)
class Act:
    """How a fake worker plays one batch: after `delay_s` it is ok, fails or answers too few rows.

    With `nan` its first row is not finite. `raise` fails at once, instead of starting the batch. A
    validation is ok or fails.
    """

    delay_s: float = 1.0
    outcome: str = "ok"


OK = Act()


def images(tag: int, rows: int) -> np.ndarray:
    """Images that bear the tags `tag`, `tag` + 1, ... in their first four bytes."""
    made = np.zeros((rows, 28, 28), np.uint8)
    tags = np.arange(tag, tag + rows, dtype="<u4")
    made.reshape(rows, -1)[:, :4] = tags.view(np.uint8).reshape(rows, 4)
    return made


def tags_of(made: np.ndarray) -> list[int]:
    first = np.ascontiguousarray(made.reshape(len(made), -1)[:, :4])
    return first.view("<u4").ravel().tolist()


@dataclass(frozen=True)
class Weights:
    """A number that a fake worker adds to every tag: the answer shows the version."""

    added: int


class Version:
    """Stands for a weight file that was read."""

    name = "lenet"

    def __init__(self, number: int = 0) -> None:
        self.version = str(number)
        self.weights = Weights(10_000 * number)

    @property
    def key(self):
        return self.name, self.version


def tags_in(answer: Prediction) -> list[int]:
    """The tags, if every row was computed with the weights of the version that is named."""
    assert (answer.probabilities == answer.probabilities[:, :1]).all()
    return (answer.probabilities[:, 0].astype(int) - 10_000 * int(answer.version)).tolist()


class FakeWorker:
    """Does one thing after another, like a thread; further work waits."""

    name, device = "fake", 0
    begun = done = 0

    def __init__(
        self, weights: Weights, script: Iterator[Act], checks: Iterator[Act], log: list[list[int]]
    ) -> None:
        self.weights = weights
        self.script, self.checks, self.log = script, checks, log
        self.valid = {weights}
        self.has_batch = False
        self.check: asyncio.Future[None] | None = None
        self.turns: list[Callable[[], None]] = []
        self.at_work = False

    async def open(self) -> None: ...

    async def close(self) -> None:
        assert not self.at_work

    def run(
        self,
        parts: list[np.ndarray],
        weights: Weights,
        on_done: Callable[[BatchResult | Exception], None],
    ) -> None:
        assert not self.has_batch, "two batches at once on one context"
        assert self.check is None or self.check.cancelled(), "a batch waits for a validation"
        act = next(self.script, OK)
        batch = np.concatenate(parts)
        self.log.append(tags_of(batch))
        if act.outcome == "raise":
            raise Boom("run raised")
        self.has_batch = True

        def begin() -> None:
            self.take_on(weights)
            asyncio.get_running_loop().call_later(act.delay_s, finish)

        def finish() -> None:
            self.has_batch = False
            rows = tags_of(batch)[: -1 if act.outcome == "short" else None]
            answers = np.array(rows, np.float32) + self.weights.added
            probabilities = np.repeat(answers[:, None], 10, axis=1)
            if act.outcome == "nan":
                probabilities[0] = np.nan
            self.end_turn()
            failed = act.outcome == "fail"
            on_done(Boom("failed") if failed else BatchResult(probabilities, 8, True, 0.25))

        self.take_turn(begin)

    def stage(self, weights: Weights) -> asyncio.Future[None]:
        assert not self.has_batch, "not between two batches"
        act = next(self.checks, OK)
        loop = asyncio.get_running_loop()
        future = self.check = loop.create_future()

        def end() -> None:
            self.check = None
            if act.outcome == "ok":
                self.valid = {self.weights, weights}
            if not future.cancelled():
                if act.outcome == "ok":
                    future.set_result(None)
                else:
                    future.set_exception(Boom("not valid"))
            self.end_turn()

        self.take_turn(lambda: loop.call_later(act.delay_s, end))
        return future

    def replace_weights(self, weights: Weights) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def replace() -> None:
            self.take_on(weights)
            future.set_result(None)
            self.end_turn()

        self.take_turn(replace)
        return future

    def take_on(self, weights: Weights) -> None:
        assert weights in self.valid, "these weights were not validated on this context"
        self.weights = weights

    def take_turn(self, turn: Callable[[], object]) -> None:
        if self.at_work:
            self.turns.append(turn)
        else:
            self.at_work = True
            turn()

    def end_turn(self) -> None:
        self.at_work = False
        if self.turns:
            self.take_turn(self.turns.pop(0))


@dataclass
class Watcher:
    """Notes what a batcher counts."""

    ended: list[tuple[int, str, float]] = field(default_factory=list)
    failed: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {"cancelled": 0, "late": 0})

    def batch_ended(
        self, model: str, rows: int, reason: str, compute_s: float, result: BatchResult | None
    ) -> None:
        if result is None:
            self.failed += 1
            return
        assert (result.computed_rows, result.captured, result.device_s) == (8, True, 0.25)
        self.ended.append((rows, reason, compute_s))

    def rows_dropped(self, rows: int, reason: str) -> None:
        assert rows > 0
        self.dropped[reason] += rows


@dataclass
class BatcherSetup:
    """A batcher over a real pool of fake workers; leaving checks that nothing is left behind."""

    loop: asyncio.AbstractEventLoop
    acts: tuple[Act, ...] = ()
    checks: tuple[Act, ...] = ()
    contexts: int = 1
    max_batch_rows: int = 4
    max_queue_rows: int = 100
    max_wait_s: float = 0.0
    overlap_rows: int = 0

    async def __aenter__(self) -> BatcherSetup:
        self.queue = BatchQueue(self.max_batch_rows, self.max_queue_rows, self.max_wait_s)
        self.first = Version()
        self.batches: list[list[int]] = []
        script, checks = iter(self.acts), iter(self.checks)
        self.workers = [
            FakeWorker(self.first.weights, script, checks, self.batches)
            for _ in range(self.contexts)
        ]
        self.pool = ContextPool(self.workers, lambda *_: None, hang_timeout_s=1e3 * FOREVER_S)
        await self.pool.open()
        self.watcher = Watcher()
        self.batcher = Batcher(
            *(self.queue, self.pool, self.watcher, self.first, None),
            *(self.loop.time, self.overlap_rows),
        )
        self.complaints: list[BaseException] = []
        self.loop.set_exception_handler(
            lambda _, context: self.complaints.append(context["exception"])
        )
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await asyncio.sleep(1000)  # batches end that nobody waits for
            assert (self.queue.rows, self.queue.requests, self.pool.busy) == (0, 0, 0)
            before_s = self.loop.time()
            await self.batcher.drain(1000)
            assert self.loop.time() == before_s, "there was something to wait for"
            assert not self.complaints
        await self.pool.close()
        if kind is None:
            assert len(self.loop.pending_timers()) == 1, "more than the limit of the whole test"

    def submit(self, tag: int, rows: int = 1, timeout_s: float = 100.0) -> asyncio.Task[Prediction]:
        return self.loop.create_task(submit(self.batcher, images(tag, rows), timeout_s))

    async def until(self, time_s: float) -> None:
        await asyncio.sleep(time_s - self.loop.time())


def staged(*acts: Act, **options):
    """Run `test(stage, ...)` on virtual time, with a `BatcherSetup` of these options."""

    def decorate(test):
        parameters = list(inspect.signature(test).parameters.values())
        fixture = inspect.Parameter("run_virtually", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        def run(run_virtually, **others):
            async def main(loop):
                async with asyncio.timeout(FOREVER_S), BatcherSetup(loop, acts, **options) as stage:
                    await test(stage, **others)

            run_virtually(main)

        run.__signature__ = inspect.Signature([fixture, *parameters[1:]])
        run.__name__ = test.__name__
        return run

    return decorate


# --- by example


@staged()
async def test_requests_of_one_turn_share_a_batch_when_a_context_is_free(stage):
    answers = await asyncio.gather(*(stage.submit(10 * n, n) for n in (1, 2)))
    assert [tags_in(answer) for answer in answers] == [[10], [20, 21]]
    assert stage.batches == [[10, 20, 21]]
    assert stage.watcher.ended == [(3, "idle", 1.0)]


@pytest.mark.parametrize(
    ("first", "overlap_rows", "batches"),
    [
        ([0, 1], 0, [[0, 1, 2]]),
        ([0], 0, [[0], [2]]),
        ([0, 1, 3, 4], 0, [[0, 1, 3, 4], [2]]),
        ([0, 1], 1, [[0, 1], [2]]),
    ],
    ids=["several arrived", "one arrived", "the batch is full", "the device is not the loop's"],
)
def test_requests_that_arrive_while_others_are_read_join_their_batch(
    run_virtually, first, overlap_rows, batches
):
    @staged(contexts=2, overlap_rows=overlap_rows)
    async def test(stage):
        tasks = [stage.submit(tag) for tag in first]
        await asyncio.sleep(0)  # the batcher is called next; what is submitted now comes after it
        tasks.append(stage.submit(2))
        await asyncio.gather(*tasks)
        assert stage.batches == batches

    test(run_virtually=run_virtually)


@staged(contexts=3, max_batch_rows=8, overlap_rows=4)
async def test_a_small_batch_waits_for_those_that_run_and_a_large_one_does_not(stage):
    tasks, loads = [], []
    for tag, rows in ((0, 1), (10, 1), (20, 1), (30, 4), (40, 1)):
        tasks.append(stage.submit(tag, rows))
        await asyncio.sleep(0.1)
        loads.append(stage.batcher.load())
    await asyncio.gather(*tasks)
    assert stage.batches == [[0], [10, 20, 30, 31, 32, 33], [40]]
    assert loads == [(0, 1), (1, 1), (2, 1), (0, 2), (0, 3)], "the six began beside the one"


@staged(overlap_rows=4, contexts=2)
async def test_the_next_batch_begins_before_the_answers_of_the_last(stage):
    seen = []

    def answered(request, error):
        seen.append(list(stage.batches))

    stage.batcher.enqueue(Asked(100.0, answered), images(1, 1))
    await asyncio.sleep(0.1)
    await stage.submit(2)
    assert seen == [[[1], [2]]]


@staged()
async def test_a_batcher_leaves_no_timer_when_it_has_ended(stage):
    timers = len(stage.loop.pending_timers())
    await stage.submit(1)
    await stage.batcher.drain(1.0)
    assert len(stage.loop.pending_timers()) == timers


@staged(Act(2.0), Act(0.5), Act(0.75), max_batch_rows=2)
async def test_an_answer_says_where_its_time_went_when_it_waited(stage):
    first = stage.submit(1)
    await stage.until(0.5)
    second = stage.submit(2, rows=4)
    assert (await first).queue_s == 0.0
    answer = await second
    assert answer.queue_s == 1.5
    assert answer.compute_s == 1.25, "from its first cut to its last answer"


@pytest.mark.parametrize("outcome", ["fail", "short", "raise"])
@staged()
async def test_a_batch_that_failed_releases_its_images_at_once(stage, outcome):
    # They may lie in memory that is handed out again when nothing refers to it.
    stage.workers[0].script = iter([Act(1.0, outcome)])
    made = images(1, rows=2)
    freed: list[bool] = []
    weakref.finalize(made, freed.append, True)
    answers: list[ServiceError] = []
    asked = Asked(100.0, lambda _request, error: answers.append(error))  # outlives its answer
    stage.batcher.enqueue(asked, made)
    del made
    logging.disable()  # pytest keeps what is logged
    gc.disable()
    try:
        await stage.until(2.0)
        assert [type(error) for error in answers] == [InferenceFailed]
        assert freed
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


@staged(overlap_rows=1)
async def test_a_batch_is_computed_when_the_answer_to_a_late_request_cancels_one_of_it(stage):
    task = stage.submit(3)
    mate = Asked(100.0, lambda *_: pytest.fail("it was cancelled"))
    late = Asked(0.0, lambda *_: stage.batcher.cancel(mate))
    stage.batcher.enqueue(late, images(1, 1))
    stage.batcher.enqueue(mate, images(2, 1))
    assert tags_in(await task) == [3]
    assert stage.batches == [[2, 3]]


@staged(Act(1.0, "nan"))
async def test_a_request_with_an_answer_that_is_not_finite_fails_and_its_batch_mates_do_not(stage):
    first, second = stage.submit(1), stage.submit(2, rows=2)
    with pytest.raises(InferenceFailed, match=r"NaN or infinite, as .* in fp16"):
        await first
    assert tags_in(await second) == [2, 3]
    assert stage.batches == [[1, 2, 3]]
    assert stage.watcher.ended == [(3, "idle", 1.0)]  # counted as computed


# --- while the model is replaced


@staged(checks=(Act(5.0), Act(5.0)), contexts=2)
async def test_the_other_contexts_answer_when_one_validates_the_new_weights(stage):
    replaced = stage.loop.create_task(stage.batcher.replace(Version(1)))
    for number in range(9):
        await stage.until(number)
        answer = await stage.submit(number)
        assert answer.version == "0"
        assert stage.loop.time() == number + 1.0
    await replaced
    assert stage.loop.time() == 10.0


@staged(contexts=2)
async def test_the_new_version_serves_when_a_context_cannot_switch_at_the_end(stage, caplog):
    first, second = stage.workers
    failed = stage.loop.create_future()
    failed.set_exception(Boom("the copy failed"))
    first.replace_weights = lambda _: failed
    assert await stage.batcher.replace(Version(1)) is None
    assert second.weights == Version(1).weights, "the others switch"
    assert (await stage.submit(1)).version == "1"
    assert caplog.messages == ["fake did not switch its weights: the copy failed"]


# --- random scenarios


@dataclass(frozen=True)
class Caller:
    arrives_s: float
    rows: int
    timeout_s: float
    leaves_s: float | None


@dataclass(frozen=True)
class Scenario:
    callers: tuple[Caller, ...]
    acts: tuple[Act, ...]
    replaced_s: tuple[float, ...]
    checks: tuple[Act, ...]
    replacing_ends_s: float | None
    contexts: int
    max_batch_rows: int
    max_queue_rows: int
    max_wait_s: float
    overlap_rows: int
    drain_s: float | None
    drain_timeout_s: float
    lost_s: float | None


# Eighths of a second, few of them: many things happen at the very same time, in every order.
TICKS = st.integers(0, 24).map(lambda tick: tick / 8)

CALLERS = st.builds(
    Caller,
    arrives_s=TICKS,
    rows=st.integers(1, 4) | st.integers(1, 17),
    timeout_s=st.just(1000.0) | TICKS,
    leaves_s=st.none() | TICKS,
)

ACTS = st.builds(Act, TICKS, st.sampled_from(["ok"] * 5 + ["fail", "short", "raise"]))

CHECKS = st.builds(
    Act, TICKS.map(lambda time_s: time_s / 4), st.sampled_from(["ok"] * 4 + ["fail"])
)

SCENARIOS = st.builds(
    Scenario,
    callers=st.lists(CALLERS, min_size=1, max_size=14).map(tuple),
    acts=st.lists(ACTS, max_size=20).map(tuple),
    replaced_s=st.lists(TICKS, max_size=5).map(sorted).map(tuple),
    checks=st.lists(CHECKS, max_size=12).map(tuple),
    replacing_ends_s=st.none() | TICKS,
    contexts=st.integers(1, 3),
    max_batch_rows=st.integers(1, 5),
    max_queue_rows=st.sampled_from([6, 20, 1000]),
    max_wait_s=st.sampled_from([0.0, 0.0, 0.5]),
    overlap_rows=st.sampled_from([0, 0, 3, 8]),
    drain_s=st.none() | TICKS,
    drain_timeout_s=TICKS,
    lost_s=st.none() | st.none() | TICKS.map(lambda time_s: time_s + 1 / 16),  # between the ticks
)


async def run_scenario(scenario: Scenario, stage: BatcherSetup) -> None:
    """Play `scenario` and check every promise of the batcher."""
    loop = stage.loop
    loop.before_jump = lambda: assert_no_idle_context(stage)
    drained_s = None if scenario.drain_s is None else scenario.drain_s + scenario.drain_timeout_s
    ended_s: dict[int, float] = {}
    served: dict[int, Version] = {}

    async def call(number: int, caller: Caller) -> Prediction:
        await stage.until(caller.arrives_s)
        served[number] = stage.batcher.version
        try:
            return await submit(stage.batcher, images(100 * number, caller.rows), caller.timeout_s)
        finally:
            ended_s[number] = loop.time()

    async def leave(task: asyncio.Task[Prediction], caller: Caller) -> None:
        if caller.leaves_s is not None:
            await stage.until(caller.arrives_s + caller.leaves_s)
            task.cancel()

    async def drain() -> None:
        if scenario.drain_s is not None:
            await stage.until(scenario.drain_s)
            await stage.batcher.drain(scenario.drain_timeout_s)
            assert loop.time() <= drained_s
            assert stage.queue.rows == 0

    async def lose_device() -> None:
        if scenario.lost_s is not None:
            await stage.until(scenario.lost_s)
            stage.batcher.fail_all()
            assert stage.queue.rows == 0

    async def replace_again_and_again() -> None:
        for number, time_s in enumerate(scenario.replaced_s, 1):
            await stage.until(time_s)
            before, new = stage.batcher.version, Version(number)
            error = await stage.batcher.replace(new)
            event("refused" if error else "replaced")
            assert stage.batcher.version is (before if error else new)
            assert isinstance(error, Boom) or error is None
            resting = {worker.weights for worker in stage.workers if not worker.at_work}
            assert resting <= {stage.batcher.version.weights}, "a context rests on other weights"

    async def replace() -> None:
        replacing = loop.create_task(replace_again_and_again())
        if scenario.replacing_ends_s is not None:
            await stage.until(scenario.replacing_ends_s)
            replacing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await replacing

    tasks = [loop.create_task(call(*numbered)) for numbered in enumerate(scenario.callers)]
    others = [leave(*pair) for pair in zip(tasks, scenario.callers, strict=True)]
    others += [drain(), replace(), lose_device()]
    await asyncio.gather(*others)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await stage.batcher.drain(1000.0)
    await asyncio.sleep(10.0)  # the contexts that nobody waits for finish

    computed = [tag for batch in stage.batches for tag in batch]
    assert len(computed) == len(set(computed)), "a row was computed twice"
    assert all(0 < len(batch) <= scenario.max_batch_rows for batch in stage.batches)
    errors = [outcome for outcome in outcomes if isinstance(outcome, ServiceError)]
    assert len({id(error) for error in errors}) == len(errors), "an error was shared"
    fails = {act.outcome for act in scenario.acts} - {"ok"}

    computed = set(computed)
    admitted = 0
    for number, (caller, outcome) in enumerate(zip(scenario.callers, outcomes, strict=True)):
        event(type(outcome).__name__)
        rows = range(100 * number, 100 * number + caller.rows)
        deadline_s = caller.arrives_s + caller.timeout_s
        if number in ended_s and not isinstance(outcome, Overloaded):
            admitted += caller.rows
        if drained_s is not None and number in ended_s:
            assert ended_s[number] <= max(drained_s, caller.arrives_s)
        if scenario.lost_s is not None and not isinstance(outcome, Unavailable):
            left = isinstance(outcome, asyncio.CancelledError)
            assert left or ended_s[number] < scenario.lost_s
        match outcome:
            case Prediction():
                assert tags_in(outcome) == list(rows)
                assert outcome.version == served[number].version
                assert computed.issuperset(rows)
                assert ended_s[number] <= deadline_s
            case DeadlineExceeded():
                assert deadline_s <= ended_s[number] <= deadline_s + RESOLUTION_S
            case Overloaded():
                assert ended_s[number] == caller.arrives_s
                assert not computed.intersection(rows)
            case Unavailable() if "lost its device" in outcome.message:
                assert outcome.retry_after_s == 1
                assert ended_s[number] == max(scenario.lost_s, caller.arrives_s)
            case Unavailable():
                assert scenario.drain_s is not None
                assert ended_s[number] >= scenario.drain_s
                assert ended_s[number] in (caller.arrives_s, drained_s)
            case InferenceFailed():
                assert fails
            case _:
                assert isinstance(outcome, asyncio.CancelledError), repr(outcome)
                assert caller.leaves_s is not None
    if not fails and scenario.drain_s is None and scenario.lost_s is None:
        dropped = sum(stage.watcher.dropped.values())
        assert len(computed) + dropped == admitted, "rows appeared or vanished"
        assert sum(rows for rows, *_ in stage.watcher.ended) == len(computed)


def assert_no_idle_context(stage: BatcherSetup) -> None:
    """Before time passes: if rows wait and a context is free, then only for more rows."""
    running = sum(cut.rows for cut in stage.batcher._in_flight)
    if running and running + stage.queue.rows < stage.overlap_rows:
        return
    if stage.queue.requests and stage.pool.busy < len(stage.pool.workers):
        assert stage.queue.cut_due_s() > stage.loop.time(), "rows wait beside a free context"


@settings(max_examples=700)
@given(SCENARIOS)
def test_every_caller_gets_its_own_rows_or_one_error_when_anything_happens(run_virtually, scenario):
    names = ("checks", "contexts", "max_batch_rows", "max_queue_rows", "max_wait_s", "overlap_rows")
    options = {name: getattr(scenario, name) for name in names}
    staged(*scenario.acts, **options)(lambda stage: run_scenario(scenario, stage))(run_virtually)
