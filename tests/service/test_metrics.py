from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from lenet.model import ARCHITECTURES
from service import errors
from service.engine.queue import CutReason
from service.errors import ServiceError
from service.metrics import (
    CONTENT_TYPE,
    FLUSHED_EVERY_S,
    LossReason,
    Metrics,
    ReloadOutcome,
    Stage,
    Transport,
)

ROOT = Path(__file__).parents[2]
LONG_S = 20.0
"""How long a process may hang before its test fails."""

# facts: 1 - 1.5 - 2 - 3 - 5 - 7 a decade, from 50 us to 5 s.
REQUEST_BOUNDS = [
    *("5e-05", "7e-05", "0.0001", "0.00015", "0.0002", "0.0003", "0.0005", "0.0007"),
    *("0.001", "0.0015", "0.002", "0.003", "0.005", "0.007"),
    *("0.01", "0.015", "0.02", "0.03", "0.05", "0.07"),
    *("0.1", "0.15", "0.2", "0.3", "0.5", "0.7", "1.0", "1.5", "2.0", "3.0", "5.0", "+Inf"),
]


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
        metrics.tallies.flush()
        return registry.get_sample_value(*arguments)

    return value


def samples(metrics):
    return [
        sample
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    ]


def bounds(metrics, name):
    edges = [sample.labels["le"] for sample in samples(metrics) if sample.name == f"{name}_bucket"]
    return list(dict.fromkeys(edges))  # the same for every protocol and stage


def codes():
    return {
        kind.code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ServiceError)
    }


def test_the_series_stay_below_600_when_everything_has_been_seen(metrics):
    for protocol in get_args(Transport):
        for outcome in ("ok", *codes()):
            metrics.request_done(protocol, outcome)
        metrics.request_timed(protocol, dict.fromkeys(get_args(Stage), 0.1), 0.4)
    for phase in ("weights", "device", "warm_up", "contexts"):
        metrics.started(phase, 1.0)
    for model in ARCHITECTURES:
        metrics.model_loaded(model, "1", "0" * 64, 2, 1e-7)
        for version in range(2, 40):
            metrics.model_replaced(model, str(version), f"{version:064}", 1e-7)
        for outcome in get_args(ReloadOutcome):
            metrics.reloaded(model, outcome)
        observer = metrics.of_model(model)
        for reason in get_args(CutReason):
            observer.batch_cut(3, reason, 4, 1)
        observer.batch_done(3, 0.1, 0, device_s=0.05, padding_rows=1, graph_hit=True)
        metrics.memory_taken(model, 2, 1)
        for reason in ("cancelled", "late"):
            observer.rows_dropped(1, reason)
    seen = samples(metrics)
    assert len(codes()) >= 10
    assert 300 < len(seen) < 600
    assert not [sample.name for sample in seen if sample.name.endswith("_created")]


def test_labels_come_from_closed_sets_when_their_names_are_listed(metrics):
    test_the_series_stay_below_600_when_everything_has_been_seen(metrics)
    names = {
        label
        for sample in samples(metrics)
        if sample.name.startswith("lenet_")
        for label in sample.labels
    }
    assert names == {
        *("protocol", "outcome", "stage", "le", "model", "reason"),
        *("phase", "version", "sha256", "result"),
    }


def test_every_series_of_ours_bears_the_name_of_its_unit(metrics):
    test_the_series_stay_below_600_when_everything_has_been_seen(metrics)
    families = text_string_to_metric_families(metrics.exposition().decode())
    for family in families:
        if family.name.startswith("lenet_") and "duration" in family.name:
            assert family.name.endswith("_seconds")
        assert family.documentation


def test_latency_bounds_are_the_agreed_ones_when_exposed(metrics):
    metrics.request_timed("http", {"decode": 0.001}, 0.002)
    assert bounds(metrics, "lenet_request_duration_seconds") == REQUEST_BOUNDS
    with_device = ["1e-05", "2e-05", "3e-05", *REQUEST_BOUNDS]
    assert bounds(metrics, "lenet_stage_duration_seconds") == with_device
    assert bounds(metrics, "lenet_batch_duration_seconds") == with_device
    assert bounds(metrics, "lenet_device_duration_seconds") == with_device


def test_batch_sizes_have_a_bucket_for_each_power_of_two_when_exposed(metrics):
    expected = [str(float(2**exponent)) for exponent in range(11)] + ["+Inf"]
    assert bounds(metrics, "lenet_batch_rows") == expected


def test_a_batch_is_observed_once_and_its_rows_counted_when_it_is_done(metrics, value):
    observer = metrics.of_model("lenet")
    observer.batch_cut(48, "full", 7, 2)
    assert value("lenet_contexts_busy", {"model": "lenet"}) == 2
    observer.batch_done(48, 0.0015, 1, device_s=0.0005, padding_rows=16, graph_hit=True)
    observer.rows_dropped(5, "late")
    assert value("lenet_batches_total", {"model": "lenet", "reason": "full"}) == 1
    assert value("lenet_batch_rows_count") == 1
    assert value("lenet_batch_rows_sum") == 48
    assert value("lenet_batch_rows_bucket", {"le": "32.0"}) == 0
    assert value("lenet_batch_rows_bucket", {"le": "64.0"}) == 1
    assert value("lenet_batch_duration_seconds_sum") == 0.0015
    assert value("lenet_images_total", {"model": "lenet"}) == 48
    assert value("lenet_device_duration_seconds_sum") == 0.0005
    assert value("lenet_padding_rows_total", {"model": "lenet"}) == 16
    assert value("lenet_graph_replays_total", {"model": "lenet", "result": "hit"}) == 1
    assert value("lenet_graph_replays_total", {"model": "lenet", "result": "miss"}) == 0
    assert value("lenet_queue_rows", {"model": "lenet"}) == 7
    assert value("lenet_contexts_busy", {"model": "lenet"}) == 1
    assert value("lenet_rows_dropped_total", {"reason": "late"}) == 5


def test_nothing_is_told_of_a_devices_clock_or_graphs_where_it_has_none(metrics, value):
    observer = metrics.of_model("lenet")
    observer.batch_done(48, 0.0015, 1, device_s=None, padding_rows=0, graph_hit=False)
    assert value("lenet_device_duration_seconds_count") == 0
    assert value("lenet_padding_rows_total", {"model": "lenet"}) == 0
    assert value("lenet_graph_replays_total", {"model": "lenet", "result": "hit"}) == 0
    assert value("lenet_graph_replays_total", {"model": "lenet", "result": "miss"}) == 1


def test_memory_and_losses_are_told_when_they_are_known(metrics, value):
    for reason in get_args(LossReason):
        assert value("lenet_device_losses_total", {"reason": reason}) == 0, "before the first"
    metrics.memory_taken("lenet", 3000, 1000)
    metrics.device_lost("sticky")
    assert value("lenet_device_bytes", {"model": "lenet"}) == 3000
    assert value("lenet_workspace_bytes", {"model": "lenet"}) == 1000
    assert value("lenet_device_losses_total", {"reason": "sticky"}) == 1
    assert value("lenet_device_losses_total", {"reason": "hang"}) == 0


def test_a_loaded_model_shows_itself_at_rest_when_exposed(metrics, value):
    metrics.model_loaded("mlp", "7", "ab" * 32, 3, 2e-7)
    metrics.started("weights", 0.5)
    told = {"model": "mlp", "version": "7", "sha256": "ab" * 32}
    assert value("lenet_model_info", told) == 1
    assert value("lenet_contexts", {"model": "mlp"}) == 3
    assert value("lenet_contexts_busy", {"model": "mlp"}) == 0
    assert value("lenet_queue_rows", {"model": "mlp"}) == 0
    assert value("lenet_golden_error", {"model": "mlp"}) == 2e-7
    assert value("lenet_start_phase_seconds", {"phase": "weights"}) == 0.5


def test_a_replaced_model_is_told_no_more_and_its_queue_is_left_alone(metrics, value):
    metrics.model_loaded("mlp", "7", "ab" * 32, 3, 2e-7)
    for outcome in get_args(ReloadOutcome):
        told = {"model": "mlp", "outcome": outcome}
        assert value("lenet_reloads_total", told) == 0, "it is there before the first"
    metrics.of_model("mlp").batch_cut(48, "full", 7, 2)
    metrics.model_replaced("mlp", "8", "cd" * 32, 3e-7)
    metrics.reloaded("mlp", "ok")
    assert value("lenet_model_info", {"model": "mlp", "version": "7", "sha256": "ab" * 32}) is None
    assert value("lenet_model_info", {"model": "mlp", "version": "8", "sha256": "cd" * 32}) == 1
    assert value("lenet_golden_error", {"model": "mlp"}) == 3e-7
    assert value("lenet_contexts", {"model": "mlp"}) == 3
    assert value("lenet_contexts_busy", {"model": "mlp"}) == 2
    assert value("lenet_queue_rows", {"model": "mlp"}) == 7
    assert value("lenet_reloads_total", {"model": "mlp", "outcome": "ok"}) == 1


def test_the_process_is_watched_when_it_is_alone(metrics):
    assert "process_resident_memory_bytes" in metrics.exposition().decode()
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_an_exposition_has_everything_at_once_and_nothing_twice(metrics):
    observer = metrics.of_model("lenet")
    metrics.request_done("grpc", "ok")
    metrics.request_timed("grpc", {"queue": 0.5}, 0.5)
    observer.batch_cut(3, "full", 4, 2)
    observer.batch_done(3, 0.5, 1, device_s=0.5, padding_rows=1, graph_hit=True)
    for _ in range(2):
        found = {
            (sample.name, *sorted(set(sample.labels.values()) - {"lenet"})): value
            for sample in samples(metrics)
            if (value := sample.value) and not sample.name.endswith("_bucket")
        }
        assert {key: value for key, value in found.items() if key[0].startswith("lenet_")} == {
            ("lenet_requests_total", "grpc", "ok"): 1,
            ("lenet_request_duration_seconds_count", "grpc"): 1,
            ("lenet_request_duration_seconds_sum", "grpc"): 0.5,
            ("lenet_stage_duration_seconds_count", "queue"): 1,
            ("lenet_stage_duration_seconds_sum", "queue"): 0.5,
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
        }


def test_the_library_is_told_once_a_period_and_at_the_end(run_virtually, registry, metrics):
    answered = {"protocol": "http", "outcome": "ok"}

    def told():
        return registry.get_sample_value("lenet_requests_total", answered)

    async def main(loop):
        with metrics.tallies.flushed_regularly():
            await asyncio.sleep(0.5 * FLUSHED_EVERY_S)
            for number in range(3):
                metrics.request_done("http", "ok")
                assert told() == number
                await asyncio.sleep(FLUSHED_EVERY_S)
                assert told() == number + 1
            metrics.request_done("http", "ok")
        assert told() == 4
        await asyncio.sleep(0)
        assert loop.pending_timers() == []

    run_virtually(main)


def test_two_registries_do_not_meet_when_two_services_run_in_one_process():
    one, two = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.request_done("http", "ok")
    answered = b'lenet_requests_total{outcome="ok",protocol="http"} '
    assert answered + b"1.0" in one.exposition()
    assert answered + b"0.0" in two.exposition()


def test_the_shared_folder_alone_is_told_when_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    metrics = Metrics(CollectorRegistry())
    metrics.request_done("http", "ok")
    assert metrics.exposition() == b"", "this process was not started as one of several"


def sharing(folder):
    """The environment of a process that keeps its series in `folder`."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(folder)}


WORKER = """
import sys
from prometheus_client import CollectorRegistry
from service.metrics import Metrics
rows = int(sys.argv[1])
metrics = Metrics(CollectorRegistry())
if rows:
    metrics.model_loaded("lenet", "1", "ab", 2, 1e-7)
    metrics.model_replaced("lenet", "2", "cd", 1e-7)
    if rows == 4:
        metrics.model_replaced("lenet", "3", "ef", 1e-7)
    metrics.reloaded("lenet", "ok")
    metrics.started("weights", rows / 10)
    metrics.request_done("http", "ok")
    metrics.request_timed("http", {"decode": 0.1}, 0.5)
    observer = metrics.of_model("lenet")
    observer.batch_cut(rows, "full", rows, 1)
    observer.batch_done(rows, 0.1, 1, device_s=None, padding_rows=1, graph_hit=rows == 3)
    metrics.memory_taken("lenet", 10 * rows, rows)
    metrics.device_lost("hang")
sys.stdout.buffer.write(metrics.exposition())
"""


def test_one_worker_answers_for_all_when_they_share_a_folder(tmp_path):
    told = b""
    for rows in (3, 4, 0):
        told = subprocess.run(
            [sys.executable, "-c", WORKER, str(rows)],
            env=sharing(tmp_path),
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(told.decode())
        for sample in family.samples
    }
    lenet = ("model", "lenet")
    assert values["lenet_requests_total", (("outcome", "ok"), ("protocol", "http"))] == 2
    assert values["lenet_images_total", (lenet,)] == 7
    assert values["lenet_batches_total", (lenet, ("reason", "full"))] == 2
    assert values["lenet_request_duration_seconds_sum", (("protocol", "http"),)] == 1.0
    assert values["lenet_batch_rows_count", ()] == 2
    assert values["lenet_device_losses_total", (("reason", "hang"),)] == 2
    assert values["lenet_graph_replays_total", (lenet, ("result", "hit"))] == 1
    assert values["lenet_graph_replays_total", (lenet, ("result", "miss"))] == 1
    assert values["lenet_padding_rows_total", (lenet,)] == 2
    assert values["lenet_device_bytes", (lenet,)] == 70
    assert values["lenet_workspace_bytes", (lenet,)] == 7
    assert values["lenet_contexts", (lenet,)] == 4
    assert values["lenet_contexts_busy", (lenet,)] == 2
    assert values["lenet_queue_rows", (lenet,)] == 7
    assert values["lenet_start_phase_seconds", (("phase", "weights"),)] == 0.4
    assert values["lenet_reloads_total", (lenet, ("outcome", "ok"))] == 2
    assert {labels: value for (name, labels), value in values.items() if "_info" in name} == {
        (lenet, ("sha256", "cd"), ("version", "2")): 1.0,
        (lenet, ("sha256", "ef"), ("version", "3")): 1.0,
    }, "what each of them serves, and no more what both replaced"
    assert not [name for name, _ in values if name.endswith("_created")]
    assert not [labels for _, labels in values if "pid" in dict(labels)]


REGULAR = """
import asyncio
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry
from prometheus_client.mmap_dict import MmapedDict
from service import metrics

def answered():
    (file,) = Path(sys.argv[1]).glob("counter_*.db")
    return sum(
        value
        for key, value, *_ in MmapedDict.read_all_values_from_file(str(file))
        if "lenet_requests_total" in key
    )

async def main():
    shared = metrics.Metrics(CollectorRegistry())
    with shared.tallies.flushed_regularly():
        shared.request_done("http", "ok")
        assert answered() == 0
        while answered() < 1:
            await asyncio.sleep(0)
        shared.request_done("http", "ok")
    assert answered() == 2

metrics.FLUSHED_EVERY_S = 0.01
asyncio.run(main())
"""


def test_the_shared_folder_has_what_happened_without_being_asked_for(tmp_path):
    subprocess.run(
        [sys.executable, "-c", REGULAR, str(tmp_path)],
        env=sharing(tmp_path),
        check=True,
        timeout=LONG_S,
    )
