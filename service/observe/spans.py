"""Spans of traced requests, for OpenTelemetry's SDK to export. Needs the extra `otel`.

A request has one span, and its stages are events of it. The event loop only notes the request. The
SDK's exporting thread makes the spans, many at once: made one by one between other requests, with
cold caches, one takes 50 us more of the event loop.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.observe.metrics import NO_MODEL, Transport
from service.observe.traces import FAULTS, Ended

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

_STEPS = "decode", "queue", "compute", "computed", "encode"
"""Events of an answer's span, one for each of `Ended.steps_s`."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_IDS = RandomIdGenerator()
_PROPAGATOR = TraceContextTextMapPropagator()

Traced = Callable[[Transport, float, str, float], None]
"""Called with protocol, seconds, trace id and end of a prediction whose span was made."""

Statuses = Mapping[Transport, Mapping[str, int | str]]
"""The status of each error's code and, by "", of an answer, by protocol."""


class _Noted(ReadableSpan):
    """A request whose span is made when it is exported; until then the SDK asks for `context`."""

    context = SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)

    def __init__(self, ended: Ended) -> None:
        self.ended = ended


class _Exporter(trace_exporter.OTLPSpanExporter):
    """Makes the spans, each as a `span` of the service's resource. `scheme`: http or https."""

    def __init__(
        self,
        url: str,
        span: partial[ReadableSpan],
        statuses: Statuses,
        scheme: str,
        traced: Traced,
    ) -> None:
        session = requests.Session()
        session.stream = True  # the answer's body is not read: it might have no end
        session.trust_env = False  # ~/.netrc would replace the header Authorization
        session.proxies = requests.utils.get_environ_proxies(url)
        super().__init__(url, session=session)
        self._span, self._statuses, self._scheme, self._traced = span, statuses, scheme, traced

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        noted = cast("Sequence[_Noted]", spans)
        return super().export([self._made(one.ended) for one in noted])

    def _made(self, ended: Ended) -> ReadableSpan:
        status = self._statuses[ended.protocol][ended.code]
        name, asked = ended.operation
        attributes: dict[str, AttributeValue] = {**dict(asked), **dict(ended.batch)}
        if ended.protocol == "http":
            attributes |= {"url.scheme": self._scheme, "http.response.status_code": status}
        else:
            attributes["rpc.response.status_code"] = status
        if ended.model != NO_MODEL:
            attributes["lenet.model"], attributes["lenet.model_version"] = ended.model
        if ended.rows:
            attributes["lenet.rows"] = ended.rows
        if ended.code:
            attributes["error.type"] = ended.code
        parent = None
        if ended.parent is not None:
            headers = {"traceparent": ended.parent.trace, "tracestate": ended.parent.state}
            parent = get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
        context = SpanContext(
            _IDS.generate_trace_id() if parent is None else parent.trace_id,
            _IDS.generate_span_id(),
            is_remote=False,
            trace_flags=_SAMPLED,
            trace_state=None if parent is None else parent.trace_state,
        )
        times_s = ended.began_s, ended.ended_s, *ended.steps_s
        clock_ns = time.time_ns() - time.monotonic_ns()
        began_ns, ended_ns, *steps_ns = (int(1e9 * time_s) + clock_ns for time_s in times_s)
        if ended.is_prediction:
            seconds, trace_id = ended.ended_s - ended.began_s, format_trace_id(context.trace_id)
            self._traced(ended.protocol, seconds, trace_id, ended_ns / 1e9)
        return self._span(
            name,
            context,
            parent,
            attributes=attributes,
            events=[Event(step, None, ns) for step, ns in zip(_STEPS, steps_ns, strict=False)],
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if ended.code in FAULTS else StatusCode.UNSET),
            start_time=began_ns,
            end_time=ended_ns,
        )


@contextlib.contextmanager
def exported(
    url: str, version: str, statuses: Statuses, scheme: str, traced: Traced
) -> Iterator[Callable[[Ended], None]]:
    """Takes requests whose spans are sent to the collector at `url`, at the latest at the end.

    The SDK reads OpenTelemetry's environment variables. `scheme`: http or https.
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
    resource = own.merge(OTELResourceDetector().detect())
    limit, ends = _OneLine(), contextlib.ExitStack()
    for logger in map(logging.getLogger, _LIMITED):
        logger.addFilter(limit)
        ends.callback(logger.removeFilter, limit)
    scope = InstrumentationScope("lenet-serve", version)
    span = partial(ReadableSpan, resource=resource, instrumentation_scope=scope)
    queue = _number(OTEL_BSP_MAX_QUEUE_SIZE)
    processor = BatchSpanProcessor(
        _Exporter(url, span, statuses, scheme, traced),
        max_queue_size=queue,
        schedule_delay_millis=_number(OTEL_BSP_SCHEDULE_DELAY),
        max_export_batch_size=min(_number(OTEL_BSP_MAX_EXPORT_BATCH_SIZE), queue),
        export_timeout_millis=_number(OTEL_BSP_EXPORT_TIMEOUT),
    )
    ends.callback(processor.shutdown)
    try:
        yield lambda ended: processor.on_end(_Noted(ended))
    finally:
        last = threading.Thread(target=ends.close, name="traces", daemon=True)
        last.start()
        last.join(_LAST_EXPORT_S)


def _number(name: str) -> int:
    """The variable `name`, or its default if it is empty or, which is logged, not a number."""
    text = os.environ.get(name, "").strip()
    if text.isdecimal() and len(text) <= len(f"{_LARGEST}") and 1 <= int(text) <= _LARGEST:
        return int(text)
    if text:
        _log.warning(
            "%s is %r, expected a whole number from 1 to %d: %d is used",
            *(name, text, _LARGEST, _DEFAULTS[name]),
        )
    return _DEFAULTS[name]


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
