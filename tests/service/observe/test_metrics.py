from __future__ import annotations

import asyncio
import math
import time
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from lenet import distribution_version
from lenet.backend import BatchResult
from lenet.model import ARCHITECTURES
from service.errors import STATUS
from service.observe.metrics import (
    NO_MODEL,
    CutReason,
    DropReason,
    Metrics,
    ReloadOutcome,
    Stage,
    Transport,
)

TIMES_S = (0.125, 0.25, 0.5, 0.0625, 1.0)
"""Times of the stages, then their total."""


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return Metrics(registry)


@pytest.fixture
def value(registry, metrics):
    """`value(name, labels)`: a sample, now."""

    def value(*arguments):
        metrics.flush()
        return registry.get_sample_value(*arguments)

    return value


def samples(metrics):
    return [
        sample
        for family in text_string_to_metric_families(asyncio.run(metrics.exposition())[0].decode())
        for sample in family.samples
    ]


def result(computed_rows=4, captured=True, device_s=0.05):
    return BatchResult(None, computed_rows, captured, device_s)


LENET, MLP = ("lenet", "1"), ("mlp", "7")
OF_LENET, OF_MLP = ({"model": model, "version": version} for model, version in (LENET, MLP))


GAUGES = (
    *("queue_rows", "queue_limit_rows", "contexts", "contexts_busy", "device_bytes"),
    *("workspace_bytes", "golden_error", "golden_tolerance"),
)
"""Gauges that each loaded model has."""


def load(metrics, model, sha256="ab" * 32, **values):
    given = {"contexts": 2, "golden_error": 1e-7, "device_bytes": 2, "workspace_bytes": 1}
    given |= {"queue_limit_rows": 10, "golden_tolerance": 1e-4}
    given["load"] = lambda: (0, 0)
    metrics.model_loaded(model, sha256, **given | values)


def test_a_loaded_model_shows_itself_at_rest_when_exposed(metrics, value):
    load(metrics, MLP, contexts=3, golden_error=2e-7, device_bytes=3000)
    metrics.started("weights", 0.5)
    info = {"model": "mlp", "version": "7", "sha256": "ab" * 32}
    assert value("lenet_model_info", info) == 1
    assert value("lenet_contexts", OF_MLP) == 3
    assert value("lenet_contexts_busy", OF_MLP) == 0
    assert value("lenet_queue_rows", OF_MLP) == 0
    assert value("lenet_golden_error", OF_MLP) == 2e-7
    assert value("lenet_device_bytes", OF_MLP) == 3000
    assert value("lenet_workspace_bytes", OF_MLP) == 1
    assert value("lenet_start_phase_seconds", {"phase": "weights"}) == 0.5
    assert value("lenet_build_info", {"version": distribution_version()}) == 1
    for protocol in get_args(Transport):
        for outcome in ("ok", "overloaded", "unavailable", "internal"):  # and others with alerts
            answered = {**OF_MLP, "protocol": protocol, "outcome": outcome}
            assert value("lenet_requests_total", answered) == 0, "it is there before the first"


def test_a_version_that_is_unloaded_leaves_only_what_it_did(metrics, value):
    load(metrics, MLP)
    load(metrics, ("mlp", "8"))
    metrics.batch_ended(MLP, 48, "full", 0.5, result(48))
    metrics.predicted("http", MLP, TIMES_S)
    assert value("lenet_contexts", OF_MLP) == 2
    metrics.model_unloaded(MLP)
    for name in GAUGES:
        assert value(f"lenet_{name}", OF_MLP) is None
        assert value(f"lenet_{name}", {"model": "mlp", "version": "8"}) is not None
    assert value("lenet_model_info", {**OF_MLP, "sha256": "ab" * 32}) is None
    assert value("lenet_images_total", OF_MLP) == 48
    assert value("lenet_last_prediction_timestamp_seconds", OF_MLP) > 0
    load(metrics, MLP)
    assert value("lenet_contexts_busy", OF_MLP) == 0


@pytest.fixture
def everything(metrics):
    """The metrics after everything has happened that they can count."""
    codes = set(STATUS)
    assert len(codes) >= 10
    for protocol in get_args(Transport):
        for outcome in codes:
            metrics.request_done(NO_MODEL, protocol, outcome)
    for phase in ("weights", "device", "warm_up", "contexts"):
        metrics.started(phase, 1.0)
    for name in ARCHITECTURES:
        model = name, "1"
        for file in range(40):
            load(metrics, model, f"{file:064}")
        for outcome in get_args(ReloadOutcome):
            metrics.reloaded(name, outcome)
        for protocol in get_args(Transport):
            metrics.predicted(protocol, model, TIMES_S)
            for outcome in AFTER_ITS_MODEL_IS_FOUND:
                metrics.request_done(model, protocol, outcome)
        for reason in get_args(CutReason):
            metrics.batch_ended(model, 3, reason, 0.1, result())
        for reason in get_args(DropReason):
            metrics.rows_dropped(1, reason)
    return metrics


AFTER_ITS_MODEL_IS_FOUND = (
    *("overloaded", "deadline_exceeded", "cancelled", "unavailable", "inference_failed"),
    "internal",
)


def test_the_series_stay_below_600_and_their_labels_are_from_closed_sets(everything):
    seen = samples(everything)
    assert 300 < len(seen) < 600
    assert not [sample.name for sample in seen if sample.name.endswith("_created")]
    assert {label for one in seen if one.name.startswith("lenet_") for label in one.labels} == {
        *("protocol", "outcome", "stage", "le", "model", "reason"),
        *("phase", "version", "sha256", "result", "rows"),
    }


def test_an_exposition_has_everything_at_once_and_nothing_twice(metrics):
    of_loaded = {f"lenet_{name}" for name in (*GAUGES, "workers")} - {"lenet_queue_rows"}
    of_loaded -= {"lenet_contexts_busy"}
    metrics.predicted("grpc", LENET, TIMES_S)
    load(metrics, LENET, load=lambda: (4, 1))
    metrics.batch_ended(LENET, 3, "full", 0.5, result(4, True, 0.5))
    for _ in range(2):
        found = {
            (sample.name, *sorted(set(sample.labels.values()) - {*LENET})): value
            for sample in samples(metrics)
            if (value := sample.value)
            and sample.name.startswith("lenet_")
            and not sample.name.endswith(("_bucket", "_info"))
            and sample.name not in of_loaded
        }
        assert found == {
            ("lenet_requests_total", "grpc", "ok"): 1,
            ("lenet_request_duration_seconds_count", "grpc"): 1,
            ("lenet_request_duration_seconds_sum", "grpc"): 1.0,
            **{("lenet_stage_duration_seconds_count", stage): 1 for stage in get_args(Stage)},
            ("lenet_stage_duration_seconds_sum", "decode"): 0.125,
            ("lenet_stage_duration_seconds_sum", "queue"): 0.25,
            ("lenet_stage_duration_seconds_sum", "compute"): 0.5,
            ("lenet_stage_duration_seconds_sum", "encode"): 0.0625,
            ("lenet_batch_rows_count",): 1,
            ("lenet_batch_rows_sum",): 3,
            ("lenet_batch_duration_seconds_count",): 1,
            ("lenet_batch_duration_seconds_sum",): 0.5,
            ("lenet_device_duration_seconds_count",): 1,
            ("lenet_device_duration_seconds_sum",): 0.5,
            ("lenet_batches_total", "full"): 1,
            ("lenet_images_total",): 3,
            ("lenet_padding_rows_total",): 1,
            ("lenet_graph_replays_total", "hit"): 1,
            ("lenet_queue_rows",): 4,
            ("lenet_contexts_busy",): 1,
            ("lenet_stage_seconds_total", "decode"): 0.125,
            ("lenet_stage_seconds_total", "queue"): 0.25,
            ("lenet_stage_seconds_total", "compute"): 0.5,
            ("lenet_stage_seconds_total", "encode"): 0.0625,
            ("lenet_stage_seconds_total", "total"): 1.0,
            ("lenet_sized_batches_total", "4"): 1,
            ("lenet_sized_batch_seconds_total", "4"): 0.5,
            ("lenet_last_prediction_timestamp_seconds",): pytest.approx(time.time(), abs=60),
        }


def test_an_exposition_shows_one_moment(metrics):
    shown = []
    for seconds in (1.0, 2.0):
        metrics.explained(seconds)
        metrics.started("weights", seconds)
        shown.append(metrics.collect())
    for total_s, families in zip((1.0, 3.0), shown, strict=True):
        found = {one.name: one.value for family in families for one in family.samples}
        assert found["lenet_explanation_duration_seconds_sum"] == total_s
        assert found["lenet_start_phase_seconds"] == (total_s + 1) // 2


async def test_small_times_add_up_however_often_they_are_shown(metrics):
    for _ in range(1000):
        metrics.predicted("http", LENET, (3e-6,) * len(TIMES_S))
        metrics.flush()
    totals = (await metrics.totals())[LENET]
    assert totals.stages_s["decode"] == pytest.approx(3e-3, rel=1e-4)


# Answered requests


def test_each_answer_is_counted_and_timed_once_however_many_there_are(metrics, value):
    load(metrics, LENET)
    counts = {("http", LENET): 0, ("grpc", LENET): 0, ("grpc", MLP): 0}
    for more in (1, 0, 1023, 1024, 2500):
        for number, key in enumerate(counts, 1):
            for _ in range(number * more):
                metrics.predicted(*key, (0.125, 0.25, 0.5, 0.0625, number / 2))
            counts[key] += number * more
        for (protocol, (model, version)), count in counts.items():
            answered = {"model": model, "version": version, "protocol": protocol, "outcome": "ok"}
            assert value("lenet_requests_total", answered) == count
        http, lenet, mlp = counts.values()
        for protocol, count, total_s in (("http", http, http / 2), ("grpc", lenet + mlp, None)):
            labels = {"protocol": protocol}
            total_s = lenet + 1.5 * mlp if total_s is None else total_s
            assert value("lenet_request_duration_seconds_count", labels) == count
            assert value("lenet_request_duration_seconds_sum", labels) == total_s
        for stage, seconds in zip(get_args(Stage), (0.125, 0.25, 0.5, 0.0625), strict=True):
            labels = {"stage": stage}
            assert value("lenet_stage_duration_seconds_count", labels) == sum(counts.values())
            total_s = seconds * sum(counts.values())
            assert value("lenet_stage_duration_seconds_sum", labels) == total_s


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_seconds_that_are_not_finite_stay_out_of_the_total(metrics, value, number):
    for one in (number, 0.5):
        metrics.explained(one)
        metrics.batch_ended(LENET, 1, "full", one, result(1, True, one))
        metrics.predicted("http", LENET, (one,) * 5)
    for name in ("explanation", "batch", "device"):
        assert value(f"lenet_{name}_duration_seconds_sum") == 0.5
        assert value(f"lenet_{name}_duration_seconds_count") == 2
    assert value("lenet_sized_batch_seconds_total", {**OF_LENET, "rows": "1"}) == 0.5
