"""The transport-free heart: what every way in calls with images and gets probabilities from.

It finds the model, hands the rows to its batcher and accounts for the request's time and outcome.
It refuses to know how a request was spelled.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lenet import nvtx
from lenet.pixels import Images, Probabilities
from service.errors import ServiceError
from service.metrics import Metrics, Protocol, Stage
from service.repository import Repository


@dataclass(slots=True)
class Prediction:
    """Probabilities float32 (n, classes) in the order of the images, and who computed them."""

    model: str
    version: str
    probabilities: Probabilities


class RequestClock:
    """Times one request by stage and counts its outcome when its `with` block ends."""

    __slots__ = ("_lap_s", "_metrics", "_protocol", "_range", "_started_s", "stages")

    def __init__(self, metrics: Metrics, protocol: Protocol) -> None:
        self._metrics = metrics
        self._protocol = protocol
        self._started_s = self._lap_s = time.perf_counter()
        self.stages: dict[Stage, float] = {}

    @property
    def total_s(self) -> float:
        """Seconds since the request was met."""
        return time.perf_counter() - self._started_s

    def lap(self) -> None:
        """A stage begins here."""
        self._lap_s = time.perf_counter()

    def record(self, stage: Stage) -> None:
        """The stage that began at the last `lap` ends here."""
        self.stages[stage] = time.perf_counter() - self._lap_s

    def __enter__(self) -> Self:
        self._range = nvtx.begin("request")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        nvtx.end(self._range)
        if error is None:
            self._metrics.request_timed(self._protocol, self.stages, self.total_s)
            outcome = "ok"
        elif isinstance(error, ServiceError):
            outcome = error.code
        else:
            outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"
        self._metrics.request_done(self._protocol, outcome)


class Predictor:
    """Answers images with probabilities.

    `ready` is what /readyz says: true from the last step of the start to the first of the stop.
    """

    def __init__(self, repository: Repository, metrics: Metrics, timeout_s: float) -> None:
        self._repository = repository
        self._metrics = metrics
        self._timeout_s = timeout_s
        self.ready = False

    def clock(self, protocol: Protocol) -> RequestClock:
        """Start the clock of a request that came in over `protocol`."""
        return RequestClock(self._metrics, protocol)

    async def predict(
        self,
        images: Images,
        clock: RequestClock,
        *,
        model: str = "",
        version: str = "",
        timeout_s: float | None = None,
    ) -> Prediction:
        """Classify `images`, uint8 (n, 28, 28), n >= 1; notes queue and compute time on `clock`.

        `timeout_s` is cut to the service's own.

        Raises:
            UnknownModel, Overloaded, DeadlineExceeded, InferenceFailed, Unavailable.
        """
        # No await until the request stands in the queue: a version that is asked for is the one
        # that answers.
        served = self._repository.get(model, version)
        timeout = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        answer = await served.batcher.submit(images, timeout)
        clock.stages["queue"] = answer.queue_s
        clock.stages["compute"] = answer.compute_s
        return Prediction(answer.model.name, answer.model.version, answer.probabilities)
