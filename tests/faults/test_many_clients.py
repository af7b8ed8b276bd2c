"""Many clients at the same time: every answer belongs to its caller, also while others leave."""

from __future__ import annotations

import asyncio
import time

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.grpc_stub import Stub
from tests.faults.checks import samples, total
from tests.faults.clients import (
    ACCEPT,
    JSON,
    NPY,
    RAW,
    Known,
    infer_request,
    message,
    quantiles_ms,
    request,
)

SIZES = (1, 1, 1, 2, 3, 5, 17, 63, 64, 65, 200, 1000)


class Mix:
    """Clients that send requests of all sizes and forms; some leave before their answer."""

    def __init__(self, known, rows, cancelled_share):
        self.known, self.rows_left, self.cancelled_share = known, rows, cancelled_share
        self.left = self.rows_of_left = 0

    async def run(self, clients):
        target = f"127.0.0.1:{self.known.service.grpc_port}"
        async with grpc.aio.insecure_channel(target) as channel, asyncio.TaskGroup() as group:
            stub = Stub(channel)
            for number in range(clients):
                group.create_task(self._over_grpc(stub) if number % 4 == 0 else self._over_http())

    def _next(self):
        """The next request, and after how long its client leaves."""
        rows, images = self.known.choose(*SIZES)
        self.rows_left -= len(rows)
        if self.known.random.random() >= self.cancelled_share:
            return rows, images, None
        self.left += 1
        self.rows_of_left += len(rows)
        # Within the time of an answer: before it is read, while it waits, is computed or written.
        return rows, images, self.known.random.expovariate(1 / 0.004)

    async def _over_http(self):
        connection = await self.known.connect()
        while self.rows_left > 0:
            rows, images, leaves_s = self._next()
            form = self.known.random.choice((RAW, RAW, NPY, JSON if len(rows) < 20 else RAW))
            connection.writer.write(message(images, form, ACCEPT))
            if leaves_s is None:
                self.known.judge(rows, await connection.answer())
                continue
            await asyncio.sleep(leaves_s)
            connection.reset()
            connection = await self.known.connect()
        await connection.close()

    async def _over_grpc(self, stub):
        while self.rows_left > 0:
            rows, images, leaves_s = self._next()
            call = stub.ModelInfer(infer_request(images))
            if leaves_s is None:
                self.known.judge(rows, await call)
                continue
            await asyncio.sleep(leaves_s)
            call.cancel()


async def test_every_answer_is_its_callers_when_a_third_of_them_leave(served, digits, intact, seed):
    known = Known(served, digits, seed=seed)
    mix, before = Mix(known, 10_000, 0.3), samples(served)
    with intact(rss_bytes=60_000_000) as watch:
        await mix.run(24)
    answered = known.answered.total()
    assert answered > mix.left / 2
    # Whoever left was either answered in vain, cancelled, or not even read.
    after = samples(served)

    def moved(name, **labels):
        return total(after, name, **labels) - total(before, name, **labels)

    known_digit = 2
    ok = moved("lenet_requests_total", outcome="ok") - known_digit
    cancelled = moved("lenet_requests_total", outcome="cancelled")
    assert answered <= ok <= answered + mix.left
    assert 0 < cancelled <= mix.left
    assert ok + cancelled <= answered + mix.left
    assert moved("lenet_rows_dropped_total", reason="cancelled") <= mix.rows_of_left
    assert moved("lenet_rows_dropped_total", reason="late") == 0
    assert watch.lines == len(served.lines), "nothing was logged"


async def test_batch_mates_are_answered_when_a_large_request_leaves_amid_its_batches(known, intact):
    def dropped():
        return total(samples(known.service), "lenet_rows_dropped_total", reason="cancelled")

    with intact(rss_bytes=60_000_000):
        before, left = dropped(), 0
        async with known.pinged() as (times_s, _):
            while left < 10 or len(times_s) < 50 or await asyncio.to_thread(dropped) == before:
                connection = await known.connect()
                connection.writer.write(request(bytes(5_000 * 784), ACCEPT))
                await asyncio.sleep(0.05)  # 0.3 s of computing
                connection.reset()
                left += 1


async def test_singles_are_answered_beside_requests_of_ten_thousand_images(known, intact):
    _, images = known.choose(10_000)
    data, larges_s = request(images.tobytes(), ACCEPT), []
    with intact(rss_bytes=60_000_000):
        async with known.pinged() as (times_s, _), await known.connect() as connection:
            while len(larges_s) < 8:
                began_s = time.monotonic()
                assert (await connection.ask(data)).status == 200
                larges_s.append(time.monotonic() - began_s)
    # A single waits for a batch or two of 64, of the large request's 157. A request that waited
    # for a large one would take as long.
    assert np.median(times_s) < np.median(larges_s) / 4


async def _scrape(known, over, every_s):
    accept = b"Accept: " + b"application/openmetrics-text;q=0.1, " * 1500 + b"*/*"
    data, scraped = request(None, accept, method=b"GET", path=b"/metrics"), 0
    async with await known.connect() as connection:
        while not over.is_set():
            answer = await connection.ask(data)
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/plain")
            if scraped % 20 == 0:
                assert len(list(text_string_to_metric_families(answer.body.decode()))) > 20
            scraped += 1
            await asyncio.sleep(every_s)
    return scraped


@pytest.mark.long
async def test_a_hundred_scrapes_a_second_leave_the_others_their_time(known, intact):
    quantiles = []
    with intact(rss_bytes=60_000_000):
        for beside in (False, True):
            over = asyncio.Event()
            async with known.pinged(every_s=0) as (times_s, _):
                scraping = asyncio.create_task(_scrape(known, over, 0.01)) if beside else None
                await asyncio.sleep(5)
                over.set()
            quantiles.append(quantiles_ms(times_s, 0.5, 0.99))
    assert await scraping > 100
    # The text is made on a thread, which takes the interpreter in turns of 5 ms; and a hundred
    # scrapes a second are a thousand times what Prometheus does.
    quiet, other = quantiles
    assert other[0] < 2 * quiet[0] + 1
    assert other[1] < 3 * quiet[1] + 15
