"""The load itself: closed loop or open loop, over httpx.

Closed: each connection sends its next request when it has the answer to the last one. Open:
requests are due at times that do not ask how the service is doing, and latency counts from the
time a request was due, so that one slow answer is seen by all that had to wait behind it
(coordinated omission). It refuses to retry.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import httpx
import numpy as np

from benchmarks.answers import judge, refusal, server_timing
from benchmarks.digits import PreparedRequest
from benchmarks.results import Results

MAX_CONNECTIONS = 900
"""A process may `select` on 1,024 file descriptors."""

_PATIENCE_S = 35.0
"""The service answers within 30 s of its own accord."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one process is to send.

    `connections` are the most in use at a time; `rate` is requests a second, of an open loop
    alone. `timeout_ms` is told to the service; None leaves it to the service's own.
    """

    url: str
    mode: Literal["closed", "open"]
    connections: int
    rate: float
    duration_s: float
    seed: int
    timeout_ms: int | None = None
    model: str | None = None


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

    `ready` is called before the first request and may hold it up; `transport` makes what a
    connection is, TCP without it.
    """

    def loop() -> asyncio.AbstractEventLoop:
        # epoll rounds every wait up to a millisecond, select does not: an open loop's requests
        # would all be half a millisecond late.
        return asyncio.SelectorEventLoop(selectors.SelectSelector())

    traffic = _Traffic(load, requests, transport or _transports(load.url))
    with _sniffio_known(), asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(traffic.run(ready))


@contextlib.contextmanager
def _sniffio_known() -> Iterator[None]:
    """Where there is no sniffio, say so once for all.

    httpcore 1.0.9 tries to import it at each request, in vain: a third of the generator's time
    (530 us a request with, 370 without; EPYC, 2026-11-20).
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
        # Whether the service answers in time is its own to say; this is for one that hangs.
        timeout_ms = self._load.timeout_ms
        patience_s = _PATIENCE_S if timeout_ms is None else timeout_ms / 1e3 + 5
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        transport=self._transport(), timeout=patience_s, trust_env=False
                    )
                )
                for _ in range(self._load.connections)
            ]
            # The requests stay for the whole test: nothing to look through at each collection.
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
        started_s = time.perf_counter()
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
        self._results.finish(time.perf_counter() - started_s, interrupted=interrupt.is_set())

    async def _closed(self, clients: Sequence[httpx.AsyncClient]) -> None:
        async def connection(client: httpx.AsyncClient) -> None:
            while (now_s := time.perf_counter()) < self._deadline_s:
                await self._send(client, now_s)

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(connection(client))

    async def _open(self, clients: Sequence[httpx.AsyncClient]) -> None:
        # Last in, first out: as few connections as the load needs.
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
        """Send the next request and book what comes back, timed from `since_s`."""
        http, request = next(self._requests)
        try:
            response = await client.send(http)
        except httpx.TransportError as exc:
            self._results.failed(type(exc).__name__)
            return
        latency_s = time.perf_counter() - since_s
        if response.status_code != 200:
            self._results.failed(refusal(response.status_code, response.content))
            return
        verdict = judge(response.content, request)
        if verdict.error:
            self._results.failed(verdict.error)
            return
        stages_ms = server_timing(response.headers.get("Server-Timing", ""))
        self._results.answered(
            latency_s, verdict, request.own_labels, request.true_labels, stages_ms
        )


def _transports(url: str) -> Callable[[], httpx.AsyncBaseTransport]:
    """One connection each: httpx's own pool looks through all of its requests at each answer."""
    context = ssl.create_default_context() if url.startswith("https:") else False
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    return lambda: httpx.AsyncHTTPTransport(verify=context, limits=limits)
