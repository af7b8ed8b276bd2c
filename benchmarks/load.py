"""A load of requests from one or several processes, and what came back.

Closed loop: each connection sends its next request when it has the answer to the previous one. Open
loop: requests are due at times that do not depend on the service, and latency counts from the due
time, so a service that stalls delays every request that was due meanwhile, and the percentiles
show it (no coordinated omission). Latencies are those of good answers only: errors are fast and
would make a failing service look fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import selectors
import signal
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from benchmarks.digits import PreparedRequest

if TYPE_CHECKING:
    import httpx

    from benchmarks.load_clients import Connection

MAX_CONNECTIONS = 900
"""Per process: `select` takes at most 1,024 file descriptors."""

WRONG_LABEL = "wrong label"
"""Kind of error: a well-formed answer with another label than the local model predicts."""

_START_DELAY_S = 0.05
_PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a load, which is reported by itself.

    `start` and `end` are requests per second in an open loop, connections in a closed one; between
    them the load changes linearly over `duration_s`.
    """

    start: float
    end: float
    duration_s: float

    def at(self, after_s: float) -> float:
        """The load `after_s` seconds after the start of the stage."""
        return self.start + (self.end - self.start) * after_s / self.duration_s

    def time_of(self, count: float) -> float:
        """When the rate adds up to `count` requests, in seconds after the start of the stage."""
        slope = (self.end - self.start) / self.duration_s
        root = math.sqrt(max(0.0, self.start**2 + 2 * slope * count))
        return 2 * count / (self.start + root)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests to send.

    `connections` is the maximum in use at a time. `warm_up_s`: the load with which the first stage
    starts is sent before it, and not reported. `timeout_ms` is sent to the service; None leaves the
    service's own. `grpc`: HOST:PORT, for gRPC instead of HTTP, which needs a `model`.
    """

    url: str
    mode: Literal["closed", "open"]
    stages: tuple[Stage, ...]
    connections: int
    arrivals: Literal["poisson", "constant"] = "poisson"
    seed: int = 1
    warm_up_s: float = 0.0
    timeout_ms: int | None = None
    model: str | None = None
    grpc: str | None = None

    def connect(
        self, transport: Callable[[], httpx.AsyncBaseTransport] | None = None
    ) -> Connection:
        """A connection; `transport` replaces TCP for HTTP."""
        # httpx is not installed everywhere that this module is imported.
        from benchmarks.load_clients import GrpcConnection, HttpConnection

        if self.grpc is None:
            return HttpConnection(
                self.url, model=self.model, timeout_ms=self.timeout_ms, transport=transport
            )
        assert self.model, "bug: gRPC without a model"
        return GrpcConnection(self.grpc, model=self.model, timeout_ms=self.timeout_ms)


def closed_loop(url: str, connections: int, duration_s: float) -> Load:
    """A closed loop of a single stage."""
    return Load(url, "closed", (Stage(connections, connections, duration_s),), connections)


def _numbers() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Results:
    """The answers to the requests of a stage.

    `received`: good answers that arrived while the stage ran. `images`, `mistakes`: of all
    well-formed answers; a mistake differs from the true label. `lateness_s`: delays of an open
    loop's requests behind their due times. `server_ms`: durations by stage of the service.
    `cpu_s`: of all processes. `busy` and `starved`: the shares of the time in which the event loop
    of the busiest process ran on a core and waited for one.
    """

    elapsed_s: float = 0.0
    interrupted: bool = False
    received: int = 0
    images: int = 0
    wrong_labels: int = 0
    mistakes: int = 0
    cpu_s: float = 0.0
    busy: float = 0.0
    starved: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    latencies_s: array[float] = field(default_factory=_numbers)
    lateness_s: array[float] = field(default_factory=_numbers)
    server_ms: dict[str, array[float]] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[Results], elapsed_s: float) -> Results:
        """The sum over processes that ran at the same time, or over stages in sequence."""
        total = cls(elapsed_s=elapsed_s)
        for part in parts:
            total.interrupted |= part.interrupted
            total.received += part.received
            total.images += part.images
            total.wrong_labels += part.wrong_labels
            total.mistakes += part.mistakes
            total.cpu_s += part.cpu_s
            if part.busy + part.starved >= total.busy + total.starved:
                total.busy, total.starved = part.busy, part.starved
            total.errors.update(part.errors)
            total.latencies_s.extend(part.latencies_s)
            total.lateness_s.extend(part.lateness_s)
            for stage, durations in part.server_ms.items():
                total.server_ms.setdefault(stage, _numbers()).extend(durations)
        return total


@dataclass(frozen=True, slots=True)
class Progress:
    """Answers that one process received since its last report."""

    at_s: float
    """Seconds from the start, warm-up included."""
    latencies_s: array[float]
    errors: int


Report: TypeAlias = Callable[[Progress], object]


def arrivals(
    stages: Iterable[Stage], kind: Literal["poisson", "constant"], seed: int
) -> Iterator[float]:
    """Due times in seconds from the start of the first stage.

    `poisson`: independent of each other, with the stages' rate on average. `constant`: evenly
    spaced, or by a rate that changes.
    """
    generator = np.random.default_rng(seed)
    # Counts are requests since the start of the first stage.
    next_count = 0.0 if kind == "constant" else float(generator.exponential())
    start_s = start_count = 0.0
    for stage in stages:
        end_count = start_count + (stage.start + stage.end) / 2 * stage.duration_s
        while next_count < end_count:
            yield start_s + stage.time_of(next_count - start_count)
            next_count += 1.0 if kind == "constant" else float(generator.exponential())
        start_s += stage.duration_s
        start_count = end_count


def active_from(stages: Iterable[Stage], number: int, at_s: float) -> float:
    """When connection `number`, from 0, of a closed loop may next send; `at_s` or later, or inf.

    Times in seconds from the start of the first stage. A stage of 8 uses connections 0 to 7.
    """
    start_s = 0.0
    needed = number + 1 - 1e-6  # the load of a ramp is not exact
    for stage in stages:
        after_s = max(0.0, at_s - start_s)
        if after_s < stage.duration_s:
            if stage.at(after_s) >= needed:
                return start_s + after_s
            if stage.end >= needed:
                share = (number + 1 - stage.start) / (stage.end - stage.start)
                return start_s + share * stage.duration_s
        start_s += stage.duration_s
    return math.inf


def send_load(
    load: Load,
    requests: Sequence[PreparedRequest],
    *,
    index: int = 0,
    processes: int = 1,
    start: Callable[[], float] = time.perf_counter,
    report: Report = lambda progress: None,
    transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
) -> list[Results]:
    """Send the part of process `index` of `processes`; a result per stage. SIGINT ends it early.

    `start` is called when all is prepared, may block, and returns when to start, on the clock of
    `time.perf_counter`. `report` is called twice a second. `transport` replaces TCP.
    """

    def loop() -> asyncio.AbstractEventLoop:
        # epoll rounds waits up to a millisecond, and would delay each request of an open loop by
        # half a millisecond; select does not round.
        return asyncio.SelectorEventLoop(selectors.SelectSelector())

    traffic = _Traffic(load, index, processes, report)
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(traffic.run(requests, start, transport))


class _Traffic:
    """The requests of one process."""

    def __init__(self, load: Load, index: int, processes: int, report: Report) -> None:
        self._load, self._index, self._processes = load, index, processes
        self._report = report
        first = load.stages[0].start
        warm_up = (Stage(first, first, load.warm_up_s),) if load.warm_up_s else ()
        self._stages = (*warm_up, *load.stages)
        self._reported = len(warm_up)
        self._results = [Results() for _ in self._stages]
        self._recent, self._recent_errors = _numbers(), 0
        self._start_s = 0.0
        self._ends_s: list[float] = []

    async def run(
        self,
        requests: Sequence[PreparedRequest],
        start: Callable[[], float],
        transport: Callable[[], httpx.AsyncBaseTransport] | None,
    ) -> list[Results]:
        load = self._load
        async with contextlib.AsyncExitStack() as stack:
            # This process has every `processes`-th connection.
            numbers = range(self._index, load.connections, self._processes)
            connections = [load.connect(transport) for _ in numbers]
            for connection in connections:
                stack.push_async_callback(connection.close)
            # Each process starts at another digit, so that no two send the same one at a time.
            first = self._index * len(requests) // self._processes
            messages = [(connections[0].prepare(one), one) for one in requests]
            self._requests = itertools.cycle(messages[first:] + messages[:first])
            # The requests live as long as the test, so garbage collections need not scan them.
            gc.collect()
            gc.freeze()
            try:
                await self._run(dict(zip(numbers, connections, strict=True)), start)
            finally:
                gc.unfreeze()
        return self._results[self._reported :]

    async def _run(self, connections: dict[int, Connection], start: Callable[[], float]) -> None:
        interrupt = asyncio.Event()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows; not main thread
            loop.add_signal_handler(signal.SIGINT, interrupt.set)
        self._start_s = start()
        durations_s = (stage.duration_s for stage in self._stages)
        self._ends_s = list(itertools.accumulate(durations_s, initial=self._start_s))[1:]
        drive = self._closed if self._load.mode == "closed" else self._open
        sending = asyncio.create_task(drive(connections))
        observing = asyncio.create_task(self._observe())
        waiting = asyncio.create_task(interrupt.wait())
        done = asyncio.gather(sending, observing)
        await asyncio.wait((done, waiting), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, observing, waiting):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await done
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
        self._results[-1].interrupted = interrupt.is_set()

    async def _closed(self, connections: dict[int, Connection]) -> None:
        async def use(number: int, connection: Connection) -> None:
            while (now_s := time.perf_counter()) < self._ends_s[-1]:
                at_s = self._start_s + active_from(self._stages, number, now_s - self._start_s)
                if at_s == math.inf:
                    return
                if at_s > now_s:
                    await asyncio.sleep(at_s - now_s)
                    continue
                await self._send(connection, now_s, self._stage_at(now_s))

        async with asyncio.TaskGroup() as group:
            for number, connection in connections.items():
                group.create_task(use(number, connection))

    async def _open(self, connections: dict[int, Connection]) -> None:
        # Last in, first out: uses as few connections as the load needs.
        free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
        for connection in reversed(connections.values()):
            free.put_nowait(connection)

        async def request(due_s: float) -> None:
            # A request due at the end of a stage belongs to the next, whatever the rounding.
            results = self._stage_at(due_s + 1e-6)
            results.lateness_s.append(time.perf_counter() - due_s)
            connection = await free.get()
            try:
                await self._send(connection, due_s, results)
            finally:
                free.put_nowait(connection)

        # Every `processes`-th of the same arrivals: together, the processes send each one once.
        times = arrivals(self._stages, self._load.arrivals, self._load.seed)
        async with asyncio.TaskGroup() as group:
            for arrival_s in itertools.islice(times, self._index, None, self._processes):
                due_s = self._start_s + arrival_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(request(due_s))

    def _stage_at(self, now_s: float) -> Results:
        return self._results[min(bisect_right(self._ends_s, now_s), len(self._results) - 1)]

    async def _send(self, connection: Connection, since_s: float, results: Results) -> None:
        """Send the next request and record its answer, timed from `since_s`."""
        message, request = next(self._requests)
        reply, now_s = await connection.exchange(message)
        if isinstance(reply, str):
            self._failed(results, reply)
            return
        verdict, server_ms = connection.examine(reply, request)
        if verdict.error:
            self._failed(results, verdict.error)
            return
        results.images += len(request.true_labels)
        results.mistakes += verdict.mistakes
        if verdict.wrong_labels:
            results.wrong_labels += verdict.wrong_labels
            self._failed(results, WRONG_LABEL)
            return
        if now_s < self._ends_s[-1]:
            self._stage_at(now_s).received += 1
        results.latencies_s.append(now_s - since_s)
        self._recent.append(now_s - since_s)
        for stage, duration_ms in server_ms.items():
            results.server_ms.setdefault(stage, _numbers()).append(duration_ms)

    def _failed(self, results: Results, kind: str) -> None:
        results.errors[kind] += 1
        self._recent_errors += 1

    async def _observe(self) -> None:
        """Measure the client in each stage, and report progress."""
        begin_s = self._start_s
        await asyncio.sleep(max(0.0, begin_s - time.perf_counter()))
        for results, end_s in zip(self._results, self._ends_s, strict=True):
            before = _usage_s()
            try:
                while (left_s := end_s - time.perf_counter()) > 0:
                    await asyncio.sleep(min(left_s, _PROGRESS_S))
                    at_s = time.perf_counter() - self._start_s
                    self._report(Progress(at_s, self._recent, self._recent_errors))
                    self._recent, self._recent_errors = _numbers(), 0
            finally:
                results.elapsed_s = min(time.perf_counter(), end_s) - begin_s
                measured_s, results.cpu_s, busy_s, starved_s = (
                    after - earlier for after, earlier in zip(_usage_s(), before, strict=True)
                )
                results.busy, results.starved = busy_s / measured_s, starved_s / measured_s
            begin_s = end_s


def _usage_s() -> tuple[float, float, float, float]:
    """Time, and CPU time of this process, of this thread; how long this thread waited for a core.

    The last is 0 outside Linux.
    """
    try:
        waited_ns = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]
    except OSError:
        waited_ns = "0"
    now_s = time.perf_counter()
    return now_s, time.process_time(), time.thread_time(), int(waited_ns) / 1e9


def send_from_processes(
    load: Load,
    requests: Sequence[PreparedRequest],
    processes: int,
    report: Report = lambda progress: None,
) -> list[Results]:
    """Send `load` from `processes` processes that start together; SIGINT ends all early.

    Returns: a result per stage.

    Raises:
        EOFError: one of them died.
    """
    if processes == 1:
        return send_load(load, requests, report=report)
    spawn = multiprocessing.get_context("spawn")
    pipes: list[multiprocessing.connection.Connection] = []
    workers: list[Any] = []
    # Workers inherit this, and survive a signal that comes before their own loop handles it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for index in range(processes):
            ours, theirs = spawn.Pipe()
            part = (load, requests, index, processes, theirs)
            worker = spawn.Process(target=_work, args=part, daemon=True)
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)

        def pass_on(number: int, frame: object) -> None:
            for worker in workers:
                if worker.pid is not None and worker.is_alive():
                    os.kill(worker.pid, signal.SIGINT)

        for pipe in pipes:
            pipe.recv()  # prepared
        signal.signal(signal.SIGINT, pass_on)
        # The clock is the same in all processes.
        start_s = time.perf_counter() + _START_DELAY_S
        for pipe in pipes:
            pipe.send(start_s)
        parts = list(_collect(pipes, report))
        for worker in workers:
            worker.join()
    finally:
        signal.signal(signal.SIGINT, before)
    return [
        Results.merge(stage, max(part.elapsed_s for part in stage))
        for stage in zip(*parts, strict=True)
    ]


def _collect(
    pipes: Sequence[multiprocessing.connection.Connection], report: Report
) -> Iterator[list[Results]]:
    waiting = set(pipes)
    while waiting:
        for pipe in multiprocessing.connection.wait(list(waiting)):
            message = pipe.recv()
            if isinstance(message, Progress):
                report(message)
            else:
                waiting.remove(pipe)
                yield message


def _work(
    load: Load,
    requests: Sequence[PreparedRequest],
    index: int,
    processes: int,
    pipe: multiprocessing.connection.Connection,
) -> None:
    def start() -> float:
        pipe.send("prepared")
        start_s: float = pipe.recv()
        return start_s

    pipe.send(
        send_load(load, requests, index=index, processes=processes, start=start, report=pipe.send)
    )
