import signal
from collections import Counter

import httpx
import orjson
import pytest

from benchmarks.digits import Verdict
from benchmarks.load import Load, Results, poisson_arrivals, send_load, server_timing, summarise
from benchmarks.load_processes import send_from_processes, share

CLOSED = Load(url="http://service", mode="closed", connections=4, rate=1, duration_s=0.1, seed=1)
OPEN = Load(url="http://service", mode="open", connections=4, rate=200, duration_s=0.1, seed=1)


def send(load, requests, service):
    return send_load(load, requests, transport=service.transport)


def test_arrivals_depend_on_seed_and_rate():
    arrivals = list(poisson_arrivals(1000, 10, seed=5))
    assert arrivals == list(poisson_arrivals(1000, 10, seed=5))
    assert arrivals != list(poisson_arrivals(1000, 10, seed=6))
    assert arrivals == sorted(arrivals)
    assert 0 < arrivals[0] < arrivals[-1] < 10
    # A Poisson count of mean 10,000 has a standard deviation of 100.
    assert len(arrivals) == pytest.approx(10_000, abs=500)


@pytest.mark.parametrize("load", [CLOSED, OPEN], ids=["closed", "open"])
def test_a_correct_service_passes(load, requests, service):
    summary = summarise(send(load, requests, service))
    assert summary.passed
    assert summary.requests == summary.images == len(service.scopes) > 0
    assert summary.server_ms == {"decode": 0.25, "queue": 0.5, "compute": 1.0, "total": 1.75}
    assert 0 < summary.latency_ms["p50"] <= summary.latency_ms["max"]
    assert summary.elapsed_s >= 0.05
    assert summary.client_busy > 0
    # The model's mistakes are not the service's.
    assert summary.mistakes == summary.own_mistakes > 0
    assert summary.accuracy == 1 - summary.mistakes / summary.images


def test_an_open_loop_sends_at_its_times_however_slow_the_service_is(requests, service):
    service.behave = lambda _, labels: (429, b"", 0.05)
    results = send(OPEN, requests, service)
    assert len(results.lateness_s) == len(list(poisson_arrivals(200, 0.1, seed=1)))
    assert results.errors == {"429": len(results.lateness_s)}


def test_an_open_loop_counts_latency_from_the_due_time(requests, service, say):
    # The first answer takes 0.2 s on the only connection, and delays the fast ones after it.
    service.behave = lambda number, labels: (200, say(labels), 0.0 if number else 0.2)
    load = Load("http://service", "open", connections=1, rate=100, duration_s=0.25, seed=1)
    latency = summarise(send(load, requests, service)).latency_ms
    assert latency["max"] >= 190
    assert latency["p50"] > 30


def test_rows_of_another_caller_are_wrong_labels(requests, service, say):
    others = requests[0].own_labels
    assert any(request.own_labels != others for request in requests)
    service.behave = lambda number, labels: (200, say(others), 0.0)
    summary = summarise(send(CLOSED, requests, service))
    assert summary.wrong_labels > 0
    assert not summary.errors
    assert not summary.passed


def test_errors_are_counted_by_kind(requests, service, say):
    overloaded = orjson.dumps({"error": {"code": "overloaded", "field": "", "message": "later"}})
    odd = {0: (429, overloaded, 0.0), 1: (502, b"<html>", 0.0), 2: (200, b"[]", 0.0)}
    service.behave = lambda number, labels: odd.get(number, (200, say(labels), 0.0))
    summary = summarise(send(CLOSED, requests, service))
    kinds = ("429 overloaded", "502", "bad answer: not the documented JSON")
    assert summary.errors == dict.fromkeys(kinds, 1)
    assert not summary.passed


def test_a_broken_connection_is_an_error_named_after_its_exception(requests):
    def broken(request):
        raise httpx.ReadError("gone")

    results = send_load(CLOSED, requests, transport=lambda: httpx.MockTransport(broken))
    assert set(results.errors) == {"ReadError"}
    assert not summarise(results).passed


def test_model_and_timeout_are_sent_to_the_service(requests, service):
    load = Load("http://service", "closed", 1, 1, 0.05, 1, timeout_ms=250, model="lenet")
    assert summarise(send(load, requests, service)).passed
    scope = service.scopes[0]
    assert scope["query_string"] == b"model=lenet"
    assert dict(scope["headers"])[b"x-request-timeout-ms"] == b"250"


def test_an_interrupt_keeps_the_results_so_far(requests, service, say):
    def behave(number, labels):
        if number == 7:
            signal.raise_signal(signal.SIGINT)
        return 200, say(labels), 0.0

    service.behave = behave
    load = Load("http://service", "closed", 1, 1, duration_s=60, seed=1)
    summary = summarise(send(load, requests, service))
    assert summary.interrupted
    assert not summary.passed
    assert summary.requests >= 7
    assert summary.elapsed_s < 30


def test_shares_add_up_to_the_load():
    load = Load("http://service", "open", connections=7, rate=90, duration_s=1, seed=4)
    parts = share(load, 3)
    assert [part.connections for part in parts] == [3, 2, 2]
    assert sum(part.rate for part in parts) == pytest.approx(90)
    assert len({part.seed for part in parts}) == 3


def test_results_of_two_processes_add_up(requests, service):
    with service.listening() as url:
        load = Load(url, "closed", connections=2, rate=1, duration_s=0.3, seed=1)
        summary = summarise(send_from_processes(load, requests, 2))
    assert summary.passed
    assert summary.requests == len(service.scopes)
    assert len({scope["client"] for scope in service.scopes}) == 2


def results(latencies_s=(), cpu_s=1.0, starved_s=0.5, **fields):
    made = Results(**fields)
    for latency_s in latencies_s:
        made.answered(latency_s, Verdict(), (1,), (1,), {"queue": 0.5})
    made.finish(2.0, cpu_s, starved_s, interrupted=False)
    return made


def test_merged_results_equal_those_of_one_process():
    merged = Results.merge(
        [
            results([0.001, 0.003], errors=Counter({"429": 1}), wrong_labels=1),
            results([0.002], cpu_s=0.2, starved_s=1.7, errors=Counter({"429": 2, "ReadError": 1})),
        ]
    )
    summary = summarise(merged)
    assert summary.requests == 7
    assert summary.requests_per_s == summary.images_per_s == 1.5
    assert summary.errors == {"429": 3, "ReadError": 1}
    assert summary.wrong_labels == 1
    for name, expected_ms in (("mean", 2.0), ("p50", 2.0), ("p99.9", 3.0), ("max", 3.0)):
        assert summary.latency_ms[name] == pytest.approx(expected_ms)
    assert summary.server_ms == {"queue": 0.5}
    # Of the process that most often ran or waited for a core.
    assert (summary.client_busy, summary.client_starved) == (pytest.approx(0.1), 0.85)


@pytest.mark.parametrize(
    "flaw",
    [{"wrong_labels": 1}, {"errors": Counter({"429": 1})}, {"mistakes": 1}, {"own_mistakes": 1}],
    ids=str,
)
def test_one_flaw_is_enough_to_fail(flaw):
    assert summarise(results([0.001])).passed
    assert not summarise(results([0.001], **flaw)).passed


@pytest.mark.parametrize(
    ("header", "stages"),
    [
        ("", {}),
        ("queue;dur=0.5, compute;dur=2", {"queue": 0.5, "compute": 2.0}),
        ('cache;desc="hit", total;desc=all;dur=3.25', {"total": 3.25}),
        ("queue;dur=soon", {}),
    ],
)
def test_server_timing_is_read_as_milliseconds_by_stage(header, stages):
    assert server_timing(header) == stages
