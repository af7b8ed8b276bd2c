"""Spans of traced requests, sent to OpenTelemetry's collector: OTLP over HTTP, in protobuf.

Needs the extra `otel`. The messages are filled without OpenTelemetry's SDK: of the five spans of a
request it takes 140 microseconds of Python, in steps that stop the event loop for milliseconds, and
this a tenth.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from service.observe.metrics import ModelKey, Transport
from service.observe.traces import FAULTS, Batch, Ended, Span, Traces, new_span

_log = logging.getLogger(__name__)

_EVERY_S = 0.2  # a worker that has lost its device ends after half a second
_PATIENCE_S = 5.0
_LAST_PATIENCE_S = 0.5  # with what is under way less than the last limit of a stop
_LOGGED_EVERY_S = 60.0
_ANSWER_BYTES = 65_536
"""Maximum size of the collector's answer that is read."""
_TOGETHER = 8
"""So many requests are worked on before the event loop may go on: 0.1 ms."""

_STAGES = ("decode", "queue", "compute", "encode")

_Value = str | int | float


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes spans. All of it is a function of its arguments, but the ids, which are random.

    Args:
        statuses: that of each error's code and, by "", of an answer, by protocol.
        scheme: http or https.
    """

    statuses: Mapping[Transport, Mapping[str, int | str]]
    scheme: str

    def add(self, ended: Ended | Batch, clock_ns: int, spans: ScopeSpans) -> None:
        """Add the spans of `ended` to `spans`; `clock_ns` is from the monotonic clock to Unix's."""
        if isinstance(ended, Batch):
            self._add_batch(ended, clock_ns, spans)
            return
        status = self.statuses[ended.protocol][ended.code]
        name, asked = ended.operation
        attributes: list[tuple[str, _Value]] = [*asked, *_of_model(ended.model)]
        if ended.protocol == "http":
            attributes += ("url.scheme", self.scheme), ("http.response.status_code", status)
        else:
            attributes.append(("rpc.response.status_code", status))
        if ended.rows:
            attributes.append(("lenet.rows", ended.rows))
        if ended.code:
            attributes.append(("error.type", ended.code))
        parent = ended.parent
        own = new_span(parent and parent.trace_id)
        request = _add(spans, own, name, (ended.began_s, ended.ended_s), clock_ns, attributes)
        request.kind = OtlpSpan.SPAN_KIND_SERVER
        if parent:
            request.parent_span_id, request.trace_state = parent.span_id, parent.state
        if ended.code in FAULTS:
            request.status.code = Status.STATUS_CODE_ERROR
        for stage, *times_s in _stages(ended):
            span = _add(spans, new_span(own.trace_id), stage, times_s, clock_ns)
            span.parent_span_id = own.span_id
            if stage == "compute" and ended.batch is not None:
                span.links.add(trace_id=ended.batch.trace_id, span_id=ended.batch.span_id)

    def _add_batch(self, batch: Batch, clock_ns: int, spans: ScopeSpans) -> None:
        attributes: list[tuple[str, _Value]] = [
            *_of_model(batch.model),
            ("lenet.rows", batch.rows),
            ("lenet.computed_rows", batch.computed_rows),
            ("lenet.cut_reason", batch.reason),
        ]
        if batch.device_s is not None:
            attributes.append(("lenet.device_us", 1e6 * batch.device_s))
        times_s = batch.cut_s, batch.answered_s
        _add(spans, batch.span, "batch", times_s, clock_ns, attributes)


def _add(
    spans: ScopeSpans,
    span: Span,
    name: str,
    times_s: Sequence[float],
    clock_ns: int,
    attributes: Iterable[tuple[str, _Value]] = (),
) -> OtlpSpan:
    begin_ns, end_ns = (int(1e9 * monotonic_s) + clock_ns for monotonic_s in times_s)
    return spans.spans.add(
        trace_id=span.trace_id,
        span_id=span.span_id,
        name=name,
        kind=OtlpSpan.SPAN_KIND_INTERNAL,
        start_time_unix_nano=begin_ns,
        end_time_unix_nano=end_ns,
        attributes=[_pair(*one) for one in attributes],
    )


def _stages(ended: Ended) -> Iterator[tuple[str, float, float]]:
    """The stages of `Server-Timing`, each with its begin and its end."""
    if ended.steps_s:
        decoding_s, queued_s, cut_s, answered_s, encoding_s = ended.steps_s
        ends_s = queued_s, cut_s, answered_s, ended.ended_s
        yield from zip(_STAGES, (decoding_s, queued_s, cut_s, encoding_s), ends_s, strict=True)


def _of_model(model: ModelKey) -> Iterable[tuple[str, str]]:
    name, version = model
    return (("lenet.model", name), ("lenet.model_version", version)) if version else ()


@lru_cache(1024)
def _pair(key: str, value: _Value) -> KeyValue:
    if isinstance(value, str):
        return KeyValue(key=key, value=AnyValue(string_value=value))
    if isinstance(value, int):
        return KeyValue(key=key, value=AnyValue(int_value=value))
    return KeyValue(key=key, value=AnyValue(double_value=value))


@contextmanager
def sent(traces: Traces, encoder: Encoder, url: str, version: str) -> Iterator[None]:
    """While the block runs, send what `traces` takes to the collector at `url`.

    Headers for the collector, our name and further attributes are read from OpenTelemetry's
    variables OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
    """
    sender = _Sender(traces, encoder, url, version)
    thread = threading.Thread(target=sender.run, name="traces", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sender.ending.set()
        thread.join(2 * _LAST_PATIENCE_S)


class _Sender:
    """The loop of the sending thread.

    Spans that the collector does not accept are dropped; one log line a minute says so.
    """

    def __init__(self, traces: Traces, encoder: Encoder, url: str, version: str) -> None:
        self.ending = threading.Event()
        self._traces, self._encoder = traces, encoder
        self._url = url
        self._headers = {
            "content-type": "application/x-protobuf",
            "user-agent": f"lenet-serve/{version}",
            **_pairs("OTEL_EXPORTER_OTLP_HEADERS"),
        }
        self._open = urllib.request.build_opener(_NoRedirect).open
        named: dict[str, str | int] = {
            "service.name": "lenet-serve",
            "service.version": version,
            "service.instance.id": str(uuid.uuid4()),
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            **_pairs("OTEL_RESOURCE_ATTRIBUTES"),
        }
        if name := os.environ.get("OTEL_SERVICE_NAME"):
            named["service.name"] = name
        self._resource = Resource(attributes=[_pair(key, text) for key, text in named.items()])
        self._scope = InstrumentationScope(name="lenet-serve", version=version)
        self._lost = 0
        self._says_next_s = 0.0

    def run(self) -> None:
        """Send until the end, and once more at it."""
        while not self.ending.wait(_EVERY_S):
            self._send(_PATIENCE_S)
        self._send(_LAST_PATIENCE_S)

    def _send(self, timeout_s: float) -> None:
        taken, dropped = self._traces.take()
        problem = "more came at once than are kept" if dropped else ""
        self._lost += dropped
        if taken:
            try:
                dropped = self._post(self._message(taken).SerializeToString(), timeout_s)
                self._lost += dropped
                problem = f"it refused {dropped} spans" if dropped else problem
            except (OSError, ValueError, HTTPException, DecodeError) as exc:
                self._lost += len(taken)
                problem = type(exc).__name__  # a ValueError may show a header, and so a key
                if not isinstance(exc, ValueError):
                    problem += f": {exc}"
        if problem and time.monotonic() >= self._says_next_s:
            self._says_next_s = time.monotonic() + _LOGGED_EVERY_S
            said = "traces to %s: %d requests, batches or spans dropped so far: %s"
            _log.warning(said, self._url, self._lost, problem)

    def _message(self, taken: Iterable[Ended | Batch]) -> ExportTraceServiceRequest:
        message = ExportTraceServiceRequest()
        of_all = message.resource_spans.add(resource=self._resource)
        spans = of_all.scope_spans.add(scope=self._scope)
        clock_ns = time.time_ns() - time.monotonic_ns()
        for number, ended in enumerate(taken):
            self._encoder.add(ended, clock_ns, spans)
            if number % _TOGETHER == 0:
                time.sleep(0)  # lets the event loop go on, which would wait for 5 ms otherwise
        return message

    def _post(self, body: bytes, timeout_s: float) -> int:
        """Send `body`; how many spans of it were refused."""
        request = urllib.request.Request(self._url, body, self._headers)  # noqa: S310 - its setting
        try:
            with self._open(request, timeout=timeout_s) as response:
                answer = ExportTraceServiceResponse.FromString(response.read(_ANSWER_BYTES))
        except HTTPError as exc:  # it holds the connection
            exc.close()
            raise
        return int(answer.partial_success.rejected_spans)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is a failure: followed, it would be a GET, and take the key to another host."""

    def redirect_request(self, *_: object) -> None:
        """None: the answer is raised as an HTTPError."""


def _pairs(variable: str) -> dict[str, str]:
    """A variable's KEY=VALUE, separated by commas; values are percent-encoded."""
    pairs = (pair.partition("=") for pair in os.environ.get(variable, "").split(","))
    found = {key.strip(): unquote(text.strip()) for key, _, text in pairs if key.strip()}
    # Bytes that are no UTF-8, which neither protobuf nor a header takes, become question marks.
    return {key: text.encode("utf-8", "replace").decode() for key, text in found.items()}
