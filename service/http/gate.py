"""What every request passes before its route, whether that is a fast one or the application's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from service.errors import ServiceError
from service.http.answer import (
    STATUS,
    Answer,
    error_answer,
    headers_of,
    protocol_error,
    speaks_protocol,
)
from service.keys import Keys

if TYPE_CHECKING:
    from service.http.head import FastRoute

_EXPOSED = (
    b"access-control-expose-headers: x-model-version, server-timing, x-request-id, retry-after, "
    b"inference-header-content-length\r\n"
)
_ALLOWED = (
    b"access-control-allow-methods: GET, HEAD, POST\r\n"
    b"access-control-allow-headers: accept, authorization, content-type, traceparent, "
    b"x-request-id, x-request-timeout-ms, inference-header-content-length\r\n"
    b"access-control-max-age: 7200\r\n"
)

_HEALTH = frozenset((b"/healthz", b"/readyz", b"/v2/health/live", b"/v2/health/ready"))
"""Open to all: probes have no keys."""


class Gate:
    """Asks for a key, and lets pages of other origins read answers (CORS).

    Args:
        keys: one of them has to come with each request but those for health; without any, none.
        origins: of the pages that may read answers, as browsers send them in `Origin`; "*" is any.
        refused: called with the error of each request that may not pass, to be counted.
    """

    def __init__(
        self,
        keys: Keys | None = None,
        origins: Collection[str] = (),
        refused: Callable[[ServiceError], None] = lambda _: None,
    ) -> None:
        self._keys = Keys() if keys is None else keys
        self._origins = origins
        self._refused = refused

    def check(
        self, method: bytes, path: bytes, headers: Mapping[str, str]
    ) -> tuple[FastRoute, ServiceError | None] | None:
        """The route of a request that does not reach its own, and the error if there is one.

        None if it may pass. `headers` have names in lower case.
        """
        if method == b"OPTIONS" and "access-control-request-method" in headers and self._origins:
            return _PREFLIGHT, None  # which browsers send without keys
        if not self._keys or path in _HEALTH:
            return None
        error = self._keys.check(headers.get("authorization"))
        return None if error is None else (Denial(path, self._refused), error)

    def cors_lines(self, headers: Mapping[str, str]) -> bytes:
        """Header lines for the answer to a page of another origin."""
        if not self._origins:
            return b""
        origin = headers.get("origin", "")
        if "*" in self._origins:
            allowed = b"*"
        elif origin in self._origins:
            allowed = origin.encode("latin-1")
        else:
            return b"vary: origin\r\n"
        return b"access-control-allow-origin: %s\r\nvary: origin\r\n%s" % (allowed, _EXPOSED)


class Denial:
    """A fast route that answers each request with the error that `Gate.check` found."""

    def __init__(self, path: bytes, refused: Callable[[ServiceError], None]) -> None:
        self._speaks_protocol = speaks_protocol(path.decode("latin-1"))
        self._refused = refused

    def refuse(self, error: ServiceError) -> Answer:
        """The answer, in the form that clients of the path expect."""
        self._refused(error)
        if self._speaks_protocol:
            return protocol_error(STATUS[error.code], error.message, headers_of(error))
        return error_answer(error)

    def read(
        self, query: bytes, headers: Mapping[str, str], path: Mapping[str, str] | None = None
    ) -> NoReturn:
        """Never: the headers have led here already."""
        raise AssertionError("bug: a request that was refused is read")

    def open(self, wanted: Any, reply: Callable[[Answer], None]) -> NoReturn:
        """Never."""
        raise AssertionError("bug: a request that was refused is opened")


class _Preflight:
    """Answers the question of a browser before a request of a page of another origin."""

    def read(
        self, query: bytes, headers: Mapping[str, str], path: Mapping[str, str] | None = None
    ) -> None:
        """Nothing: whether the origin may is in the lines of every answer to it."""

    def refuse(self, error: ServiceError) -> Answer:
        """Not called by `Head`."""
        return error_answer(error)

    def open(self, wanted: Any, reply: Callable[[Answer], None]) -> _PreflightCall:
        """Begin to answer."""
        return _PreflightCall(reply)


class _PreflightCall:
    def __init__(self, reply: Callable[[Answer], None]) -> None:
        self._reply = reply

    def data(self, data: bytes) -> None:
        """Dropped: a preflight has none."""

    def wait_for_body(self) -> None:
        """Answer without waiting: a preflight has none, and this one may never end."""
        self.end()

    def end(self, body: bytes | None = None) -> None:
        """Answer; not with 204, which has no Content-Length."""
        self._reply(Answer(200, b"text/plain", b"", _ALLOWED))

    def fail(self, error: ServiceError) -> None:
        """Answer with `error`."""
        self._reply(error_answer(error))

    def cancel(self) -> None:
        """The client is gone."""


_PREFLIGHT = _Preflight()
