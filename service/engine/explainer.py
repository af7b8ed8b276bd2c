"""Explanations: what each layer of a model computes of one image, apart from the batches."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

import numpy as np

from lenet import nvtx
from lenet.explanation import MAX_OPERATIONS, Change, Layer, explain, operations
from lenet.nvtx import span
from lenet.pixels import Images
from service.engine.deadlines import Deadlines
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


class Explanation:
    """Images, uint8 (n, 28, 28), the one of them that is to be explained, and its layers.

    Times are those of `time.monotonic`. `on_answer` is called with None, or with the error.
    """

    def __init__(
        self,
        images: Images,
        deadline_s: float,
        version: ModelVersion,
        on_answer: Callable[[ServiceError | None], None],
        index: int,
        change: Change,
    ) -> None:
        self.images, self.deadline_s, self.version = images, deadline_s, version
        self.on_answer, self.index, self.change = on_answer, index, change
        self.layers: list[Layer] = []
        self.done = False
        """Answered or cancelled."""
        self.arrived_s = time.monotonic()
        self.begun_s = self.answered_s = 0.0
        self._range = nvtx.begin("queue")

    def end_wait(self) -> None:
        """Close the profiler's range."""
        nvtx.end(self._range)
        self._range = None


class Explainer:
    """Computes one explanation at a time, on a thread of its own, which the first one starts.

    Belongs to an event loop. A context manager; on leaving, those that wait are failed.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadlines = deadlines
        self._thread = ThreadPoolExecutor(1, "explainer")
        self._waiting: OrderedDict[Explanation, None] = OrderedDict()
        self._running: Explanation | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        running = () if self._running is None else (self._running,)
        for request in (*self._waiting, *running):
            self._answer(request, stopping())
        self._thread.shutdown()  # after the layer that it computes

    def enqueue(
        self,
        version: ModelVersion,
        images: Images,
        index: int,
        change: Change,
        deadline_s: float,
        on_answer: Callable[[ServiceError | None], None],
    ) -> Explanation:
        """Explain what `version` computes of image `index`, until `deadline_s`.

        `on_answer` is called once, never from within this call, with None, or with InvalidInput
        (`change` names no block, or the network is too large), DeadlineExceeded, InferenceFailed
        or Unavailable.

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
        request = Explanation(images, deadline_s, version, on_answer, index, change)
        self._waiting[request] = None
        self._deadlines.add(request, self._expire)
        self._start()
        return request

    def cancel(self, request: Explanation) -> None:
        """Nobody waits for `request` any more: it is not begun, or ends after its present layer."""
        if not request.done:
            self._end(request)

    def _start(self) -> None:
        """Begin the next one, if the thread is free."""
        if self._running is None and self._waiting and not self._closed:
            request, _ = self._waiting.popitem(last=False)
            self._running = request
            request.end_wait()
            request.begun_s = time.monotonic()
            computing = self._loop.run_in_executor(self._thread, _compute, request)
            computing.add_done_callback(partial(self._finish, request))

    def _finish(self, request: Explanation, computing: asyncio.Future[None]) -> None:
        self._running = None
        self._start()
        request.answered_s = time.monotonic()
        error = computing.exception()
        if error is not None and not isinstance(error, ServiceError):
            _log.error("an explanation failed", exc_info=error)
            error = InferenceFailed("the explanation failed; see the server log")
        self._answer(request, error)

    def _expire(self, request: Explanation) -> None:
        timeout_ms = 1e3 * (request.deadline_s - request.arrived_s)
        self._answer(request, DeadlineExceeded(f"no answer within {timeout_ms:.0f} ms"))

    def _answer(self, request: Explanation, error: ServiceError | None) -> None:
        if not request.done:
            self._end(request)
            request.on_answer(error)

    def _end(self, request: Explanation) -> None:
        request.done = True
        request.end_wait()
        self._deadlines.remove(request)
        self._waiting.pop(request, None)


@span("explain")
def _compute(request: Explanation) -> None:
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
            if request.done:
                return
            if not math.isfinite(layer.high - layer.low):
                raise InferenceFailed(f"layer {layer.name} computes values that are not finite")
            request.layers.append(layer)
