"""Spans of traced requests, for OpenTelemetry's SDK to export. Needs the extra `otel`.

The event loop only notes what happened. The SDK's exporting thread makes the spans, many at once:
made one by one between other requests, by a `Tracer`, those of a request took 0.4 ms.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import requests
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_EXPORT_TIMEOUT,
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_BSP_SCHEDULE_DELAY,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.observe.metrics import ModelKey, Transport
from service.observe.traces import FAULTS, Batch, Ended, Parent

_log = logging.getLogger(__name__)

_DEFAULTS = {
    OTEL_BSP_SCHEDULE_DELAY: 400,
    OTEL_BSP_EXPORT_TIMEOUT: 30_000,
    OTEL_BSP_MAX_QUEUE_SIZE: 2048,
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE: 512,
}
"""Those of the SDK, but for the delay, which is 5000 ms there: a worker ends half a second after it
has lost its device."""
_LARGEST = 2**31 - 1
_LAST_EXPORT_S = 1.0
"""Maximum time for the last export, less than the last limit of a stop."""
_LOGGED_EVERY_S = 60.0
_SECRETIVE = "opentelemetry.util.re", "opentelemetry.trace.span"
"""Loggers that quote a header, which may be the collector's key, or a client's `tracestate`."""
_LIMITED = trace_exporter.__name__, "opentelemetry.sdk._shared_internal", *_SECRETIVE
"""Loggers that write a line for each failure, dropped span or request."""

_STAGES = ("decode", "queue", "compute", "encode")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_IDS = RandomIdGenerator()
_PROPAGATOR = TraceContextTextMapPropagator()

Statuses = Mapping[Transport, Mapping[str, int | str]]
"""The status of each error's code and, by "", of an answer, by protocol."""


class _Noted(ReadableSpan):
    """What `make` makes spans of, in the place of these until they are exported."""

    def __init__(self, make: Callable[[], Iterable[ReadableSpan]]) -> None:
        super().__init__("", _NOTED, resource=_NO_RESOURCE)
        self.make = make


_NOTED = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)
_NO_RESOURCE = Resource({})


class _Resource(Resource):
    """Hashed for each span by the SDK, whose hash writes it as JSON: a quarter of an export."""

    def __hash__(self) -> int:
        return hash(self.schema_url)


class _Exporter(SpanExporter):
    """Makes the spans, and exports them by `exporter`."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        noted = cast("Sequence[_Noted]", spans)
        return self._exporter.export([span for one in noted for span in one.make()])

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self._exporter.shutdown()


class Spans:
    """Notes requests and batches, and makes their spans. `scheme`: http or https."""

    def __init__(
        self,
        processor: BatchSpanProcessor,
        resource: Resource,
        version: str,
        statuses: Statuses,
        scheme: str,
    ) -> None:
        self._processor = processor
        self._statuses = statuses
        self._scheme = scheme
        scope = InstrumentationScope("lenet-serve", version)
        self._span = partial(ReadableSpan, resource=resource, instrumentation_scope=scope)

    def batch(self, batch: Batch) -> SpanContext:
        """Note a batch; returns its span, in a trace of its own, for requests to link to."""
        context = _new_context()
        self._processor.on_end(_Noted(partial(self._of_batch, batch, context)))
        return context

    def request(self, ended: Ended, batch: SpanContext | None) -> None:
        """Note a request; `batch` had all of its rows."""
        self._processor.on_end(_Noted(partial(self._of_request, ended, batch)))

    def _of_batch(self, batch: Batch, context: SpanContext) -> Iterator[ReadableSpan]:
        attributes: dict[str, AttributeValue] = {
            **_of_model(batch.model),
            "lenet.rows": batch.rows,
            "lenet.computed_rows": batch.computed_rows,
            "lenet.cut_reason": batch.reason,
        }
        if batch.device_s is not None:
            attributes["lenet.device_us"] = 1e6 * batch.device_s
        begin_ns, end_ns = _unix_ns((batch.cut_s, batch.answered_s))
        yield self._span(
            "batch", context, attributes=attributes, start_time=begin_ns, end_time=end_ns
        )

    def _of_request(self, ended: Ended, batch: SpanContext | None) -> Iterator[ReadableSpan]:
        status = self._statuses[ended.protocol][ended.code]
        name, asked = ended.operation
        attributes: dict[str, AttributeValue] = {**dict(asked), **_of_model(ended.model)}
        if ended.protocol == "http":
            attributes |= {"url.scheme": self._scheme, "http.response.status_code": status}
        else:
            attributes["rpc.response.status_code"] = status
        if ended.rows:
            attributes["lenet.rows"] = ended.rows
        if ended.code:
            attributes["error.type"] = ended.code
        began_ns, ended_ns, *steps_ns = _unix_ns((ended.began_s, ended.ended_s, *ended.steps_s))
        parent = None if ended.parent is None else _context_of(ended.parent)
        context = _new_context(parent)
        yield self._span(
            name,
            context,
            parent,
            attributes=attributes,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if ended.code in FAULTS else StatusCode.UNSET),
            start_time=began_ns,
            end_time=ended_ns,
        )
        if steps_ns:  # the stages of `Server-Timing`
            decoding_ns, queued_ns, cut_ns, answered_ns, encoding_ns = steps_ns
            begins_ns = decoding_ns, queued_ns, cut_ns, encoding_ns
            ends_ns = queued_ns, cut_ns, answered_ns, ended_ns
            for stage, begin_ns, end_ns in zip(_STAGES, begins_ns, ends_ns, strict=True):
                yield self._span(
                    stage,
                    _new_context(context),
                    context,
                    links=(Link(batch),) if stage == "compute" and batch is not None else (),
                    start_time=begin_ns,
                    end_time=end_ns,
                )


def _unix_ns(times_s: Iterable[float]) -> list[int]:
    """Times of the monotonic clock as nanoseconds of Unix's."""
    clock_ns = time.time_ns() - time.monotonic_ns()
    return [int(1e9 * time_s) + clock_ns for time_s in times_s]


def _new_context(parent: SpanContext | None = None) -> SpanContext:
    """Ids of a new span, in the trace of `parent` or in a new one."""
    trace_id = _IDS.generate_trace_id() if parent is None else parent.trace_id
    state = None if parent is None else parent.trace_state
    return SpanContext(trace_id, _IDS.generate_span_id(), False, _SAMPLED, state)


def _context_of(parent: Parent) -> SpanContext:
    headers = {"traceparent": parent.trace, "tracestate": parent.state}
    return get_current_span(_PROPAGATOR.extract(headers)).get_span_context()


def _of_model(model: ModelKey) -> dict[str, AttributeValue]:
    name, version = model
    return {"lenet.model": name, "lenet.model_version": version} if version else {}


@contextmanager
def exported(url: str, version: str, statuses: Statuses, scheme: str) -> Iterator[Spans]:
    """Spans that are sent to the collector at `url` while the block runs, and at its end.

    The SDK reads OpenTelemetry's environment variables. `statuses` and `scheme`: see `Spans`.
    """
    own = Resource.create(
        {
            "service.name": "lenet-serve",
            "service.version": version,
            "service.instance.id": str(uuid.uuid4()),
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
    )
    merged = own.merge(OTELResourceDetector().detect())
    resource = _Resource(merged.attributes, merged.schema_url)
    with _limited_logs():
        exporter = _Exporter(trace_exporter.OTLPSpanExporter(url, session=_session(url)))
        queue = _number(OTEL_BSP_MAX_QUEUE_SIZE)
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=queue,
            schedule_delay_millis=_number(OTEL_BSP_SCHEDULE_DELAY),
            max_export_batch_size=min(_number(OTEL_BSP_MAX_EXPORT_BATCH_SIZE), queue),
            export_timeout_millis=_number(OTEL_BSP_EXPORT_TIMEOUT),
        )
        try:
            yield Spans(processor, resource, version, statuses, scheme)
        finally:
            last = threading.Thread(target=processor.shutdown, name="traces", daemon=True)
            last.start()
            last.join(_LAST_EXPORT_S)


def _session(url: str) -> requests.Session:
    session = requests.Session()
    session.stream = True  # the answer's body is not read: it might have no end
    session.trust_env = False  # ~/.netrc would replace the header Authorization
    session.proxies = requests.utils.get_environ_proxies(url)
    return session


def _number(name: str) -> int:
    """The variable `name`, or its default if it is empty or, which is logged, not a number."""
    text = os.environ.get(name, "").strip()
    if not text:
        return _DEFAULTS[name]
    with contextlib.suppress(ValueError):
        if 1 <= (number := int(text)) <= _LARGEST:
            return number
    _log.warning(
        "%s is %r, expected a whole number from 1 to %d: %d is used",
        *(name, text, _LARGEST, _DEFAULTS[name]),
    )
    return _DEFAULTS[name]


@contextmanager
def _limited_logs() -> Iterator[None]:
    """Inside, the loggers of `_LIMITED` write what `_OneLine` lets through."""
    loggers, limit = [logging.getLogger(name) for name in _LIMITED], _OneLine()
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)


class _OneLine(logging.Filter):
    """Lets a message through every `_LOGGED_EVERY_S`, without what should not be quoted.

    An attempt that is repeated is not logged. The reason of the last one is added to the line that
    says that the export failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next_s: dict[str, float] = {}
        self._reason: object = None

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        given = record.args if isinstance(record.args, tuple) else ()
        if record.msg.startswith("Transient error "):
            self._reason = given[0]
            return False
        if record.created < self._next_s.get(record.msg, -math.inf):
            return False
        self._next_s[record.msg] = record.created + _LOGGED_EVERY_S
        if record.name in _SECRETIVE:
            record.args = ("(not shown)",) * len(given)
            return True
        # The message of this error quotes a header, which may be the collector's key.
        hidden = requests.exceptions.InvalidHeader
        given = tuple(hidden.__name__ if isinstance(one, hidden) else one for one in given)
        if "max retries" in record.msg and self._reason is not None:
            record.msg = f"{record.msg.rstrip('.')}: %s"
            given = (*given, self._reason)
        record.args = given
        return True
