"""How an error looks over HTTP: one JSON shape, one status for each code. 422 is not used."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, cast, get_args

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from lenet.nvtx import span
from lenet.pixels import Images
from service import distribution_version
from service.engine.models import Models
from service.engine.queue import Prediction
from service.errors import DeadlineExceeded, InvalidInput, ServiceError
from service.http.body import (
    Bodies,
    CancelledOnDisconnect,
    UnavailableOnStop,
    asked_timeout_s,
    headers_of,
)
from service.http.openapi import (
    ErrorResponse,
    Health,
    InfoResponse,
    PredictResponse,
    predict_openapi,
)
from service.images import Invert, Limits, decode
from service.metrics import CONTENT_TYPE, Metrics, RequestClock

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


def operations_router(
    models: Models, metrics: Metrics, info: Callable[[], InfoResponse]
) -> APIRouter:
    """The routes, bound to what they tell of; `info` says what runs at the moment."""
    router = APIRouter(tags=["operations"])

    @router.get("/healthz", summary="Is the process alive")
    async def healthz() -> Health:
        """200 as long as the event loop turns; no reason to restart it."""
        return Health(live=True, ready=models.ready)

    @router.get("/readyz", summary="May traffic come", responses={503: {"model": Health}})
    async def readyz(response: Response) -> Health:
        """200 once every context is warm and has proven its weights, until the stop begins."""
        response.status_code = 200 if models.ready else 503
        return Health(live=True, ready=models.ready)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def exposition() -> Response:
        """The Prometheus text format, of all workers."""
        return Response(await metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    @router.get("/info", summary="What runs here")
    async def show_info() -> InfoResponse:
        """Models, versions, digests, accuracy, device and limits."""
        return info()

    return router


BINARY = "application/octet-stream"

_INVERT = get_args(Invert)
_PARAMETERS = ("model", "version", "invert")
_BINARY_ANSWER = {
    BINARY: {"schema": {"type": "string", "format": "binary"}}  # float32, ten an image
}
_HEADERS = {
    "X-Model-Version": {
        "description": "The version that computed the whole answer.",
        "schema": {"type": "string"},
    }
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 404, 408, 413, 415, 429, 500, 503, 504)
}

# Decoding holds the event loop up: at about 10 us an image in JSON, this much is 2 ms.
_DECODE_HERE_BYTES = 256 * 1024


class _Answer(Response):
    """200, its few headers put down as they are sent."""

    def __init__(self, content: bytes, binary: bool, version: str, timing: str) -> None:
        self.body, self.status_code, self.background = content, 200, None
        self.raw_headers = [
            (b"content-length", b"%d" % len(content)),
            (b"content-type", BINARY.encode() if binary else b"application/json"),
            (b"server-timing", timing.encode()),
            (b"x-model-version", version.encode()),
        ]


def create_app(
    models: Models,
    metrics: Metrics,
    *,
    info: Callable[[], InfoResponse],
    limits: Limits,
    bodies: Bodies,
    timeout_s: float,
) -> FastAPI:
    """The application that answers with `models`; `timeout_s` is the most a request may take."""
    app = Application(
        title="lenet-serve",
        summary="Handwritten digits, recognised over HTTP and gRPC.",
        version=distribution_version(),
        redoc_url=None,
        redirect_slashes=False,  # a redirect would be made of the Host header
    )
    install(app)
    route = predict_route(models, metrics, limits, bodies, timeout_s)
    app.router.routes.append(route)  # for the documentation, and below a root path
    app.predict_route = route
    app.include_router(operations_router(models, metrics, info))
    return app


class Application(FastAPI):
    """FastAPI, where `POST /predict` goes to the endpoint of `predict_route` and nowhere else.

    What it leaves out, the middleware and the router, takes a sixth of a lone request's time.
    """

    predict_route: APIRoute | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        route = self.predict_route
        if route is None or scope.get("path") != route.path or scope.get("method") != "POST":
            await super().__call__(scope, receive, send)
            return
        try:
            response = await route.endpoint(Request(scope, receive))
        except ServiceError as exc:
            response = error_response(exc)
        except Exception:
            await surprise_response()(scope, receive, send)
            raise  # for uvicorn to log
        await response(scope, receive, send)


def predict_route(
    models: Models, metrics: Metrics, limits: Limits, bodies: Bodies, timeout_s: float
) -> APIRoute:
    """The route, bound to what answers it; `timeout_s` is the most that a request may take."""

    async def predict(request: Request) -> Response:
        """One or many images of 28x28 pixels, ink high; or a picture of any size."""
        with metrics.clock("http") as clock, UnavailableOnStop():
            parameters = _parameters(request)
            headers = headers_of(request)
            within_s = min(asked_timeout_s(headers) or timeout_s, timeout_s)
            body = await bodies.read(request, headers, within_s)
            try:
                clock.lap()
                content_type = headers.get("content-type", "")
                images = await _decode(body, content_type, _invert(parameters), limits)
            finally:
                bodies.release(len(body))
            clock.record("decode")
            left_s = _left(within_s, clock)
            with CancelledOnDisconnect(request):
                try:
                    prediction = await models.predict(
                        images,
                        clock,
                        model=parameters.get("model", ""),
                        version=parameters.get("version", ""),
                        timeout_s=left_s,
                    )
                except DeadlineExceeded as exc:  # which knows only what was left
                    raise DeadlineExceeded(f"no answer within {within_s * 1e3:.0f} ms") from exc
            clock.lap()
            binary = _accepts_binary(headers.get("accept", ""))
            content = _as_bytes(prediction) if binary else _as_json(prediction)
            clock.record("encode")
            return _Answer(content, binary, prediction.version, _server_timing(clock))

    return APIRoute(
        "/predict",
        predict,
        methods=["POST"],
        tags=["predict"],
        summary="Recognise digits",
        response_model=None,
        responses={
            200: {"model": PredictResponse, "content": _BINARY_ANSWER, "headers": _HEADERS},
            **_ERRORS,
        },
        operation_id="predict",
        openapi_extra=predict_openapi(),
    )


def _left(within_s: float, clock: RequestClock) -> float:
    left_s = within_s - clock.total_s
    if left_s <= 0:
        raise DeadlineExceeded(f"reading and decoding took more than {within_s * 1e3:.0f} ms")
    return left_s


def _accepts_binary(accept: str) -> bool:
    """Whether `accept` lists `BINARY`, and not with a quality of 0 (RFC 9110, 12.5.1)."""
    if BINARY not in (accept := accept.lower()):
        return False
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        if kind == BINARY:
            return not any(re.fullmatch(r"q=0(\.0*)?", part) for part in parameters)
    return False


def _parameters(request: Request) -> dict[str, str]:
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


def _invert(parameters: dict[str, str]) -> Invert:
    value = parameters.get("invert", "auto")
    if value not in _INVERT:
        raise InvalidInput(
            f"query parameter invert is {value[:40]!r}, expected one of {', '.join(_INVERT)}",
            field="invert",
        )
    return cast("Invert", value)


async def _decode(body: bytes, content_type: str, invert: Invert, limits: Limits) -> Images:
    pixels = content_type.startswith(("application/json", BINARY))
    if pixels and len(body) <= _DECODE_HERE_BYTES:
        return decode(body, content_type, invert=invert, limits=limits)
    return await asyncio.to_thread(decode, body, content_type, invert=invert, limits=limits)


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
    return prediction.probabilities.astype("<f4", copy=False).tobytes()


def _server_timing(clock: RequestClock) -> str:
    """Milliseconds by stage, as W3C Server-Timing has it; shown by a browser's network page."""
    parts = [f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in clock.stages.items()]
    return ", ".join([*parts, f"total;dur={clock.total_s * 1e3:.3f}"])
