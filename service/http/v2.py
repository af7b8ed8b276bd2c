"""The routes of the Open Inference Protocol besides inference: health, metadata, configuration.

Inference is `http.infer`'s, on the connection itself. Errors are objects with one string, `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from inspect import isawaitable
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from lenet import DISTRIBUTION, distribution_version
from service.engine.models import Models, ServedModel
from service.errors import UnknownModel
from service.http.answer import STATUS, protocol_error
from service.http.openapi import Health, ProtocolError, model_parameters
from service.metrics import Metrics
from service.open_inference import (
    EXTENSIONS,
    model_config,
    model_metadata,
    model_statistics,
)

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


def protocol_routes(models: Models, metrics: Metrics, max_images: int) -> APIRouter:
    """The routes that answer with `models`, of which a request may have `max_images` images."""
    router = APIRouter(prefix=PREFIX, tags=["open inference protocol"])

    async def server_metadata() -> ServerMetadata:
        """Name, version and the extensions of the protocol that are supported."""
        return ServerMetadata(
            name=DISTRIBUTION, version=distribution_version(), extensions=list(EXTENSIONS)
        )

    for path, shown in (("", True), ("/", False)):
        router.add_api_route(
            path, server_metadata, include_in_schema=shown, summary="Server metadata"
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

    def metadata(served: ServedModel, _: Response) -> ModelDescription:
        """The tensors of a model."""
        return ModelDescription(**asdict(model_metadata(served.version)))

    def readiness(served: ServedModel, response: Response) -> ModelReadiness:
        """200 if it is loaded and the server is ready."""
        response.status_code = 200 if models.ready else 503
        return ModelReadiness(name=served.version.name, ready=models.ready)

    def configuration(served: ServedModel, _: Response) -> dict[str, Any]:
        """As Triton's clients read it. `max_batch_size`: images in one request."""
        return model_config(served.version, max_images)

    unknown: dict[int | str, dict[str, Any]] = {
        404: {"model": ProtocolError, "description": "No such model or version"}
    }

    def add(
        path: str, answer: Callable[[ServedModel, Response], Any], kind: Any, summary: str
    ) -> None:
        """The same route with and without a version; `answer` may be a coroutine function."""

        async def endpoint(request: Request, response: Response) -> Any:
            # Not as arguments, for which FastAPI would document its own errors.
            named = request.path_params
            found = answer(models.get(named["model"], named.get("version", "")), response)
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

    async def statistics(served: ServedModel, _: Response) -> dict[str, Any]:
        """Counts and durations since the start, of all workers, as Triton's clients read them."""
        return await _statistics(metrics, (served,))

    @router.get("/models/stats", summary="Statistics of all models")
    async def all_statistics() -> dict[str, Any]:
        """The same of every model."""
        return await _statistics(metrics, models.served)

    add("/stats", statistics, dict[str, Any], "Model statistics")
    add("", metadata, ModelDescription, "Model metadata")
    add("/ready", readiness, ModelReadiness, "Model readiness")
    add("/config", configuration, dict[str, Any], "Model configuration")
    return router


async def _statistics(metrics: Metrics, served: Iterable[ServedModel]) -> dict[str, Any]:
    totals = await metrics.totals()
    versions = [one.version for one in served]
    return {"model_stats": [model_statistics(one, totals[one.name]) for one in versions]}


def on_unknown_model(_: Request, error: Exception) -> Response:
    """404, for the application to register."""
    assert isinstance(error, UnknownModel), "bug: registered for UnknownModel"
    answer = protocol_error(STATUS[error.code], error.message)
    return Response(answer.body, answer.status, media_type=answer.media_type.decode())
