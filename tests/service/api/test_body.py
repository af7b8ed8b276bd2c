from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from lenet.cpu import CpuBackend, CpuPlan
from lenet.pixels import HEIGHT, PIXELS, WIDTH, joined
from lenet.staging import Staging
from service.decode import pool as decoders
from service.forms import prediction
from tests.pictures import FORM, PNG, long_form, seven
from tests.service_process import PATIENCE_S
from tests.wire.doors import until

TYPE = b"Content-Type: application/octet-stream\r\n"
FORM_TYPE = b"Content-Type: multipart/form-data; boundary=b\r\n"
LONG = long_form()


@asynccontextmanager
async def connect(served):
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


def head(*lines):
    return b"POST /predict HTTP/1.1\r\nHost: a\r\n" + TYPE + b"".join(lines) + b"\r\n"


async def in_two(served, body):
    """The status of the answer to a body that comes in two pieces: only such a one is held."""
    async with connect(served) as (reader, writer):
        writer.write(head(b"Content-Length: %d\r\n" % len(body), b"Connection: close\r\n"))
        writer.write(body[:-1])
        await asyncio.sleep(0.01)
        writer.write(body[-1:])
        async with asyncio.timeout(PATIENCE_S):
            return int((await reader.read()).split()[1])


# The size of a body


@pytest.mark.parametrize(
    "target",
    ["/predict?model=vgg", "/explain?version=9", "/v2/models/vgg/infer", "/v1/models/vgg:predict"],
)
async def test_an_unknown_model_is_a_404_before_any_of_a_large_body_is_sent(open_app, target):
    async with open_app() as served:
        for _ in range(2):  # the second finds its header section known
            async with connect(served) as (reader, writer):
                section = head(b"Content-Length: 9999999\r\n")
                writer.write(section.replace(b"/predict", target.encode()))
                async with asyncio.timeout(PATIENCE_S):
                    assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
        assert served.requests("unknown_model") == 2


async def test_an_unknown_model_is_a_404_without_asking_for_the_body(open_app):
    async with open_app() as served, connect(served) as (reader, writer):
        section = head(b"Content-Length: 784\r\nExpect: 100-continue\r\n")
        writer.write(section.replace(b"/predict", b"/predict?model=vgg"))
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")


# The time of a body


# Decoding in another process


@pytest.fixture
def one_slot(monkeypatch):
    """All that is decoded waits in one line for one decoder."""
    monkeypatch.setattr(decoders, "SMALL_BYTES", -1)


async def test_a_picture_is_answered_within_its_deadline_when_decoding_takes_longer(
    served, one_slot, refusal, one
):
    for _ in range(3):
        late = await served.post(LONG, FORM, x_request_timeout_ms="300")
        assert "300 ms" in refusal(late, 504, "deadline_exceeded").message
    assert served.requests("deadline_exceeded") == 3
    assert (await served.post(one)).status_code == 200, "pixels need no decoder"
    assert (await served.post(seven(), PNG)).status_code == 200
    refusal(await served.post(b"picture", PNG), 400, "invalid_input")


async def test_a_body_is_held_until_its_decoding_has_ended(open_app, one):
    size = len(LONG) + 1000
    async with open_app(max_body_bytes=size, max_in_flight_bytes=2 * size) as served:
        async with connect(served) as (_, writer):
            length = b"Content-Length: %d\r\n" % len(LONG)
            writer.write(head(length).replace(TYPE, FORM_TYPE) + LONG)
            async with asyncio.timeout(PATIENCE_S):
                while served.service.budget.held_bytes < len(LONG):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert (await served.post(LONG, FORM)).status_code == 429
        async with asyncio.timeout(PATIENCE_S):
            while await in_two(served, 500 * one) != 200:
                pass


class Late:
    """A batch of which a device reads the pixels some turns of the event loop later."""

    def __init__(self, plan, parts):
        self.plan, self.parts, self.turns = plan, parts, 20

    def done(self):
        self.turns -= 1
        return self.turns < 0

    def result(self):
        return self.plan.run(joined(self.parts))


async def test_pixels_stay_where_they_arrived_until_the_device_has_read_them(open_app, monkeypatch):
    staging = Staging(np.zeros(1000 * PIXELS, np.uint8) for _ in range(3))
    staged = []

    def launch(plan, parts):
        staged.extend(staging.holds(part) for part in parts)
        return Late(plan, parts)

    monkeypatch.setattr("service.engine.models.open_staging", lambda *_: staging)
    monkeypatch.setattr(CpuPlan, "launch", launch)

    async def ask(served, seed):
        generator, weights = np.random.default_rng(seed), served.models.find().version.weights
        plan = CpuBackend().plan(weights, 1000)
        async with connect(served) as (reader, writer):
            for rows in generator.choice([1, 400, 1000], 20):
                images = generator.integers(0, 256, (rows, HEIGHT, WIDTH), np.uint8)
                accept = b"Accept: application/octet-stream\r\n"
                writer.write(head(b"Content-Length: %d\r\n" % images.nbytes, accept))
                writer.write(images.tobytes())
                async with asyncio.timeout(PATIENCE_S):
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                    got = np.frombuffer(await reader.readexactly(40 * int(rows)), "<f4")
                want = plan.run(images).probabilities
                np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-5)

    async with open_app(max_batch_rows=1000, max_images=1000) as served:
        await asyncio.gather(*(ask(served, seed) for seed in range(8)))
    assert {True, False} == set(staged)


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_large_answer_can_end_between_two_slices(open_app, monkeypatch, images, leaves):
    rows = np.concatenate([images] * 500)
    steps = prediction._steps
    begun = asyncio.Event()

    def never_ending(request, end):
        while True:
            begun.set()
            yield next(steps(request, end))

    monkeypatch.setattr(prediction, "_steps", never_ending)
    async with open_app(max_batch_rows=64, max_images=2500) as served:
        if leaves:
            async with connect(served) as (_, writer):
                writer.write(head(b"Content-Length: %d\r\n" % rows.nbytes) + rows.tobytes())
                await asyncio.wait_for(begun.wait(), PATIENCE_S)
        else:
            late = await served.post(rows.tobytes(), x_request_timeout_ms="1000")
            assert late.status_code == 504
        outcome = "cancelled" if leaves else "deadline_exceeded"
        await until(lambda: served.requests(outcome) == 1)
