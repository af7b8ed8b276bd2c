"""The queue, by example and against a model that is too simple to be wrong."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from service.engine.queue import BatchQueue, Work
from service.errors import Overloaded
from tests.tasks import Asked

IMAGES = np.zeros((10_000, 28, 28), np.uint8)


def request(
    rows: int, deadline_s: float = 100.0, arrived_s: float = 0.0, version: str = "one"
) -> Asked:
    made = Asked(deadline_s, answered=None)
    made.begin(IMAGES[:rows], version, arrived_s)
    return made


def push(queue: BatchQueue, item: Work) -> None:
    queue.push(item, item.images, item.version, item.arrived_s)


def simulated(queue, arrivals):
    """How long each accepted request waits for its last row, by rows, in times of a row.

    `arrivals`: (time, rows) in order. A batch takes a time unit a row.
    """
    waits = {}
    now, coming = 0.0, next(arrivals, None)
    while coming or queue.requests:
        if coming and (coming[0] <= now or not queue.requests):
            now = max(now, coming[0])
            with contextlib.suppress(Overloaded):
                push(queue, request(coming[1], float("inf"), coming[0]))
            coming = next(arrivals, None)
            continue
        cut = queue.cut(now)
        now += cut.rows
        for item, _, stop in cut.segments:
            if stop == item.rows:
                waits.setdefault(stop, []).append(now - item.arrived_s)
    return waits


@pytest.mark.parametrize("seed", range(5))
def test_an_accepted_request_waits_hardly_longer_than_a_full_queue_takes(seed):
    draw = random.Random(seed)
    sizes, limit = (1, 4, 11), 400
    arrivals, now = [], 0.0
    for _ in range(6000):  # three times what the queue can do
        now += draw.expovariate(3 / np.mean(sizes))
        arrivals.append((now, draw.choice(sizes)))
    waits = simulated(BatchQueue(4, limit), iter(arrivals))
    assert set(waits) == set(sizes)
    for rows, times in waits.items():
        assert max(times) < 1.3 * limit, f"{rows} rows"


@pytest.mark.parametrize(
    ("rows", "max_wait_s", "draining", "reason"),
    [
        (1, 0.0, False, "idle"),
        (1, 0.5, False, "waited"),
        (1, 0.5, True, "drain"),
        (4, 0.5, False, "full"),
        (4, 0.0, True, "full"),
    ],
)
def test_a_cut_says_why_when_it_is_made(rows, max_wait_s, draining, reason):
    queue = BatchQueue(4, 100, max_wait_s)
    push(queue, request(rows))
    assert queue.cut(0.0, draining=draining).reason == reason


@dataclass
class Waiting:
    """A request in the naive model: the numbers of its rows that still wait."""

    request: Work
    left: list[int]
    gone: list[int] = field(default_factory=list)
    expected: int = 0
    """How many rows will have been cut, ever, when its last is, in strict order."""


class QueueAgainstModel(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.max_rows, self.limit = 8, 28
        self.queue: BatchQueue = BatchQueue(self.max_rows, self.limit, max_wait_s=2)
        self.line: list[Waiting] = []
        self.cut_rows = 0
        self.all: list[Waiting] = []

    def waiting_rows(self) -> int:
        return sum(len(item.left) for item in self.line)

    @rule(
        target=requests,
        rows=st.integers(1, 22),
        patience=st.integers(0, 6),
        version=st.sampled_from(["one", "one", "two"]),
    )
    def push(self, rows: int, patience: int, version: str) -> Waiting:
        item = Waiting(request(rows, self.now + patience, self.now, version), list(range(rows)))
        fits = self.waiting_rows() + rows <= self.limit
        try:
            push(self.queue, item.request)
        except Overloaded:
            assert not fits
            item.left = []
        else:
            assert fits
            self.line.append(item)
            item.expected = self.cut_rows + self.waiting_rows()
            self.all.append(item)
        return item

    @rule(item=consumes(requests))
    def discard(self, item: Waiting) -> None:
        expected = len(item.left) if item in self.line else 0
        assert self.queue.discard(item.request) == expected
        if item in self.line:
            self.line.remove(item)

    @rule(draining=st.booleans())
    def cut(self, draining: bool) -> None:
        batch: list[tuple[Work, int]] = []
        late: list[Work] = []
        while self.line and len(batch) < self.max_rows:
            split = [item for item in self.all if item.gone and item in self.line]
            overdue = bool(split) and self.cut_rows >= split[0].expected + self.limit // 8
            whole = [item for item in self.line if not item.gone]
            item = split[0] if overdue or not whole else whole[0]
            places = self.line.index(item)
            self.line.remove(item)
            if item.request.deadline_s <= self.now:
                late.append(item.request)
                continue
            few = len(batch) <= self.max_rows // 8
            apart = item.request.rows > self.max_rows and few
            if batch and (apart or item.request.version != batch[0][0].version):
                self.line.insert(places, item)
                break
            while item.left and len(batch) < self.max_rows:
                item.gone.append(item.left.pop(0))
                batch.append((item.request, item.gone[-1]))
                self.cut_rows += 1
            if item.left:
                self.line.append(item)
        made = self.queue.cut(self.now, draining=draining)
        rows = [(item, row) for item, start, stop in made.segments for row in range(start, stop)]
        assert rows == batch
        assert made.late == late
        assert made.rows == len(batch) <= self.max_rows
        assert (made.reason == "full") == (len(batch) == self.max_rows)
        assert all(start < stop for _, start, stop in made.segments)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def agree(self) -> None:
        assert self.queue.rows == self.waiting_rows()
        assert self.queue.requests == len(self.line)
        if self.waiting_rows() >= self.max_rows:
            assert self.queue.cut_due_s() <= self.now
        elif self.line:
            first = next(
                (item for item in self.all if item.gone and item in self.line), self.line[0]
            )
            assert self.queue.cut_due_s() == first.request.arrived_s + 2
        for item in self.all:
            assert item.gone == list(range(item.request.cut_rows)), "lost, doubled or reordered"


def test_the_queue_cuts_as_its_model_does():
    run_state_machine_as_test(
        QueueAgainstModel, settings=settings(max_examples=150, stateful_step_count=40)
    )
