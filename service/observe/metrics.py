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
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Literal, TypeAlias, get_args

import numpy as np
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

from lenet import distribution_version
from lenet.backend import BatchResult
from service.observe import metrics_files
from service.observe.buffers import (
    B,
    Buffered,
    BufferedCounter,
    BufferedGauge,
    BufferedHistogram,
    Family,
    Labels,
)
from service.observe.samples import Collected, Totals, WorkerProcess, all_workers

_log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
_COUNTED_TOGETHER = 128
"""Requests that are counted at once, in 23 us: 0.21 us each, instead of 0.53 one by one (one core
of an AMD EPYC, 2026-11-24). 1,024 held the event loop for 0.4 ms."""

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
"""Load of a model: waiting rows and busy contexts."""

_ALERTED = ("overloaded", "deadline_exceeded", "unavailable", "inference_failed", "internal")
"""Outcomes that are there from the start: the first of a series that appears is in no rate."""

NO_MODEL: ModelKey = ("none", "")
"""Labels of a request that failed before its model was found."""

_MODEL = ("model", "version")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REQUEST_BOUNDS_S = tuple(
    round(mantissa * 10.0**exponent, 9)
    for exponent in (-5, -4, -3, -2, -1, 0)
    for mantissa in (1, 1.5, 2, 3, 5, 7)
    if 5e-5 <= mantissa * 10.0**exponent <= 5
)
_BELOW_S = (1e-5, 2e-5, 3e-5)
_STAGE_BOUNDS_S = (*_BELOW_S, *_REQUEST_BOUNDS_S)
_STAGE_BOUNDS = np.array(_STAGE_BOUNDS_S)
_STAGE_BINS = len(_STAGE_BOUNDS_S) + 1
_TIMES = len(get_args(Stage)) + 1
"""Times of a predicted request: one for each stage, and their total."""
_FIRST_BINS = _STAGE_BINS * np.arange(_TIMES)
_SIZED = (*_MODEL, "rows")
_POWERS = tuple(str(1 << exponent) for exponent in range(32))
_ROW_BOUNDS = tuple(float(1 << exponent) for exponent in range(11))


class _Predictions:
    """Predicted requests of a model over a protocol since the last flush."""

    __slots__ = ("_bins", "_seconds", "times_s")

    def __init__(self) -> None:
        self.times_s: list[float] = []
        """Times of the requests that are not counted yet, `_TIMES` for each."""
        self._bins = np.zeros((_TIMES, _STAGE_BINS), np.int64)
        self._seconds = np.zeros(_TIMES)

    def count(self) -> None:
        """Count the requests that are not counted yet."""
        times_s = np.array(self.times_s).reshape(-1, _TIMES)
        self.times_s.clear()
        bins = _STAGE_BOUNDS.searchsorted(times_s) + _FIRST_BINS
        self._bins += np.bincount(bins.ravel(), minlength=self._bins.size).reshape(_TIMES, -1)
        self._seconds += times_s.sum(axis=0)

    def take(self) -> tuple[list[list[int]], list[float]]:
        """Requests between the bounds, and seconds: for each stage, then for their total."""
        self.count()
        return self._bins.tolist(), self._seconds.tolist()


class _Batches:
    """Batches of a model since the last flush."""

    __slots__ = (
        *("computed_rows", "device", "device_s", "duration", "failed", "failed_rows", "images"),
        *("kinds", "sizes_s"),
    )

    def __init__(self) -> None:
        self.kinds: dict[tuple[int, CutReason, bool], int] = defaultdict(int)
        """Batches by exponent of the next power of two, reason of the cut, and graph replay."""
        self.sizes_s = [0.0] * len(_POWERS)
        """Seconds by that exponent."""
        self.images = self.computed_rows = 0
        self.duration, self.device = [0] * _STAGE_BINS, [0] * _STAGE_BINS
        self.device_s = 0.0
        self.failed: dict[tuple[int, CutReason], int] = defaultdict(int)
        self.failed_rows = 0

    def add(
        self, rows: int, reason: CutReason, compute_s: float, result: BatchResult | None
    ) -> None:
        """Add a batch, see `Metrics.batch_ended`."""
        exponent = (rows - 1).bit_length()
        if result is None:
            self.failed[exponent, reason] += 1
            self.failed_rows += rows
            return
        self.kinds[exponent, reason, result.captured] += 1
        self.sizes_s[exponent] += compute_s
        self.images += rows
        self.computed_rows += result.computed_rows
        self.duration[bisect_left(_STAGE_BOUNDS_S, compute_s)] += 1
        device_s = result.device_s
        if device_s is not None:
            self.device[bisect_left(_STAGE_BOUNDS_S, device_s)] += 1
            self.device_s += device_s


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
            self._buffers.append(WorkerProcess(registry))
        else:
            ProcessCollector(registry=registry)
        build = self._gauge(
            "lenet_build_info", "1, with the version as a label.", "version", mode="livemax"
        )
        build[distribution_version(),].set(1)
        self._requests = self._counter(
            "lenet_requests",
            "Requests answered, by outcome: ok, except for explanations, or the code of the error. "
            "The model is none, and the version empty, if the request failed before its model was "
            "found. Outcomes with alerts are there from the start, others from their first.",
            *(*_MODEL, "protocol", "outcome"),
        )
        self._request_duration = self._histogram(
            "lenet_request_duration_seconds",
            "From the headers of a request read to its answer made; predictions only.",
            _REQUEST_BOUNDS_S,
            "protocol",
        )
        self._explanation_duration = self._histogram(
            "lenet_explanation_duration_seconds",
            "From the headers of a request for an explanation read to its answer made.",
            _REQUEST_BOUNDS_S,
        )
        self._stage_duration = self._histogram(
            "lenet_stage_duration_seconds",
            "Time of a predicted request in each stage.",
            _STAGE_BOUNDS_S,
            "stage",
        )
        self._batch_rows = self._histogram("lenet_batch_rows", "Images in a batch.", _ROW_BOUNDS)
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
        self._batches = self._counter(
            "lenet_batches", "Batches, by the reason for which they were cut.", *_MODEL, "reason"
        )
        self._images = self._counter(
            "lenet_images",
            "Images in batches that were computed, also those whose requests failed afterwards.",
            *_MODEL,
        )
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
            "Bodies being received or decoded, and answers waiting to be sent: what is in use of "
            "--max-in-flight-bytes.",
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
            "lenet_rows_dropped",
            "Images that left the queue without a batch: cancelled, or too late.",
            "reason",
        )
        self._queue_rows = self._gauge("lenet_queue_rows", "Images waiting in the queue.", *_MODEL)
        self._queue_limit_rows = self._gauge(
            "lenet_queue_limit_rows",
            "Most images that may wait: --max-queue-rows of all workers.",
            *_MODEL,
        )
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
        self._golden_tolerance = self._gauge(
            "lenet_golden_tolerance",
            "The lenet_golden_error beyond which a version is not served.",
            *_MODEL,
            mode="livemax",
        )
        self._per_version = (
            *(self._queue_rows, self._queue_limit_rows, self._contexts, self._busy),
            *(self._device_bytes, self._workspace_bytes),
            *(self._golden_error, self._golden_tolerance),
        )
        workers = self._gauge("lenet_workers", "Processes that serve or start.")
        workers[()].set(1)
        _show(
            self._counter(
                "lenet_worker_deaths",
                "Workers that ended, for whatever reason, while others go on.",
            )
        )
        self._certificate_end: Family[BufferedGauge] | None = None
        self._start_phase = self._gauge(
            "lenet_start_phase_seconds",
            "Time of each phase of the start; contexts holds most of device and all of warm_up. Of "
            "several workers the longest.",
            "phase",
            mode="livemax",
        )
        self._model = self._gauge(
            "lenet_model_info",
            "1 for each loaded version of a model.",
            *(*_MODEL, "sha256"),
            mode="livemax",
        )
        self._reloads = self._counter(
            "lenet_reloads",
            "Loads and reloads of a model: ok if the newest file is served afterwards.",
            *("model", "outcome"),
        )
        self._predictions: dict[tuple[Transport, ModelKey], _Predictions]
        self._predictions = defaultdict(_Predictions)
        self._ended: dict[ModelKey, _Batches] = defaultdict(_Batches)
        self._loads: dict[ModelKey, Callable[[], Load]] = {}
        self._loaded: dict[ModelKey, Labels] = {}  # of lenet_model_info
        _show(self._requests, *((label,) for label in NO_MODEL), get_args(Transport), _ALERTED)
        _show(self._request_duration, get_args(Transport))
        _show(self._stage_duration, get_args(Stage))
        _show(self._losses, get_args(LossReason))
        _show(self._decoder_ends, get_args(DecoderEnd))
        _show(self._dropped, get_args(DropReason))
        _show(self._connections_refused)

    def request_done(self, model: ModelKey, protocol: Transport, outcome: str) -> None:
        """Count an answer: `outcome` is ok or the code of a `ServiceError`."""
        self._requests[*model, protocol, outcome].inc()

    def predicted(self, protocol: Transport, model: ModelKey, times_s: tuple[float, ...]) -> None:
        """A request was answered: seconds of decode, queue, compute and encode, and in all."""
        predictions = self._predictions[protocol, model]
        times = predictions.times_s
        times += times_s
        if len(times) >= _COUNTED_TOGETHER * _TIMES:
            predictions.count()

    def explained(self, seconds: float) -> None:
        """A request for an explanation was answered: seconds in all."""
        self._explanation_duration[()].observe(seconds)

    def batch_ended(
        self,
        model: ModelKey,
        rows: int,
        reason: CutReason,
        compute_s: float,
        result: BatchResult | None,
    ) -> None:
        """A batch of `rows` ended, `compute_s` after its cut; without `result` it failed."""
        self._ended[model].add(rows, reason, compute_s, result)

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
        queue_limit_rows: int,
        golden_error: float,
        golden_tolerance: float,
        device_bytes: int,
        workspace_bytes: int,
        load: Callable[[], Load],
    ) -> None:
        """A version is served from now on, on `contexts` contexts, with so much memory in all.

        `load` is asked at each flush until it is unloaded.
        """
        name, version = model
        each = ((name,), (version,))
        _show(self._requests, *each, get_args(Transport), ("ok", *_ALERTED))
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
        self._golden_tolerance[model].set(golden_tolerance)
        self._queue_limit_rows[model].set(queue_limit_rows)
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
        for family in self._per_version:
            self._remove(family, model)
        self.flush()

    def _remove(self, family: Family[BufferedGauge], labels: Labels) -> None:
        if self._shared:  # where the library cannot remove; `all_workers` leaves it out
            family[labels].set(0)
        elif family.pop(labels, None) is not None:
            family.metric.remove(*labels)

    def reloaded(self, model: str, outcome: ReloadOutcome) -> None:
        """Count a reload of a model."""
        self._reloads[model, outcome].inc()
        self.flush()

    def certificate_read(self, ends_s: float) -> None:
        """The certificate that is served from now on ends at `ends_s`, as `time.time()`."""
        if self._certificate_end is None:  # made here: the library shows 0 of one without labels
            self._certificate_end = self._gauge(
                "lenet_certificate_end_timestamp_seconds",
                "When the served certificate, or one of its chain, expires; absent without TLS.",
                mode="livemin",  # a worker that could not read the next one still serves the last
            )
        self._certificate_end[()].set(ends_s)
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
        for (protocol, model), predictions in self._predictions.items():
            self._add_predictions(protocol, model, predictions)
        self._predictions.clear()
        for model, batches in self._ended.items():
            self._add_batches(model, batches)
        self._ended.clear()
        for model, load in self._loads.items():
            waiting_rows, busy = load()
            self._queue_rows[model].set(waiting_rows)
            self._busy[model].set(busy)
        for buffer in self._buffers:
            buffer.flush()

    def _add_predictions(
        self, protocol: Transport, model: ModelKey, predictions: _Predictions
    ) -> None:
        (*bins, total_bins), (*seconds, total_s) = predictions.take()
        self._requests[*model, protocol, "ok"].inc(sum(total_bins))
        self._last_prediction[model].set(time.time())
        for stage, stage_bins, stage_s in zip(get_args(Stage), bins, seconds, strict=True):
            self._stage_duration[stage,].add(stage_bins, stage_s)
            self._stage_seconds[*model, stage].inc(stage_s)
        first = len(_BELOW_S) + 1
        request_bins = [sum(total_bins[:first]), *total_bins[first:]]
        self._request_duration[protocol,].add(request_bins, total_s)
        self._stage_seconds[*model, _TOTAL].inc(total_s)

    def _add_batches(self, model: ModelKey, batches: _Batches) -> None:
        row_bins = [0] * (len(_ROW_BOUNDS) + 1)
        largest = len(_ROW_BOUNDS)
        for (exponent, reason), count in batches.failed.items():
            row_bins[min(exponent, largest)] += count
            self._batches[*model, reason].inc(count)
        for (exponent, reason, captured), count in batches.kinds.items():
            row_bins[min(exponent, largest)] += count
            self._batches[*model, reason].inc(count)
            self._replays[*model, "hit" if captured else "miss"].inc(count)
            self._sized[*model, _POWERS[exponent]].inc(count)
        for exponent, seconds in enumerate(batches.sizes_s):
            if seconds:
                self._sized_seconds[*model, _POWERS[exponent]].inc(seconds)
        self._batch_rows[()].add(row_bins, batches.images + batches.failed_rows)
        self._batch_duration[()].add(batches.duration, sum(batches.sizes_s))
        self._device_duration[()].add(batches.device, batches.device_s)
        self._images[model].inc(batches.images)
        self._padding_rows[model].inc(batches.computed_rows - batches.images)

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
        """Totals of each version since the start, over all workers."""
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
        return generate_latest(Collected(self._families()))

    def _families(self) -> list[Metric]:
        """The metrics of all workers; of this one alone if the others' cannot be read."""
        if self._shared:
            try:
                if metrics_files.are_there():
                    return list(all_workers())
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
        mode: Literal["livesum", "livemax", "livemin", "max"] = "livesum",
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
