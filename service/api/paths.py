"""The paths of HTTP: who reads their images, the shape of their errors, and which need no key.

A new form gets a function in `routes` that reads its head, and a line here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from service.api.errors import plain_error_answer, status_of
from service.api.routes import (
    MODEL,
    MODEL_LABEL,
    MODEL_VERSION,
    PREFIX,
    TENSORFLOW,
    ImageRoute,
    ReadForm,
    read_infer,
    read_invocation,
    read_predict,
    read_tensorflow,
)
from service.api.schemas import TIMEOUT_HEADER
from service.forms.oip_json import LENGTH_HEADER
from service.forms.oip_proto import SCALE
from service.request import Requests
from wire.answer import Answer, error_answer
from wire.errors import Refusal
from wire.gate import Policy

DOCS_FILES = "/docs/static"
"""Path of what `GET /docs` loads."""

PAGE_FILES = "/page/"
"""Path of what `GET /` loads."""


@dataclass(frozen=True, slots=True)
class Path:
    """What is said of a path, or of all below it that are not listed."""

    read: ReadForm | None = None
    """Reads the head of a request with images; None if it takes none."""
    error: Callable[[Refusal], Answer] = error_answer
    is_open: bool = False
    """Whether requests need no key: of probes, and of pages, for which browsers send none. Pages
    describe the API, not the models."""


_OPEN = Path(is_open=True)
_PLAIN = Path(error=plain_error_answer)
_OPEN_PLAIN = Path(error=plain_error_answer, is_open=True)
_INFER = Path(read_infer, plain_error_answer)
_TENSORFLOW = Path(read_tensorflow, plain_error_answer)

PATHS = {
    "/": _OPEN,
    "/docs": _OPEN,
    f"{DOCS_FILES}/...": _OPEN,
    f"{PAGE_FILES}...": _OPEN,
    "/openapi.json": _OPEN,
    "/healthz": _OPEN,
    "/readyz": _OPEN,
    "/ping": _OPEN,
    "/predict": Path(read_predict),
    "/invocations": Path(read_invocation),
    PREFIX: _PLAIN,
    f"{PREFIX}/health/live": _OPEN_PLAIN,
    f"{PREFIX}/health/ready": _OPEN_PLAIN,
    f"{PREFIX}{MODEL}/infer": _INFER,
    f"{PREFIX}{MODEL_VERSION}/infer": _INFER,
    f"{PREFIX}/...": _PLAIN,
    f"{TENSORFLOW}{MODEL}:predict": _TENSORFLOW,
    f"{TENSORFLOW}{MODEL_VERSION}:predict": _TENSORFLOW,
    f"{TENSORFLOW}{MODEL_LABEL}:predict": _TENSORFLOW,
    f"{TENSORFLOW}/...": _PLAIN,
}
"""Paths by their template. Those of no line need a key, and their errors are objects."""

_BELOW = {path.removesuffix("..."): said for path, said in PATHS.items() if path.endswith("...")}
_OTHER = Path()


def plain_path(path: str) -> str:
    """`path` with single slashes and none behind it: clients join it to a base URL."""
    return "/" + re.sub("/{2,}", "/", path.strip("/")) if path.startswith("/") else path


def path_like(path: str) -> Path:
    """What is said of `path`, which may be a template."""
    path = plain_path(path)
    if (found := PATHS.get(path)) is not None:
        return found
    return next((said for prefix, said in _BELOW.items() if path.startswith(prefix)), _OTHER)


def image_routes(requests: Requests, own: str = "") -> dict[tuple[bytes, bytes], ImageRoute]:
    """The routes that take images, by method and path.

    `own`: a further path of invocations, or one that takes them instead.
    """
    read: dict[str, ReadForm] = {own: read_invocation} if own else {}
    read |= {path: said.read for path, said in PATHS.items() if said.read and path != own}
    return {
        (b"POST", path.encode()): ImageRoute(requests, path, form, path_like(path).error)
        for path, form in read.items()
    }


PROBES = {
    f"{method} {path}"
    for method in ("GET", "HEAD")
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics")
} | {"Check", "Watch", "ServerLive", "ServerReady"}
"""Health checks and scrapes, as the access log names them."""


POLICY = Policy(
    is_open=lambda path: path_like(path.decode("latin-1")).is_open,
    answer=lambda path, error: path_like(path.decode("latin-1")).error(error),
    status=status_of,
    headers=(TIMEOUT_HEADER.lower(), LENGTH_HEADER.lower(), "content-encoding", SCALE),
    varying=(TIMEOUT_HEADER.lower(),),
    exposed=("x-model-version", "server-timing", LENGTH_HEADER.lower()),
)
"""What the transport has to know of all that."""
