"""Which requests OpenTelemetry gets a span of, and what it is made of.

It is made after the answer, of clock readings that this has anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from lenet.backend import BatchResult
from service.observe.metrics import ModelKey, Transport

MOST_A_SECOND = 500
"""Maximum number of traced requests of a worker in a second, each of which costs 0.1 ms: callers
set the flag, and a fault may reach every request."""
_MOST_PATH_CHARACTERS = 256

FAULTS = frozenset(("internal", "inference_failed", "unavailable", "deadline_exceeded"))
"""Codes of errors that are not the client's fault."""

_MOST_STATE_CHARACTERS = 512
"""W3C Trace Context, 3.3.1.5: so many should be passed on."""


class Parent(NamedTuple):
    """The caller's span: its valid `traceparent`, and its `tracestate`."""

    trace: str
    state: str

    @property
    def sampled(self) -> bool:
        """Its flag, the lowest bit of the last two digits."""
        return bool(int(self.trace.split("-")[3], 16) & 1)


Attributes: TypeAlias = tuple[tuple[str, str | float], ...]

Operation: TypeAlias = tuple[str, Attributes]
"""The name of a span, and the attributes that say what was asked for."""


def http_operation(method: str, route: str, path: str) -> Operation:
    """After OpenTelemetry's conventions for HTTP; `route` is `path` with placeholders."""
    shown = path[:_MOST_PATH_CHARACTERS]  # the client chooses its length
    asked = (("http.request.method", method), ("http.route", route), ("url.path", shown))
    return f"{method} {route}", asked


def grpc_operation(method: str) -> Operation:
    """After the same for RPC; `method` is PACKAGE.SERVICE/METHOD."""
    return method, (("rpc.system.name", "grpc"), ("rpc.method", method))


def batch_attributes(rows: int, reason: str, result: BatchResult) -> Attributes:
    """A batch of `rows` that was cut for `reason`."""
    sizes = ("lenet.batch_rows", rows), ("lenet.computed_rows", result.computed_rows)
    device_s = result.device_s
    of_device = () if device_s is None else (("lenet.device_us", 1e6 * device_s),)
    return *sizes, ("lenet.cut_reason", reason), *of_device


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
    batch: Attributes = ()
    """None if there was no batch, or several."""
    is_prediction: bool = False
    """Whether it was answered, and not with an explanation."""


class Traces:
    """Samples requests, and hands them to `note`, which makes their spans.

    A request is sampled by its caller's flag, or without one if it is the next of `one_in` (0:
    never). One that ends with one of `FAULTS`, or takes longer than `slower_s`, always is. Beyond
    `MOST_A_SECOND` none is.
    """

    def __init__(self, one_in: int, slower_s: float, note: Callable[[Ended], None]) -> None:
        self._one_in = self._left = one_in or math.inf
        self._slower_s = slower_s
        self.note = note
        self._second_ends_s = 0.0
        self._left_in_second = 0

    def wants(self, parent: Parent | None, code: str, took_s: float) -> bool:
        """Whether a request is traced that ended with `code`, an error's or ""."""
        if parent is not None:
            chosen = parent.sampled
        else:
            self._left -= 1
            if chosen := self._left <= 0:
                self._left = self._one_in
        return (chosen or took_s > self._slower_s or code in FAULTS) and self._is_below_limit()

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
