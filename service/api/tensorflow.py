"""TensorFlow Serving's REST API, for clients that come from there.

`POST /v1/models/{model}:predict` predicts, `GET` of the same without `:predict` is the status, with
`/metadata` behind it the tensors. Behind the model may stand `/versions/{version}` or
`/labels/{version}`. A prediction has the outputs `probabilities` and `label`, and `name` if the
model's classes have names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from service.api.endpoints import path_of
from service.api.openapi import TENSORFLOW_TAG, UNKNOWN
from service.api.routes import MODEL, MODEL_LABEL, MODEL_VERSION, TENSORFLOW
from service.api.schemas import ModelNames
from service.engine.models import Models
from service.forms.tensorflow import has_names
from service.forms.tensors import ALL_OUTPUTS, INPUT_METADATA, TensorMetadata, output_metadata


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
    version_labels: list[str]


class ModelStatus(BaseModel):
    """The states of the versions of a model, and what KServe's version 1 protocol has instead."""

    model_version_status: list[VersionStatus]
    name: str
    ready: bool


class ModelSpec(BaseModel):
    """The version that `SignatureMetadata` is of."""

    name: str
    signature_name: Literal[""] = ""
    version: str


class SignatureMetadata(BaseModel):
    """The tensors of a version, as the only signature of a SavedModel."""

    model_spec: ModelSpec
    metadata: dict[str, Any]


def status_routes(models: Models) -> APIRouter:
    """`GET` of the models, and of one: the state of its versions, and its tensors."""
    router = APIRouter(prefix=TENSORFLOW, tags=[TENSORFLOW_TAG])

    @router.get(MODEL_LABEL, summary="Model status", responses=UNKNOWN)
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
        versions = [
            VersionStatus(
                version=one.version.version,
                state=state,
                version_labels=models.labels_of(one),
            )
            for one in served
        ]
        return ModelStatus(
            model_version_status=versions, name=served[0].version.name, ready=models.ready
        )

    @router.get("/models", summary="Names of the models")
    async def model_list() -> ModelNames:
        """The models that are loaded, as KServe's version 1 protocol lists them."""
        return ModelNames(models=models.listed)

    @router.get(f"{MODEL_LABEL}/metadata", summary="Model metadata", responses=UNKNOWN)
    @router.get(f"{MODEL_VERSION}/metadata", summary="Model metadata", responses=UNKNOWN)
    @router.get(f"{MODEL}/metadata", summary="Model metadata", responses=UNKNOWN)
    async def model_signature(asked: Request) -> SignatureMetadata:
        """The tensors of the only signature, `serving_default`; size -1 is the number of images."""
        path = asked.path_params
        version = models.get(path["model"], path.get("version", "")).version
        outputs = output_metadata(ALL_OUTPUTS, -1, version.weights.model.classes)
        if has_names(version.labels):
            outputs += (TensorMetadata("name", "STRING", (-1,)),)
        signature = {
            "inputs": _tensors([INPUT_METADATA]),
            "outputs": _tensors(outputs),
            "method_name": "tensorflow/serving/predict",
        }
        return SignatureMetadata(
            model_spec=ModelSpec(name=version.name, version=version.version),
            metadata={"signature_def": {"signature_def": {"serving_default": signature}}},
        )

    return router


def _tensors(tensors: Iterable[TensorMetadata]) -> dict[str, Any]:
    """`tensors` as JSON has TensorFlow's `TensorInfo`."""
    types = {"FP32": "DT_FLOAT"}
    return {
        one.name: {
            "dtype": types.get(one.datatype, f"DT_{one.datatype}"),
            "tensor_shape": {
                "dim": [{"size": str(side), "name": ""} for side in one.shape],
                "unknown_rank": False,
            },
            "name": f"{one.name}:0",
        }
        for one in tensors
    }
