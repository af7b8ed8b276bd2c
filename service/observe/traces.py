"""Which requests OpenTelemetry gets spans of, and what these are made of.

Spans are made after the answer, of clock readings that it has anyway: an untraced request costs a
comparison.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from service.observe.metrics import ModelKey, Transport

if TYPE_CHECKING:
    from service.observe.spans import Spans

MOST_A_SECOND = 500
"""Maximum number of traced requests of a worker in a second, each of which costs 0.2 ms: callers
set the flag, and a fault may reach every request."""
_MOST_PATH_CHARACTERS = 256

FAULTS = frozenset(("internal", "inference_failed", "unavailable", "deadline_exceeded"))
"""Codes of errors that are not the client's fault."""

_MOST_STATE_CHARACTERS = 512
"""W3C Trace Context, 3.3.1.5: so many should be passed on."""

_SAMPLED = 1


class Parent(NamedTuple):
    """The caller's span: its valid `traceparent`, and its `tracestate`."""

    trace: str
    state: str

    @property
    def sampled(self) -> bool:
        """Its flag."""
        return bool(int(self.trace.split("-")[3], 16) & _SAMPLED)


Operation: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a span, and the attributes that say what was asked for."""


def http_operation(method: str, route: str, path: str) -> Operation:
    """After OpenTelemetry's conventions for HTTP; `route` is `path` with placeholders."""
    shown = path[:_MOST_PATH_CHARACTERS]  # the client chooses its length
    asked = (("http.request.method", method), ("http.route", route), ("url.path", shown))
    return f"{method} {route}", asked


def grpc_operation(method: str) -> Operation:
    """After the same for RPC; `method` is PACKAGE.SERVICE/METHOD."""
    return method, (("rpc.system.name", "grpc"), ("rpc.method", method))


class Batch(NamedTuple):
    """A batch that a traced request was computed in. Seconds are on the monotonic clock."""

    model: ModelKey
    rows: int
    computed_rows: int
    """`rows` and the padding."""
    reason: str
    """Why it was cut."""
    device_s: float | None
    cut_s: float
    answered_s: float


class Ended(NamedTuple):
    """A request that was answered, or failed. Seconds are on the monotonic clock."""

    protocol: Transport
    operation: Operation
    parent: Parent | None
    model: ModelKey
    rows: int
    code: str
    """"" or that of the error."""
    began_s: float
    ended_s: float
    steps_s: tuple[float, ...] = ()
    """When decoding began, the request was queued, its first rows were cut, its last were answered
    and encoding began."""


class Traces:
    """Samples requests and makes their `spans`.

    A request is sampled by its caller's flag, or without one if it is the next of `one_in` (0:
    never). One that ends with one of `FAULTS`, or takes longer than `slower_s`, always is. Beyond
    `MOST_A_SECOND` none is.
    """

    def __init__(self, one_in: int, slower_s: float, spans: Spans) -> None:
        self._one_in = self._left = one_in or math.inf
        self._slower_s = slower_s
        self.spans = spans
        self._second_ends_s = 0.0
        self._left_in_second = 0

    def wants(self, parent: Parent | None, code: str, took_s: float) -> bool:
        """Whether a request is traced that ended with `code`, an error's or ""."""
        return self._is_sampled(parent, code, took_s) and self._is_below_limit()

    def _is_sampled(self, parent: Parent | None, code: str, took_s: float) -> bool:
        if parent is None:
            self._left -= 1
            if self._left <= 0:
                self._left = self._one_in
                return True
        elif parent.sampled:
            return True
        return took_s > self._slower_s or code in FAULTS

    def _is_below_limit(self) -> bool:
        now_s = time.monotonic()
        if now_s >= self._second_ends_s:
            self._second_ends_s, self._left_in_second = now_s + 1, MOST_A_SECOND
        self._left_in_second -= 1
        return self._left_in_second >= 0


def parent_of(trace: str, state: str) -> Parent | None:
    """The caller's span. `trace`: a valid `traceparent`, or "" for no caller."""
    if not trace:
        return None
    return Parent(trace, state if len(state) <= _MOST_STATE_CHARACTERS else "")
