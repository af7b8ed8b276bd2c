"""What happens at every request, kept in plain Python until prometheus_client is told of it.

In the files that several workers share, what the library did for a lone request took 21 us of the
39 that it spent behind its transport (two cores, 2026-11-20). Here an observation is a bisection
and two additions. It refuses to expose anything: the series are the library's.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

FLUSHED_EVERY_S = 1.0


class Tally(Protocol):
    """What has happened to one series since the library was told last."""

    def flush(self) -> None:
        """Tell it now."""
        ...


T = TypeVar("T", bound=Tally)


class Tallies:
    """The tallies of one process."""

    def __init__(self) -> None:
        self._all: list[Tally] = []

    def counter(self, series: Counter) -> CounterTally:
        """One more, of a counter."""
        return self._kept(CounterTally(series))

    def gauge(self, series: Gauge) -> GaugeTally:
        """One more, of a gauge."""
        return self._kept(GaugeTally(series))

    def histogram(self, series: Histogram, bounds: tuple[float, ...]) -> HistogramTally:
        """One more, of a histogram with these upper bounds."""
        return self._kept(HistogramTally(series, bounds))

    def _kept(self, tally: T) -> T:
        self._all.append(tally)
        return tally

    def flush(self) -> None:
        """Put everything that happened so far into the library's series."""
        for tally in self._all:
            tally.flush()

    @contextmanager
    def flushed_regularly(self) -> Iterator[None]:
        """Inside, on the running event loop, every `FLUSHED_EVERY_S` for those who share a folder.

        An exposition of this process has everything at any time.
        """

        async def flush() -> None:
            while True:
                await asyncio.sleep(FLUSHED_EVERY_S)
                self.flush()

        flushing = asyncio.create_task(flush())
        try:
            yield
        finally:
            flushing.cancel()
            self.flush()


class CounterTally:
    """Of a counter without labels, or with all of them given."""

    __slots__ = ("_amount", "_series")

    def __init__(self, series: Counter) -> None:
        self._series = series
        self._amount = 0.0

    def inc(self, amount: float = 1) -> None:
        """Count `amount` more."""
        self._amount += amount

    def flush(self) -> None:
        """Tell it now."""
        if self._amount:
            self._series.inc(self._amount)
            self._amount = 0.0


class GaugeTally:
    """Of a gauge."""

    __slots__ = ("_changed", "_series", "_value")

    def __init__(self, series: Gauge) -> None:
        self._series = series
        self._value, self._changed = 0.0, False

    def set(self, value: float) -> None:
        """It is `value` now."""
        self._value, self._changed = value, True

    def flush(self) -> None:
        """Tell it now."""
        if self._changed:
            self._series.set(self._value)
            self._changed = False


class HistogramTally:
    """Of a histogram with these upper bounds, the last of which is infinite by itself."""

    __slots__ = ("_bounds", "_counts", "_series", "_sum")

    def __init__(self, series: Histogram, bounds: tuple[float, ...]) -> None:
        self._series, self._bounds = series, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more event, of this size."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Tell it now: by the library's own values, for it takes no more than one event a call."""
        if any(self._counts):
            for index, count in enumerate(self._counts):
                if count:
                    self._series._buckets[index].inc(count)
                    self._counts[index] = 0
            self._series._sum.inc(self._sum)
            self._sum = 0.0


Transport = Literal["http", "grpc"]
Stage = Literal["decode", "queue", "compute", "encode"]
ReloadOutcome = Literal["ok", "refused"]
LossReason = Literal["sticky", "hang"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REQUEST_BOUNDS_S = tuple(
    round(mantissa * 10.0**exponent, 9)
    for exponent in (-5, -4, -3, -2, -1, 0)
    for mantissa in (1, 1.5, 2, 3, 5, 7)
    if 5e-5 <= mantissa * 10.0**exponent <= 5
)
_STAGE_BOUNDS_S = (1e-5, 2e-5, 3e-5, *_REQUEST_BOUNDS_S)
_ROW_BOUNDS = tuple(float(1 << exponent) for exponent in range(11))


class Metrics:
    """The service's series in `registry`; also what a `Batcher` tells of its batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self.tallies = tallies = Tallies()
        # Set by the parent of several workers before this library is imported in them.
        self._shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        if not self._shared:
            ProcessCollector(registry=registry)
        self._requests = Counter(
            "lenet_requests",
            "Requests answered, by outcome: ok or the code of the error.",
            ("protocol", "outcome"),
            registry=registry,
        )
        duration = Histogram(
            "lenet_request_duration_seconds",
            "From the first byte of a request read to its answer made; predictions only.",
            ("protocol",),
            buckets=_REQUEST_BOUNDS_S,
            registry=registry,
        )
        stage = Histogram(
            "lenet_stage_duration_seconds",
            "Where the time of a predicted request went.",
            ("stage",),
            buckets=_STAGE_BOUNDS_S,
            registry=registry,
        )
        protocols = get_args(Transport)
        answered = {protocol: self._requests.labels(protocol, "ok") for protocol in protocols}
        self._answered = {name: tallies.counter(series) for name, series in answered.items()}
        self._durations = {
            protocol: tallies.histogram(duration.labels(protocol), _REQUEST_BOUNDS_S)
            for protocol in protocols
        }
        self._stages = {
            name: tallies.histogram(stage.labels(name), _STAGE_BOUNDS_S) for name in get_args(Stage)
        }
        batch_rows = Histogram(
            "lenet_batch_rows", "Rows in a batch.", buckets=_ROW_BOUNDS, registry=registry
        )
        batch_duration = Histogram(
            "lenet_batch_duration_seconds",
            "Time of one batch on its context.",
            buckets=_STAGE_BOUNDS_S,
            registry=registry,
        )
        device_duration = Histogram(
            "lenet_device_duration_seconds",
            "Time of one batch by the device's clock, where it is read.",
            buckets=_STAGE_BOUNDS_S,
            registry=registry,
        )
        self._batch_rows = tallies.histogram(batch_rows, _ROW_BOUNDS)
        self._batch_duration = tallies.histogram(batch_duration, _STAGE_BOUNDS_S)
        self._device_duration = tallies.histogram(device_duration, _STAGE_BOUNDS_S)
        self._cuts = Counter(
            "lenet_batches", "Batches cut, by reason.", ("model", "reason"), registry=registry
        )
        self._images = Counter("lenet_images", "Images classified.", ("model",), registry=registry)
        self._padding = Counter(
            "lenet_padding_rows",
            "Rows that were computed only to fill a batch up.",
            ("model",),
            registry=registry,
        )
        self._replays = Counter(
            "lenet_graph_replays",
            "Batches; hit if a captured graph computed it, which the CPU has none of.",
            ("model", "result"),
            registry=registry,
        )
        losses = Counter(
            "lenet_device_losses",
            "Times that a process ended because its device was lost: a sticky error, or a hang.",
            ("reason",),
            registry=registry,
        )
        self._losses = {reason: losses.labels(reason) for reason in get_args(LossReason)}
        self._dropped = Counter(
            "lenet_rows_dropped",
            "Rows that left the queue without a batch.",
            ("reason",),
            registry=registry,
        )
        self._queue_rows = self._gauge("lenet_queue_rows", "Rows left waiting by the last cut.")
        self._contexts = self._gauge("lenet_contexts", "Execution contexts.")
        self._busy = self._gauge("lenet_contexts_busy", "Execution contexts with a batch.")
        self._device_bytes = self._gauge("lenet_device_bytes", "Device memory of all contexts.")
        self._workspace_bytes = self._gauge(
            "lenet_workspace_bytes", "The part of it that is scratch."
        )
        self._golden_error = Gauge(
            "lenet_golden_error",
            "Largest golden logit difference at the proof, relative to the largest golden logit.",
            ("model",),
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._start_phase = Gauge(
            "lenet_start_phase_seconds",
            "Time of each phase of the start; contexts holds most of device and all of warm_up.",
            ("phase",),
            multiprocess_mode="max",
            registry=registry,
        )
        self._model = Gauge(
            "lenet_model_info",
            "1 for each loaded model.",
            ("model", "version", "sha256"),
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._loaded: dict[str, tuple[str, str]] = {}  # version and sha256 by model
        self._reloads = Counter(
            "lenet_reloads",
            "Reloads of a model: ok if the newest file is served afterwards.",
            ("model", "outcome"),
            registry=registry,
        )

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(
            name, help_text, ("model",), multiprocess_mode="livesum", registry=self._registry
        )

    def request_done(self, protocol: Transport, outcome: str) -> None:
        """A request was answered: `outcome` is ok or the code of a `ServiceError`."""
        if outcome == "ok":
            self._answered[protocol].inc()
        else:
            self._requests.labels(protocol, outcome).inc()

    def request_timed(
        self, protocol: Transport, stages: dict[Stage, float], total_s: float
    ) -> None:
        """Seconds of a predicted request, by stage and in all."""
        for stage, seconds in stages.items():
            self._stages[stage].observe(seconds)
        self._durations[protocol].observe(total_s)

    def started(self, phase: str, seconds: float) -> None:
        """A phase of the start took `seconds`."""
        self._start_phase.labels(phase).set(seconds)

    def model_loaded(
        self, model: str, version: str, sha256: str, contexts: int, golden_error: float
    ) -> None:
        """A model is ready on `contexts` contexts."""
        self.model_replaced(model, version, sha256, golden_error)
        for outcome in get_args(ReloadOutcome):
            self._reloads.labels(model, outcome)
        self._contexts.labels(model).set(contexts)
        self._busy.labels(model).set(0)
        self._queue_rows.labels(model).set(0)

    def memory_taken(self, model: str, device_bytes: int, workspace_bytes: int) -> None:
        """What the contexts of a model hold on their devices, and how much of it is scratch."""
        self._device_bytes.labels(model).set(device_bytes)
        self._workspace_bytes.labels(model).set(workspace_bytes)

    def device_lost(self, reason: LossReason) -> None:
        """This process ends because its device is lost."""
        self._losses[reason].inc()
        self.tallies.flush()

    def model_replaced(self, model: str, version: str, sha256: str, golden_error: float) -> None:
        """Another file of a model is served from now on; the former's info goes."""
        if (former := self._loaded.pop(model, None)) is not None:
            if self._shared:  # where the library cannot remove; `exposition` leaves it out
                self._model.labels(model, *former).set(0)
            else:
                self._model.remove(model, *former)
        self._model.labels(model, version, sha256).set(1)
        self._loaded[model] = version, sha256
        self._golden_error.labels(model).set(golden_error)

    def reloaded(self, model: str, outcome: ReloadOutcome) -> None:
        """A reload of a model ended."""
        self._reloads.labels(model, outcome).inc()

    def of_model(self, model: str) -> ModelMetrics:
        """The observer for the batcher of `model`."""
        return ModelMetrics(self, model)

    def exposition(self) -> bytes:
        """All series in the Prometheus text format, of all workers where there are several."""
        self.tallies.flush()
        registry = self._registry
        if self._shared:
            registry = CollectorRegistry()
            _AllWorkers(registry)
        return generate_latest(registry)


class _AllWorkers(MultiProcessCollector):
    """What all workers counted, without the models that are 0: replaced in each of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():  # type: ignore[no-untyped-call]
            if metric.name == "lenet_model_info":
                metric.samples = [sample for sample in metric.samples if sample.value]
            yield metric


class ModelMetrics:
    """The series of one model's batcher; see `service.engine.batcher.BatchObserver`."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._cuts: dict[str, CounterTally] = {}  # by reason
        self._images = metrics.tallies.counter(metrics._images.labels(model))
        self._busy = metrics.tallies.gauge(metrics._busy.labels(model))
        self._queue_rows = metrics.tallies.gauge(metrics._queue_rows.labels(model))
        self._padding = metrics.tallies.counter(metrics._padding.labels(model))
        self._hits = metrics.tallies.counter(metrics._replays.labels(model, "hit"))
        self._misses = metrics.tallies.counter(metrics._replays.labels(model, "miss"))

    def batch_cut(self, rows: int, reason: str, waiting_rows: int, busy: int) -> None:
        """A batch left the queue."""
        if reason not in self._cuts:
            cuts = self._metrics._cuts.labels(self._model, reason)
            self._cuts[reason] = self._metrics.tallies.counter(cuts)
        self._cuts[reason].inc()
        self._metrics._batch_rows.observe(rows)
        self._queue_rows.set(waiting_rows)
        self._busy.set(busy)

    def batch_done(
        self,
        rows: int,
        compute_s: float,
        busy: int,
        *,
        device_s: float | None,
        padding_rows: int,
        graph_hit: bool,
    ) -> None:
        """A context finished a batch."""
        self._metrics._batch_duration.observe(compute_s)
        if device_s is not None:
            self._metrics._device_duration.observe(device_s)
        self._images.inc(rows)
        self._busy.set(busy)
        (self._hits if graph_hit else self._misses).inc()
        if padding_rows:
            self._padding.inc(padding_rows)

    def rows_dropped(self, rows: int, reason: str) -> None:
        """Waiting rows were forgotten."""
        self._metrics._dropped.labels(reason).inc(rows)
