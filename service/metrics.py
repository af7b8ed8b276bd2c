"""Every series of the service, its unit and its buckets.

A request or a batch pays for an addition in plain Python. The sums are flushed to prometheus_client
once a second and before each exposition: in the files that several workers share, the library took
21 us of a lone request (two cores, 2026-11-20).
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike
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
from prometheus_client.samples import Sample

from lenet import distribution_version
from lenet.backend import BatchResult
from service import metrics_files

_log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
_COUNTED_TOGETHER = 1024
"""Requests, or batches, that are counted at once: one by one that takes 2 us each."""

Transport: TypeAlias = Literal["http", "grpc"]
Stage: TypeAlias = Literal["decode", "queue", "compute", "encode"]
CutReason: TypeAlias = Literal["full", "idle", "waited", "drain"]
DropReason: TypeAlias = Literal["cancelled", "late"]
ReloadOutcome: TypeAlias = Literal["ok", "refused"]
LossReason: TypeAlias = Literal["sticky", "hang"]
DecoderEnd: TypeAlias = Literal["idle", "cancelled", "died"]

_TOTAL = "total"
"""Beside the stages: from the arrival of a request to its answer."""

ModelKey: TypeAlias = tuple[str, str]
"""Name and version of a model: the labels `model` and `version`."""

Load: TypeAlias = tuple[int, int]
"""What a model has to do: rows that wait, and contexts with a batch."""

NO_MODEL: ModelKey = ("none", "")
"""Of a request that failed before its model was found."""

_MODEL = ("model", "version")
_KEPT = ("lenet_last_prediction_timestamp_seconds",)
"""Gauges of a version that stay when it is unloaded."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REQUEST_BOUNDS_S = tuple(
    round(mantissa * 10.0**exponent, 9)
    for exponent in (-5, -4, -3, -2, -1, 0)
    for mantissa in (1, 1.5, 2, 3, 5, 7)
    if 5e-5 <= mantissa * 10.0**exponent <= 5
)
_STAGE_BOUNDS_S = (1e-5, 2e-5, 3e-5, *_REQUEST_BOUNDS_S)
_Ended: TypeAlias = tuple[int, CutReason, float, int | None, bool, float | None]
"""A batch: its rows, why cut, seconds from its cut; then of its result, None if it failed, the rows
computed, whether a captured graph was replayed, and seconds on the device."""
_SIZED = (*_MODEL, "rows")
_POWERS = tuple(str(1 << exponent) for exponent in range(32))
_ROW_BOUNDS = tuple(float(1 << exponent) for exponent in range(11))


class Buffered(Protocol):
    """What happened to a metric since the last flush."""

    def flush(self) -> None:
        """Add it to the library's metric."""
        ...


class BufferedCounter:
    """Buffers increments of one series."""

    __slots__ = ("_amount", "_series")

    def __init__(self, series: Counter) -> None:
        self._series = series
        self._amount = 0.0

    def inc(self, amount: float = 1) -> None:
        """Count `amount` more."""
        self._amount += amount

    def flush(self) -> None:
        """See `Buffered`."""
        if self._amount:
            self._series.inc(self._amount)
            self._amount = 0.0


class BufferedGauge:
    """Buffers the last value of one series."""

    __slots__ = ("_changed", "_series", "_value")

    def __init__(self, series: Gauge) -> None:
        self._series = series
        self._value, self._changed = 0.0, False

    def set(self, value: float) -> None:
        """Replace the value."""
        self._value, self._changed = value, True

    def flush(self) -> None:
        """See `Buffered`."""
        if self._changed:
            self._series.set(self._value)
            self._changed = False


class BufferedHistogram:
    """Buffers observations of one series with upper bounds `bounds` and infinity."""

    __slots__ = ("_bounds", "_counts", "_series", "_sum")

    def __init__(self, series: Histogram, bounds: tuple[float, ...]) -> None:
        self._series, self._bounds = series, np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe_all(self, values: ArrayLike) -> None:
        """Count one event for each of `values`."""
        counts, values = self._counts, np.asarray(values, np.float64)
        bins = np.bincount(np.searchsorted(self._bounds, values), minlength=len(counts))
        for index in np.flatnonzero(bins).tolist():
            counts[index] += int(bins[index])
        self._sum += float(values.sum())

    def flush(self) -> None:
        """See `Buffered`.

        The only use of private attributes of prometheus_client: its public interface takes one
        event a call. pyproject.toml bounds the version.
        """
        if any(self._counts):
            for index, count in enumerate(self._counts):
                if count:
                    self._series._buckets[index].inc(count)
                    self._counts[index] = 0
            self._series._sum.inc(self._sum)
            self._sum = 0.0


B = TypeVar("B", bound=Buffered)
_Labels: TypeAlias = tuple[str, ...]


class Family(dict[_Labels, B], Generic[B]):
    """The buffered series of one metric by the values of its labels, made when first used."""

    def __init__(self, metric: Counter | Gauge | Histogram, buffer: Callable[[Any], B]) -> None:
        super().__init__()
        self.metric = metric
        self._buffer = buffer

    def __missing__(self, labels: _Labels) -> B:
        series = self[labels] = self._buffer(self.metric.labels(*labels) if labels else self.metric)
        return series

    def flush(self) -> None:
        """See `Buffered`."""
        for series in self.values():
            series.flush()


class Metrics:
    """The service's metrics, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._buffers: list[Buffered] = []
        # Set by the supervisor, before prometheus_client is imported in a worker.
        self._shared = metrics_files.VARIABLE in os.environ
        self._alone = False  # with files that were lost, which is reported
        if self._shared:
            self._buffers.append(_WorkerProcess(registry))
        else:
            ProcessCollector(registry=registry)
        build = self._gauge(
            "lenet_build_info", "1, with the version as a label.", "version", mode="livemax"
        )
        build[distribution_version(),].set(1)
        self._requests = self._counter(
            "lenet_requests",
            "Requests answered, by outcome: ok, except for explanations, or the code of the error. "
            "The model is none if the request failed before its model was found.",
            *(*_MODEL, "protocol", "outcome"),
        )
        self._request_duration = self._histogram(
            "lenet_request_duration_seconds",
            "From the first byte of a request read to its answer made; predictions only.",
            _REQUEST_BOUNDS_S,
            "protocol",
        )
        self._explanation_duration = self._histogram(
            "lenet_explanation_duration_seconds",
            "From the first byte of a request for an explanation read to its answer made.",
            _REQUEST_BOUNDS_S,
        )
        self._stage_duration = self._histogram(
            "lenet_stage_duration_seconds",
            "Time of a predicted request in each stage.",
            _STAGE_BOUNDS_S,
            "stage",
        )
        self._batch_rows = self._histogram("lenet_batch_rows", "Rows in a batch.", _ROW_BOUNDS)
        self._batch_duration = self._histogram(
            "lenet_batch_duration_seconds",
            "From the cut of a batch to its result.",
            _STAGE_BOUNDS_S,
        )
        self._device_duration = self._histogram(
            "lenet_device_duration_seconds",
            "Time of one batch by the device's clock, where it is read.",
            _STAGE_BOUNDS_S,
        )
        self._batches = self._counter("lenet_batches", "Batches, by why cut.", *_MODEL, "reason")
        self._images = self._counter("lenet_images", "Images classified.", *_MODEL)
        self._padding_rows = self._counter(
            "lenet_padding_rows", "Rows computed only to fill a batch up.", *_MODEL
        )
        self._stage_seconds = self._counter(
            "lenet_stage_seconds",
            "Time of all predicted requests in each stage, and in all.",
            *(*_MODEL, "stage"),
        )
        self._sized = self._counter(
            "lenet_sized_batches", "Batches by the next power of two of their rows.", *_SIZED
        )
        self._sized_seconds = self._counter(
            "lenet_sized_batch_seconds", "From the cut of these batches to their results.", *_SIZED
        )
        self._last_prediction = self._gauge(
            "lenet_last_prediction_timestamp_seconds",
            "When a request was last predicted, to a second; 0 before the first.",
            *_MODEL,
            mode="max",
        )
        self._replays = self._counter(
            "lenet_graph_replays",
            "Batches; hit if a captured graph computed it. The CPU captures none.",
            *(*_MODEL, "result"),
        )
        self._losses = self._counter(
            "lenet_device_losses",
            "Processes that ended because their device was lost: a sticky error, or a hang.",
            "reason",
        )
        self._in_flight = self._gauge(
            "lenet_in_flight_bytes",
            "Bodies being received or decoded, and answers waiting to be sent.",
        )
        self._in_flight_bytes: Callable[[], int] = lambda: 0
        self._decoder_ends = self._counter(
            "lenet_decoder_ends",
            "Decoding processes that ended: idle, killed for work that was cancelled, or died.",
            "reason",
        )
        self._connections_refused = self._counter(
            "lenet_connections_refused",
            "Connections that were closed at once because as many as are allowed were open.",
        )
        self._dropped = self._counter(
            "lenet_rows_dropped", "Rows that left the queue without a batch.", "reason"
        )
        self._queue_rows = self._gauge("lenet_queue_rows", "Rows waiting.", *_MODEL)
        self._contexts = self._gauge("lenet_contexts", "Execution contexts.", *_MODEL)
        self._busy = self._gauge("lenet_contexts_busy", "Execution contexts with a batch.", *_MODEL)
        self._device_bytes = self._gauge(
            "lenet_device_bytes", "Device memory of all contexts.", *_MODEL
        )
        self._workspace_bytes = self._gauge(
            "lenet_workspace_bytes", "The part of lenet_device_bytes that is scratch.", *_MODEL
        )
        self._golden_error = self._gauge(
            "lenet_golden_error",
            "Largest golden logit difference at the self-test, relative to the largest logit.",
            *_MODEL,
            mode="livemax",
        )
        self._of_loaded = (
            *(self._queue_rows, self._contexts, self._busy),
            *(self._device_bytes, self._workspace_bytes, self._golden_error),
        )
        self._start_phase = self._gauge(
            "lenet_start_phase_seconds",
            "Time of each phase of the start; contexts holds most of device and all of warm_up.",
            "phase",
            mode="max",
        )
        self._model = self._gauge(
            "lenet_model_info",
            "1 for each loaded version of a model.",
            *(*_MODEL, "sha256"),
            mode="livemax",
        )
        self._reloads = self._counter(
            "lenet_reloads",
            "Reloads of a model: ok if the newest file is served afterwards.",
            *("model", "outcome"),
        )
        self._timed: dict[tuple[Transport, ModelKey], list[tuple[float, ...]]] = defaultdict(list)
        """Times of predicted requests that are not counted yet, by protocol and model."""
        self._ended: dict[ModelKey, list[_Ended]] = defaultdict(list)
        """Batches that are not counted yet, by model."""
        self._loads: dict[ModelKey, Callable[[], Load]] = {}
        self._loaded: dict[ModelKey, _Labels] = {}  # of lenet_model_info
        _show(self._request_duration, get_args(Transport))
        _show(self._stage_duration, get_args(Stage))
        _show(self._losses, get_args(LossReason))
        _show(self._decoder_ends, get_args(DecoderEnd))
        _show(self._connections_refused)

    def request_done(self, model: ModelKey, protocol: Transport, outcome: str) -> None:
        """Count an answer: `outcome` is ok or the code of a `ServiceError`."""
        self._requests[*model, protocol, outcome].inc()

    def predicted(self, protocol: Transport, model: ModelKey, times_s: tuple[float, ...]) -> None:
        """A request was answered: seconds of decode, queue, compute and encode, and in all."""
        timed = self._timed[protocol, model]
        timed.append(times_s)
        if len(timed) >= _COUNTED_TOGETHER:
            self._count_timed(protocol, model, timed)

    def explained(self, seconds: float) -> None:
        """A request for an explanation was answered: seconds in all."""
        self._explanation_duration[()].observe_all([seconds])

    def batch_ended(
        self,
        model: ModelKey,
        rows: int,
        reason: CutReason,
        compute_s: float,
        result: BatchResult | None,
    ) -> None:
        """A batch of `rows` ended, `compute_s` after its cut; without `result` it failed."""
        ended = self._ended[model]
        if result is None:
            ended.append((rows, reason, compute_s, None, False, None))
        else:
            computed, captured, device_s = result.computed_rows, result.captured, result.device_s
            ended.append((rows, reason, compute_s, computed, captured, device_s))
        if len(ended) >= _COUNTED_TOGETHER:
            self._count_ended(model, ended)

    def decoder_ended(self, reason: DecoderEnd) -> None:
        """Count a decoding process that ended while serving."""
        self._decoder_ends[reason,].inc()

    def connection_refused(self) -> None:
        """Count a connection beyond the limit."""
        self._connections_refused[()].inc()

    def rows_dropped(self, rows: int, reason: DropReason) -> None:
        """Waiting rows left the queue without a batch."""
        self._dropped[reason,].inc(rows)

    def started(self, phase: str, seconds: float) -> None:
        """A phase of the start took `seconds`."""
        self._start_phase[phase,].set(seconds)
        self.flush()

    def model_loaded(
        self,
        model: ModelKey,
        sha256: str,
        *,
        contexts: int,
        golden_error: float,
        device_bytes: int,
        workspace_bytes: int,
        load: Callable[[], Load],
    ) -> None:
        """A version is served from now on, on `contexts` contexts, with so much memory in all.

        `load` is asked at each flush until it is unloaded.
        """
        name, version = model
        each = ((name,), (version,))
        _show(self._requests, *each, get_args(Transport), ("ok",))
        _show(self._reloads, (name,), get_args(ReloadOutcome))
        _show(self._batches, *each, get_args(CutReason))
        _show(self._replays, *each, ("hit", "miss"))
        _show(self._images, *each)
        _show(self._stage_seconds, *each, (*get_args(Stage), _TOTAL))
        _show(self._last_prediction, *each)
        _show(self._padding_rows, *each)
        self._contexts[model].set(contexts)
        _show(self._busy, *each)
        _show(self._queue_rows, *each)
        self._device_bytes[model].set(device_bytes)
        self._workspace_bytes[model].set(workspace_bytes)
        self._golden_error[model].set(golden_error)
        if (former := self._loaded.pop(model, None)) is not None:  # another file of the version
            self._remove(self._model, former)
        self._loads[model] = load
        self._loaded[model] = labels = (*model, sha256)
        self._model[labels].set(1)
        self.flush()

    def model_unloaded(self, model: ModelKey) -> None:
        """A version is not served any more. What it did stays counted."""
        del self._loads[model]
        self._remove(self._model, self._loaded.pop(model))
        for family in self._of_loaded:
            self._remove(family, model)
        self.flush()

    def _remove(self, family: Family[BufferedGauge], labels: _Labels) -> None:
        if self._shared:  # where the library cannot remove; `_all_workers` leaves it out
            family[labels].set(0)
        elif family.pop(labels, None) is not None:
            family.metric.remove(*labels)

    def reloaded(self, model: str, outcome: ReloadOutcome) -> None:
        """Count a reload of a model."""
        self._reloads[model, outcome].inc()
        self.flush()

    def device_lost(self, reason: LossReason) -> None:
        """Count the loss that ends this process, and flush."""
        self._losses[reason,].inc()
        self.flush()

    def watch_in_flight(self, in_flight_bytes: Callable[[], int]) -> None:
        """Expose what `in_flight_bytes` returns at each flush."""
        self._in_flight_bytes = in_flight_bytes

    def flush(self) -> None:
        """Put everything that happened so far into the library's metrics."""
        self._in_flight[()].set(self._in_flight_bytes())
        for (protocol, model), timed in self._timed.items():
            self._count_timed(protocol, model, timed)
        for model, ended in self._ended.items():
            self._count_ended(model, ended)
        for model, load in self._loads.items():
            waiting_rows, busy = load()
            self._queue_rows[model].set(waiting_rows)
            self._busy[model].set(busy)
        for buffer in self._buffers:
            buffer.flush()

    def _count_timed(
        self, protocol: Transport, model: ModelKey, timed: list[tuple[float, ...]]
    ) -> None:
        if timed:
            self._requests[*model, protocol, "ok"].inc(len(timed))
            self._last_prediction[model].set(time.time())
            *stages, total = np.array(timed).T
            timed.clear()
            for stage, seconds in zip(get_args(Stage), stages, strict=True):
                self._stage_duration[stage,].observe_all(seconds)
                self._stage_seconds[*model, stage].inc(float(seconds.sum()))
            self._request_duration[protocol,].observe_all(total)
            self._stage_seconds[*model, _TOTAL].inc(float(total.sum()))

    def _count_ended(self, model: ModelKey, ended: list[_Ended]) -> None:
        if not ended:
            return
        batches_ended = ended[:]
        ended.clear()
        all_rows, reasons, *_ = zip(*batches_ended, strict=True)
        self._batch_rows[()].observe_all(all_rows)
        for reason, count in Counted(reasons).items():
            self._batches[*model, reason].inc(count)
        done = [one for one in batches_ended if one[3] is not None]
        if not done:
            return
        all_rows, _, all_compute_s, computed_rows, captured, device_s = zip(*done, strict=True)
        self._batch_duration[()].observe_all(all_compute_s)
        on_device_s = [seconds for seconds in device_s if seconds is not None]
        self._device_duration[()].observe_all(on_device_s)
        self._images[model].inc(sum(all_rows))
        self._padding_rows[model].inc(sum(computed_rows) - sum(all_rows))
        for hit, count in Counted(captured).items():
            self._replays[*model, "hit" if hit else "miss"].inc(count)
        exponents = [(rows - 1).bit_length() for rows in all_rows]
        batches = np.bincount(exponents)
        seconds = np.bincount(exponents, weights=all_compute_s)
        for exponent in np.flatnonzero(batches).tolist():
            sized = *model, _POWERS[exponent]
            self._sized[sized].inc(int(batches[exponent]))
            self._sized_seconds[sized].inc(float(seconds[exponent]))

    @contextmanager
    def flushed_regularly(self) -> Iterator[None]:
        """Inside, on the running event loop, flush every `FLUSH_INTERVAL_S` and at the end.

        The other workers read what this one flushed.
        """

        async def flush_on_and_on() -> None:
            while True:
                await asyncio.sleep(FLUSH_INTERVAL_S)
                try:
                    self.flush()
                except Exception:  # noqa: BLE001 - the top of a task: the next flush may work
                    _log.exception("metrics were not flushed, next try in %g s", FLUSH_INTERVAL_S)

        flushing = asyncio.create_task(flush_on_and_on())
        try:
            yield
        finally:
            flushing.cancel()
            self.flush()

    async def totals(self) -> dict[ModelKey, Totals]:
        """What each version of a model did since the start, in all workers."""
        self.flush()
        return await asyncio.to_thread(self._totals)

    def _totals(self) -> dict[ModelKey, Totals]:
        found: dict[ModelKey, Totals] = defaultdict(Totals)
        for metric in self._families():
            for sample in metric.samples:
                if "version" in sample.labels and "model" in sample.labels:
                    model = sample.labels["model"], sample.labels["version"]
                    found[model].add(sample.name, sample.labels, sample.value)
        return found

    async def exposition(self) -> bytes:
        """All metrics in the Prometheus text format, of all workers where there are several."""
        self.flush()
        return await asyncio.to_thread(self._generate)

    def _generate(self) -> bytes:
        return generate_latest(_Collected(self._families()))

    def _families(self) -> list[Metric]:
        """The metrics of all workers; of this one alone if the others' cannot be read."""
        if self._shared:
            try:
                if metrics_files.are_there():
                    return list(_all_workers())
                reason = "this worker's files are gone"
            # The folder, a file of it, or what is in one is not what this program left there.
            except (OSError, ValueError, RuntimeError, struct.error) as exc:
                reason = f"{type(exc).__name__}: {exc}"
            if not self._alone:
                self._alone = True
                _log.warning(
                    "metrics in %s cannot be read (%s): /metrics shows only the worker that "
                    "answers, until the service is started again",
                    *(os.environ.get(metrics_files.VARIABLE), reason),
                )
        return list(self._registry.collect())

    def _counter(self, name: str, help_text: str, *labels: str) -> Family[BufferedCounter]:
        counter = Counter(name, help_text, labels, registry=self._registry)
        return self._buffered(Family(counter, BufferedCounter))

    def _gauge(
        self,
        name: str,
        help_text: str,
        *labels: str,
        mode: Literal["livesum", "livemax", "max"] = "livesum",
    ) -> Family[BufferedGauge]:
        gauge = Gauge(name, help_text, labels, multiprocess_mode=mode, registry=self._registry)
        return self._buffered(Family(gauge, BufferedGauge))

    def _histogram(
        self, name: str, help_text: str, bounds: tuple[float, ...], *labels: str
    ) -> Family[BufferedHistogram]:
        metric = Histogram(name, help_text, labels, buckets=bounds, registry=self._registry)
        return self._buffered(Family(metric, partial(BufferedHistogram, bounds=bounds)))

    def _buffered(self, family: Family[B]) -> Family[B]:
        self._buffers.append(family)
        return family


def _show(family: Family[B], *values: tuple[str, ...]) -> None:
    """Expose the series with each combination of these label values as 0 before the first event."""
    for labels in product(*values):
        family[labels]


@dataclass(slots=True)
class Totals:
    """What one version of a model did: requests, images, batches, and seconds.

    `stages_s`: by stage, and "total". `sized`: number and seconds of batches by the next power of
    two of their rows.
    """

    predicted: int = 0
    failed: int = 0
    images: int = 0
    batches: int = 0
    last_s: float = 0.0
    """When it last answered, as `time.time()`; 0 if it never did."""
    stages_s: dict[str, float] = field(default_factory=dict)
    sized: dict[int, list[float]] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Take one sample of the model."""
        match name:
            case "lenet_requests_total" if labels["outcome"] == "ok":
                self.predicted += int(value)
            case "lenet_requests_total":
                self.failed += int(value)
            case "lenet_images_total":
                self.images += int(value)
            case "lenet_batches_total":
                self.batches += int(value)
            case "lenet_last_prediction_timestamp_seconds":
                self.last_s = value
            case "lenet_stage_seconds_total":
                self.stages_s[labels["stage"]] = value
            case "lenet_sized_batches_total":
                self.sized.setdefault(int(labels["rows"]), [0.0, 0.0])[0] = value
            case "lenet_sized_batch_seconds_total":
                self.sized.setdefault(int(labels["rows"]), [0.0, 0.0])[1] = value


@dataclass(frozen=True, slots=True)
class _Collected:
    """What was collected, for the library to write."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        """As a registry's."""
        return self.metrics


def _all_workers() -> Iterator[Metric]:
    """The merged series of all workers, without versions that none of them serves any more."""
    merged = MultiProcessCollector(None)  # type: ignore[no-untyped-call]
    metrics = list(merged.collect())  # type: ignore[no-untyped-call]
    (info,) = [metric for metric in metrics if metric.name == "lenet_model_info"] or [None]
    loaded = set()
    if info is not None:
        info.samples = [sample for sample in info.samples if sample.value]
        loaded = {_key_of(sample) for sample in info.samples}
    for metric in metrics:
        if metric.type == "gauge" and metric.name not in _KEPT:
            metric.samples = [one for one in metric.samples if _key_of(one) in (*loaded, None)]
        yield metric


def _key_of(sample: Sample) -> ModelKey | None:
    labels = sample.labels
    return (labels["model"], labels["version"]) if "model" in labels else None


class _WorkerProcess:
    """Memory, CPU time and open files of this worker, summed over the live workers.

    prometheus_client's own process metrics do not add up over processes.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._process = ProcessCollector(registry=None)
        self._cpu = Counter(
            "process_cpu_seconds", "User and system CPU time of all workers.", registry=registry
        )
        self._cpu_s = 0.0
        self._gauges = {
            name: Gauge(name, help_text, multiprocess_mode="livesum", registry=registry)
            for name, help_text in (
                ("process_resident_memory_bytes", "Resident memory of all workers."),
                ("process_open_fds", "Open file descriptors of all workers."),
            )
        }

    def flush(self) -> None:
        """See `Buffered`."""
        for family in self._process.collect():
            for sample in family.samples:
                if sample.name == "process_cpu_seconds_total":
                    self._cpu.inc(sample.value - self._cpu_s)
                    self._cpu_s = sample.value
                elif sample.name in self._gauges:
                    self._gauges[sample.name].set(sample.value)
