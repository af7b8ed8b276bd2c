"""The HTTP routes of the Open Inference Protocol besides inference.

These are metadata, configuration, statistics and the repository. Errors are objects with one
string, `error`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from service.api.open_inference import (
    EXTENSIONS,
    ModelMetadata,
    OpenInference,
    RepositoryEntry,
    ServerMetadata,
)
from service.api.openapi import OIP_TAG, REPOSITORY, UNKNOWN, small_body
from service.api.routes import MODEL, MODEL_VERSION, PREFIX
from service.api.schemas import ChangeRequest, IndexRequest, ModelNames
from service.errors import InvalidInput, TooLarge, invalid, shown
from wire.keys import Keys

_MAX_BODY_BYTES = 64 * 1024
"""Limit of repository request bodies."""


class ModelReadiness(BaseModel):
    """Whether a model can be used."""

    name: str
    ready: bool


_Body = TypeVar("_Body", IndexRequest, ChangeRequest)


def protocol_routes(answers: OpenInference, keys: Keys) -> APIRouter:
    """The routes that answer with `answers`.

    Those of the repository need one of the administrator's `keys`.
    """
    router = APIRouter(prefix=PREFIX, tags=[OIP_TAG])

    @router.get("", summary="Server metadata")
    async def server_metadata() -> ServerMetadata:
        """Name, version and the extensions of the protocol that are supported."""
        return answers.server(EXTENSIONS)

    @router.get("/models", summary="Names of the models")
    async def model_names() -> ModelNames:
        """The models that are loaded, the default one first."""
        return ModelNames(models=answers.models.listed)

    @router.get("/models/stats", summary="Statistics of all models")
    async def all_statistics() -> dict[str, Any]:
        """Counts and durations of every model."""
        return await answers.statistics()

    async def model_statistics(request: Request) -> dict[str, Any]:
        """Counts and durations since the start, of all workers, as Triton's clients read them.

        Of the version, or of all of the model.
        """
        return await answers.statistics(**request.path_params)

    async def model_metadata(request: Request) -> ModelMetadata:
        """The tensors of a model; -1 in a shape is the number of images."""
        return answers.metadata(**request.path_params)

    async def model_readiness(request: Request, response: Response) -> ModelReadiness:
        """200 if it is loaded and the server is ready."""
        name, ready = answers.metadata(**request.path_params).name, answers.models.ready
        response.status_code = 200 if ready else 503
        return ModelReadiness(name=name, ready=ready)

    async def model_config(request: Request) -> dict[str, Any]:
        """The configuration that Triton's clients read. `max_batch_size`: images a request."""
        return answers.config(**request.path_params)

    not_ready: dict[int | str, dict[str, Any]] = {503: {"model": ModelReadiness}}
    for endpoint, path, summary, responses in (
        (model_statistics, "/stats", "Model statistics", UNKNOWN),
        (model_metadata, "", "Model metadata", UNKNOWN),
        (model_readiness, "/ready", "Model readiness", UNKNOWN | not_ready),
        (model_config, "/config", "Model configuration", UNKNOWN),
    ):
        for owner in (MODEL, MODEL_VERSION):
            router.get(owner + path, summary=summary, responses=responses)(endpoint)

    @router.post(
        "/repository/index",
        summary="Models and versions that are there",
        openapi_extra=small_body(IndexRequest),
        responses=REPOSITORY,
    )
    async def repository_index(request: Request) -> list[RepositoryEntry]:
        """Every version in the weights folder; with `ready` those that are loaded."""
        asked = await _administered(request, keys, IndexRequest)
        return await answers.index(asked.ready)

    async def load_model(request: Request) -> Response:
        """Load a model, or what its files are now if it is loaded."""
        asked = await _administered(request, keys, ChangeRequest)
        await answers.load(request.path_params["model"], asked.parameters)
        return Response()

    async def unload_model(request: Request) -> Response:
        """Unload a model; requests that came before are answered."""
        await _administered(request, keys, ChangeRequest)
        await answers.unload(request.path_params["model"])
        return Response()

    for verb, change in (("load", load_model), ("unload", unload_model)):
        router.post(
            f"/repository{MODEL}/{verb}",
            summary=f"{verb.capitalize()} a model",
            response_class=Response,
            openapi_extra=small_body(ChangeRequest),
            responses=REPOSITORY | UNKNOWN,
        )(change)
    return router


async def _administered(request: Request, keys: Keys, kind: type[_Body]) -> _Body:
    """The JSON body of a request that an administrator makes; no body is an empty object.

    FastAPI would read it before the key is checked, however large it is.

    Raises: Unauthorized, Forbidden, TooLarge, InvalidInput.
    """
    if (error := keys.check(request.headers, admin=True)) is not None:
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
