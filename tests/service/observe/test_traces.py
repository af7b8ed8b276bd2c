from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import time
from http.client import HTTPConnection
from threading import Event, Thread

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from lenet.backend import BatchResult
from service.errors import GRPC_STATUS, STATUS
from service.forms import open_inference_pb2 as pb
from service.observe import spans
from service.observe.metrics import NO_MODEL
from service.observe.traces import (
    FAULTS,
    MOST_A_SECOND,
    Ended,
    Parent,
    Traces,
    batch_attributes,
    grpc_operation,
    http_operation,
    parent_of,
)
from tests.collector import ENDLESS_BYTES, attributes, collector
from tests.service_process import PATIENCE_S
from wire.ids import Ids

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (Parent(f"00-{TRACE}-{CALLER}-0{flag}", "a=1") for flag in (1, 0))


# What is chosen.


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{CALLER}-01", True),
        (f"00-{TRACE}-{CALLER}-03", True),  # W3C's random flag beside it
        (f"00-{TRACE}-{CALLER}-00", False),
        (f"01-{TRACE}-{CALLER}-01-later", True),
        (f"00-{TRACE}-{CALLER}-01-later", None),
        (f"ff-{TRACE}-{CALLER}-01", None),
        (f"00-{'0' * 32}-{CALLER}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{CALLER}-01", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_the_parent_is_read_as_w3c_says(header, sampled):
    parent = parent_of(Ids.read({"traceparent": header}).trace, "a=1")
    if sampled is None:
        assert parent is None
        return
    assert parent.sampled is sampled
    span = spans_of(CALL._replace(parent=parent))[0]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert span.trace_state == "a=1"


def test_a_tracestate_that_is_too_long_is_left_out():
    assert parent_of(SAMPLED.trace, "a=" + "1" * 511) == (SAMPLED.trace, "")


@pytest.mark.parametrize(
    ("one_in", "parent", "code", "took_s", "chosen"),
    [
        (0, SAMPLED, "", 0.0, [True] * 6),
        (1, UNSAMPLED, "", 0.0, [False] * 6),
        (0, None, "", 0.0, [False] * 6),
        (1, None, "", 0.0, [True] * 6),
        (3, None, "", 0.0, [False, False, True] * 2),
        (0, None, "", 0.6, [True] * 6),
        (0, UNSAMPLED, "", 0.6, [True] * 6),
        (0, None, "invalid_input", 0.0, [False] * 6),
        (0, None, "overloaded", 0.0, [False] * 6),
        *((0, None, fault, 0.0, [True] * 6) for fault in sorted(FAULTS)),
    ],
)
def test_the_caller_decides_else_one_in_n_and_what_is_slow_or_fails_is_always_chosen(
    one_in, parent, code, took_s, chosen
):
    traces = Traces(one_in, 0.5, None)
    assert [traces.wants(parent, code, took_s) for _ in chosen] == chosen


def test_no_more_than_the_limit_are_chosen_in_a_second(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    traces = Traces(1, 1.0, None)
    for now_s in (100.0, 100.9, 101.0, 150.0):
        chosen = sum(traces.wants(SAMPLED, "internal", 9.0) for _ in range(2 * MOST_A_SECOND))
        assert chosen == (0 if now_s == 100.9 else MOST_A_SECOND)


# What is made of it, as a collector reads it.

STATUSES = {"http": STATUS | {"": 200}, "grpc": GRPC_STATUS | {"": "OK"}}
STEPS_S = 1.001, 1.002, 1.004, 1.008, 1.016
PREDICT = http_operation("POST", "/v1/models/{model}:predict", "/v1/models/lenet:predict")
INFER = grpc_operation("a.B/C")
BATCH = batch_attributes(5, "idle", BatchResult(None, 8, True, 25e-6))
CALL = Ended("grpc", INFER, None, ("lenet", "1"), 1, "", 1.0, 2.0)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def exported(url):
    return spans.exported(url, "1.2", STATUSES, "https", lambda *_: None)


def spans_of(*requests):
    with collector() as found:
        with exported(found.url) as note:
            for ended in requests:
                note(ended)
        return found.spans  # those of the last export too


def seconds(*times_ns):
    """Expected Unix seconds of times of the monotonic clock."""
    clock_ns = time.time_ns() - time.monotonic_ns()
    return [pytest.approx((ns - clock_ns) / 1e9, abs=1e-4) for ns in times_ns]


def events(span):
    return [(event.name, event.time_unix_nano) for event in span.events]


def test_an_answer_has_a_span_with_its_stages_and_its_batch():
    (span,) = spans_of(
        Ended("http", PREDICT, SAMPLED, ("lenet", "3"), 2, "", 1.0, 1.032, STEPS_S, BATCH)
    )
    assert (span.name, span.kind) == ("POST /v1/models/{model}:predict", OtlpSpan.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert span.trace_state == "a=1"
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert seconds(span.start_time_unix_nano, span.end_time_unix_nano) == [1.0, 1.032]
    assert attributes(span) == {
        "http.request.method": "POST",
        "http.route": "/v1/models/{model}:predict",
        "url.path": "/v1/models/lenet:predict",
        "url.scheme": "https",
        "http.response.status_code": 200,
        "lenet.model": "lenet",
        "lenet.model_version": "3",
        "lenet.rows": 2,
        "lenet.batch_rows": 5,
        "lenet.computed_rows": 8,
        "lenet.cut_reason": "idle",
        "lenet.device_us": 25.0,
    }
    names, times_ns = zip(*events(span), strict=True)
    assert names == ("decode", "queue", "compute", "computed", "encode")
    assert seconds(*times_ns) == [1.001, 1.002, 1.004, 1.008, 1.016]


@pytest.mark.parametrize(
    ("code", "http", "rpc", "status"),
    [
        ("invalid_input", 400, "INVALID_ARGUMENT", Status.STATUS_CODE_UNSET),
        ("cancelled", 499, "CANCELLED", Status.STATUS_CODE_UNSET),
        ("unavailable", 503, "UNAVAILABLE", Status.STATUS_CODE_ERROR),
        ("deadline_exceeded", 504, "DEADLINE_EXCEEDED", Status.STATUS_CODE_ERROR),
    ],
)
def test_an_error_has_one_span_with_its_code(code, http, rpc, status):
    ways = (
        ("http", PREDICT, "http.response.status_code", http),
        ("grpc", INFER, "rpc.response.status_code", rpc),
    )
    made = spans_of(*(Ended(*way[:2], None, NO_MODEL, 0, code, 1.0, 2.0) for way in ways))
    for span, (*_, key, expected) in zip(made, ways, strict=True):
        found = attributes(span)
        assert (found[key], found["error.type"]) == (expected, code)
        assert "lenet.model" not in found
        assert span.status.code == status
        assert (span.parent_span_id, span.trace_state) == (b"", "")
    assert (span.name, found["rpc.system.name"], found["rpc.method"]) == ("a.B/C", "grpc", "a.B/C")


@pytest.mark.states(
    "times and counts in operations.md",
    "url.path is cut after 256 characters",
    found="a path of 60,000",
)
def test_a_long_path_is_cut():
    _, asked = http_operation("POST", "/v2/models/{model}/infer", "/v2/models/" + "a" * 60_000)
    assert len(dict(asked)["url.path"]) == 256


# What arrives.


def test_the_variables_of_opentelemetry_are_heeded(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x, b=2")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "digits")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=no,deployment.environment.name=t")
    with collector() as found:
        with exported(found.url) as note:
            note(CALL)
        (resource,) = found.resources
    assert (resource["service.name"], resource["service.version"]) == ("digits", "1.2")
    assert resource["deployment.environment.name"] == "t"
    assert resource["process.pid"] == os.getpid()
    headers = {name.lower(): value for name, value in found.headers[0].items()}
    assert (headers["authorization"], headers["b"]) == ("Bearer x", "2"), "not netrc's"


@pytest.mark.parametrize(
    ("name", "text", "logged"),
    [
        ("MAX_QUEUE_SIZE", "100", 0),
        ("MAX_EXPORT_BATCH_SIZE", "", 0),
        ("SCHEDULE_DELAY", "0", 1),
        ("MAX_QUEUE_SIZE", "1.5", 1),
    ],
)
def test_a_number_that_is_none_is_one_log_line_and_the_default(
    monkeypatch, caplog, name, text, logged
):
    monkeypatch.setenv(f"OTEL_BSP_{name}", text)
    with collector() as found, exported(found.url) as note:
        note(CALL)
        found.wait_for(1, "a.B/C")
    expected = f"OTEL_BSP_{name} is {text!r}, expected a whole number from 1 to 2147483647: "
    assert [message.startswith(expected) for message in caplog.messages] == [True] * logged


@pytest.mark.parametrize(
    "header", ["authorization=Bearer%20s3cr3t", "authorization=s3cr3t%0Ax", "Bearer s3cr3t"]
)
def test_the_collectors_key_goes_nowhere_else(monkeypatch, caplog, header):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
    with collector() as elsewhere, collector(moved_to=elsewhere.url) as found:
        with exported(found.url) as note:
            note(CALL)
        assert not elsewhere.headers
    assert "s3cr3t" not in caplog.text
    assert "InvalidHeader" in caplog.text or "%0A" not in header
    assert "Header format invalid" in caplog.text or "=" in header


def test_a_clients_tracestate_is_not_logged(caplog):
    parent = SAMPLED._replace(state="b4d")
    spans = spans_of(*[CALL._replace(parent=parent)] * 3)
    assert [span.trace_state for span in spans] == [""] * 3
    assert "b4d" not in caplog.text
    assert len(caplog.records) == 1


def test_a_collector_that_refuses_is_one_log_line(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collector(status=400) as found, exported(found.url) as note:
        for number in range(3):
            note(CALL)
            found.wait_for(number + 1, "a.B/C")
    (record,) = caplog.records
    assert record.getMessage() == "Failed to export spans batch code: 400, reason: Bad Request"


def test_retries_are_not_logged_and_their_end_is_with_the_reason(monkeypatch, caplog):
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)  # tried again at once
    with collector(status=503) as found, exported(found.url) as note:
        note(CALL)
        found.wait_for(6, "a.B/C")
    (message,) = caplog.messages
    assert message.startswith("Failed to export spans batch due to timeout, max retries")
    assert message.endswith(": Service Unavailable")


def test_a_full_queue_is_one_log_line(monkeypatch, caplog):
    # Without the SDK's own filter, which lets a line through every 20 s.
    monkeypatch.setattr(logging.getLogger("opentelemetry.sdk._shared_internal"), "filters", [])
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    go_on = Event()
    exporter = spans.trace_exporter.OTLPSpanExporter
    monkeypatch.setattr(exporter, "export", lambda *_: go_on.wait(PATIENCE_S))
    with exported("http://127.0.0.1:9/") as note:
        for _ in range(20):
            note(CALL)
        go_on.set()
    assert caplog.messages == ["Queue full, dropping Span."]


def test_an_answer_without_end_is_not_read():
    with collector(endless=True) as found, exported(found.url) as note:
        note(CALL)
    assert found.spans
    assert found.taken_bytes < ENDLESS_BYTES / 2  # what the kernel's buffers take


def test_a_collector_that_does_not_answer_keeps_no_stop_up(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with exported(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces") as note:
            note(CALL)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 15  # the SDK alone waits for 30


def test_nothing_of_it_is_imported_while_it_is_off():
    program = (
        "import sys, service.server\n"
        "print(*(name for name in sys.modules if 'opentelemetry.sdk' in name or 'otlp' in name))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip()) == (0, "")


def predict(service, path="/predict", **headers):
    connection = HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_S)
    kind = {"content-type": "application/octet-stream", **headers}
    connection.request("POST", path, bytes(784), kind)
    assert connection.getresponse().status == 200
    connection.close()


def infer_request(model="lenet"):
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="image", datatype="FP32", shape=[1, 1, 28, 28]
    )
    raw = [struct.pack("<784f", *[0.0] * 784)]
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=raw)


def took_s(span):
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def exemplars_of(service):
    """Protocol, upper bound and exemplar of each bucket of the durations that has one."""
    connection = HTTPConnection("127.0.0.1", service.port)
    connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    text = connection.getresponse().read().decode()
    connection.close()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return [
        (one.labels["protocol"], float(one.labels["le"]), one.exemplar)
        for one in samples
        if one.exemplar
    ]


def test_spans_arrive_of_both_protocols(start):
    with collector() as found:
        arguments = ("--traces-endpoint", found.url, "--traces-one-in", "1")
        service = start(*arguments, "--max-wait-us", "500000").ready()
        callers = [Thread(target=predict, args=(service,)) for _ in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        predict(service)
        predict(service, "/explain")
        sampled, not_sampled = (f"00-{TRACE}-{CALLER}-0{flag}" for flag in (1, 0))
        predict(service, traceparent=sampled, tracestate="a=1")
        predict(service, traceparent=not_sampled)
        path = "/inference.GRPCInferenceService"
        with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
            ways = {"request_serializer": lambda message: message.SerializeToString()}
            call = channel.unary_unary(f"{path}/ModelInfer", **ways)
            call(infer_request(), metadata=[("traceparent", sampled)])
            with pytest.raises(grpc.RpcError):
                call(infer_request("nobody"))
            stream = channel.stream_stream(f"{path}/ModelStreamInfer", **ways)
            messages = iter([infer_request()] * 2)
            assert len(list(stream(messages, metadata=[("traceparent", sampled)]))) == 2
        https = found.wait_for(4, "POST /predict")
        calls = found.wait_for(2, f"{path[1:]}/ModelInfer")
        streamed = found.wait_for(2, f"{path[1:]}/ModelStreamInfer")
        time.sleep(1.2)  # what came too often would be here
        assert len(found.called("POST /predict")) == 4
        of_caller = [span for span in https + calls if span.parent_span_id]
        assert [span.parent_span_id.hex() for span in of_caller + streamed] == [CALLER] * 4
        assert [span.trace_id.hex() for span in of_caller] == [TRACE] * 2
        assert of_caller[0].trace_state == "a=1"
        assert {attributes(span)["rpc.response.status_code"] for span in calls} == {
            "OK",
            "NOT_FOUND",
        }
        (explained,) = found.wait_for(1, "POST /explain")
        assert "lenet.batch_rows" not in attributes(explained)
        rows = sorted(attributes(span)["lenet.batch_rows"] for span in https)
        assert rows == [1, 1, 2, 2]
        for span in (*https, *streamed, explained):
            names, times_ns = zip(*events(span), strict=True)
            assert names == ("decode", "queue", "compute", "computed", "encode")
            of_span = span.start_time_unix_nano, *times_ns, span.end_time_unix_nano
            assert list(of_span) == sorted(of_span), "each stage lies within its request"
            assert abs(span.start_time_unix_nano - time.time_ns()) < 60e9
        of_protocol = {"http": https, "grpc": [*calls, *streamed]}
        exemplars = exemplars_of(service)
        assert {protocol for protocol, *_ in exemplars} == {*of_protocol}
        for protocol, bound, exemplar in exemplars:
            assert exemplar.value <= bound
            assert abs(float(exemplar.timestamp) - time.time()) < 60
            assert exemplar.labels["trace_id"] in {
                span.trace_id.hex()
                for span in of_protocol[protocol]
                if took_s(span) == pytest.approx(exemplar.value, abs=1e-6)
            }
        resource = found.resources[0]
        assert resource["service.name"] == "lenet-serve"
        assert "opentelemetry" not in service.log.lower()
