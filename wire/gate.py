"""Authentication and CORS, before routing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from wire.answer import Answer, error_answer
from wire.errors import Refusal, shown
from wire.grpc_status import Status, status_of
from wire.keys import HEADERS, Keys

_log = logging.getLogger(__name__)

_EXPOSED = ("x-request-id", "retry-after")
_ALLOWED = (
    *("accept", *HEADERS, "content-type", "traceparent", "x-request-id"),
    *("connect-protocol-version", "connect-timeout-ms", "grpc-timeout", "x-grpc-web"),
    "x-user-agent",
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a service says of its paths, its errors and its headers, whose names are in lower case.

    Attributes:
        is_open: whether requests for a path need no key.
        answer: the answer that tells an error, by the path of its request.
        status: the status that tells an error over gRPC.
        headers: those that the service reads. Each may be given once: of two, a proxy may read the
            other. Pages of other origins may send them.
        varying: of those, the ones whose values differ between the requests of a client.
        exposed: those of its answers that such pages may read.
    """

    is_open: Callable[[bytes], bool] = lambda _: False
    answer: Callable[[bytes, Refusal], Answer] = lambda _, error: error_answer(error)
    status: Callable[[Refusal], Status] = status_of
    headers: Sequence[str] = ()
    varying: Sequence[str] = ()
    exposed: Sequence[str] = ()


_NO_POLICY = Policy()


class Gate:
    """Checks API keys, and writes the CORS headers for pages of other origins.

    Args:
        keys: requests need one of them, unless their path is open; without any, none does.
        origins: of the pages that may read answers, as browsers send them in `Origin`; "*" is any.
        refused: called with each rejection, for metrics.
        policy: of the service.

    Attributes:
        single: names of the fields that a request may have once.
        methods: methods and paths of HTTP whose routes check keys themselves.
    """

    def __init__(
        self,
        keys: Keys | None = None,
        origins: Collection[str] = (),
        refused: Callable[[Refusal], None] = lambda _: None,
        policy: Policy = _NO_POLICY,
    ) -> None:
        self.policy = policy
        self.methods: Container[tuple[bytes, bytes]] = ()
        self.single = frozenset(map(str.encode, (*HEADERS, "content-type", *policy.headers)))
        exposed, allowed = (
            ", ".join((*_EXPOSED, *policy.exposed)),
            ", ".join((*_ALLOWED, *policy.headers)),
        )
        self._exposed = f"access-control-expose-headers: {exposed}\r\n".encode()
        lines = (
            "access-control-allow-methods: GET, HEAD, POST\r\n"
            f"access-control-allow-headers: {allowed}\r\n"
            "access-control-max-age: 7200\r\n"
        )
        # Not 204, which has no Content-Length. `cors_lines` adds the allowed origin.
        self._preflight = Answer(200, b"text/plain", b"", lines.encode())
        self._keys = Keys() if keys is None else keys
        self._noted = False
        self._origins = origins
        self._refused = refused

    def check(self, method: bytes, path: bytes, headers: Mapping[str, str]) -> Answer | None:
        """The answer to a request that may not reach its route, or is a preflight; else None.

        `headers` have names in lower case.
        """
        if method == b"OPTIONS" and "access-control-request-method" in headers and self._origins:
            return self._preflight  # which browsers send without keys
        is_open = (method, path) in self.methods or self.policy.is_open(path)
        error = None if is_open else self.key_error(headers)
        if error is None:
            return None
        self._refused(error)
        return self.policy.answer(path, error)

    def key_error(self, headers: Mapping[str, str]) -> Refusal | None:
        """The error of a request that lacks a key; its names are in lower case."""
        return self._keys.check(headers)

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
        return b"access-control-allow-origin: %s\r\nvary: origin\r\n%s" % (allowed, self._exposed)

    def _note(self, origin: str) -> None:
        """Log once what a browser does not tell its page, except that a fetch failed."""
        if not self._noted:
            self._noted = True
            _log.info(
                "a page of %s asked; its browser lets it read no answer, as no origin is allowed "
                "(said once)",
                shown(origin),
            )
