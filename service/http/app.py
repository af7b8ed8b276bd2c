"""The FastAPI application: `POST /predict`, the operations routes and the answers to errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast, get_args

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from lenet import distribution_version
from lenet.nvtx import span
from lenet.pixels import Images
from service.engine.models import Models
from service.engine.queue import Prediction
from service.errors import DeadlineExceeded, InvalidInput, ServiceError, shown
from service.http.body import BodyReader, Cancellation, Headers, read_headers, requested_timeout_s
from service.http.openapi import (
    APPLICATION,
    BINARY,
    Health,
    InfoResponse,
    predict_openapi,
    predict_responses,
)
from service.images import DecodingThreads, Invert, Limits, decode
from service.metrics import CONTENT_TYPE, Metrics, RequestClock

_log = logging.getLogger(__name__)

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
"""HTTP status by error code. 422 is not used."""

_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}
_INVERT = get_args(Invert)
_PARAMETERS = ("model", "version", "invert")

_INLINE_BYTES = 256 * 1024
"""Larger bodies are decoded on a thread: at about 10 us an image in JSON, this much blocks the
event loop for 2 ms."""

_Predict: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    models: Models,
    metrics: Metrics,
    *,
    info: Callable[[], InfoResponse],
    limits: Limits,
    bodies: BodyReader,
    decoding: DecodingThreads,
    timeout_s: float,
) -> FastAPI:
    """The application that answers with `models`.

    Args:
        models: are loaded, or will be before the first request.
        metrics: what GET /metrics exposes.
        info: what GET /info answers, asked for each time.
        limits: images and picture pixels in one request.
        bodies: reads the bodies within their limits.
        decoding: where large bodies and pictures are decoded.
        timeout_s: the longest that a request may take.
    """
    route = PredictRoute(models, metrics, limits, bodies, decoding, timeout_s)
    app = _Application(route.predict)
    operation = partial(app.get, tags=["operations"])

    @operation("/healthz", summary="Liveness")
    async def healthz() -> Health:
        """200 while the event loop runs."""
        return Health(live=True, ready=models.ready)

    @operation("/readyz", summary="Readiness", responses={503: {"model": Health}})
    async def readyz(response: Response) -> Health:
        """200 from the end of the warm-up to the beginning of the stop, else 503."""
        response.status_code = 200 if models.ready else 503
        return Health(live=True, ready=models.ready)

    @operation("/metrics", summary="Prometheus metrics", response_class=Response)
    async def exposition() -> Response:
        """The Prometheus text format, summed over all workers."""
        return Response(await metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    @operation("/info", summary="Models and limits")
    async def show_info() -> InfoResponse:
        """Models, versions, digests, accuracy, device and limits."""
        return info()

    async def on_routing_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "bug: registered for HTTPException"
        return _routing_error_response(request, error, tuple(app.openapi()["paths"]))

    async def on_internal_error(_: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, and uvicorn logs it.
        return internal_error_response()

    app.add_exception_handler(HTTPException, on_routing_error)
    app.add_exception_handler(Exception, on_internal_error)
    return app


class _Application(FastAPI):
    """FastAPI, except that `POST /predict` is answered without its middleware and router.

    They take a sixth of a single request's time. The route is declared all the same: for the
    documentation, and for requests below a root path.
    """

    def __init__(self, predict: _Predict) -> None:
        super().__init__(
            **APPLICATION,
            version=distribution_version(),
            redoc_url=None,
            redirect_slashes=False,  # the redirect would contain the request's Host header
        )
        self._predict = predict
        self.add_api_route(
            "/predict",
            predict,
            methods=["POST"],
            tags=["predict"],
            summary="Recognise digits",
            description="One or many images of 28x28 pixels, ink high; or a picture of any size.",
            response_model=None,
            responses=predict_responses(),
            operation_id="predict",
            openapi_extra=predict_openapi(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope.get("path") == "/predict" and scope.get("method") == "POST":
            response = await self._predict(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


@dataclass(frozen=True, slots=True)
class PredictRoute:
    """`POST /predict`: body in, probabilities or an error out."""

    models: Models
    metrics: Metrics
    limits: Limits
    bodies: BodyReader
    decoding: DecodingThreads
    timeout_s: float

    async def predict(self, request: Request) -> Response:
        """The answer to `request`, errors included."""
        try:
            with self.metrics.clock("http") as clock, Cancellation() as cancellation:
                return await self._predict(request, clock, cancellation)
        except ServiceError as exc:
            return error_response(exc)
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            _log.exception("POST /predict failed")
            return internal_error_response()

    async def _predict(
        self, request: Request, clock: RequestClock, cancellation: Cancellation
    ) -> Response:
        query = _query(request)
        invert = _invert(query)
        headers = read_headers(request)
        timeout_s = min(requested_timeout_s(headers) or self.timeout_s, self.timeout_s)
        body = await self.bodies.read(request, headers, timeout_s)
        cancellation.on_disconnect(request)
        clock.lap()
        try:
            images = await self._decode(body, headers, invert, timeout_s - clock.total_s)
            clock.record("decode")
            prediction = await self.models.predict(
                images,
                clock,
                model=query.get("model", ""),
                version=query.get("version", ""),
                timeout_s=timeout_s - clock.total_s,
            )
        except DeadlineExceeded as exc:  # its message gives only the time that was left
            raise DeadlineExceeded(f"no answer within {timeout_s * 1e3:.0f} ms") from exc
        clock.lap()
        binary = _accepts_binary(headers.get("accept", ""))
        content = _as_bytes(prediction) if binary else _as_json(prediction)
        clock.record("encode")
        response = Response(content, media_type=BINARY if binary else "application/json")
        response.raw_headers += (
            (b"server-timing", _server_timing(clock)),
            (b"x-model-version", prediction.version.encode()),
        )
        return response

    async def _decode(
        self, body: bytes, headers: Headers, invert: Invert, timeout_s: float
    ) -> Images:
        """The images of `body`, whose bytes are released once nothing reads them any more."""
        content_type = headers.get("content-type", "")
        if len(body) <= _INLINE_BYTES and content_type.startswith(("application/json", BINARY)):
            try:
                return decode(body, content_type, invert=invert, limits=self.limits)
            finally:
                self.bodies.release(len(body))
        work = partial(decode, body, content_type, invert=invert, limits=self.limits)
        release = partial(self.bodies.release, len(body))
        return await self.decoding.run(work, timeout_s, ended=release)


def error_response(error: ServiceError) -> Response:
    """`error` in the JSON that every error has."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    unread = error.code == "overloaded" and error.field == "body"
    if unread or error.code in ("too_large", "body_timeout"):
        # The rest of the body is not read, so the connection cannot be used again.
        headers["Connection"] = "close"
    return _error_response(STATUS[error.code], error.code, error.field, error.message, headers)


def internal_error_response() -> Response:
    """The answer to an exception that is not a `ServiceError`."""
    return _error_response(500, "internal", "", "internal error; see the server log", {})


def _routing_error_response(
    request: Request, error: HTTPException, paths: tuple[str, ...]
) -> Response:
    headers = dict(error.headers or {})
    path = shown(request.scope["path"])
    if error.status_code == 404:
        message = f"path: got {path}, expected one of {', '.join(paths)}; see /docs"
    else:
        message = (
            f"method: got {shown(request.method)} for {path}, "
            f"expected {headers.get('Allow', 'another')}; see /docs"
        )
    code = _ROUTING_CODES.get(error.status_code, "invalid_input")
    return _error_response(error.status_code, code, "", message, headers)


def _error_response(
    status: int, code: str, field: str, message: str, headers: Mapping[str, str]
) -> Response:
    # The message may quote a lone surrogate that the client sent; JSON cannot contain it.
    text = message.encode("utf-8", "replace").decode()
    body = orjson.dumps({"error": {"code": code, "field": field, "message": text}})
    return Response(body, status, headers, media_type="application/json")


def _accepts_binary(accept: str) -> bool:
    """Whether `accept` lists `BINARY`, and not with a quality of 0 (RFC 9110, 12.5.1)."""
    if BINARY not in (accept := accept.lower()):
        return False
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        if kind == BINARY:
            return not any(re.fullmatch(r"q=0(\.0*)?", part) for part in parameters)
    return False


def _query(request: Request) -> dict[str, str]:
    if not request.scope["query_string"]:
        return {}
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in _PARAMETERS or name in found:
            wrong = "given twice" if name in found else "unknown"
            raise InvalidInput(
                f"query parameter {name[:40]!r} is {wrong}, "
                f"expected at most one each of {', '.join(_PARAMETERS)}",
                field=name[:40],
            )
        found[name] = value
    return found


def _invert(query: Mapping[str, str]) -> Invert:
    value = query.get("invert", "auto")
    if value not in _INVERT:
        raise InvalidInput(
            f"query parameter invert is {value[:40]!r}, expected one of {', '.join(_INVERT)}",
            field="invert",
        )
    return cast("Invert", value)


@span("encode")
def _as_json(prediction: Prediction) -> bytes:
    probabilities = prediction.probabilities
    labels = probabilities.argmax(axis=1)
    answers = [
        {"label": label, "confidence": row[label], "probabilities": row}
        for label, row in zip(labels.tolist(), probabilities, strict=True)
    ]
    answer = {"model": prediction.model, "version": prediction.version, "predictions": answers}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


@span("encode")
def _as_bytes(prediction: Prediction) -> bytes:
    """float32, little-endian, ten an image."""
    return prediction.probabilities.astype("<f4", copy=False).tobytes()


def _server_timing(clock: RequestClock) -> bytes:
    """Milliseconds by stage, in the W3C Server-Timing format."""
    parts = [f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in clock.stages.items()]
    return ", ".join([*parts, f"total;dur={clock.total_s * 1e3:.3f}"]).encode()
