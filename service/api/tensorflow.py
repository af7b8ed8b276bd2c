"""TensorFlow Serving's REST API, for clients that come from there: prediction, and status.

`POST /v1/models/{model}[/versions/{version}]:predict`, and `GET` of the same without `:predict`.
A prediction has two outputs, `probabilities` and `label`.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from service.api.endpoints import path_of
from service.api.openapi import TENSORFLOW_TAG, UNKNOWN
from service.api.routes import MODEL, MODEL_VERSION, TENSORFLOW
from service.engine.models import Models


def verb_of(path: str) -> str:
    """The text after the colon of a path of this API, "" without a colon."""
    if not path.startswith(f"{TENSORFLOW}/"):
        return ""
    _, colon, verb = path.rpartition("/")[2].partition(":")
    return verb or "nothing" if colon else ""


class VersionStatus(BaseModel):
    """The state of a version."""

    version: str
    state: Literal["AVAILABLE", "UNLOADING"]
    status: dict[str, str] = {"error_code": "OK", "error_message": ""}


class ModelStatus(BaseModel):
    """The states of the versions of a model, and what KServe's version 1 protocol has instead."""

    model_version_status: list[VersionStatus]
    name: str
    ready: bool


def status_routes(models: Models) -> APIRouter:
    """`GET` of a model: the state of its versions."""
    router = APIRouter(prefix=TENSORFLOW, tags=[TENSORFLOW_TAG])

    @router.get(MODEL_VERSION, summary="Model status", responses=UNKNOWN)
    @router.get(MODEL, summary="Model status", responses=UNKNOWN)
    async def model_status(asked: Request) -> ModelStatus:
        """The versions of a model; AVAILABLE until the service stops."""
        name, version = asked.path_params["model"], asked.path_params.get("version", "")
        if verb_of(path_of(asked.scope)) and models.find(name, version) is None:
            raise HTTPException(405, headers={"Allow": "POST"})
        # HTTP begins when they are loaded.
        state: Literal["AVAILABLE", "UNLOADING"] = "AVAILABLE" if models.ready else "UNLOADING"
        served = models.select(name, version)
        versions = [VersionStatus(version=one.version.version, state=state) for one in served]
        return ModelStatus(
            model_version_status=versions, name=served[0].version.name, ready=models.ready
        )

    return router
