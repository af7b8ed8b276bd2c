"""How an error looks over HTTP: one JSON shape, one status for each code. 422 is not used."""

from __future__ import annotations

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from service.errors import ServiceError

STATUS = {
    "invalid_input": 400,
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

_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_response(error: ServiceError) -> Response:
    """The answer that tells of `error`."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    unread = error.code == "overloaded" and error.field == "body"
    if unread or error.code in ("too_large", "body_timeout"):
        # The rest of the body is not read, so the connection cannot be used again.
        headers["Connection"] = "close"
    return _response(STATUS[error.code], error.code, error.field, error.message, headers)


def surprise_response() -> Response:
    """The answer when something went wrong that nobody thought of."""
    return _response(500, "internal", "", "an unforeseen error; it was logged", {})


def _response(
    status: int, code: str, field: str, message: str, headers: dict[str, str]
) -> Response:
    # A lone surrogate that a client sent may be quoted in the message; JSON cannot carry it.
    text = message.encode("utf-8", "replace").decode()
    body = orjson.dumps({"error": {"code": code, "field": field, "message": text}})
    return Response(body, status, headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make `app` answer every error in this shape."""

    async def on_service_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError), "bug: registered for ServiceError"
        return error_response(error)

    async def on_routing_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "bug: registered for HTTPException"
        code = _ROUTING_CODES.get(error.status_code, "invalid_input")
        message = f"{request.method} on this path: {error.detail}; /docs lists what there is"
        return _response(error.status_code, code, "", message, dict(error.headers or {}))

    async def on_surprise(_: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, and uvicorn logs it.
        return surprise_response()

    app.add_exception_handler(ServiceError, on_service_error)
    app.add_exception_handler(HTTPException, on_routing_error)
    app.add_exception_handler(Exception, on_surprise)
