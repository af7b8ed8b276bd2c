import asyncio
import contextlib
import itertools
import math
import signal
import socket
import socketserver
import threading
import time
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import httpx
import numpy as np
import orjson
import pytest

from benchmarks.load import (
    WRONG_LABEL,
    Load,
    Results,
    Stage,
    active_from,
    arrivals,
    closed_loop,
    send_from_processes,
    send_load,
)
from benchmarks.load_clients import HttpConnection, KeptConnection, server_timing
from benchmarks.load_report import summarise
from service.forms import open_inference_pb2 as pb

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


def test_constant_arrivals_are_evenly_spaced():
    times = list(arrivals([Stage(10, 10, 1), Stage(20, 20, 0.5)], "constant", seed=1))
    assert times == pytest.approx([*np.arange(10) / 10, *1 + np.arange(10) / 20])


@pytest.mark.parametrize("kind", ["poisson", "constant"])
@pytest.mark.parametrize("ramp", [(100, 900), (900, 100)])
def test_a_ramp_changes_the_rate_linearly(kind, ramp):
    times = np.array(list(arrivals([Stage(*ramp, 20)], kind, seed=2)))
    counts = np.histogram(times, 4, (0, 20))[0]
    # The mean rates of quarters of 5 s; a Poisson count of 4,000 has a standard deviation of 63.
    expected = [1000, 2000, 3000, 4000] if ramp[1] > ramp[0] else [4000, 3000, 2000, 1000]
    assert counts == pytest.approx(expected, abs=1 if kind == "constant" else 250)


def test_a_stage_of_a_closed_loop_uses_its_number_of_connections():
    stages = [Stage(2, 2, 1), Stage(2, 4, 2), Stage(1, 1, 1)]
    assert [active_from(stages, number, 0) for number in range(5)] == [0, 0, 2, 3, math.inf]
    assert active_from(stages, 2, 2.5) == 2.5
    assert active_from(stages, 0, 3.5) == 3.5
    assert active_from(stages, 1, 3.5) == active_from(stages, 0, 4) == math.inf


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


def test_an_open_loop_sends_at_its_times_however_slow_the_service_is(requests, service):
    service.behave = lambda _, labels: (429, b"", 0.05)
    results = send(OPEN, requests, service)
    assert len(results.lateness_s) == len(list(arrivals(OPEN.stages, "poisson", seed=1)))
    assert results.errors == {"429": len(results.lateness_s)}


@pytest.fixture
def stalling(service, say):
    """The service: it stops for 0.4 s, connections included, at its 51st request."""

    def behave(number, labels):
        if number == 50:
            time.sleep(0.4)
        return 200, say(labels), 0.0

    service.behave = behave
    with service.listening() as url:
        yield url


def test_an_open_loop_reports_a_stall_in_its_percentiles(stalling, requests):
    stages = (Stage(200, 200, 1),)
    load = Load(stalling, "open", stages, connections=4, arrivals="constant")
    (results,) = send_load(load, requests)
    summary = summarise(results)
    # 80 of 200 requests are due during the stall and wait for its end: 0.4 s down to 0.
    assert summary.requests == 200
    assert summary.latency_ms["max"] >= 380
    assert summary.latency_ms["p90"] >= 270
    assert sum(latency_s > 0.1 for latency_s in results.latencies_s) >= 55


def test_a_closed_loop_shows_a_stall_in_its_slowest_requests_alone(stalling, requests):
    (results,) = send_load(closed_loop(stalling, connections=1, duration_s=1), requests)
    assert sum(latency_s > 0.3 for latency_s in results.latencies_s) == 1
    assert summarise(results).latency_ms["p90"] < 100


def test_rows_of_another_caller_are_wrong_labels(requests, service, say):
    others = requests[0].own_labels
    assert any(request.own_labels != others for request in requests)
    service.behave = lambda number, labels: (200, say(others), 0.0)
    summary = summarise(send(CLOSED, requests, service))
    assert summary.wrong_labels == summary.errors[WRONG_LABEL] > 0


def test_errors_are_counted_by_kind(requests, service, say):
    overloaded = orjson.dumps({"error": {"code": "overloaded", "field": "", "message": "later"}})
    odd = {0: (429, overloaded, 0.0), 1: (502, b"<html>", 0.0), 2: (200, b"[]", 0.0)}
    service.behave = lambda number, labels: odd.get(number, (200, say(labels), 0.0))
    kinds = ("429 overloaded", "502", "bad answer: not the documented JSON")
    assert send(CLOSED, requests, service).errors == dict.fromkeys(kinds, 1)


def test_a_broken_connection_is_an_error_named_after_its_exception(requests):
    def broken(request):
        raise httpx.ReadError("gone")

    (results,) = send_load(CLOSED, requests, transport=lambda: httpx.MockTransport(broken))
    assert set(results.errors) == {"ReadError"}
    assert not results.latencies_s


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"", "ReadError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "ReadError"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "RemoteProtocolError"),
        (b"HTTP/1.1 503 -\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", "503"),
    ],
)
def test_a_server_that_closes_connections_is_an_error_and_asked_again(reply, kind, requests):
    with closing_server(reply) as (url, opened):
        (results,) = send_load(closed_loop(url, 1, 0.1), requests)
    assert set(results.errors) == {kind}
    assert results.errors[kind] == len(opened) > 1


def test_a_port_without_a_server_is_an_error(requests):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # does not listen
        load = closed_loop(f"http://127.0.0.1:{taken.getsockname()[1]}", 1, 0.05)
        (results,) = send_load(load, requests)
    assert set(results.errors) == {"ConnectError"}


def test_a_hanging_service_is_an_error(requests):
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        transport = KeptConnection(url)

        async def ask():
            message = HttpConnection(url, model=None, timeout_ms=None).prepare(requests[0])
            message.extensions["timeout"]["read"] = 0.05
            try:
                await transport.handle_async_request(message)
            finally:
                await transport.aclose()

        with pytest.raises(httpx.ReadTimeout):
            asyncio.run(ask())


@contextlib.contextmanager
def closing_server(reply):
    """Answers each connection's first bytes with `reply` and closes it: its URL, its peers."""
    opened = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            opened.append(self.client_address)
            self.request.recv(65536)
            self.request.sendall(reply)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", opened
        finally:
            server.shutdown()
            thread.join()


def test_model_and_timeout_are_sent_to_the_service(requests, service):
    send(replace(CLOSED, timeout_ms=250, model="lenet"), requests, service)
    scope = service.scopes[0]
    assert scope["query_string"] == b"model=lenet"
    assert dict(scope["headers"])[b"x-request-timeout-ms"] == b"250"


def test_stages_are_reported_by_themselves_and_the_warm_up_is_not(requests, service, say):
    # The warm-up has 10 requests, the stages 20 and 40.
    stages = (Stage(100, 100, 0.2), Stage(200, 200, 0.2))
    load = replace(OPEN, stages=stages, warm_up_s=0.1, arrivals="constant")
    service.behave = lambda number, labels: (500 if number < 15 else 200, say(labels), 0.0)
    first, second = send_load(load, requests, transport=service.transport)
    assert len(service.scopes) == 70
    assert first.errors == {"500": 5}
    assert (len(first.latencies_s), len(second.latencies_s)) == (15, 40)
    assert second.received == pytest.approx(40, abs=2)
    assert not second.errors


def test_progress_is_reported_while_the_load_runs(requests, service):
    reports = []
    load = replace(CLOSED, stages=(Stage(1, 1, 0.7),))
    send_load(load, requests, transport=service.transport, report=reports.append)
    assert [report.at_s for report in reports] == pytest.approx([0.5, 0.7], abs=0.1)
    # Answers that came after the last report are missing.
    received = sum(len(report.latencies_s) for report in reports)
    assert received == pytest.approx(len(service.scopes), abs=2)


def test_an_interrupt_keeps_the_results_so_far(requests, service, say):
    def behave(number, labels):
        if number == 7:
            signal.raise_signal(signal.SIGINT)
        return 200, say(labels), 0.0

    service.behave = behave
    summary = summarise(send(closed_loop("http://service", 1, 60), requests, service))
    assert summary.interrupted
    assert summary.requests >= 7
    assert summary.elapsed_s < 30


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


class FakeInference:
    """Answers known images, and fails the first request."""

    def __init__(self, requests):
        self._labels = {request.body: request.own_labels for request in requests}
        self._numbers = itertools.count()

    def infer(self, request, context):
        if next(self._numbers) == 0:
            context.set_trailing_metadata((("lenet-error-code", "overloaded"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")
        (image,) = request.inputs
        assert (request.model_name, image.name, image.datatype) == ("lenet", "image", "UINT8")
        (body,) = request.raw_input_contents
        labels = np.array(self._labels[body], "<i8")
        probabilities = np.full((len(labels), 10), 0.01, "<f4")
        probabilities[np.arange(len(labels)), labels] = 0.91
        response = pb.ModelInferResponse(model_name="lenet")
        for name, values in (("label", labels), ("probabilities", probabilities)):
            response.outputs.add(name=name, shape=values.shape)
            response.raw_output_contents.append(values.tobytes())
        response.parameters["queue_us"].int64_param = 1500
        return response


@pytest.mark.parametrize("mode", ["closed", "open"])
def test_grpc_is_loaded_and_checked_like_http(mode, requests):
    server = grpc.server(ThreadPoolExecutor(2))
    infer = grpc.unary_unary_rpc_method_handler(
        FakeInference(requests).infer,
        pb.ModelInferRequest.FromString,
        pb.ModelInferResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelInfer": infer}
    )
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        stages = (Stage(2, 2, 0.3),) if mode == "closed" else (Stage(100, 100, 0.3),)
        load = Load("", mode, stages, 2, model="lenet", grpc=f"127.0.0.1:{port}")
        (results,) = send_load(load, requests)
    finally:
        server.stop(0).wait()
    assert results.errors == {"RESOURCE_EXHAUSTED overloaded": 1}
    summary = summarise(results)
    assert summary.requests > 2
    assert summary.server_ms["queue"]["p50"] == 1.5


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
