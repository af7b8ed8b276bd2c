"""What every request passes before its route, whether that is a fast one or the application's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from service.errors import ServiceError
from service.http.answer import STATUS, Answer, error_answer, headers_of, protocol_error
from service.keys import Keys

PROTOCOL = b"/v2"
"""The root of the Open Inference Protocol, which has its own form of errors."""

_HEALTH = frozenset((b"/healthz", b"/readyz", b"/v2/health/live", b"/v2/health/ready"))
"""Open to all: probes have no keys."""


class Gate:
    """Asks for a key. `refused` is told of each request that may not pass."""

    def __init__(
        self, keys: Keys | None = None, refused: Callable[[ServiceError], None] = lambda _: None
    ) -> None:
        self._keys = keys or Keys()
        self._refused = refused

    def check(self, path: bytes, authorization: bytes | None) -> tuple[Denial, ServiceError] | None:
        """The route for a request that may not pass, and why; None for one that may."""
        if not self._keys or path in _HEALTH:
            return None
        given = None if authorization is None else authorization.decode("latin-1")
        error = self._keys.check(given)
        return None if error is None else (Denial(path, self._refused), error)


class Denial:
    """A fast route that answers each request with the error that `Gate.check` found."""

    def __init__(self, path: bytes, refused: Callable[[ServiceError], None]) -> None:
        self._speaks_protocol = path == PROTOCOL or path.startswith(PROTOCOL + b"/")
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
