"""Answers over HTTP: their parts, and the JSON of an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import orjson

from wire.errors import Refusal, StatusCode, Unauthorized, Unavailable
from wire.ids import Ids

_log = logging.getLogger(__name__)

JSON = b"application/json"

FAILURES = (Refusal.status, Unavailable.status)
"""Logged with the ids that the client sent. Late answers are not: any client can cause them."""

_LOGGED_CHARACTERS = 200


@dataclass(slots=True)  # not frozen: one is made for each request
class Answer:
    """A complete answer.

    `headers` are lines, each with its line end, without Content-Type, Content-Length, Date and
    Connection.
    """

    status: int
    media_type: bytes
    body: bytes
    headers: bytes = b""
    rest: Sequence[bytes] = ()
    """The pieces of a large body that follow `body`; each is written in a turn of its own."""
    call: StatusCode | None = None
    """How a call of gRPC-Web or Connect ended, for the access log."""

    @property
    def content(self) -> bytes:
        """All of the body."""
        return b"".join((self.body, *self.rest))


def error_answer(error: Refusal) -> Answer:
    """`error` in JSON, as an object with code, field and message."""
    # The message may quote a lone surrogate that the client sent; JSON cannot contain it.
    text = error.message.encode("utf-8", "replace").decode()
    body = orjson.dumps({"error": {"code": error.code, "field": error.field, "message": text}})
    return Answer(error.status, JSON, body, headers_of(error))


def headers_of(error: Refusal) -> bytes:
    """The header lines of its answer: when a retry may succeed, or what a client has to send."""
    if isinstance(error, Unauthorized):
        return b"www-authenticate: Bearer\r\n"
    if error.retry_after_s is None:
        return b""
    return b"retry-after: %d\r\n" % error.retry_after_s


def log_failure(request: str, status: int, ids: Ids) -> None:
    """Log the ids of a request that got one of `FAILURES`; `request` is its method and target."""
    request = request[:_LOGGED_CHARACTERS]
    _log.error("%s was answered with %d: %s", request, status, ids, extra=ids.fields)


_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
