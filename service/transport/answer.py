"""Answers over HTTP: their parts, the JSON of an error, and its status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import orjson

from service.errors import ServiceError, Unauthorized

JSON = b"application/json"

STATUS = {
    "invalid_input": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "unknown_model": 404,
    "body_timeout": 408,
    "too_large": 413,
    "unsupported_media_type": 415,
    "overloaded": 429,
    "cancelled": 499,
    "internal": 500,
    "inference_failed": 500,
    "unavailable": 503,
    "deadline_exceeded": 504,
}
"""HTTP status by error code. 422 is not used."""


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

    @property
    def content(self) -> bytes:
        """All of the body."""
        return b"".join((self.body, *self.rest))


def error_answer(error: ServiceError) -> Answer:
    """`error` in the JSON that every error has."""
    return refusal(STATUS[error.code], error.code, error.message, error.field, headers_of(error))


def headers_of(error: ServiceError) -> bytes:
    """The header lines of its answer: when a retry may succeed, or what a client has to send."""
    if isinstance(error, Unauthorized):
        return b"www-authenticate: Bearer\r\n"
    if error.retry_after_s is None:
        return b""
    return b"retry-after: %d\r\n" % error.retry_after_s


def refusal(status: int, code: str, message: str, field: str = "", headers: bytes = b"") -> Answer:
    """An error with `status`."""
    # The message may quote a lone surrogate that the client sent; JSON cannot contain it.
    text = message.encode("utf-8", "replace").decode()
    body = orjson.dumps({"error": {"code": code, "field": field, "message": text}})
    return Answer(status, JSON, body, headers)


def has_plain_errors(path: str) -> bool:
    """Whether errors below `path` have the form of `plain_error`."""
    return path == "/v2" or path.startswith(("/v2/", "/v1/"))


def plain_error_answer(error: ServiceError) -> Answer:
    """`error` in that form."""
    return plain_error(STATUS[error.code], error.message, headers_of(error))


def error_answer_below(path: bytes, error: ServiceError) -> Answer:
    """`error` in the form of errors below `path`."""
    form = plain_error_answer if has_plain_errors(path.decode("latin-1")) else error_answer
    return form(error)


def plain_error(status: int, message: str, headers: bytes = b"") -> Answer:
    """An error as the Open Inference Protocol and TensorFlow Serving have it: one string."""
    text = message.encode("utf-8", "replace").decode()
    return Answer(status, JSON, orjson.dumps({"error": text}), headers)


INTERNAL_ERROR = refusal(500, "internal", "internal error; see the server log")
"""The answer to an exception that is not a `ServiceError`."""

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
