"""TensorFlow Serving's REST API, for clients that come from there: prediction, and status.

`POST /v1/models/{model}[/versions/{version}]:predict`, and `GET` of the same without `:predict`.
A prediction has two outputs, `probabilities` and `label`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import orjson
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException

from lenet.nvtx import span
from lenet.pixels import Probabilities
from service.api.openapi import ProtocolError, model_parameters
from service.api.v2 import MODEL, MODEL_VERSION
from service.decode.pool import Body, Decoded, TensorflowSource
from service.engine.models import Models
from service.engine.queue import BatchAnswer, Request
from service.errors import ServiceError
from service.forms.tensorflow import read_tensorflow_body
from service.request import ENCODED_ROWS, ImageCall, ImageRoute, Reply, Wanted
from service.transport.answer import JSON, Answer, plain_error_answer

PREFIX = "/v1"

def verb_of(path: str) -> str:
    """What stands behind the colon of a path of this API, "" if there is none."""
    if not path.startswith(f"{PREFIX}/"):
        return ""
    _, colon, verb = path.rpartition("/")[2].partition(":")
    return verb or "nothing" if colon else ""


def status_routes(models: Models) -> APIRouter:
    """`GET` of a model: the state of its versions."""
    router = APIRouter(prefix=PREFIX, tags=["TensorFlow Serving"])
    unknown: dict[int | str, dict[str, Any]] = {
        404: {"model": ProtocolError, "description": "No such model or version"}
    }

    async def status(request: HttpRequest) -> dict[str, Any]:
        """Its versions; AVAILABLE until the service stops."""
        name, version = request.path_params["model"], request.path_params.get("version", "")
        if verb_of(request.scope["path"]) and models.find(name, version) is None:
            raise HTTPException(405, headers={"Allow": "POST"})
        state = "AVAILABLE" if models.ready else "UNLOADING"  # HTTP begins when they are loaded
        fine = {"error_code": "OK", "error_message": ""}
        return {
            "model_version_status": [
                {"version": one.version.version, "state": state, "status": fine}
                for one in models.select(name, version)
            ]
        }

    for owner in (MODEL, MODEL_VERSION):
        router.add_api_route(
            owner,
            status,
            summary="Model status",
            openapi_extra={"parameters": model_parameters(versioned=owner == MODEL_VERSION)},
            responses=unknown,
        )
    return router
