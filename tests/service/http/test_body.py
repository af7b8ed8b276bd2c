from __future__ import annotations

import asyncio
import json
import logging
import re
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from service import metrics
from service.errors import Cancelled, DeadlineExceeded, Unavailable
from service.http import body as limits
from service.http.body import CancelledOnDisconnect, UnavailableOnStop

TYPE = b"Content-Type: application/octet-stream\r\n"
GONE = {"type": "http.disconnect"}


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


async def answer(reader):
    """Status, headers and error of an answer after which the server closes the connection."""
    async with asyncio.timeout(20):
        raw = await reader.read()
    start, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = start.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert re.match(r"HTTP/1.1 \d+ ", status)
    return int(status.split()[1]), headers, json.loads(body)["error"]


def quiet(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# The size of a body


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"], ids=["", "asking first"])
@pytest.mark.parametrize("length", [2001, 10**12])
async def test_a_body_over_the_limit_is_refused_before_any_of_it_is_sent(
    listen, caplog, length, expect
):
    async with listen(max_body_bytes=2000) as served:
        async with connect(served) as (reader, writer):
            writer.write(head(b"Content-Length: %d\r\n" % length, expect))
            status, headers, error = await answer(reader)
        assert status == 413
        assert headers["connection"] == "close"
        assert error["code"] == "too_large"
        assert error["field"] == "body"
        assert f"{length} bytes, expected at most 2000" in error["message"]
        assert await served.requests("too_large") == 1
    assert quiet(caplog)


async def test_a_body_in_chunks_is_refused_at_the_chunk_that_passes_the_limit(listen, caplog):
    chunk = b"3e8\r\n" + bytes(1000) + b"\r\n"
    async with listen(max_body_bytes=2000) as served:
        async with connect(served) as (reader, writer):
            writer.write(head(b"Transfer-Encoding: chunked\r\n") + 3 * chunk)
            # The last chunk is never sent: the answer comes without it.
            status, headers, error = await answer(reader)
        assert status == 413
        assert headers["connection"] == "close"
        assert "more, expected at most 2000 bytes" in error["message"]
    assert quiet(caplog)


async def test_a_body_of_exactly_the_limit_is_read_in_either_way(listen, one):
    async def chunks():
        for start in range(0, 784, 100):
            yield one[start : start + 100]

    async with listen(max_body_bytes=784) as served:
        assert (await served.post(one)).status_code == 200
        assert (await served.post(chunks())).status_code == 200
        assert (await served.post(one + b"0")).status_code == 413


async def test_bodies_in_hand_have_a_common_bound(listen, one):
    async with listen(max_body_bytes=2000, max_bodies_bytes=2000) as served:
        async with connect(served) as (_, holder), connect(served) as (reader, writer):
            holder.write(head(b"Content-Length: 2000\r\n") + bytes(1500))
            await holder.drain()
            async with asyncio.timeout(20):
                while (refused := await served.post(one)).status_code != 429:
                    pass  # until the server has read what is held
            assert refused.headers["retry-after"] == "1"
            writer.write(head(b"Content-Length: 784\r\n") + one)
            status, headers, error = await answer(reader)
            assert (status, error["code"], error["field"]) == (429, "overloaded", "body")
            assert headers["connection"] == "close"
        async with asyncio.timeout(20):
            while (await served.post(one)).status_code != 200:
                pass  # until the server has seen the holder leave
        for body in (b"", one + one, one[:-1], bytes(2001)):
            await served.post(body)
        assert (await served.post(one + one)).status_code == 200, "every kind of end gives back"


async def test_a_compressed_body_is_a_415(served, one, refusal):
    response = await served.post(one, content_encoding="gzip")
    error = refusal(response, 415, "unsupported_media_type")
    assert error.field == "content-encoding"
    assert (await served.post(one, content_encoding="Identity")).status_code == 200


# The time of a body


async def test_the_time_that_a_request_may_take_begins_with_its_body(listen, monkeypatch, one):
    clock = SimpleNamespace(perf_counter=lambda: clock.now_s, now_s=0.0)
    monkeypatch.setattr(metrics, "time", clock)
    read = limits.Bodies.read

    async def slow_read(bodies, request, headers, within_s):
        assert within_s == 0.05
        clock.now_s += 0.06
        return await read(bodies, request, headers, within_s)

    async with listen() as served:
        monkeypatch.setattr(limits.Bodies, "read", slow_read)
        response = await served.post(one, x_request_timeout_ms="50")
        assert response.status_code == 504
        assert "more than 50 ms" in response.json()["error"]["message"]


@pytest.mark.parametrize("sent", [b"", bytes(100)], ids=["nothing", "a part"])
async def test_a_body_that_stalls_is_a_408_and_the_connection_is_closed(listen, caplog, sent):
    async with listen(request_timeout_ms=60) as served:
        async with connect(served) as (reader, writer):
            writer.write(head(b"Content-Length: 784\r\n") + sent)
            status, headers, error = await answer(reader)
        assert status == 408
        assert headers["connection"] == "close"
        assert error["code"] == "body_timeout"
        assert error["message"].startswith(f"{len(sent)} bytes of the body arrived in 0.06 s")
        assert await served.requests("body_timeout") == 1
    assert quiet(caplog)


async def test_a_body_in_single_bytes_is_read_when_it_comes_in_time(listen, one):
    async with listen() as served, connect(served) as (reader, writer):
        writer.write(head(b"Content-Length: 784\r\n", b"Connection: close\r\n"))
        for i in range(784):
            writer.write(one[i : i + 1])
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_that_ends_early_is_a_cancelled_request_and_no_error(listen, caplog):
    async with listen() as served:
        async with connect(served) as (_, writer):
            writer.write(head(b"Content-Length: 784\r\n") + bytes(100))
            await writer.drain()
        async with asyncio.timeout(20):
            while await served.requests("cancelled") != 1:
                pass  # each turn is a request to the server
    assert quiet(caplog)


# Clients that leave


async def test_waiting_rows_are_dropped_when_their_client_leaves(listen, hold, caplog, one):
    async with listen() as served:
        first = asyncio.create_task(served.post(one))
        await hold.submitted()
        await hold.begun()
        async with connect(served) as (_, writer):
            writer.write(head(b"Content-Length: 2352\r\n") + 3 * one)
            await hold.submitted()
        await hold.left()
        hold.release()
        assert (await first).status_code == 200
        assert await served.value("lenet_rows_dropped_total", reason="cancelled") == 3
        assert await served.requests("cancelled") == 1
        assert await served.requests("ok") == 1
        assert (await served.post(one)).status_code == 200
        assert await served.value("lenet_images_total", model="tiny") == 2
    assert quiet(caplog)


async def test_batch_mates_are_answered_when_a_client_leaves_in_the_middle_of_a_batch(
    listen, hold, caplog, one, images
):
    async with listen() as served:
        async with connect(served) as (_, writer):
            writer.write(head(b"Content-Length: 784\r\n") + one)
            await hold.submitted()
            await hold.begun()
        await hold.left()
        other = asyncio.create_task(served.post(images.tobytes()))
        await hold.submitted()
        hold.release()
        assert len((await other).json()["predictions"]) == 5
        assert await served.requests("cancelled") == 1
        assert await served.value("lenet_rows_dropped_total", reason="cancelled") == 0
        assert await served.value("lenet_contexts_busy", model="tiny") == 0
    assert quiet(caplog)


@pytest.fixture
def impatient(monkeypatch):
    """Watching starts at once."""
    monkeypatch.setattr(limits, "_WATCH_AFTER_S", 0)


class Caller:
    """A task in `CancelledOnDisconnect` that waits for `answer`; `messages` are its client's."""

    def __init__(self):
        self.answer = asyncio.get_running_loop().create_future()
        self.messages = asyncio.Queue()
        self.watched = asyncio.Event()
        self.stopped_too = False
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        try:
            with CancelledOnDisconnect(SimpleNamespace(receive=self._receive)):
                result = await self.answer
        except Cancelled:
            result = "gone"
        # Nobody may cancel what comes after the block.
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.current_task().cancelling() == 0
        return result

    async def _receive(self):
        self.watched.set()
        message = await self.messages.get()
        if self.stopped_too:
            self.task.cancel()
        return message


async def test_an_answer_is_given_when_the_client_stays(impatient):
    caller = Caller()
    await caller.watched.wait()
    caller.answer.set_result("answer")
    assert await caller.task == "answer"
    assert len(asyncio.all_tasks()) == 1  # nobody watches on


async def test_the_block_is_cancelled_when_the_client_leaves(impatient):
    caller = Caller()
    await caller.watched.wait()
    caller.watched.clear()
    caller.messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    await caller.watched.wait()
    assert not caller.answer.cancelled()
    caller.messages.put_nowait(GONE)
    assert await caller.task == "gone"
    assert caller.answer.cancelled()


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("first", ["answer", "client"])
async def test_either_outcome_is_whole_when_answer_and_departure_meet(impatient, first, turns):
    caller = Caller()
    await caller.watched.wait()
    acts = [lambda: caller.answer.done() or caller.answer.set_result("answer")]
    acts.insert(first == "answer", lambda: caller.messages.put_nowait(GONE))
    acts[0]()
    for _ in range(turns):
        await asyncio.sleep(0)
    acts[1]()
    assert await caller.task in ("answer", "gone")


@pytest.mark.parametrize("turns", range(4))
async def test_an_error_is_no_orphan_when_it_meets_a_departure(impatient, turns):
    caller = Caller()
    await caller.watched.wait()
    caller.messages.put_nowait(GONE)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not caller.answer.done():
        caller.answer.set_exception(DeadlineExceeded("late"))
    try:
        assert await caller.task == "gone"
    except DeadlineExceeded:
        assert turns == 0


async def test_a_stop_is_not_taken_for_a_departure(impatient):
    caller = Caller()
    await caller.watched.wait()
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.task


async def test_a_stop_wins_when_the_client_leaves_at_the_same_time(impatient):
    caller = Caller()
    await caller.watched.wait()
    caller.stopped_too = True
    caller.messages.put_nowait(GONE)
    with pytest.raises(asyncio.CancelledError):
        await caller.task


async def test_nobody_watches_when_the_answer_is_quick(impatient):
    with CancelledOnDisconnect(SimpleNamespace(receive=asyncio.Event().wait)):
        pass
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_a_request_that_the_server_cancels_is_unavailable():
    async def wait():
        with UnavailableOnStop():
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(Unavailable, match="another instance") as caught:
        await task
    assert caught.value.retry_after_s == 1
