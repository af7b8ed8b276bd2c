"""What happens, counted in plain numbers, and their exposition by prometheus_client.

A request or a batch pays for additions in Python. Once a second, and before each exposition, they
are added to a new copy of the numbers. A thread writes it to a file where several workers share
theirs: see `workers`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from prometheus_client import CollectorRegistry, Metric, ProcessCollector, core, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from lenet import distribution_version
from lenet.backend import BatchResult
from service.observe.series import (
    BELOW_S,
    FAMILIES,
    REQUEST_BOUNDS_S,
    STAGE_BOUNDS_S,
    Family,
    Labels,
    Numbers,
    added,
    merged,
)
from service.observe.workers import WorkerFile

_log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
_COUNTED_TOGETHER = 128
"""Requests that are counted at once, in 28 us: 0.25 us each, instead of 0.53 one by one (one core
of an AMD EPYC, 2026-11-26). 1,024 held the event loop for 0.4 ms."""

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

PLAIN, OPEN_METRICS = "text/plain", "application/openmetrics-text"
"""Media types of an exposition."""

_EXPOSITIONS: dict[str, tuple[Callable[[CollectorRegistry], bytes], str]] = {
    PLAIN: (generate_latest, f"{PLAIN}; version=0.0.4; charset=utf-8"),
    OPEN_METRICS: (openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST),
}

_LATENCY = "lenet_request_duration_seconds"

_STAGE_BOUNDS = np.array(STAGE_BOUNDS_S)
_STAGE_BINS = len(STAGE_BOUNDS_S) + 1
_TIMES = len(get_args(Stage)) + 1
"""Times of a predicted request: one for each stage, and their total."""
_FIRST_BINS = _STAGE_BINS * np.arange(_TIMES)
_POWERS = tuple(str(1 << exponent) for exponent in range(32))


@dataclass(slots=True)
class Totals:
    """Totals of one version: requests, images, batches and seconds.

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


class _Predictions:
    """Predicted requests of a model over a protocol since the last flush."""

    __slots__ = ("times_s", "values")

    def __init__(self) -> None:
        self.times_s: list[float] = []
        """Times of the requests that are not counted yet, `_TIMES` for each."""
        self.values = np.zeros((_TIMES, _STAGE_BINS + 1))
        """Histograms of the others."""

    def count(self) -> None:
        """Count the requests that are not counted yet."""
        times_s = np.array(self.times_s).reshape(-1, _TIMES)
        self.times_s.clear()
        bins = _STAGE_BOUNDS.searchsorted(times_s) + _FIRST_BINS
        counts = np.bincount(bins.ravel(), minlength=_TIMES * _STAGE_BINS)
        self.values[:, :-1] += counts.reshape(_TIMES, -1)
        self.values[:, -1] += np.where(np.isfinite(times_s), times_s, 0).sum(axis=0)


class _Series(dict[Labels, list[float]]):
    """What was added to a counter or histogram since the last flush, by the values of its labels.

    One without labels is shown before its first event.
    """

    def __init__(self, family: Family) -> None:
        super().__init__() if family.labels else super().__init__({(): family.zero})
        self._family, self._bounds = family, family.bounds
        self.sums: dict[Labels, float] = {}

    def __missing__(self, labels: Labels) -> list[float]:
        self[labels] = zero = self._family.zero
        return zero

    def add(self, amount: float, *labels: str) -> None:
        """Count `amount` more; one that is not finite would stay in the total for ever."""
        if math.isfinite(amount):
            self[labels][-1] += amount

    def add_all(self, values: Iterable[float], *labels: str) -> None:
        """Add a histogram."""
        self[labels] = list(map(operator.add, self[labels], values))

    def observe(self, value: float, *labels: str) -> None:
        """Count an event."""
        values = self[labels]
        values[bisect_left(self._bounds, value)] += 1
        if math.isfinite(value):
            values[-1] += value

    def show(self, *values: tuple[str, ...]) -> None:
        """Show the series with each combination of these label values before its first event."""
        for labels in product(*values):
            self[labels]


class Metrics(Collector):
    """The service's metrics, in `registry`; with `folder` those of all workers that share it."""

    def __init__(self, registry: CollectorRegistry, folder: Path | None = None) -> None:
        self._registry = registry
        self._file = None if folder is None else WorkerFile(folder)
        self._writing = threading.Lock()
        self._process = ProcessCollector(registry=registry if folder is None else None)
        self._alone = False  # with files that could not be read, which is reported
        own = [family for family in FAMILIES.values() if family.name.startswith("lenet_")]
        self._numbers: Numbers = {family.name: {} for family in own}
        """As of the last flush, never changed, but replaced: a thread may read it."""
        self._series = {family.name: _Series(family) for family in own if family.kind != "gauge"}
        self._gauges: Numbers = {family.name: {} for family in own if family.kind == "gauge"}
        self._requests = self._series["lenet_requests"]
        self._predictions: dict[tuple[Transport, ModelKey], _Predictions]
        self._predictions = defaultdict(_Predictions)
        self._loaded: dict[ModelKey, tuple[str, Callable[[], Load]]] = {}
        self._exemplars: dict[Labels, list[Exemplar | None]] = {
            (protocol,): [None] * (len(REQUEST_BOUNDS_S) + 1) for protocol in get_args(Transport)
        }
        """By protocol: the latest traced request in each bucket of its durations."""
        self._in_flight_bytes: Callable[[], int] = lambda: 0
        self._gauges["lenet_build_info"][distribution_version(),] = [1]
        self._gauges["lenet_workers"][()] = [1]
        self._requests.show(*((label,) for label in NO_MODEL), get_args(Transport), _ALERTED)
        self._series[_LATENCY].show(get_args(Transport))
        self._series["lenet_stage_duration_seconds"].show(get_args(Stage))
        self._series["lenet_device_losses"].show(get_args(LossReason))
        self._series["lenet_decoder_ends"].show(get_args(DecoderEnd))
        self._series["lenet_rows_dropped"].show(get_args(DropReason))
        registry.register(self)

    def request_done(self, model: ModelKey, protocol: Transport, outcome: str) -> None:
        """Count an answer: `outcome` is ok or the code of a `ServiceError`."""
        self._requests[*model, protocol, outcome][0] += 1

    def predicted(self, protocol: Transport, model: ModelKey, times_s: tuple[float, ...]) -> None:
        """A request was answered: seconds of decode, queue, compute and encode, and in all."""
        predictions = self._predictions[protocol, model]
        predictions.times_s += times_s
        if len(predictions.times_s) >= _COUNTED_TOGETHER * _TIMES:
            predictions.count()

    def traced(self, protocol: Transport, seconds: float, trace_id: str, ended_s: float) -> None:
        """A predicted request has a trace, which OpenMetrics shows. Any thread may call it.

        `ended_s`: when it ended, as `time.time()`.
        """
        exemplar = Exemplar({"trace_id": trace_id}, seconds, ended_s)
        self._exemplars[protocol,][bisect_left(REQUEST_BOUNDS_S, seconds)] = exemplar

    def explained(self, seconds: float) -> None:
        """A request for an explanation was answered: seconds in all."""
        self._series["lenet_explanation_duration_seconds"].observe(seconds)

    def batch_ended(
        self,
        model: ModelKey,
        rows: int,
        reason: CutReason,
        compute_s: float,
        result: BatchResult | None,
    ) -> None:
        """A batch of `rows` ended, `compute_s` after its cut; without `result` it failed."""
        series = self._series
        series["lenet_batches"][*model, reason][0] += 1
        series["lenet_batch_rows"].observe(rows)
        if result is None:
            return
        size = _POWERS[(rows - 1).bit_length()]
        series["lenet_graph_replays"][*model, "hit" if result.captured else "miss"][0] += 1
        series["lenet_images"][model][0] += rows
        series["lenet_padding_rows"][model][0] += result.computed_rows - rows
        series["lenet_sized_batches"][*model, size][0] += 1
        series["lenet_sized_batch_seconds"].add(compute_s, *model, size)
        series["lenet_batch_duration_seconds"].observe(compute_s)
        if result.device_s is not None:
            series["lenet_device_duration_seconds"].observe(result.device_s)

    def decoder_ended(self, reason: DecoderEnd) -> None:
        """Count a decoding process that ended while serving."""
        self._series["lenet_decoder_ends"].add(1, reason)

    def connection_refused(self) -> None:
        """Count a connection beyond the limit."""
        self._series["lenet_connections_refused"].add(1)

    def rows_dropped(self, rows: int, reason: DropReason) -> None:
        """Waiting rows left the queue without a batch."""
        self._series["lenet_rows_dropped"].add(rows, reason)

    def started(self, phase: str, seconds: float) -> None:
        """A phase of the start took `seconds`."""
        self._gauges["lenet_start_phase_seconds"][phase,] = [seconds]
        self.flush()

    def model_loaded(
        self, model: ModelKey, sha256: str, *, load: Callable[[], Load], **gauges: float
    ) -> None:
        """A version is served from now on.

        `gauges`: its numbers, by the names of their metrics without `lenet_`. `load` is asked at
        each flush until it is unloaded.
        """
        series, (name, version) = self._series, model
        each = ((name,), (version,))
        self._requests.show(*each, get_args(Transport), ("ok", *_ALERTED))
        series["lenet_reloads"].show((name,), get_args(ReloadOutcome))
        series["lenet_batches"].show(*each, get_args(CutReason))
        series["lenet_graph_replays"].show(*each, ("hit", "miss"))
        series["lenet_stage_seconds"].show(*each, (*get_args(Stage), _TOTAL))
        series["lenet_images"].show(*each)
        series["lenet_padding_rows"].show(*each)
        self._gauges["lenet_last_prediction_timestamp_seconds"].setdefault(model, [0])
        for gauge, value in gauges.items():
            self._gauges[f"lenet_{gauge}"][model] = [value]
        self._loaded[model] = sha256, load

    def model_unloaded(self, model: ModelKey) -> None:
        """A version is not served any more. What it did stays counted."""
        del self._loaded[model]
        for name, gauge in self._gauges.items():
            if not FAMILIES[name].lasts:
                gauge.pop(model, None)

    def reloaded(self, model: str, outcome: ReloadOutcome) -> None:
        """Count a reload of a model."""
        self._series["lenet_reloads"].add(1, model, outcome)
        self.flush()

    def certificate_read(self, ends_s: float) -> None:
        """The certificate that is served from now on ends at `ends_s`, as `time.time()`."""
        self._gauges["lenet_certificate_end_timestamp_seconds"][()] = [ends_s]

    def device_lost(self, reason: LossReason) -> None:
        """Count the loss that ends this process, and flush."""
        self._series["lenet_device_losses"].add(1, reason)
        self.flush()

    def watch_in_flight(self, in_flight_bytes: Callable[[], int]) -> None:
        """Expose what `in_flight_bytes` returns at each flush."""
        self._in_flight_bytes = in_flight_bytes

    def flush(self) -> None:
        """Show everything that happened so far in expositions of this and the other workers."""
        self._take()
        self._share()

    def _take(self) -> None:
        """Add everything that happened to a new copy of the numbers."""
        self._take_predictions()
        gauges = self._gauges
        for name in ("lenet_model_info", "lenet_queue_rows", "lenet_contexts_busy"):
            gauges[name] = {}
        for model, (sha256, load) in self._loaded.items():
            gauges["lenet_model_info"][*model, sha256] = [1]
            rows, busy = load()
            gauges["lenet_queue_rows"][model] = [rows]
            gauges["lenet_contexts_busy"][model] = [busy]
        gauges["lenet_in_flight_bytes"][()] = [self._in_flight_bytes()]
        numbers = self._numbers | {name: dict(gauge) for name, gauge in gauges.items()}
        for name, series in self._series.items():
            if series:
                numbers[name] = added(numbers[name], series, series.sums)
                series.clear()
        self._numbers = numbers

    def _share(self) -> Numbers:
        """Write the numbers to this worker's file, for the others. Any thread may call it."""
        if self._file is None:
            return self._numbers
        with self._writing:  # prometheus_client's own do not add up over processes
            numbers = dict(self._numbers)
            for metric in self._process.collect():
                if metric.name in FAMILIES:
                    numbers[metric.name] = {(): [metric.samples[0].value]}
            self._file.write(numbers)
        return numbers

    def _take_predictions(self) -> None:
        series, first = self._series, len(BELOW_S) + 1
        for (protocol, model), predictions in self._predictions.items():
            predictions.count()
            *stages, total = predictions.values.tolist()
            self._gauges["lenet_last_prediction_timestamp_seconds"][model] = [time.time()]
            self._requests[*model, protocol, "ok"][0] += int(sum(total[:-1]))
            request = [sum(total[:first]), *total[first:]]
            series[_LATENCY].add_all(request, protocol)
            series["lenet_stage_seconds"].add(total[-1], *model, _TOTAL)
            for stage, values in zip(get_args(Stage), stages, strict=True):
                series["lenet_stage_duration_seconds"].add_all(values, stage)
                series["lenet_stage_seconds"].add(values[-1], *model, stage)
        self._predictions.clear()

    @contextmanager
    def flushed_regularly(self) -> Iterator[None]:
        """Inside, on the running event loop, flush every `FLUSH_INTERVAL_S` and at the end.

        The other workers read what this one flushed.
        """

        async def flush_on_and_on() -> None:
            while True:
                await asyncio.sleep(FLUSH_INTERVAL_S)
                try:
                    self._take()
                    if self._file is not None:
                        await asyncio.to_thread(self._share)
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
        self._take()
        return await asyncio.to_thread(self._totals)

    def _totals(self) -> dict[ModelKey, Totals]:
        numbers = self._merged()
        found: dict[ModelKey, Totals] = defaultdict(Totals)
        for (name, version, _, outcome), (count,) in numbers["lenet_requests"].items():
            of = found[name, version]
            if outcome == "ok":
                of.predicted += int(count)
            else:
                of.failed += int(count)
        for (name, version), (count,) in numbers["lenet_images"].items():
            found[name, version].images = int(count)
        for (name, version, _), (count,) in numbers["lenet_batches"].items():
            found[name, version].batches += int(count)
        for (name, version), (at_s,) in numbers["lenet_last_prediction_timestamp_seconds"].items():
            found[name, version].last_s = at_s
        for (name, version, stage), (seconds,) in numbers["lenet_stage_seconds"].items():
            found[name, version].stages_s[stage] = seconds
        sizes_s = numbers["lenet_sized_batch_seconds"]
        for (name, version, rows), (count,) in numbers["lenet_sized_batches"].items():
            found[name, version].sized[int(rows)] = [count, *sizes_s[name, version, rows]]
        return found

    async def exposition(
        self, media_type: str = PLAIN, coding: Callable[[bytes], bytes] = bytes
    ) -> tuple[bytes, str]:
        """All metrics, of all workers where there are several, and their Content-Type.

        On a thread, which also applies `coding`.
        """
        generate, content_type = _EXPOSITIONS[media_type]
        self._take()
        text = await asyncio.to_thread(lambda: coding(generate(self._registry)))
        return text, content_type

    def collect(self) -> Iterator[Metric]:
        """The metrics as of the last flush."""
        numbers = self._merged()
        exemplars = {_LATENCY: self._exemplars}
        return (
            _metric(family, numbers[name], exemplars.get(name, {}))
            for name, family in FAMILIES.items()
            if name in numbers
        )

    def _merged(self) -> Numbers:
        """The numbers of all workers; of this one alone if the others' cannot be read."""
        own = self._share()
        if self._file is not None:
            try:
                return merged([own, *self._file.others()])
            except (OSError, ValueError, TypeError) as exc:
                # The files are gone, or not what this program left there.
                if not self._alone:
                    self._alone = True
                    _log.warning(
                        "metrics of the other workers cannot be read (%s: %s): /metrics shows only "
                        "the worker that answers until they can be",
                        *(type(exc).__name__, exc),
                    )
        return own


def _metric(
    family: Family,
    series: dict[Labels, list[float]],
    exemplars: Mapping[Labels, list[Exemplar | None]],
) -> Metric:
    if family.kind == "histogram":
        histogram = core.HistogramMetricFamily(family.name, family.help_text, labels=family.labels)
        bounds = [f"{bound}" for bound in family.bounds] + ["+Inf"]
        for labels, (*counts, total) in series.items():
            latest = exemplars.get(labels, [None] * len(bounds))
            buckets: list[Any] = list(zip(bounds, accumulate(counts), latest, strict=True))
            histogram.add_metric(labels, buckets, total)
        return histogram
    kind = core.CounterMetricFamily if family.kind == "counter" else core.GaugeMetricFamily
    metric = kind(family.name, family.help_text, labels=family.labels)
    for labels, (value,) in series.items():
        metric.add_metric(labels, value)
    return metric
