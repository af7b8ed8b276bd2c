from array import array
from collections import Counter

import numpy as np
import orjson
import pytest

from benchmarks.load import (
    Load,
    Results,
    Stage,
    arrivals,
    closed_loop,
    send_from_processes,
    send_load,
)
from benchmarks.load_report import summarise

CLOSED = closed_loop("http://service", connections=4, duration_s=0.1)
OPEN = Load("http://service", "open", (Stage(200, 200, 0.1),), connections=4)


def send(load, requests, service):
    (results,) = send_load(load, requests, transport=service.transport)
    return results


def test_poisson_arrivals_depend_on_seed_and_rate():
    steady = [Stage(1000, 1000, 10)]
    times = list(arrivals(steady, "poisson", seed=5))
    assert times == list(arrivals(steady, "poisson", seed=5))
    assert times != list(arrivals(steady, "poisson", seed=6))
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 10
    # A Poisson count of mean 10,000 has a standard deviation of 100.
    assert len(times) == pytest.approx(10_000, abs=500)


@pytest.mark.parametrize("kind", ["poisson", "constant"])
@pytest.mark.parametrize("ramp", [(100, 900), (900, 100)])
def test_a_ramp_changes_the_rate_linearly(kind, ramp):
    times = np.array(list(arrivals([Stage(*ramp, 20)], kind, seed=2)))
    counts = np.histogram(times, 4, (0, 20))[0]
    # The mean rates of quarters of 5 s; a Poisson count of 4,000 has a standard deviation of 63.
    expected = [1000, 2000, 3000, 4000] if ramp[1] > ramp[0] else [4000, 3000, 2000, 1000]
    assert counts == pytest.approx(expected, abs=1 if kind == "constant" else 250)


@pytest.mark.parametrize("load", [CLOSED, OPEN], ids=["closed", "open"])
def test_a_correct_service_has_no_errors(load, requests, service):
    summary = summarise(send(load, requests, service))
    assert summary.requests == len(service.scopes) > 0
    assert not summary.errors
    medians = {stage: found["p50"] for stage, found in summary.server_ms.items()}
    assert medians == {"decode": 0.25, "queue": 0.5, "compute": 1.0, "total": 1.75}
    assert 0 < summary.latency_ms["p50"] <= summary.latency_ms["max"]
    assert summary.elapsed_s == pytest.approx(0.1)
    assert summary.client_busy > 0
    assert summary.client_cores > 0
    # The model's mistakes are not the service's.
    assert summary.accuracy < 1


def test_errors_are_counted_by_kind(requests, service, say):
    overloaded = orjson.dumps({"error": {"code": "overloaded", "field": "", "message": "later"}})
    odd = {0: (429, overloaded, 0.0), 1: (502, b"<html>", 0.0), 2: (200, b"[]", 0.0)}
    service.behave = lambda number, labels: odd.get(number, (200, say(labels), 0.0))
    kinds = ("429 overloaded", "502", "bad answer: not the documented JSON")
    assert send(CLOSED, requests, service).errors == dict.fromkeys(kinds, 1)


@pytest.mark.parametrize("mode", ["closed", "open"])
def test_two_processes_send_one_load(mode, requests, service):
    with service.listening() as url:
        stages = (Stage(2, 2, 0.3),) if mode == "closed" else (Stage(100, 100, 0.3),)
        load = Load(url, mode, stages, connections=2, arrivals="constant")
        reports = []
        (results,) = send_from_processes(load, requests, 2, reports.append)
    assert not results.errors
    assert len(results.latencies_s) == len(service.scopes) > 0
    assert len({scope["client"] for scope in service.scopes}) == 2
    assert reports
    if mode == "open":
        assert len(service.scopes) == 30


def results(latencies_s=(), **fields):
    return Results(
        elapsed_s=2.0, received=len(latencies_s), latencies_s=array("d", latencies_s), **fields
    )


def test_merged_results_are_summed_and_name_the_busiest_client():
    merged = Results.merge(
        [
            results([0.001, 0.003], images=2, cpu_s=1.0, busy=0.5, starved=0.25),
            results(
                [0.002],
                images=1,
                cpu_s=0.5,
                busy=0.1,
                starved=0.85,
                wrong_labels=1,
                mistakes=1,
                errors=Counter({"429": 2, "ReadError": 1}),
            ),
        ],
        elapsed_s=2.0,
    )
    summary = summarise(merged)
    assert summary.requests == 6
    assert summary.requests_per_s == summary.images_per_s == 1.5
    assert summary.errors == {"429": 2, "ReadError": 1}
    assert summary.wrong_labels == 1
    assert summary.accuracy == pytest.approx(2 / 3)
    for name, expected_ms in (("mean", 2.0), ("p50", 2.0), ("p99.9", 3.0), ("max", 3.0)):
        assert summary.latency_ms[name] == pytest.approx(expected_ms)
    assert (summary.client_busy, summary.client_starved) == (0.1, 0.85)
    assert summary.client_cores == 0.75
