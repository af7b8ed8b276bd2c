"""Authentication and CORS, before routing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from service.errors import ServiceError, shown
from service.process.keys import Keys
from service.transport.answer import Answer, error_answer_below

_log = logging.getLogger(__name__)

DOCS_FILES = "/docs/static"
"""Path of what `GET /docs` loads."""

PAGE_FILES = "/page/"
"""Path of what `GET /` loads."""

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

_PREFLIGHT = Answer(200, b"text/plain", b"", _ALLOWED)
"""Not 204, which has no Content-Length. `Gate.cors_lines` adds the allowed origin."""

_PROBES = (b"/healthz", b"/readyz", b"/v2/health/live", b"/v2/health/ready")
"""Probes have no keys."""

_PAGES = (b"/", b"/docs", b"/openapi.json")
"""Browsers send no key for a page. These describe the API, not the models."""

_OPEN = frozenset((*_PROBES, *_PAGES))
_OPEN_BELOW = (PAGE_FILES.encode(), DOCS_FILES.encode() + b"/")


def is_open(path: bytes) -> bool:
    """Whether requests for `path` need no key."""
    return path in _OPEN or path.startswith(_OPEN_BELOW)


class Gate:
    """Checks API keys, and writes the CORS headers for pages of other origins.

    Args:
        keys: requests need one of them, unless `is_open`; without any, none does.
        origins: of the pages that may read answers, as browsers send them in `Origin`; "*" is any.
        refused: called with each rejection, for metrics.
    """

    def __init__(
        self,
        keys: Keys | None = None,
        origins: Collection[str] = (),
        refused: Callable[[ServiceError], None] = lambda _: None,
    ) -> None:
        self._keys = Keys() if keys is None else keys
        self._noted = False
        self._origins = origins
        self._refused = refused

    def check(self, method: bytes, path: bytes, headers: Mapping[str, str]) -> Answer | None:
        """The answer to a request that may not reach its route, or is a preflight; else None.

        `headers` have names in lower case.
        """
        if method == b"OPTIONS" and "access-control-request-method" in headers and self._origins:
            return _PREFLIGHT  # which browsers send without keys
        if not self._keys or is_open(path):
            return None
        error = self._keys.check(headers.get("authorization"))
        if error is None:
            return None
        self._refused(error)
        return error_answer_below(path, error)

    def cors_lines(self, headers: Mapping[str, str]) -> bytes:
        """Header lines for the answer to a page of another origin."""
        origin = headers.get("origin", "")
        if not self._origins:
            if origin and origin.partition("://")[2] != headers.get("host", ""):
                self._note(origin)
            return b""
        if "*" in self._origins:
            allowed = b"*"
        elif origin in self._origins:
            allowed = origin.encode("latin-1")
        else:
            return b"vary: origin\r\n"
        return b"access-control-allow-origin: %s\r\nvary: origin\r\n%s" % (allowed, _EXPOSED)

    def _note(self, origin: str) -> None:
        """Log once what a browser does not tell its page, except that a fetch failed."""
        if not self._noted:
            self._noted = True
            _log.info(
                "a page of %s asked; browsers let pages of other origins read answers only with "
                "--cors-origins (said once)",
                shown(origin),
            )
