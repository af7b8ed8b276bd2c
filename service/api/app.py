"""The FastAPI application: every HTTP route, on any ASGI server.

Our own server answers the routes that take images itself, before the application: see
`api.endpoints`.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from lenet import DISTRIBUTION, distribution_version
from service.api.endpoints import Endpoint, image_endpoint, path_of, response
from service.api.errors import plain_error_answer
from service.api.open_inference import OpenInference
from service.api.openapi import OIP_TAG, complete, image_route
from service.api.page import HTML, Page, StaticFile
from service.api.paths import DOCS_FILES, PAGE_FILES, PATHS, path_like, plain_path
from service.api.routes import ImageRoute, prefers, takes_gzip
from service.api.schemas import Health, InfoResponse
from service.api.tensorflow import status_routes, verb_of
from service.api.v2 import protocol_routes
from service.engine.models import Models
from service.errors import shown
from service.observe.metrics import OPEN_METRICS, PLAIN, Metrics
from wire.errors import INTERNAL, Refusal
from wire.keys import Keys

_MAIN_PATHS = "/predict, /v2/models/MODEL/infer, /v1/models/MODEL:predict, /info"
_LONGEST_PATH = 64
"""Compared with the others, which takes 0.5 ms at most."""

_NOT_EXPLAINED = (
    "path: '/explain' is turned off; start the service with --explain on, or without LENET_EXPLAIN"
)
_REVALIDATED = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


def create_app(
    answers: OpenInference,
    metrics: Metrics,
    keys: Keys,
    info: Callable[[], InfoResponse],
    images: Mapping[tuple[bytes, bytes], ImageRoute],
    explain: Endpoint | None,
    health: str = "",
) -> FastAPI:
    """The application.

    Args:
        answers: of the Open Inference Protocol; its models are loaded, or will be before the first
            request.
        metrics: what GET /metrics exposes.
        keys: of whom models may be loaded and unloaded.
        info: what GET /info answers, asked for each time.
        images: the routes that take images, by method and path.
        explain: the endpoint of POST /explain; None if it is turned off.
        health: a further path of readiness; "" for none.
    """
    models = answers.models
    app = FastAPI(
        title=DISTRIBUTION,
        summary="Handwritten digits, recognised over HTTP and gRPC.",
        version=distribution_version(),
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_url=None,
        redirect_slashes=False,  # the redirect would contain the request's Host header
        generate_unique_id_function=_operation_id,
    )
    app.add_middleware(_PlainPaths)
    for (method, template), image in images.items():
        path, methods = template.decode(), [method.decode()]
        said = image_route(path) if path in PATHS else {"include_in_schema": False}
        app.add_api_route(path, image_endpoint(image), methods=methods, **said)
    if explain is not None:
        app.post("/explain", **image_route("/explain"))(explain)
    routers = status_routes(models), protocol_routes(answers, keys)
    for router in routers:
        app.include_router(router)
    _add_operations(app, models, metrics, info, health)
    _add_pages(app, needs_key=bool(keys))

    if explain is None:

        @app.post("/explain", include_in_schema=False)
        async def not_explained() -> Response:
            return _refused("/explain", 404, _NOT_EXPLAINED)

    @app.exception_handler(Refusal)
    async def on_refusal(_: Request, error: Refusal) -> Response:
        # Only routes below /v1 and /v2 have placeholders.
        return response(plain_error_answer(error))

    @app.exception_handler(HTTPException)
    async def on_routing_error(request: Request, error: HTTPException) -> Response:
        return _routing_error_response(request, error, ["/docs", *paths])

    @app.exception_handler(Exception)
    async def on_internal_error(request: Request, error: Exception) -> Response:
        # Starlette raises it again after this answer, and the connection logs it.
        return response(path_like(path_of(request.scope)).error(Refusal(INTERNAL)))

    routes = (route for one in (app, *routers) for route in one.routes)
    paths = [one.path for one in routes if isinstance(one, APIRoute) and one.include_in_schema]
    return app


class _PlainPaths:
    """Has `app` answer requests for other spellings of a path, see `plain_path`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else ""
        if (plain := plain_path(path)) != path:
            scope = {**scope, "path": scope["path"].removesuffix(path) + plain}
        await self._app(scope, receive, send)


def _operation_id(route: APIRoute) -> str:
    """The name that generated clients give to the function for a route."""
    by = [one for one in ("version", "label") if f"/{one}s/{{version}}" in route.path]
    return "_by_".join((route.name, *by))


def _add_operations(
    app: FastAPI,
    models: Models,
    metrics: Metrics,
    info: Callable[[], InfoResponse],
    health: str,
) -> None:
    async def live() -> Health:
        """200 while the event loop runs."""
        return Health(live=True, ready=models.ready)

    async def ready(answer: Response) -> Health:
        """200 from the end of the warm-up to the beginning of the stop, else 503."""
        answer.status_code = 200 if models.ready else 503
        return Health(live=True, ready=models.ready)

    not_ready: dict[int | str, dict[str, Any]] = {503: {"model": Health}}
    for tag, owner, alive, prepared in (
        ("operations", "", "/healthz", "/readyz"),
        (OIP_TAG, "server_", "/v2/health/live", "/v2/health/ready"),
    ):
        add = partial(app.get, tags=[tag])
        add(alive, name=f"{owner}live", summary="Liveness")(live)
        add(prepared, name=f"{owner}ready", summary="Readiness", responses=not_ready)(ready)
    ping = app.get(
        "/ping", name="ping", tags=["operations"], summary="Readiness", responses=not_ready
    )
    ping(ready)

    @app.get("/metrics", tags=["operations"], summary="Prometheus metrics", response_class=Response)
    async def metrics_text(request: Request) -> Response:
        """The Prometheus text format, or OpenMetrics where preferred, summed over all workers."""
        wanted, headers = request.headers, {"Vary": "Accept, Accept-Encoding"}
        kind = OPEN_METRICS if prefers(OPEN_METRICS, wanted.get("accept", ""), PLAIN) else PLAIN
        if takes_gzip(wanted.get("accept-encoding", "")):
            headers["Content-Encoding"], coding = "gzip", partial(gzip.compress, compresslevel=1)
            text, headers["Content-Type"] = await metrics.exposition(kind, coding)
        else:
            text, headers["Content-Type"] = await metrics.exposition(kind)
        return Response(text, headers=headers)

    @app.get("/info", tags=["operations"], summary="Models and limits")
    async def server_info() -> InfoResponse:
        """Models, versions, digests, accuracy, device and limits."""
        return info()

    if health:  # behind the others, none of which it replaces
        app.get(health, include_in_schema=False)(ready)


def _add_pages(app: FastAPI, *, needs_key: bool) -> None:
    """The page to draw digits on, the OpenAPI document, and the page that shows it.

    The document is made by the first request for it, which takes 120 ms of a Xeon core
    (2026-11-24), and kept as bytes.
    """
    page = Page()

    @app.get(
        "/",
        tags=["operations"],
        summary="Where everything is",
        response_model=dict[str, str],
        responses={200: {"content": {HTML: {}}}},
    )
    async def index(request: Request, answer: Response) -> Any:
        """The page to draw digits on, where the client prefers HTML, as browsers do.

        Otherwise the paths of this document, health, models and metrics.
        """
        if prefers(HTML, request.headers.get("accept", "")):
            return page.answer(request)
        answer.headers["Vary"] = "Accept"
        paths = {"docs": "/docs", "openapi": "/openapi.json", "models": "/info"}
        paths |= {"live": "/healthz", "ready": "/readyz", "metrics": "/metrics"}
        root = request.scope.get("root_path", "")
        links = {name: f"{root}{path}" for name, path in paths.items()}
        return {"name": DISTRIBUTION, "version": distribution_version(), **links}

    @app.get(PAGE_FILES + "{name}", include_in_schema=False)
    async def page_file(request: Request, name: str) -> Response:
        return page.answer(request, name)

    generate = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        return complete(generate(), needs_key=needs_key)

    @lru_cache
    def document(root: str) -> StaticFile:
        servers = {"servers": [{"url": root}]} if root else {}
        return StaticFile(orjson.dumps(openapi() | servers), "application/json", _REVALIDATED)

    app.openapi = openapi  # type: ignore[method-assign]
    files = DOCS_FILES.removeprefix("/")  # relative links lead to where the service is mounted
    docs = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{DISTRIBUTION} - Swagger UI",
        swagger_js_url=f"{files}/swagger-ui-bundle.js",
        swagger_css_url=f"{files}/swagger-ui.css",
        swagger_favicon_url=f"{files}/favicon.png",
    )

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_document(request: Request) -> Response:
        return document(request.scope.get("root_path", "")).answer(request)

    @app.get("/docs", include_in_schema=False)
    async def docs_page() -> Response:
        return docs

    app.mount(DOCS_FILES, StaticFiles(packages=[("fastapi_offline", "static")]))


def _refused(path: str, status: int, message: str) -> Response:
    """The answer to a request that no route takes, in the form of errors below `path`."""
    error = Refusal(message)
    error.status, error.code = status, _ROUTING_CODES.get(status, "invalid_input")
    return response(path_like(path).error(error))


def _routing_error_response(
    request: Request, error: HTTPException, paths: Sequence[str]
) -> Response:
    headers = dict(error.headers or {})
    path, status, allowed = path_of(request.scope), error.status_code, headers.get("Allow", "")
    if status == 405:
        methods = (allowed, "HEAD" if allowed == "GET" else "", "OPTIONS")
        headers["Allow"] = ", ".join(filter(None, methods))
    if request.method == "OPTIONS" and (status == 405 or path == "*"):
        return Response(status_code=204, headers=headers)
    if (verb := verb_of(path)) not in ("", "predict"):  # of TensorFlow Serving's API
        status = 404
        message = f"path: got {shown(path)}, but {shown(verb)} is not offered; predict is"
    elif status == 404:
        nearest = _nearest(path, paths)
        hint = f"; did you mean {shown(nearest)}?" if nearest else ""
        if path == "/models":
            hint = "; /v2/models lists the models"
        message = f"path: got {shown(path)}, expected {_MAIN_PATHS} or another of /docs{hint}"
    else:
        expected = f"expected {headers.get('Allow', 'another')}; see /docs"
        message = f"method: got {shown(request.method)} for {shown(path)}, {expected}"
    found = _refused(path, status, message)
    found.headers.update(headers)
    return found


def _nearest(path: str, templates: Sequence[str]) -> str:
    """The path that is most like `path`, with the model and version named there; "" if none is."""
    if len(path) > _LONGEST_PATH:
        return ""
    # A template may have more parts than the path.
    given = [part.partition(":")[0] for part in path.split("/")] + [""] * 9
    known = ["/".join(map(_filled, template.split("/"), given)) for template in templates]
    protocol = path[:4] if path[:4] in ("/v1/", "/v2/") else "/"
    same = [one for one in known if one.startswith(protocol)]
    wanted = path.replace("predict", "infer") if protocol == "/v2/" else path  # its own word
    close = get_close_matches(wanted, same, n=1, cutoff=0.7)
    return next(iter(close or get_close_matches(path, known, n=1, cutoff=0.7)), "")


def _filled(segment: str, value: str) -> str:
    """A part of a template with what a path has in its place."""
    return re.sub(r"\{(\w+)\}", lambda found: value or found[1].upper(), segment)
