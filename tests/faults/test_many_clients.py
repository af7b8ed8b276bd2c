"""Many clients at the same time: every answer belongs to its caller, also while others leave."""

from __future__ import annotations

import asyncio
import io
import json
import time

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.grpc_stub import Stub
from tests.faults.checks import samples, total
from tests.faults.clients import (
    RAW,
    AsyncConnection,
    Pinger,
    assert_same,
    infer_request,
    quantiles_ms,
    request,
)

ACCEPT = b"Accept: " + RAW
SIZES = (1, 1, 1, 2, 3, 5, 17, 63, 64, 65, 200, 1000)


def _message(digits, chosen, form):
    images = digits.images[chosen]
    if form == "json":
        content = json.dumps({"images": images.reshape(-1, 784).tolist()}).encode()
        return request(content, ACCEPT, kind=b"application/json")
    if form == "npy":
        content = io.BytesIO()
        np.save(content, images)
        return request(content.getvalue(), ACCEPT, kind=b"application/x-npy")
    return request(images.tobytes(), ACCEPT)


class Mix:
    """Clients that send requests of all sizes and forms; some leave before their answer."""

    def __init__(self, service, digits, seed, rows, cancelled_share):
        self.service, self.digits = service, digits
        self.generator = np.random.default_rng(seed)
        self.rows_left = rows
        self.cancelled_share = cancelled_share
        self.answered = self.left = self.rows_of_left = 0

    def run(self, clients):
        asyncio.run(self._run(clients))

    async def _run(self, clients):
        target = f"127.0.0.1:{self.service.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel, asyncio.TaskGroup() as group:
            stub = Stub(channel)
            for number in range(clients):
                group.create_task(self._over_grpc(stub) if number % 4 == 0 else self._over_http())

    def _next(self):
        """The rows of the next request, each another image where there are enough, and its form."""
        size = int(self.generator.choice(SIZES))
        self.rows_left -= size
        count = len(self.digits.images)
        chosen = self.generator.choice(count, size, replace=size > count)
        form = str(self.generator.choice(("raw", "raw", "npy", "json" if size < 20 else "raw")))
        leaves = self.generator.random() < self.cancelled_share
        # Within the time of an answer: before it is read, while it waits, is computed or written.
        return chosen, form, self.generator.exponential(0.004) if leaves else None

    def _leave(self, chosen):
        self.left += 1
        self.rows_of_left += len(chosen)

    def _check(self, chosen, content):
        assert_same(
            np.frombuffer(content, "<f4").reshape(-1, 10), self.digits.probabilities[chosen]
        )
        self.answered += 1

    async def _over_http(self):
        connection = await AsyncConnection.open(self.service.port)
        while self.rows_left > 0:
            chosen, form, leaves_s = self._next()
            connection.writer.write(_message(self.digits, chosen, form))
            if leaves_s is None:
                answer = await connection.answer()
                assert answer.status == 200, answer
                self._check(chosen, answer.body)
                continue
            self._leave(chosen)
            await asyncio.sleep(leaves_s)
            connection.reset()
            connection = await AsyncConnection.open(self.service.port)
        await connection.close()

    async def _over_grpc(self, stub):
        while self.rows_left > 0:
            chosen, _, leaves_s = self._next()
            call = stub.ModelInfer(infer_request(self.digits.images[chosen]))
            if leaves_s is None:
                answer = await call
                self._check(chosen, answer.raw_output_contents[0])
                continue
            self._leave(chosen)
            await asyncio.sleep(leaves_s)
            call.cancel()


def _mix(served, digits, intact, seed, rows, clients):
    mix = Mix(served, digits, seed, rows, cancelled_share=0.3)
    before = samples(served)
    with intact(rss_bytes=60_000_000) as watch:
        mix.run(clients)
    assert mix.answered > mix.left / 2
    # Whoever left was either answered in vain, cancelled, or not even read.
    after = samples(served)

    def moved(name, **labels):
        return total(after, name, **labels) - total(before, name, **labels)

    known_digit = 2
    ok = moved("lenet_requests_total", outcome="ok") - known_digit
    cancelled = moved("lenet_requests_total", outcome="cancelled")
    assert mix.answered <= ok <= mix.answered + mix.left
    assert 0 < cancelled <= mix.left
    assert ok + cancelled <= mix.answered + mix.left
    assert moved("lenet_rows_dropped_total", reason="cancelled") <= mix.rows_of_left
    assert moved("lenet_rows_dropped_total", reason="late") == 0
    assert watch.lines == len(served.lines), "nothing was logged"


def test_every_answer_is_its_callers_when_a_third_of_them_leave(served, digits, intact, seed):
    _mix(served, digits, intact, seed, rows=10_000, clients=24)


def test_batch_mates_are_answered_when_a_large_request_leaves_amid_its_batches(
    served, digits, intact
):
    def dropped():
        return total(samples(served), "lenet_rows_dropped_total", reason="cancelled")

    before, answers = dropped(), 0

    async def large():
        left = 0
        while left < 10 or answers <= 50 or await asyncio.to_thread(dropped) == before:
            connection = await AsyncConnection.open(served.port)
            connection.writer.write(request(bytes(5_000 * 784), ACCEPT))
            await asyncio.sleep(0.05)  # 0.3 s of computing
            connection.reset()
            left += 1

    async def mates(until):
        nonlocal answers
        connection = await AsyncConnection.open(served.port)
        row = 0
        while not until.done():
            body, expected = digits.rows([row])
            answer = await connection.ask(request(body, ACCEPT))
            assert_same(np.frombuffer(answer.body, "<f4").reshape(-1, 10), expected)
            answers += 1
            row = (row + 1) % len(digits.images)
        await connection.close()

    async def both():
        leaving = asyncio.create_task(large())
        await asyncio.gather(*(mates(leaving) for _ in range(8)))
        await leaving

    with intact(rss_bytes=60_000_000):
        asyncio.run(both())


def test_singles_are_answered_beside_requests_of_ten_thousand_images(served, digits, intact):
    body = digits.rows(np.arange(10_000) % len(digits.images))[0]

    async def large(over):
        connection = await AsyncConnection.open(served.port)
        times_s = []
        while not over.is_set():
            began_s = time.monotonic()
            assert (await connection.ask(request(body, ACCEPT))).status == 200
            times_s.append(time.monotonic() - began_s)
        await connection.close()
        return times_s

    async def both():
        over = asyncio.Event()
        others = asyncio.create_task(large(over))
        with Pinger(served.port, digits.images[0], digits.probabilities[:1]) as pinger:
            (_, p99_ms) = await asyncio.to_thread(pinger.run, 3)
        over.set()
        return p99_ms, await others

    with intact(rss_bytes=60_000_000):
        p99_ms, others_s = asyncio.run(both())
    # A single waits for a batch or two of 64, of the large request's 157.
    assert p99_ms < quantiles_ms(others_s, 0.5)[0] / 4


async def _scrape(port, over, every_s):
    accept = b"Accept: " + b"application/openmetrics-text;q=0.1, " * 1500 + b"*/*"
    message = request(None, accept, method=b"GET", path=b"/metrics")
    connection = await AsyncConnection.open(port)
    scraped = 0
    while not over.is_set():
        answer = await connection.ask(message)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain")
        if scraped % 20 == 0:
            families = list(text_string_to_metric_families(answer.body.decode()))
            assert len(families) > 20
        scraped += 1
        await asyncio.sleep(every_s)
    await connection.close()
    return scraped


@pytest.mark.long
def test_a_hundred_scrapes_a_second_leave_the_others_their_time(served, digits, intact):
    async def both(pinger):
        over = asyncio.Event()
        scraping = asyncio.create_task(_scrape(served.port, over, 0.01))
        times = await asyncio.to_thread(pinger.run, 5)
        over.set()
        return times, await scraping

    with (
        intact(rss_bytes=60_000_000),
        Pinger(served.port, digits.images[0], digits.probabilities[:1]) as pinger,
    ):
        quiet = pinger.run(5)
        beside, scraped = asyncio.run(both(pinger))
    assert scraped > 100
    # The text is made on a thread, which takes the interpreter in turns of 5 ms; and a hundred
    # scrapes a second are a thousand times what Prometheus does.
    assert beside[0] < 2 * quiet[0] + 1
    assert beside[1] < 3 * quiet[1] + 15
