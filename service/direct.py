"""Predictions for code in this process, without HTTP or gRPC."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, WIDTH, Images, Probabilities
from service.engine.models import Models
from service.engine.queue import Work
from service.errors import DeadlineExceeded, ServiceError, TooLarge, invalid


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The answer for n images.

    Attributes:
        model, version: computed all of it.
        labels: int64 (n,), the class with the highest probability.
        probabilities: float32 (n, classes).
    """

    model: str
    version: str
    labels: NDArray[np.int64]
    probabilities: Probabilities


class _Waiting(Work):
    """Images in the queue of a model, for a coroutine that awaits `done`."""

    __slots__ = ("done",)

    def __init__(self, timeout_s: float) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deadline_s, self.waits = time.monotonic() + timeout_s, False

    def answered(self, error: ServiceError | None) -> None:
        if self.done.done():  # its task was cancelled
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


async def predict(
    models: Models, images: Images, model: str, version: str, *, timeout_s: float, max_images: int
) -> Predictions:
    """See `service.assembly.Service.predict`."""
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (HEIGHT, WIDTH):
        got = f"{images.dtype} {images.shape}"
        raise invalid("images", got, f"uint8 (n, {HEIGHT}, {WIDTH})")
    if not len(images):
        raise invalid("images", "none", "at least one")
    if len(images) > max_images:
        raise TooLarge(f"images: got {len(images)}, expected at most {max_images}", field="images")
    batcher = models.get(model, version)
    waiting = _Waiting(timeout_s)
    batcher.enqueue(waiting, images)
    try:
        await waiting.done
    except DeadlineExceeded as exc:
        raise DeadlineExceeded(f"no answer within {round(timeout_s * 1e3, 3):g} ms") from exc
    finally:
        batcher.cancel(waiting)
    found = waiting.batch.probabilities[waiting.row : waiting.row + waiting.rows]
    by = waiting.version
    return Predictions(by.name, by.version, found.argmax(axis=1), found)
