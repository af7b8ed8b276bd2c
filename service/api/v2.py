"""The routes of the Open Inference Protocol besides inference.

These are health, metadata, configuration, statistics and the repository. Inference is
`http.infer`'s, on the connection itself. Errors are objects with one string, `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from inspect import isawaitable
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from lenet import DISTRIBUTION, distribution_version
from service.api.descriptions import (
    EXTENSIONS,
    check_repository_parameters,
    model_config,
    model_metadata,
    model_statistics,
    repository_entries,
)
from service.api.openapi import Health, ProtocolError, model_parameters
from service.engine.models import Models, ServedModel
from service.engine.repository import Repository
from service.errors import InvalidInput, TooLarge, invalid, shown
from service.observe.metrics import Metrics
from service.process.keys import Keys

_MAX_BODY_BYTES = 64 * 1024
"""Of requests to the repository."""

PREFIX = "/v2"
MODEL = "/models/{model}"
MODEL_VERSION = "/models/{model}/versions/{version}"


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class Tensor(BaseModel):
    """A tensor; -1 in `shape` is the number of images."""

    name: str
    datatype: str
    shape: list[int]


class ModelDescription(BaseModel):
    """A model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class ModelReadiness(BaseModel):
    """Whether a model can be used."""

    name: str
    ready: bool


class RepositoryEntry(BaseModel):
    """A version of a model."""

    name: str
    version: str
    state: str = Field(description="READY, or UNAVAILABLE if it is not loaded.")
    reason: str


def protocol_routes(
    models: Models, repository: Repository, metrics: Metrics, keys: Keys, max_images: int
) -> APIRouter:
    """The routes that answer with `models`, of which a request may have `max_images` images.

    Those of the repository need one of the administrator's `keys`.
    """
    router = APIRouter(prefix=PREFIX, tags=["open inference protocol"])

    async def server_metadata() -> ServerMetadata:
        """Name, version and the extensions of the protocol that are supported."""
        return ServerMetadata(
            name=DISTRIBUTION, version=distribution_version(), extensions=list(EXTENSIONS)
        )

    for path, documented in (("", True), ("/", False)):
        router.add_api_route(
            path, server_metadata, include_in_schema=documented, summary="Server metadata"
        )

    @router.get("/health/live", summary="Liveness")
    async def live() -> Health:
        """200 while the event loop runs."""
        return Health(live=True, ready=models.ready)

    @router.get("/health/ready", summary="Readiness", responses={503: {"model": Health}})
    async def ready(response: Response) -> Health:
        """As /readyz."""
        response.status_code = 200 if models.ready else 503
        return Health(live=True, ready=models.ready)

    def metadata(served: Sequence[ServedModel], _: Response) -> ModelDescription:
        """The tensors of a model."""
        version = served[0].version
        versions = [one.version.version for one in models.select(version.name)]
        return ModelDescription(**asdict(model_metadata(version, versions)))

    def readiness(served: Sequence[ServedModel], response: Response) -> ModelReadiness:
        """200 if it is loaded and the server is ready."""
        response.status_code = 200 if models.ready else 503
        return ModelReadiness(name=served[0].version.name, ready=models.ready)

    def configuration(served: Sequence[ServedModel], _: Response) -> dict[str, Any]:
        """As Triton's clients read it. `max_batch_size`: images in one request."""
        return model_config(served[0].version, max_images)

    unknown: dict[int | str, dict[str, Any]] = {
        404: {"model": ProtocolError, "description": "No such model or version"}
    }

    def add(
        path: str, answer: Callable[[Sequence[ServedModel], Response], Any], kind: Any, summary: str
    ) -> None:
        """The same route with and without a version.

        `answer` gets the version, or all of the model, the highest first; it may be a coroutine
        function.
        """

        async def endpoint(request: Request, response: Response) -> Any:
            # Not as arguments, for which FastAPI would document its own errors.
            named = request.path_params
            found = answer(models.select(named["model"], named.get("version", "")), response)
            return await found if isawaitable(found) else found

        for owner in (MODEL, MODEL_VERSION):
            parameters = model_parameters(versioned=owner == MODEL_VERSION)
            router.add_api_route(
                owner + path,
                endpoint,
                response_model=kind,
                summary=summary,
                description=answer.__doc__,
                openapi_extra={"parameters": parameters},
                responses={**unknown, 503: {"model": kind}} if answer is readiness else unknown,
            )

    async def statistics(served: Sequence[ServedModel], _: Response) -> dict[str, Any]:
        """Counts and durations since the start, of all workers, as Triton's clients read them.

        Of the version, or of all of the model.
        """
        return await _statistics(metrics, served)

    @router.get("/models/stats", summary="Statistics of all models")
    async def all_statistics() -> dict[str, Any]:
        """The same of every model."""
        return await _statistics(metrics, models.served)

    @router.post(
        "/repository/index",
        summary="Models and versions that are there",
        openapi_extra=_repository_body(ready={"type": "boolean"}),
        responses=_REFUSED,
    )
    async def repository_index(request: Request) -> list[RepositoryEntry]:
        """Every version in the weights folder; with `ready` those that are loaded."""
        ready = (await _administered(request, keys)).get("ready", False)
        if type(ready) is not bool:
            raise invalid("ready", shown(ready), "true or false")
        return [
            RepositoryEntry(**entry)
            for entry in repository_entries(await repository.index(), ready)
        ]

    async def load(request: Request) -> Response:
        """Load a model, or what its files are now if it is loaded."""
        document = await _administered(request, keys)
        check_repository_parameters(document.get("parameters", {}))
        await repository.load(request.path_params["model"])
        return Response()

    async def unload(request: Request) -> Response:
        """Unload a model; requests that came before are answered."""
        await _administered(request, keys)
        await repository.unload(request.path_params["model"])
        return Response()

    for name, endpoint in (("load", load), ("unload", unload)):
        router.add_api_route(
            f"/repository/models/{{model}}/{name}",
            endpoint,
            methods=["POST"],
            summary=f"{name.capitalize()} a model",
            response_class=Response,
            openapi_extra={
                **_repository_body(parameters={"type": "object"}),
                "parameters": model_parameters(versioned=False),
            },
            responses={**_REFUSED, **unknown},
        )

    add("/stats", statistics, dict[str, Any], "Model statistics")
    add("", metadata, ModelDescription, "Model metadata")
    add("/ready", readiness, ModelReadiness, "Model readiness")
    add("/config", configuration, dict[str, Any], "Model configuration")
    return router


async def _statistics(metrics: Metrics, served: Sequence[ServedModel]) -> dict[str, Any]:
    totals = await metrics.totals()
    versions = [one.version for one in served]
    return {"model_stats": [model_statistics(one, totals[one.key]) for one in versions]}


_REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": ProtocolError, "description": "The body is wrong, or a file must not be served"},
    401: {"model": ProtocolError, "description": "No key, or an unknown one"},
    403: {"model": ProtocolError, "description": "No key of an administrator, or there are none"},
    413: {"model": ProtocolError, "description": "The body is too large"},
    503: {"model": ProtocolError, "description": "The service stops"},
}


def _repository_body(**properties: dict[str, str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


async def _administered(request: Request, keys: Keys) -> dict[str, Any]:
    """The JSON body of a request that an administrator makes, {} for none.

    Raises: Unauthorized, Forbidden, TooLarge, InvalidInput.
    """
    if (error := keys.check(request.headers.get("authorization"), admin=True)) is not None:
        raise error
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise TooLarge(
                f"body: got more than {_MAX_BODY_BYTES} bytes, expected a small JSON object; "
                "models are read from the folder, and not from requests",
                field="body",
            )
    try:
        document = orjson.loads(body) if body.strip() else {}
    except orjson.JSONDecodeError as exc:
        raise InvalidInput(f"body: is not JSON ({exc})", field="body") from None
    if type(document) is not dict:
        raise invalid("body", shown(document), "a JSON object")
    return document
