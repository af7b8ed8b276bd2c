"""Request ids and W3C trace context: `X-Request-Id` and `traceparent`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

REQUEST_ID, TRACEPARENT = "x-request-id", "traceparent"

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_TRACEPARENT = re.compile(
    r"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    r"(-[!-~]{1,64})?"
)
"""W3C Trace Context, 3.2; versions after 00 may append fields."""


class Ids(NamedTuple):
    """The ids of one request, "" for a missing one. Malformed values are ignored."""

    request: str = ""
    trace: str = ""

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> Ids:
        """Read the ids from headers or metadata, whose names are in lower case."""
        request, trace = headers.get(REQUEST_ID, ""), headers.get(TRACEPARENT, "")
        if not (request or trace):
            return _NONE
        return cls(
            request if _REQUEST_ID.fullmatch(request) else "",
            trace if _TRACEPARENT.fullmatch(trace) else "",
        )

    def __bool__(self) -> bool:
        return self != _NONE

    @property
    def fields(self) -> dict[str, str]:
        """The ids as fields of a log line in JSON; `span_id` is the caller's span."""
        _, trace_id, span_id, *_ = self.trace.split("-") if self.trace else ("", "", "")
        named = {"request_id": self.request, "trace_id": trace_id, "span_id": span_id}
        return {name: value for name, value in named.items() if value}

    @property
    def line(self) -> bytes:
        """The header line that returns the request's."""
        return b"x-request-id: %s\r\n" % self.request.encode() if self.request else b""

    def __str__(self) -> str:
        named = {"request": self.request, "traceparent": self.trace}
        return ", ".join(f"{name} {value}" for name, value in named.items() if value)


_NONE = Ids()
