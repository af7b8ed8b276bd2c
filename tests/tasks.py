"""`Batcher.enqueue` and `Decoders.start` for tasks: both call back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import numpy as np

from service.engine.queue import BatchAnswer, Work
from service.errors import DeadlineExceeded


@dataclass
class Prediction:
    """The answer to one request; its rows begin at row `row` of `batch`."""

    model: str
    version: str
    probabilities: np.ndarray
    queue_s: float
    compute_s: float
    batch: BatchAnswer
    row: int


class Asked(Work):
    """Images in a batcher's queue; `answered(request, error)` is called with their answer."""

    __slots__ = ("__weakref__", "_answered")

    def __init__(self, deadline_s, answered):
        self.deadline_s, self.waits, self._answered = deadline_s, False, answered

    def answered(self, error):
        self._answered(self, error)


def _prediction(request: Work) -> Prediction:
    return Prediction(
        request.version.name,
        request.version.version,
        request.batch.probabilities[request.row : request.row + request.rows],
        request.queue_s,
        request.compute_s,
        request.batch,
        request.row,
    )


def _resolve(future, outcome):
    if future.done():  # its task was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


async def submit(batcher, images, timeout_s: float) -> Prediction:
    """Wait for the answer; cancelling the task cancels the request."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def answered(request, error):
        _resolve(future, error or _prediction(request))

    request = Asked(loop.time() + timeout_s, answered)
    batcher.enqueue(request, images)
    try:
        return await future
    finally:
        batcher.cancel(request)


async def decode(decoders, source, body, timeout_s: float):
    """Wait for what was decoded, at most `timeout_s`; then the work is cancelled."""
    future = asyncio.get_running_loop().create_future()
    job = decoders.start(source, body, partial(_resolve, future))
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError as exc:
        raise DeadlineExceeded("not decoded in time") from exc
    finally:
        decoders.cancel(job)
