"""A load of requests sent with httpx, and the statistics of the answers.

Closed loop: each connection sends its next request when it has the answer to the previous one. Open
loop: requests are due at random times that do not depend on the service, and latency counts from
the due time, so a slow answer also delays the requests that wait behind it (no coordinated
omission). Requests are not retried. Latencies are those of good answers only: errors are fast and
would make a failing service look fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import itertools
import selectors
import signal
import ssl
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np

from benchmarks.digits import PreparedRequest, Verdict, error_kind, judge
from benchmarks.timing import percentile

MAX_CONNECTIONS = 900
"""Per process: `select` takes at most 1,024 file descriptors."""

PERCENTILES = (50.0, 90.0, 99.0, 99.9)

_TIMEOUT_S = 35.0  # the service itself gives up after 30 s


@dataclass(frozen=True, slots=True)
class Load:
    """The load that one process sends.

    `connections` is the maximum in use at a time. `rate` is requests per second, for an open loop
    only. `timeout_ms` is sent to the service; None leaves the service's own.
    """

    url: str
    mode: Literal["closed", "open"]
    connections: int
    rate: float
    duration_s: float
    seed: int
    timeout_ms: int | None = None
    model: str | None = None


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Results:
    """The answers that one process received, or several after `merge`.

    `stages_ms`: durations by stage from the Server-Timing header. `own_mistakes`: mistakes of the
    local model on the answered images. `lateness_s`: delays of an open loop's requests behind
    their due times. `busy` and `starved`: the shares of the elapsed time in which the busiest
    process ran on a core and waited for one.
    """

    images: int = 0
    wrong_labels: int = 0
    mistakes: int = 0
    own_mistakes: int = 0
    interrupted: bool = False
    requests_per_s: float = 0.0
    images_per_s: float = 0.0
    elapsed_s: float = 0.0
    busy: float = 0.0
    starved: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    latencies_s: array[float] = field(default_factory=_seconds)
    lateness_s: array[float] = field(default_factory=_seconds)
    stages_ms: dict[str, array[float]] = field(default_factory=dict)

    def answered(
        self,
        latency_s: float,
        verdict: Verdict,
        own: Sequence[int],
        true: Sequence[int],
        stages_ms: dict[str, float],
    ) -> None:
        """Record a well-formed answer; `own` and `true` are the labels of its request."""
        self.latencies_s.append(latency_s)
        self.images += len(true)
        self.wrong_labels += verdict.wrong_labels
        self.mistakes += verdict.mistakes
        self.own_mistakes += sum(mine != right for mine, right in zip(own, true, strict=True))
        for stage, duration_ms in stages_ms.items():
            self.stages_ms.setdefault(stage, _seconds()).append(duration_ms)

    def failed(self, kind: str) -> None:
        """Record a request without a good answer; `kind` is from a closed set."""
        self.errors[kind] += 1

    def finish(
        self, elapsed_s: float, cpu_s: float, starved_s: float, *, interrupted: bool
    ) -> None:
        """Record the time from the first request to the last answer, and the client's part."""
        self.interrupted = interrupted
        self.elapsed_s = elapsed_s
        self.busy = cpu_s / elapsed_s
        self.starved = starved_s / elapsed_s
        self.requests_per_s = len(self.latencies_s) / elapsed_s
        self.images_per_s = self.images / elapsed_s

    @classmethod
    def merge(cls, parts: Iterable[Results]) -> Results:
        """The sum over processes that ran at the same time; rates add up."""
        total = cls()
        for part in parts:
            total.images += part.images
            total.wrong_labels += part.wrong_labels
            total.mistakes += part.mistakes
            total.own_mistakes += part.own_mistakes
            total.interrupted |= part.interrupted
            total.requests_per_s += part.requests_per_s
            total.images_per_s += part.images_per_s
            total.elapsed_s = max(total.elapsed_s, part.elapsed_s)
            if part.busy + part.starved >= total.busy + total.starved:
                total.busy, total.starved = part.busy, part.starved
            total.errors.update(part.errors)
            total.latencies_s.extend(part.latencies_s)
            total.lateness_s.extend(part.lateness_s)
            for stage, durations in part.stages_ms.items():
                total.stages_ms.setdefault(stage, _seconds()).extend(durations)
        return total


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a load test, as written to JSON.

    `accuracy`: the share of true labels, 0 to 1, None without an answer. `passed`: there were
    answers, no error and no wrong label. `client_busy` and `client_starved`: the shares of time
    in which the busiest process of the client ran on a core and waited for one.
    """

    passed: bool
    interrupted: bool
    elapsed_s: float
    requests: int
    images: int
    requests_per_s: float
    images_per_s: float
    errors: dict[str, int]
    wrong_labels: int
    accuracy: float | None
    mistakes: int
    own_mistakes: int
    latency_ms: dict[str, float]
    server_ms: dict[str, float]
    sent_late_ms: dict[str, float]
    client_busy: float
    client_starved: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(results: Results) -> Summary:
    """The numbers of a finished load test."""
    errors = sum(results.errors.values())
    answered = len(results.latencies_s)
    good = answered > 0 and not errors and not results.wrong_labels
    return Summary(
        passed=good and results.mistakes == results.own_mistakes and not results.interrupted,
        interrupted=results.interrupted,
        elapsed_s=results.elapsed_s,
        requests=answered + errors,
        images=results.images,
        requests_per_s=results.requests_per_s,
        images_per_s=results.images_per_s,
        errors=dict(results.errors.most_common()),
        wrong_labels=results.wrong_labels,
        accuracy=1 - results.mistakes / results.images if results.images else None,
        mistakes=results.mistakes,
        own_mistakes=results.own_mistakes,
        latency_ms=_distribution_ms(results.latencies_s),
        server_ms={
            stage: float(np.median(durations)) for stage, durations in results.stages_ms.items()
        },
        sent_late_ms=_distribution_ms(results.lateness_s),
        client_busy=results.busy,
        client_starved=results.starved,
    )


def _distribution_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not len(seconds):
        return {}
    values = {"mean": float(np.mean(seconds))}
    values |= {f"p{percent:g}": percentile(seconds, percent) for percent in PERCENTILES}
    values["max"] = max(seconds)
    return {name: value * 1e3 for name, value in values.items()}


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """Times in seconds, from 0 up to `duration_s`, of a Poisson process of `rate` a second."""
    generator = np.random.default_rng(seed)
    at_s = 0.0
    while (at_s := at_s + generator.exponential(1 / rate)) < duration_s:
        yield at_s


def send_load(
    load: Load,
    requests: Sequence[PreparedRequest],
    *,
    ready: Callable[[], object] = lambda: None,
    transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
) -> Results:
    """Send `load` from this process; SIGINT ends it early.

    `ready` is called before the first request and may block. `transport` makes a connection, by
    default over TCP.
    """

    def loop() -> asyncio.AbstractEventLoop:
        # epoll rounds waits up to a millisecond, and would delay each request of an open loop by
        # half a millisecond; select does not round.
        return asyncio.SelectorEventLoop(selectors.SelectSelector())

    traffic = _Traffic(load, requests, transport or _transports(load.url))
    with _sniffio_absent(), asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(traffic.run(ready))


@contextlib.contextmanager
def _sniffio_absent() -> Iterator[None]:
    """If sniffio is not installed, let imports of it fail fast.

    httpcore 1.0.9 tries to import it at each request, which takes a third of the generator's time
    (530 us a request instead of 370; EPYC, 2026-11-20).
    """
    absent = "sniffio" not in sys.modules and importlib.util.find_spec("sniffio") is None
    if absent:
        sys.modules["sniffio"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            del sys.modules["sniffio"]


class _Traffic:
    def __init__(
        self,
        load: Load,
        requests: Sequence[PreparedRequest],
        transport: Callable[[], httpx.AsyncBaseTransport],
    ) -> None:
        self._load = load
        self._results = Results()
        self._transport = transport
        self._requests = itertools.cycle([(self._http(one), one) for one in requests])
        self._deadline_s = 0.0

    def _http(self, request: PreparedRequest) -> httpx.Request:
        load = self._load
        headers = {"Content-Type": request.content_type, "Accept": "application/json"}
        if load.timeout_ms is not None:
            headers["X-Request-Timeout-Ms"] = str(load.timeout_ms)
        parameters = {"model": load.model} if load.model else None
        url = f"{load.url}/predict"
        return httpx.Request("POST", url, params=parameters, headers=headers, content=request.body)

    async def run(self, ready: Callable[[], object]) -> Results:
        # The service reports its own timeouts; this one is for a service that hangs.
        timeout_ms = self._load.timeout_ms
        timeout_s = _TIMEOUT_S if timeout_ms is None else timeout_ms / 1e3 + 5
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        transport=self._transport(), timeout=timeout_s, trust_env=False
                    )
                )
                for _ in range(self._load.connections)
            ]
            # The requests live as long as the test, so garbage collections need not scan them.
            gc.collect()
            gc.freeze()
            try:
                ready()
                await self._run(clients)
            finally:
                gc.unfreeze()
        return self._results

    async def _run(self, clients: Sequence[httpx.AsyncClient]) -> None:
        interrupt = asyncio.Event()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError):  # Windows; not main thread
            loop.add_signal_handler(signal.SIGINT, interrupt.set)
        started_s, used_s, starved_s = time.perf_counter(), time.process_time(), _starved_s()
        self._deadline_s = started_s + self._load.duration_s
        drive = self._closed if self._load.mode == "closed" else self._open
        sending = asyncio.create_task(drive(clients))
        waiting = asyncio.create_task(interrupt.wait())
        await asyncio.wait((sending, waiting), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, waiting):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
        self._results.finish(
            time.perf_counter() - started_s,
            time.process_time() - used_s,
            _starved_s() - starved_s,
            interrupted=interrupt.is_set(),
        )

    async def _closed(self, clients: Sequence[httpx.AsyncClient]) -> None:
        async def connection(client: httpx.AsyncClient) -> None:
            while (now_s := time.perf_counter()) < self._deadline_s:
                await self._send(client, now_s)

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(connection(client))

    async def _open(self, clients: Sequence[httpx.AsyncClient]) -> None:
        # Last in, first out: uses as few connections as the load needs.
        free: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()
        for client in reversed(clients):
            free.put_nowait(client)

        async def request(due_s: float) -> None:
            self._results.lateness_s.append(time.perf_counter() - due_s)
            client = await free.get()
            try:
                await self._send(client, due_s)
            finally:
                free.put_nowait(client)

        load = self._load
        started_s = self._deadline_s - load.duration_s
        async with asyncio.TaskGroup() as group:
            for arrival_s in poisson_arrivals(load.rate, load.duration_s, load.seed):
                due_s = started_s + arrival_s
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(request(due_s))

    async def _send(self, client: httpx.AsyncClient, since_s: float) -> None:
        """Send the next request and record its answer, timed from `since_s`."""
        http, request = next(self._requests)
        try:
            response = await client.send(http)
        except httpx.TransportError as exc:
            self._results.failed(type(exc).__name__)
            return
        latency_s = time.perf_counter() - since_s
        if response.status_code != 200:
            self._results.failed(error_kind(response.status_code, response.content))
            return
        verdict = judge(response.content, request)
        if verdict.error:
            self._results.failed(verdict.error)
            return
        stages_ms = server_timing(response.headers.get("Server-Timing", ""))
        self._results.answered(
            latency_s, verdict, request.own_labels, request.true_labels, stages_ms
        )


def _starved_s() -> float:
    """How long the main thread has been ready to run without a core; 0 outside Linux."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def _transports(url: str) -> Callable[[], httpx.AsyncBaseTransport]:
    """A transport of one connection: httpx's pool scans all of its requests at each answer."""
    context = ssl.create_default_context() if url.startswith("https:") else False
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    return lambda: httpx.AsyncHTTPTransport(verify=context, limits=limits)


def server_timing(header: str) -> dict[str, float]:
    """Milliseconds by stage from a Server-Timing header; entries without a duration are skipped."""
    stages = {}
    for entry in header.split(","):
        name, *parameters = entry.split(";")
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "dur":
                try:
                    stages[name.strip()] = float(value)
                except ValueError:
                    continue
    return stages
