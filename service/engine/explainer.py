"""Explanations: what each layer of a model computes of one image, apart from the batches."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

import numpy as np

from lenet import nvtx
from lenet.explanation import MAX_OPERATIONS, Change, Layer, explain, operations
from lenet.nvtx import span
from lenet.pixels import Images
from service.engine.deadlines import Deadlines
from service.engine.queue import Work
from service.engine.versions import ModelVersion
from service.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    Overloaded,
    ServiceError,
    invalid,
    shown,
    stopping,
)

_log = logging.getLogger(__name__)

MAX_WAITING = 32
"""Explanations that wait for the thread; further ones are rejected as `Overloaded`."""


class Explained(Work):
    """Images, the one of them that is to be explained, and its layers, once it is answered."""

    __slots__ = ()

    index: int
    change: Change
    layers: list[Layer]


class Explainer:
    """Computes one explanation at a time, on a thread of its own, which the first one starts.

    Belongs to an event loop. A context manager; on leaving, those that wait are failed.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadlines = deadlines
        self._thread = ThreadPoolExecutor(1, "explainer")
        self._waiting: OrderedDict[Explained, None] = OrderedDict()
        self._running: Explained | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        running = () if self._running is None else (self._running,)
        for request in (*self._waiting, *running):
            self._answer(request, stopping())
        self._thread.shutdown()  # after the layer that it computes

    def enqueue(self, request: Explained, images: Images, version: ModelVersion) -> None:
        """Explain what `version` computes of one of `images`, until the deadline of `request`.

        `request.answered` is called once, never from within this call, with None, or with
        InvalidInput (`change` names no block, or the network is too large), DeadlineExceeded,
        InferenceFailed or Unavailable.

        Raises:
            Overloaded: too many wait.
            Unavailable: the service is stopping.
        """
        if self._closed:
            raise stopping()
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} explanations wait, and no more may; try again later",
                retry_after_s=1,
            )
        request.begin(images, version, time.monotonic())
        request.rows = request.batch_rows = 1
        request.queue_range = nvtx.begin("queue")
        self._waiting[request] = None
        self._deadlines.add(request, self._expire)
        self._start()

    def cancel(self, request: Explained) -> None:
        """Nobody waits for `request` any more: it is not begun, or ends after its present layer."""
        if request.waits:
            self._end(request)

    def _start(self) -> None:
        """Begin the next one, if the thread is free."""
        if self._running is None and self._waiting and not self._closed:
            request, _ = self._waiting.popitem(last=False)
            self._running = request
            request.end_wait()
            request.first_cut_s = time.monotonic()
            computing = self._loop.run_in_executor(self._thread, _compute, request)
            computing.add_done_callback(partial(self._finish, request))

    def _finish(self, request: Explained, computing: asyncio.Future[None]) -> None:
        self._running = None
        self._start()
        request.answered_s = time.monotonic()
        error = computing.exception()
        if error is not None and not isinstance(error, ServiceError):
            _log.error("an explanation failed", exc_info=error)
            error = InferenceFailed("the explanation failed; see the server log")
        self._answer(request, error)

    def _expire(self, request: Explained) -> None:
        timeout_ms = 1e3 * (request.deadline_s - request.arrived_s)
        self._answer(request, DeadlineExceeded(f"no answer within {timeout_ms:.0f} ms"))

    def _answer(self, request: Explained, error: ServiceError | None) -> None:
        if request.waits:
            self._end(request)
            request.answered(error)

    def _end(self, request: Explained) -> None:
        request.waits = False
        request.end_wait()
        self._deadlines.remove(request)
        self._waiting.pop(request, None)


@span("explain")
def _compute(request: Explained) -> None:
    """Fill its layers, unless it ends meanwhile. Raises: InvalidInput, InferenceFailed."""
    weights, change = request.version.weights, request.change
    model = weights.model
    if (found := operations(model)) > MAX_OPERATIONS:
        raise InvalidInput(
            f"model: {shown(model.name)} takes {found} operations an image, expected at most "
            f"{MAX_OPERATIONS} of a model that is explained; ask for its prediction",
            field="model",
        )
    names = [shape.name for shape in model.shapes()]
    if change.noisy and change.noisy not in names:
        raise invalid("noisy", shown(change.noisy), f"one of {', '.join(names)}")
    image = request.images[request.index : request.index + 1]
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in explain(weights, image, change):
            if not request.waits:
                return
            if not math.isfinite(layer.high - layer.low):
                raise InferenceFailed(f"layer {layer.name} computes values that are not finite")
            request.layers.append(layer)
