"""The FastAPI application: it declares and documents all routes, and answers all but the fast ones.

Those are answered by an `ImageRoute` over a connection without ASGI; their routes here lead to the
same objects, for whoever calls the application itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lenet import DISTRIBUTION, distribution_version
from service.api.explain import ExplainRoute
from service.api.infer import InferRoute
from service.api.openapi import (
    APPLICATION,
    MAX_EXPLAINED_IMAGES,
    Health,
    InfoResponse,
    explain_openapi,
    explain_responses,
    infer_openapi,
    infer_responses,
    predict_openapi,
    predict_responses,
    tensorflow_openapi,
    tensorflow_responses,
)
from service.api.page import HTML, Page
from service.api.tensorflow import PREFIX as TENSORFLOW
from service.api.tensorflow import TensorflowRoute, status_routes, verb_of
from service.api.v2 import MODEL, MODEL_VERSION, PREFIX, protocol_routes
from service.engine.models import Models
from service.engine.repository import Repository
from service.errors import Cancelled, ServiceError, shown
from service.observe.metrics import CONTENT_TYPE, Metrics
from service.process.keys import Keys
from service.request import PredictRoute, prefers
from service.transport.answer import (
    INTERNAL_ERROR,
    Answer,
    has_plain_errors,
    plain_error,
    plain_error_answer,
    refusal,
)
from service.transport.gate import DOCS_FILES, is_open
from service.transport.gate import PAGE_FILES as PAGE_PREFIX
from service.transport.head import FastRoute

_MAIN_PATHS = "/predict, /v2/models/MODEL/infer, /v1/models/MODEL:predict, /info"
_LONGEST_PATH = 64
"""Compared with the others, which takes 0.5 ms at most."""

_NOT_EXPLAINED = (
    "path: '/explain' is turned off; start the service with --explain on, or without LENET_EXPLAIN"
)
_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(
    models: Models,
    repository: Repository,
    metrics: Metrics,
    predict: PredictRoute,
    infer: InferRoute,
    tensorflow: TensorflowRoute,
    explain: ExplainRoute | None,
    keys: Keys,
    info: Callable[[], InfoResponse],
) -> FastAPI:
    """The application that answers with `models`.

    Args:
        models: are loaded, or will be before the first request.
        repository: loads and unloads them.
        metrics: what GET /metrics exposes.
        predict: answers POST /predict.
        infer: answers inference by the Open Inference Protocol.
        tensorflow: answers predictions by TensorFlow Serving's API.
        explain: answers POST /explain; None if that is turned off.
        keys: of whom models may be loaded and unloaded.
        info: what GET /info answers, asked for each time.
    """
    app = FastAPIOffline(
        **APPLICATION,
        version=distribution_version(),
        redoc_url=None,
        static_url=DOCS_FILES,
        redirect_slashes=False,  # the redirect would contain the request's Host header
    )

    async def predict_digits(request: Request) -> Response:
        return await _answer(predict, request)

    app.add_api_route(
        "/predict",
        predict_digits,
        methods=["POST"],
        tags=["predict"],
        summary="Recognise digits",
        description="One or many images of 28x28 pixels, ink high; or a picture of any size.",
        response_model=None,
        responses=predict_responses(),
        operation_id="predict",
        openapi_extra=predict_openapi(),
    )

    async def explain_digit(request: Request) -> Response:
        if explain is None:
            return _response(refusal(404, "not_found", _NOT_EXPLAINED))
        return await _answer(explain, request)

    app.add_api_route(
        "/explain",
        explain_digit,
        methods=["POST"],
        tags=["predict"],
        summary="See inside",
        description="What each layer of a model computes of an image, in float32 on the CPU. At "
        f"most {MAX_EXPLAINED_IMAGES} images, of which one is explained.",
        response_model=None,
        responses=explain_responses(),
        operation_id="explain",
        openapi_extra=explain_openapi(),
        include_in_schema=explain is not None,
    )

    async def infer_digits(request: Request) -> Response:
        return await _answer(infer, request)

    for owner, operation_id in ((MODEL, "infer"), (MODEL_VERSION, "infer_by_version")):
        app.add_api_route(
            f"{PREFIX}{owner}/infer",
            infer_digits,
            methods=["POST"],
            tags=["open inference protocol"],
            summary="Inference",
            description="JSON, or JSON followed by binary tensors, or the bytes of images.",
            response_model=None,
            responses=infer_responses(),
            operation_id=operation_id,
            openapi_extra=infer_openapi(versioned=owner == MODEL_VERSION),
        )

    async def predict_instances(request: Request) -> Response:
        return await _answer(tensorflow, request)

    owners = ((MODEL, "predict_instances"), (MODEL_VERSION, "predict_instances_by_version"))
    for owner, operation_id in owners:
        app.add_api_route(
            f"{TENSORFLOW}{owner}:predict",
            predict_instances,
            methods=["POST"],
            tags=["TensorFlow Serving"],
            summary="Prediction",
            description="Images as `instances`, answered by row, or as `inputs`, by column.",
            response_model=None,
            responses=tensorflow_responses(),
            operation_id=operation_id,
            openapi_extra=tensorflow_openapi(versioned=owner == MODEL_VERSION),
        )
    app.include_router(status_routes(models))
    app.include_router(protocol_routes(models, repository, metrics, keys, infer.limits.max_images))
    operation = partial(app.get, tags=["operations"])

    page = Page()

    @operation(
        "/",
        summary="Where everything is",
        response_model=dict[str, str],
        responses={200: {"content": {HTML: {}}}},
    )
    async def index(request: Request, response: Response) -> Any:
        """The page to draw digits on, where the client prefers HTML, as browsers do.

        Otherwise the paths of this document, health, models and metrics.
        """
        if prefers(HTML, request.headers.get("accept", "")):
            return page.answer(request)
        response.headers["Vary"] = "Accept"
        paths = {"docs": "/docs", "openapi": "/openapi.json", "models": "/info"}
        health = {"live": "/healthz", "ready": "/readyz", "metrics": "/metrics"}
        return {"name": DISTRIBUTION, "version": distribution_version(), **paths, **health}

    @app.get(PAGE_PREFIX + "{name}", include_in_schema=False)
    async def page_file(request: Request, name: str) -> Response:
        return page.answer(request, name)

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

    if keys:
        _declare_keys(app)

    async def on_service_error(_: Request, error: Exception) -> Response:
        # Of the routes below /v1 and /v2: the others answer errors themselves, or have none.
        assert isinstance(error, ServiceError), "bug: registered for ServiceError"
        return _response(plain_error_answer(error))

    async def on_routing_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "bug: registered for HTTPException"
        return _routing_error_response(request, error, (*app.openapi()["paths"], "/docs"))

    async def on_internal_error(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, and uvicorn logs it.
        if has_plain_errors(request.scope["path"]):
            return _response(plain_error(500, "internal error; see the server log"))
        return _response(INTERNAL_ERROR)

    app.add_exception_handler(ServiceError, on_service_error)
    app.add_exception_handler(HTTPException, on_routing_error)
    app.add_exception_handler(Exception, on_internal_error)
    return app


def _declare_keys(app: FastAPI) -> None:
    """Have the OpenAPI document say which routes need a key."""
    generate = app.openapi

    def with_keys() -> dict[str, Any]:
        document = generate()  # made once
        schemes = document["components"].setdefault("securitySchemes", {})
        schemes["bearerAuth"] = {"type": "http", "scheme": "bearer"}
        document["security"] = [{"bearerAuth": []}]
        for path, operations in document["paths"].items():
            if is_open(path.encode()):
                for described in operations.values():
                    described["security"] = []
        return document

    app.openapi = with_keys  # type: ignore[method-assign]


async def _answer(route: FastRoute, request: Request) -> Response:
    """The answer of `route` over ASGI."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    headers = dict(reversed(request.headers.items()))
    try:
        wanted: Any = route.read(request.scope["query_string"], headers, request.path_params)
    except ServiceError as exc:
        return _response(route.refuse(exc))

    def reply(found: Answer) -> None:
        if not answer.done():
            answer.set_result(found)

    call = route.open(wanted, reply)

    async def read_body() -> None:
        try:
            call.wait_for_body()
            async for chunk in request.stream():
                call.data(chunk)
            call.end()
        except ServiceError as exc:
            call.fail(exc)
        except ClientDisconnect:
            call.fail(Cancelled("the client disconnected"))

    reading = asyncio.create_task(read_body())
    try:
        await asyncio.wait((reading, answer), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            await reading
        return _response(await answer)
    finally:
        reading.cancel()
        call.cancel()  # if the server gave up


def _response(answer: Answer) -> Response:
    headers = [line.split(": ", 1) for line in answer.headers.decode().splitlines()]
    return Response(
        answer.content,
        answer.status,
        dict(headers),
        media_type=answer.media_type.decode(),
    )


def _routing_error_response(
    request: Request, error: HTTPException, paths: Sequence[str]
) -> Response:
    headers = dict(error.headers or {})
    path = request.scope["path"]
    if error.status_code == 405:
        methods = [
            headers.get("Allow", ""),
            "HEAD" if headers.get("Allow") == "GET" else "",
            "OPTIONS",
        ]
        headers["Allow"] = ", ".join(filter(None, methods))
    if request.method == "OPTIONS" and (error.status_code == 405 or path == "*"):
        return Response(status_code=204, headers=headers)
    status, verb = error.status_code, verb_of(path)
    if verb not in ("", "predict"):  # of TensorFlow Serving's API
        status = 404
        message = f"path: got {shown(path)}, but {shown(verb)} is not offered; predict is"
    elif status == 404:
        nearest = _nearest(path, paths)
        hint = f"; did you mean {shown(nearest)}?" if nearest else ""
        message = f"path: got {shown(path)}, expected {_MAIN_PATHS} or another of /docs{hint}"
    else:
        message = (
            f"method: got {shown(request.method)} for {shown(path)}, "
            f"expected {headers.get('Allow', 'another')}; see /docs"
        )
    code = _ROUTING_CODES.get(status, "invalid_input")
    if has_plain_errors(path):
        response = _response(plain_error(status, message))
    else:
        response = _response(refusal(status, code, message))
    response.headers.update(headers)
    return response


def _nearest(path: str, templates: Sequence[str]) -> str:
    """The path that is most like `path`, with the model and version named there; "" if none is."""
    if len(path) > _LONGEST_PATH:
        return ""
    given = path.split("/")
    known = [
        "/".join(_filled(segment, given[at : at + 1]) for at, segment in enumerate(one.split("/")))
        for one in templates
    ]
    protocol = path[:4] if path[:4] in ("/v1/", "/v2/") else "/"
    same = [one for one in known if one.startswith(protocol)]
    wanted = path.replace("predict", "infer") if protocol == "/v2/" else path  # its own word
    close = get_close_matches(wanted, same, n=1, cutoff=0.7)
    return next(iter(close or get_close_matches(path, known, n=1, cutoff=0.7)), "")


def _filled(segment: str, given: Sequence[str]) -> str:
    """A part of a template with what a path has in its place."""
    value = given[0].partition(":")[0] if given else ""
    return re.sub(r"\{(\w+)\}", lambda found: value or found[1].upper(), segment)
