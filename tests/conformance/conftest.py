"""The service in this process, behind a real socket, and a device that tests hold up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import Counter

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lenet.context import ExecutionContext
from service import server
from service.assembly import open_service
from service.settings import Settings
from tests.conformance.doors import DOORS, Ask
from tests.service_process import PATIENCE_S
from tests.wire.doors import until


class Device:
    """Computes batches while it is not held.

    Attributes:
        batches: the images of each batch that has begun.
        error: raised instead of an answer.
    """

    def __init__(self, monkeypatch):
        self.batches, self.error = [], None
        self._allowed, self._changed = math.inf, threading.Condition()
        run = ExecutionContext.run

        def held_run(context, images):
            self.batches.append(images.copy())
            with self._changed:
                allowed = self._changed.wait_for(lambda: self._allowed > 0, PATIENCE_S)
                assert allowed, "nobody released the device"
                self._allowed -= 1
            if self.error is not None:
                raise self.error
            return run(context, images)

        monkeypatch.setattr(ExecutionContext, "launch", lambda context, images: None)
        monkeypatch.setattr(ExecutionContext, "run", held_run)

    def hold(self, batches=0):
        """Compute so many batches, and no other."""
        with self._changed:
            self._allowed = batches
            self._changed.notify_all()

    def release(self):
        self.hold(math.inf)

    @property
    def rows(self):
        """How many images it has computed, or has begun to."""
        return sum(map(len, self.batches))


class Opened:
    """An open service, asked through one door."""

    def __init__(self, service, device, door, target, stop, serving):
        self.service, self.device, self.door = service, device, door
        self.stop, self.serving = stop, serving
        self._target, self._clients = target, []

    async def begin(self, ask=None, held_back=0):
        """A client that has sent `ask` but its last `held_back` bytes."""
        return await self.send(self.door.form.message(ask or Ask()), held_back)

    async def send(self, message, held_back=0):
        """A client that has sent `message` but its last `held_back` bytes."""
        client = await self._open()
        client.send(message, held_back)
        return client

    async def end(self, client):
        """The outcome that `client` reads."""
        return self.door.form.outcome(await client.reply())

    async def ask(self, ask=None):
        return await self.end(await self.begin(ask))

    async def is_ready(self):
        client = await self.send(self.door.form.probe())
        return self.door.form.is_ready(await client.reply())

    async def _open(self):
        client = await self.door.transport.open(self._target)
        self._clients.append(client)
        return client

    async def fill(self, rows):
        """Hold the device at one image, and let `rows` more wait; the two clients."""
        self.device.hold()
        running = await self.begin(Ask(images(1)))
        await until(lambda: self.device.batches)
        waiting = await self.begin(Ask(images(rows)))
        await self.until_waiting(rows)
        return running, waiting

    @contextlib.contextmanager
    def without_contexts(self):
        """Requests inside wait, as no context is free."""
        pool = self.service.models.get().pool
        workers = [pool.acquire() for _ in pool.workers]
        yield
        for worker in workers:
            pool.release(worker)

    async def until_refused(self):
        """Wait until nobody can connect."""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while True:
                    await (await self.door.transport.open(self._target)).close()

    async def until_waiting(self, rows):
        """Wait until so many images are in the queue."""
        await until(lambda: self.waiting == rows)

    @property
    def waiting(self):
        """How many images are in the queue."""
        return sum(model.load()[0] for model in self.service.models.served)

    async def samples(self):
        text = (await self.service.metrics.exposition())[0].decode()
        return [one for family in text_string_to_metric_families(text) for one in family.samples]

    async def value(self, name, **labels):
        """The sum of the samples `name` with these labels."""
        wanted = labels.items()
        found = await self.samples()
        return sum(one.value for one in found if one.name == name and wanted <= one.labels.items())

    async def counted(self, *labels):
        """How many requests ended in which way: by outcome, and further `labels`."""
        counts = Counter()
        for one in await self.samples():
            if one.name == "lenet_requests_total" and one.value:
                assert one.labels["protocol"] == self.door.form.protocol
                counts[tuple(one.labels[name] for name in (*labels, "outcome"))] += one.value
        return {key if labels else key[0]: count for key, count in counts.items()}

    async def assert_counted(self, **outcomes):
        """So many requests have ended with each outcome, and none with another."""
        count = sum(outcomes.values())
        async with asyncio.timeout(PATIENCE_S):  # a client that leaves is not told of it
            while sum((await self.counted()).values()) < count:
                pass  # it waits in a thread
        assert await self.counted() == outcomes

    async def assert_idle(self):
        """Nothing is left of any request: no memory, no deadline, no place in the queue."""
        requests = self.service.fast_routes[b"POST", b"/predict"].requests
        await until(lambda: not (requests.budget.held_bytes or requests.watched))
        await self.until_waiting(0)
        for name in ("lenet_in_flight_bytes", "lenet_queue_rows"):
            assert await self.value(name) == 0

    async def close(self):
        for client in self._clients:
            await client.close()


def images(rows, seed=0):
    """Random images, uint8 (rows, 28, 28)."""
    return np.random.default_rng(seed).integers(0, 256, (rows, 28, 28), np.uint8)


@pytest.fixture(params=DOORS, ids=[door.name for door in DOORS])
def door(request):
    return request.param


@pytest.fixture
def device(monkeypatch):
    device = Device(monkeypatch)
    yield device
    device.release()


@pytest.fixture
def opened(folder, write, device, door, ranges, monkeypatch):
    """`async with opened(max_images=4) as service`: the model `tiny`, version 3, through `door`.

    Nothing may be left of any request at the end, nor a range that a profiler saw begin.
    """
    write("tiny/3")
    monkeypatch.setattr(server, "_freeze_objects", lambda: None)  # they live longer than this test

    @contextlib.asynccontextmanager
    async def open_(**changes):
        options = {"port": 0, "grpc_port": 0, "weights": folder, "default_model": "tiny"}
        options |= {"max_batch_rows": 4, "contexts": 1, "request_timeout_ms": 3_600_000}
        options |= {"hang_timeout_s": 3600, "drain_timeout_s": 3600}
        settings = Settings(**(options | changes))
        async with (
            open_service(settings, grpc_port=0) as service,
            door.server(service, settings) as (target, stop, serving),
        ):
            opened = Opened(service, device, door, target, stop, serving)
            try:
                yield opened
                await opened.assert_idle()
                began, ended = ranges
                assert sorted(ended) == list(range(1, len(began) + 1))
            finally:
                device.release()
                await opened.close()

    return open_
