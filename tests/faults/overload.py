"""Three times what a service can do, over HTTP and gRPC: what is answered, how late, what follows.

The network is larger than the committed ones, so that one process can offer so much.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from types import SimpleNamespace

import grpc
import numpy as np

from benchmarks.grpc_stub import Stub
from lenet.context import Target, open_backend
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model, Pool
from tests.conftest import draw_weights
from tests.faults.clients import (
    ACCEPT,
    Connection,
    Known,
    infer_request,
    quantiles_ms,
    request,
)
from tests.service_process import PATIENCE_S, Service

SIZES = (1, 64, 200)
OFFERED = 3.0
QUEUE_S = 1.0
"""How long the queue takes to drain when it is full: sets --max-queue-rows."""

PEAK_S = 5.0
GOODPUT = 0.9
"""Least share of the measured peak under overload."""

LATENCY = 1.3
"""How many times queue bound over drain rate the p99 of accepted requests may be, ..."""

BATCH_ROWS = 64
"""... beside the batch before a request and its own images, which are computed at that rate. Fixed
seconds are too few for 200 images of a slow network, and too many for one."""

RECOVERED_S = 1.0
SLOW = Model(
    "slow",
    (
        ConvBlock(64, (5, 5)),
        ConvBlock(384, (5, 5), pool=Pool("max", (2, 2), (2, 2))),
        DenseBlock(10, activation=IDENTITY),
    ),
)
"""Large enough that it is the limit, and not the clients. With 128 channels in the second
convolution gRPC's client was, with 3,600 calls a second: it took more than one of two EPYC cores
(2026-11-25)."""


CALLS = 100
"""Calls of gRPC that are open on a connection at a time."""

STATUS = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class Load:
    """Results of the requests of one run. A call's status is the one that HTTP has for it."""

    def __init__(self):
        self.statuses = Counter()
        self.accepted_s = []
        self.problems = Counter()
        self.offered = self.begun = 0
        self.took_s = 0.0


class Clients:
    """Clients of one service over HTTP, all with requests of `size` images."""

    name = "HTTP"

    def __init__(self, port, known, size):
        self.port, self.known, self.size, self.idle = port, known, size, []
        asked = (known.choose(size) for _ in range(32))
        self.messages = [(rows, self.message(images)) for rows, images in asked]

    def message(self, images):
        return request(images.tobytes(), ACCEPT)

    async def ask(self, data, load):
        """Status and answer, on an idle connection or on a new one.

        Raises:
            OSError: the connection ended.
        """
        connection = self.idle.pop() if self.idle else await Connection.open(self.port)
        answer = await connection.ask(data)
        if answer.status == 429 and "retry-after" not in answer.headers:
            load.problems["without Retry-After"] += 1
        if answer.headers.get("connection") == "close":
            await connection.close()
        else:
            self.idle.append(connection)
        return answer.status, answer

    async def exchange(self, load, number):
        """One request; the status."""
        rows, data = self.messages[number % len(self.messages)]
        load.offered += 1
        began_s = time.monotonic()
        try:
            status, answer = await self.ask(data, load)
        except OSError:
            load.problems["lost"] += 1
            return 0
        load.statuses[status] += 1
        if status == 200:
            load.accepted_s.append(time.monotonic() - began_s)
            try:
                self.known.judge(rows, answer)
            except AssertionError:
                load.problems["wrong"] += 1
        return status

    async def closed(self, clients, duration_s, retry_s=0.0):
        """`clients` ask again as soon as they have an answer, `retry_s` after a 429.

        They begin one after another in the first `retry_s`. If they began together they would also
        retry together, and the load would be thousands of requests at once and then a pause.
        """
        load, end_s = Load(), time.monotonic() + duration_s

        async def client(number):
            await asyncio.sleep(retry_s * number / clients)
            while time.monotonic() < end_s:
                if await self.exchange(load, number) != 200:
                    await asyncio.sleep(retry_s)

        began_s = time.monotonic()
        await asyncio.gather(*(client(number) for number in range(clients)))
        load.took_s = time.monotonic() - began_s
        return load

    async def open(self, rate, duration_s):
        """`rate` requests a second, whatever becomes of them."""
        load, began_s = Load(), time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (passed_s := time.monotonic() - began_s) < duration_s:
                for number in range(load.begun, int(rate * passed_s)):
                    group.create_task(self.exchange(load, number))
                load.begun = int(rate * passed_s)
                await asyncio.sleep(0.002)
        load.took_s = time.monotonic() - began_s
        return load

    async def recovery_s(self, quiet_s):
        """How long after the load a request takes no longer than three times `quiet_s`."""
        began_s = time.monotonic()
        while True:
            load = Load()
            await self.exchange(load, 0)
            if load.accepted_s and load.accepted_s[0] < 3 * quiet_s + 0.02:
                return time.monotonic() - began_s
            if time.monotonic() - began_s > 30:
                return float("inf")

    async def close(self):
        for connection in self.idle:
            await connection.close()


class GrpcClients(Clients):
    """Clients of gRPC. `idle` has a channel for each call that may be open."""

    name = "gRPC"

    def message(self, images):
        return infer_request(images)

    async def ask(self, data, load):
        if not self.idle:
            options = (("grpc.use_local_subchannel_pool", 1),)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options)
            self.idle += [(channel, Stub(channel).ModelInfer)] * CALLS
        one = self.idle.pop()
        try:
            return 200, await one[1](data, timeout=PATIENCE_S)
        except grpc.RpcError as exc:
            return STATUS.get(exc.code(), 500), None
        finally:
            self.idle.append(one)

    async def close(self):
        for channel in {channel for channel, _ in self.idle}:
            await channel.close()


async def _peak(clients):
    """Images a second that are answered when a few clients keep the batches full."""
    load = await clients.closed(max(4, 256 // clients.size), PEAK_S)
    return clients.size * load.statuses[200] / load.took_s


async def _measure(service, known, duration_s, queue_rows):
    problems = []
    print(
        f"{'':>4} {'images':>6} {'loop':>7} {'offered':>8} {'goodput':>8} {'of peak':>8} "
        f"{'p99, s':>7} {'bound, s':>8} {'429':>8} {'wrong':>6} {'back, s':>8}"
    )
    for kind, size in itertools.product((Clients, GrpcClients), SIZES):
        clients = kind(service.port, known, size)
        single = Load()
        for _ in range(5):
            await clients.exchange(single, 0)
        quiet_s = float(np.median(single.accepted_s))
        peak_rows = await _peak(clients)
        for loop in ("closed", "open"):
            offered_rows = OFFERED * peak_rows
            if loop == "closed":
                # A third of them wait in the queue; the others offer so much together.
                number = int(OFFERED * queue_rows / size)
                load = await clients.closed(number, duration_s, number * size / offered_rows)
            else:
                load = await clients.open(offered_rows / size, duration_s)
            back_s = await clients.recovery_s(quiet_s)
            # Other programs on the machine may have taken a part of it in the meantime.
            peak_rows = min(peak_rows, await _peak(clients))
            goodput = size * load.statuses[200] / load.took_s
            p99_s = quantiles_ms(load.accepted_s, 0.99)[0] / 1e3
            bound_s = (LATENCY * queue_rows + BATCH_ROWS + size) / goodput
            print(
                f"{kind.name} {size:6} {loop:>7} {size * load.offered / load.took_s:8.0f} "
                f"{goodput:8.0f} {goodput / peak_rows:8.2f} {p99_s:7.2f} {bound_s:8.2f} "
                f"{load.statuses[429]:8} {load.problems['wrong']:6} {back_s:8.2f}",
                flush=True,
            )
            problems += [
                f"{kind.name}, {size} images, {loop} loop: {what}"
                for holds, what in (
                    (not load.problems, f"answers are {dict(load.problems)}"),
                    (set(load.statuses) <= {200, 429}, f"statuses {dict(load.statuses)}"),
                    (goodput >= GOODPUT * peak_rows, f"{goodput:.0f}, peak {peak_rows:.0f}"),
                    (p99_s <= bound_s, f"p99 {p99_s:.2f} s, expected at most {bound_s:.2f}"),
                    (back_s <= RECOVERED_S, f"recovered after {back_s:.2f} s"),
                )
                if not holds
            ]
        await clients.close()
    return problems


def overload(folder, duration_s, seed, arguments):
    """Run all; prints a table and what is wrong. Returns the exit code."""
    weights = draw_weights(SLOW, seed)
    images = np.random.default_rng(seed).integers(0, 256, (64, 28, 28), np.uint8)
    plan = open_backend(Target("cpu")).plan(weights, len(images))
    began_s = time.monotonic()
    expected = plan.run(images).probabilities
    rate = len(images) / (time.monotonic() - began_s)
    queue_rows = max(400, int(QUEUE_S * rate))
    (folder / "weights" / "slow").mkdir(parents=True)
    weights.write(folder / "weights" / "slow" / "1.safetensors")
    limits = ["--max-queue-rows", str(queue_rows), "--max-images", "200"]
    service = Service(["--port", "0", "--grpc-port", "0", *limits, *arguments], folder)
    try:
        service.ready()
        lines = len(service.lines)
        known = Known(service, SimpleNamespace(images=images), {"1": expected}, seed)
        problems = asyncio.run(_measure(service, known, duration_s, queue_rows))
        problems += [f"in the log: {line}" for line in service.lines[lines:]]
        service.signal()
        if code := service.wait():
            problems.append(f"the stop ended with {code}")
    finally:
        service.end()
    print(*problems, sep="\n")
    return 1 if problems else 0
