"""Which requests OpenTelemetry gets spans of, and what is kept of them until a thread makes these.

At most `MOST_WAITING` requests and batches wait, the newer ones are dropped. Spans are made after
the answer, of clock readings that it has anyway: on the event loop a request that is traced costs a
few microseconds, any other a comparison.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from service.observe.ids import TRACEPARENT, Ids
from service.observe.metrics import ModelKey, Transport

MOST_WAITING = 1024
_MOST_PATH_CHARACTERS = 256

FAULTS = frozenset(("internal", "inference_failed", "unavailable", "deadline_exceeded"))
"""Codes of errors that are not the client's fault."""

_TRACESTATE = "tracestate"
_MOST_STATE_CHARACTERS = 512
"""W3C Trace Context, 3.3.1.5: so many should be passed on."""

_SAMPLED = 1


class Span(NamedTuple):
    """W3C's ids of a span, 16 and 8 bytes; of a caller's also its flag and its `tracestate`."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True
    state: str = ""


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

    span: Span
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
    parent: Span | None
    model: ModelKey
    rows: int
    code: str
    """"" or that of the error."""
    began_s: float
    ended_s: float
    steps_s: tuple[float, ...] = ()
    """When decoding began, the request was queued, its first rows were cut, its last were answered
    and encoding began."""
    batch: Span | None = None
    """The batch with all of its rows, if there was one."""


class Traces:
    """Chooses the requests, and keeps what is known of them.

    A request is chosen by the flag of its caller, or without one if it is the next of `one_in`
    (0: never). One that ends with one of `FAULTS`, or takes longer than `slower_s`, always is.
    """

    def __init__(self, one_in: int, slower_s: float) -> None:
        self._one_in = self._left = one_in or math.inf
        self._slower_s = slower_s
        self._waiting: deque[Ended | Batch] = deque()
        self._dropped = 0

    def wants(self, parent: Span | None, code: str, took_s: float) -> bool:
        """Whether a request is traced that ended with `code`, an error's or ""."""
        if parent is None:
            self._left -= 1
            if self._left <= 0:
                self._left = self._one_in
                return True
        elif parent.sampled:
            return True
        return took_s > self._slower_s or code in FAULTS

    def add(self, ended: Ended | Batch) -> None:
        """Keep it for the thread that makes the spans."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(ended)
        else:
            self._dropped += 1

    def take(self) -> tuple[list[Ended | Batch], int]:
        """The requests and batches since the last call, and how many were dropped.

        Called by the sender's thread.
        """
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        dropped, self._dropped = self._dropped, 0
        return taken, dropped


def new_span(trace_id: bytes | None = None) -> Span:
    """A span of a trace, or of a new one."""
    ids = random.getrandbits(192).to_bytes(24, "big")
    return Span(trace_id or ids[:16], ids[16:])


def parent_of(headers: Mapping[str, str]) -> Span | None:
    """The caller's span, None without one; names of headers are in lower case."""
    if TRACEPARENT not in headers:
        return None
    version, *ids = Ids.read(headers).trace.split("-")
    if not ids or version == "ff":
        return None
    trace_id, span_id = map(bytes.fromhex, ids[:2])
    if not (any(trace_id) and any(span_id)):
        return None
    state = headers.get(_TRACESTATE, "")
    sampled = bool(int(ids[2], 16) & _SAMPLED)
    return Span(trace_id, span_id, sampled, state if len(state) <= _MOST_STATE_CHARACTERS else "")
