import signal
import sys

import httpx
import orjson
import pytest

from benchmarks.crew import send_from_processes, share
from benchmarks.results import summarise
from benchmarks.traffic import Load, poisson_arrivals, send_load

CLOSED = Load(url="http://service", mode="closed", connections=4, rate=1, duration_s=0.1, seed=1)
OPEN = Load(url="http://service", mode="open", connections=4, rate=200, duration_s=0.1, seed=1)


def send(load, requests, service):
    return send_load(load, requests, transport=service.transport)


def test_arrivals_are_those_of_their_seed_and_rate():
    arrivals = list(poisson_arrivals(1000, 10, seed=5))
    assert arrivals == list(poisson_arrivals(1000, 10, seed=5))
    assert arrivals != list(poisson_arrivals(1000, 10, seed=6))
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals[-1] < 10
    # A Poisson count of mean 10,000 has a standard deviation of 100.
    assert len(arrivals) == pytest.approx(10_000, abs=500)


@pytest.mark.parametrize("load", [CLOSED, OPEN], ids=["closed", "open"])
def test_a_right_service_passes(load, requests, service):
    summary = summarise(send(load, requests, service))
    assert summary.passed
    assert summary.requests == summary.images == len(service.scopes) > 0
    assert summary.server_ms == {"decode": 0.25, "queue": 0.5, "compute": 1.0, "total": 1.75}
    assert 0 < summary.latency_ms["p50"] <= summary.latency_ms["max"]
    assert summary.elapsed_s >= 0.05


def test_an_open_loop_sends_at_the_times_of_its_seed_whatever_the_service_does(requests, service):
    service.behave = lambda _, labels: (429, b"", 0.05)
    results = send(OPEN, requests, service)
    assert len(results.lateness_s) == len(list(poisson_arrivals(200, 0.1, seed=1)))
    assert results.errors == {"429": len(results.lateness_s)}


def test_a_closed_loop_sends_all_digits_in_turn(requests, service):
    seen = []
    plain = service.behave

    def note(number, labels):
        seen.append(tuple(labels))
        return plain(number, labels)

    service.behave = note
    send(CLOSED, requests, service)
    expected = [request.own_labels for request in requests]
    assert seen[: len(expected)] == expected


def test_an_open_loop_counts_latency_from_when_a_request_was_due(requests, service, say):
    # The first answer takes 0.2 s and there is one connection: whoever waits behind it is late
    # too, though each of the other answers takes no time at all.
    service.behave = lambda number, labels: (200, say(labels), 0.0 if number else 0.2)
    load = Load("http://service", "open", connections=1, rate=100, duration_s=0.25, seed=1)
    latency = summarise(send(load, requests, service)).latency_ms
    assert latency["max"] >= 190
    assert latency["p50"] > 30


def test_a_label_other_than_the_models_own_is_wrong(requests, service, say):
    def lie(number, labels):
        return 200, say([(label + (number == 2)) % 10 for label in labels]), 0.0

    service.behave = lie
    summary = summarise(send(CLOSED, requests, service))
    assert summary.wrong_labels == 1
    assert not summary.errors
    assert not summary.passed


def test_rows_of_another_caller_are_wrong(requests, service, say):
    others = requests[0].own_labels
    assert any(request.own_labels != others for request in requests)
    service.behave = lambda number, labels: (200, say(others), 0.0)
    assert summarise(send(CLOSED, requests, service)).wrong_labels > 0


def test_the_models_own_mistakes_are_no_wrong_labels(requests, service):
    mistaken = sum(request.own_labels != request.true_labels for request in requests)
    assert mistaken > 0
    summary = summarise(send(CLOSED, requests, service))
    assert summary.passed
    assert summary.mistakes == summary.own_mistakes >= mistaken
    assert summary.accuracy == 1 - summary.mistakes / summary.images


def test_errors_are_counted_by_kind(requests, service, say):
    overloaded = orjson.dumps({"error": {"code": "overloaded", "field": "", "message": "later"}})
    odd = {0: (429, overloaded, 0.0), 1: (502, b"<html>", 0.0), 2: (200, b"[]", 0.0)}
    service.behave = lambda number, labels: odd.get(number, (200, say(labels), 0.0))
    summary = summarise(send(CLOSED, requests, service))
    assert summary.errors == {
        "429 overloaded": 1,
        "502": 1,
        "bad answer: not the promised JSON": 1,
    }
    assert not summary.passed


def test_a_broken_connection_is_an_error_by_the_name_of_its_exception(requests):
    def broken(request):
        raise httpx.ReadError("gone")

    results = send_load(CLOSED, requests, transport=lambda: httpx.MockTransport(broken))
    assert set(results.errors) == {"ReadError"}
    assert not summarise(results).passed


def test_model_and_timeout_are_told_to_the_service(requests, service):
    load = Load("http://service", "closed", 1, 1, 0.05, 1, timeout_ms=250, model="lenet")
    assert summarise(send(load, requests, service)).passed
    scope = service.scopes[0]
    assert scope["query_string"] == b"model=lenet"
    assert dict(scope["headers"])[b"x-request-timeout-ms"] == b"250"


def test_an_interrupt_keeps_what_there_was(requests, service, say):
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


def test_httpcore_is_not_left_without_sniffio(requests, service):
    before = sys.modules.get("sniffio", "absent")
    send(CLOSED, requests, service)
    assert sys.modules.get("sniffio", "absent") == before


def test_shares_together_are_the_load():
    load = Load("http://service", "open", connections=7, rate=90, duration_s=1, seed=4)
    parts = share(load, 3)
    assert [part.connections for part in parts] == [3, 2, 2]
    assert sum(part.rate for part in parts) == pytest.approx(90)
    assert len({part.seed for part in parts}) == 3


def test_two_processes_send_and_their_results_add_up(requests, service, serve):
    with serve(service) as url:
        load = Load(url, "closed", connections=2, rate=1, duration_s=0.3, seed=1)
        results = send_from_processes(load, requests, 2)
    summary = summarise(results)
    assert summary.passed
    assert summary.requests == len(service.scopes)
    assert len({scope["client"] for scope in service.scopes}) == 2
