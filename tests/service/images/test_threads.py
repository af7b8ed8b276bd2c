from __future__ import annotations

import asyncio
import threading

import pytest

from service.errors import DeadlineExceeded, Overloaded
from service.images import DecodingThreads, threads

LONG_S = 20.0


class Work:
    """Decoding that lasts until `release`; `started` counts those that began."""

    def __init__(self):
        self._released = threading.Event()
        self.begun = threading.Semaphore(0)
        self.started = 0
        self.ended = 0

    def __call__(self):
        self.started += 1
        self.begun.release()
        assert self._released.wait(LONG_S)
        return "images"

    def release(self):
        self._released.set()

    def end(self):
        self.ended += 1


@pytest.fixture
def work():
    work = Work()
    yield work
    work.release()


@pytest.fixture
async def one(work):
    """One thread, busy with `work`."""
    with DecodingThreads(1) as one:
        busy = asyncio.create_task(one.run(work, LONG_S))
        assert await asyncio.to_thread(work.begun.acquire, timeout=LONG_S)
        yield one
        work.release()
        assert await busy == "images"


async def test_a_result_and_an_error_reach_their_caller():
    def fail():
        raise ValueError("broken")

    with DecodingThreads(1) as threads:
        assert await threads.run(threading.get_ident, LONG_S) != threading.get_ident()
        with pytest.raises(DeadlineExceeded):
            await threads.run(fail, 0.0)
        with pytest.raises(ValueError, match="broken"):
            await threads.run(fail, LONG_S)


async def test_work_is_dropped_when_its_deadline_passes_before_a_thread_is_free(one, work):
    queued = Work()
    for timeout_s in (0.02, 0.0, -1.0):
        with pytest.raises(DeadlineExceeded):
            await one.run(queued, timeout_s)
    work.release()
    assert await one.run(lambda: "next", LONG_S) == "next"
    assert queued.started == 0


async def test_work_is_dropped_when_its_caller_leaves_before_a_thread_is_free(one, work):
    queued, outcomes = Work(), []
    one.cancel(one.start(queued, outcomes.append, queued.end))
    assert queued.ended == 1
    task = asyncio.create_task(one.run(queued, LONG_S))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    work.release()
    assert await one.run(lambda: "next", LONG_S) == "next"
    assert (queued.started, outcomes) == (0, [])


@pytest.mark.parametrize("leave", [True, False])
async def test_work_that_has_begun_keeps_its_thread_when_its_caller_is_gone(work, leave):
    with DecodingThreads(1) as threads:
        outcomes = []
        job = threads.start(work, outcomes.append, work.end)
        assert await asyncio.to_thread(work.begun.acquire, timeout=LONG_S)
        if leave:
            threads.cancel(job)
        assert work.ended == 0
        follower = asyncio.create_task(threads.run(lambda: "next", LONG_S))
        await asyncio.sleep(0.01)
        assert not follower.done()
        work.release()
        assert await follower == "next"
        assert (work.ended, outcomes) == (1, [] if leave else ["images"])


async def test_a_request_is_refused_when_too_many_wait(one, monkeypatch):
    monkeypatch.setattr(threads, "MAX_WAITING", 2)
    queued = [one.start(str, print) for _ in range(2)]
    with pytest.raises(Overloaded) as caught:
        await one.run(str, LONG_S)
    assert caught.value.retry_after_s == 1
    for job in queued:
        one.cancel(job)
