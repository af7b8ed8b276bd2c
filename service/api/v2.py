"""The routes of the Open Inference Protocol besides inference.

These are metadata, configuration, statistics and the repository. Errors are objects with one
string, `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, ValidationError

from lenet import DISTRIBUTION, distribution_version
from service.api import openapi
from service.api.descriptions import (
    EXTENSIONS,
    ModelMetadata,
    check_repository_parameters,
    model_config,
    model_metadata,
    model_statistics,
    repository_entries,
)
from service.api.openapi import OF_REPOSITORY, OIP_TAG, errors
from service.api.routes import MODEL, MODEL_VERSION, PREFIX
from service.api.schemas import ChangeRequest, IndexRequest, ProtocolError
from service.engine.models import Models, ServedModel
from service.engine.repository import Repository
from service.errors import InvalidInput, TooLarge, invalid, shown
from service.observe.metrics import Metrics
from service.process.keys import Keys

_MAX_BODY_BYTES = 64 * 1024
"""Limit of repository request bodies."""


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class ModelReadiness(BaseModel):
    """Whether a model can be used."""

    name: str
    ready: bool


class RepositoryEntry(BaseModel):
    """A version of a model."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"] = Field(description="UNAVAILABLE: it is not loaded.")
    reason: str


_Body = TypeVar("_Body", IndexRequest, ChangeRequest)


def protocol_routes(
    models: Models, repository: Repository, metrics: Metrics, keys: Keys, max_images: int
) -> APIRouter:
    """The routes that answer with `models`, of which a request may have `max_images` images.

    Those of the repository need one of the administrator's `keys`.
    """
    router = APIRouter(prefix=PREFIX, tags=[OIP_TAG])

    @router.get("/", include_in_schema=False)
    @router.get("", summary="Server metadata")
    async def server_metadata() -> ServerMetadata:
        """Name, version and the extensions of the protocol that are supported."""
        return ServerMetadata(
            name=DISTRIBUTION, version=distribution_version(), extensions=list(EXTENSIONS)
        )

    async def statistics_of(served: Sequence[ServedModel]) -> dict[str, Any]:
        totals = await metrics.totals()
        versions = [one.version for one in served]
        return {"model_stats": [model_statistics(one, totals[one.key]) for one in versions]}

    @router.get("/models/stats", summary="Statistics of all models")
    async def all_statistics() -> dict[str, Any]:
        """Counts and durations of every model."""
        return await statistics_of(models.served)

    async def metadata(served: Sequence[ServedModel], _: Response) -> ModelMetadata:
        """The tensors of a model; -1 in a shape is the number of images."""
        version = served[0].version
        versions = [one.version.version for one in models.select(version.name)]
        return model_metadata(version, versions)

    async def readiness(served: Sequence[ServedModel], response: Response) -> ModelReadiness:
        """200 if it is loaded and the server is ready."""
        response.status_code = 200 if models.ready else 503
        return ModelReadiness(name=served[0].version.name, ready=models.ready)

    async def config(served: Sequence[ServedModel], _: Response) -> dict[str, Any]:
        """The configuration that Triton's clients read. `max_batch_size`: images a request."""
        return model_config(served[0].version, max_images)

    async def statistics(served: Sequence[ServedModel], _: Response) -> dict[str, Any]:
        """Counts and durations since the start, of all workers, as Triton's clients read them.

        Of the version, or of all of the model.
        """
        return await statistics_of(served)

    def add(
        path: str,
        answer: Callable[[Sequence[ServedModel], Response], Coroutine[Any, Any, Any]],
        kind: Any,
        summary: str,
    ) -> None:
        """The route with and without a version.

        `answer` gets the version, or all of the model, the highest first.
        """

        async def endpoint(request: Request, response: Response) -> Any:
            named = request.path_params
            return await answer(models.select(named["model"], named.get("version", "")), response)

        for owner in (MODEL, MODEL_VERSION):
            router.get(
                owner + path,
                name=f"model_{answer.__name__}",
                openapi_extra=openapi.request(owner),
                response_model=kind,
                summary=summary,
                description=answer.__doc__,
                responses=_UNKNOWN | ({503: {"model": kind}} if answer is readiness else {}),
            )(endpoint)

    add("/stats", statistics, dict[str, Any], "Model statistics")
    add("", metadata, ModelMetadata, "Model metadata")
    add("/ready", readiness, ModelReadiness, "Model readiness")
    add("/config", config, dict[str, Any], "Model configuration")

    @router.post(
        "/repository/index",
        summary="Models and versions that are there",
        response_model=list[RepositoryEntry],
        openapi_extra=openapi.request("", content=openapi.json(IndexRequest)),
        responses=errors(ProtocolError, OF_REPOSITORY),
    )
    async def repository_index(request: Request) -> list[dict[str, str]]:
        """Every version in the weights folder; with `ready` those that are loaded."""
        asked = await _administered(request, keys, IndexRequest)
        return repository_entries(await repository.index(), asked.ready)

    async def load(request: Request) -> Response:
        """Load a model, or what its files are now if it is loaded."""
        asked = await _administered(request, keys, ChangeRequest)
        check_repository_parameters(asked.parameters)
        await repository.load(request.path_params["model"])
        return Response()

    async def unload(request: Request) -> Response:
        """Unload a model; requests that came before are answered."""
        await _administered(request, keys, ChangeRequest)
        await repository.unload(request.path_params["model"])
        return Response()

    for name, endpoint in (("load", load), ("unload", unload)):
        path = f"/repository{MODEL}/{name}"
        router.post(
            path,
            name=f"{name}_model",
            summary=f"{name.capitalize()} a model",
            response_class=Response,
            openapi_extra=openapi.request(path, content=openapi.json(ChangeRequest)),
            responses=errors(ProtocolError, OF_REPOSITORY) | _UNKNOWN,
        )(endpoint)
    return router


_UNKNOWN = errors(ProtocolError, [404])


async def _administered(request: Request, keys: Keys, kind: type[_Body]) -> _Body:
    """The JSON body of a request that an administrator makes; no body is an empty object.

    FastAPI would read it before the key is checked, however large it is.

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
        return kind.model_validate_json(body.strip() or b"{}")
    except ValidationError as exc:
        (wrong,) = exc.errors(include_url=False)
    if wrong["type"] == "json_invalid":
        raise InvalidInput(f"body: is not JSON ({wrong['ctx']['error']})", field="body")
    field = ".".join(map(str, wrong["loc"])) or "body"
    raise invalid(field, shown(wrong["input"]), wrong["msg"].removeprefix("Input should be "))
