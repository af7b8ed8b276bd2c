"""Reads the counts of one process, or the sums over all workers, for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample

from service.observe import metrics_files
from service.observe.buffers import exact

_KEPT = ("lenet_last_prediction_timestamp_seconds",)
"""Gauges of a version that stay when it is unloaded."""


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
class Collected:
    """Passes collected metrics to the library's writer."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        """See `CollectorRegistry.collect`."""
        return self.metrics


def all_workers() -> Iterator[Metric]:
    """The merged series of all workers, without versions that none of them serves any more."""
    with metrics_files.unchanged() as ended_workers:
        merged = MultiProcessCollector(None)  # type: ignore[no-untyped-call]
        metrics = list(merged.collect())  # type: ignore[no-untyped-call]
    (info,) = [metric for metric in metrics if metric.name == "lenet_model_info"] or [None]
    loaded = set()
    if info is not None:
        info.samples = [sample for sample in info.samples if sample.value]
        loaded = {_key_of(sample) for sample in info.samples}
    for metric in metrics:
        if metric.name == "lenet_worker_deaths":  # nobody is left to count them
            deaths = Sample(f"{metric.name}_total", {}, ended_workers)
            metric.samples = [deaths]
        if metric.type == "gauge" and metric.name not in _KEPT:
            metric.samples = [one for one in metric.samples if _key_of(one) in (*loaded, None)]
        yield metric


def _key_of(sample: Sample) -> tuple[str, str] | None:
    labels = sample.labels
    return (labels["model"], labels["version"]) if "model" in labels else None


class WorkerProcess:
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
        """Write the collected changes to the metric."""
        for family in self._process.collect():
            for sample in family.samples:
                if sample.name == "process_cpu_seconds_total":
                    now_s = exact(sample.value)
                    self._cpu.inc(now_s - self._cpu_s)
                    self._cpu_s = now_s
                elif sample.name in self._gauges:
                    self._gauges[sample.name].set(sample.value)
