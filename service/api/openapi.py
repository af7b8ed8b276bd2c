"""The OpenAPI document: what FastAPI cannot see in an endpoint that reads its request itself.

Parameters and bodies come from the models of `schemas`; no endpoint is called through them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api import schemas
from service.api.paths import path_like
from service.api.routes import PREFIX, TENSORFLOW
from service.api.schemas import ENCODED_SEVEN, FLAT_SEVEN, SEVEN
from service.errors import STATUS
from service.forms.body import ACCEPTED
from service.forms.oip_json import LENGTH_HEADER
from service.forms.reader import OCTETS as BINARY

OIP_TAG, TENSORFLOW_TAG = "open inference protocol", "TensorFlow Serving"

_REF = "#/components/schemas/{model}"
_MODELS = (
    *(schemas.PredictRequest, schemas.InferRequest),
    *(schemas.TensorflowRows, schemas.TensorflowColumns),
    *(schemas.IndexRequest, schemas.ChangeRequest),
    *(schemas.ErrorResponse, schemas.ProtocolError),
)
"""Models of bodies and of errors. FastAPI would build a validator for each error of each route: two
thirds of the time in which the application is made."""


def json(*models: type[BaseModel], **examples: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a body that is JSON in the form of one of `models`, of `_MODELS`."""
    references = [{"$ref": _REF.format(model=one.__name__)} for one in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references, "title": "Body"}
    shown = {name: {"value": one} for name, one in examples.items()}
    return {"application/json": {"schema": schema} | ({"examples": shown} if shown else {})}


def small_body(model: type[BaseModel]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route with a body, which may be left out, of `_MODELS`."""
    return {"requestBody": {"content": json(model)}}


# Answers


def _header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


_RETRY_AFTER = {"Retry-After": _header("Seconds after which a retry may succeed.", "integer")}
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": _header("Bearer.")},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
# Only requests to the repository get 403. Clients never see 499: they have left.
_OF_PREDICTIONS = sorted(set(STATUS.values()) - {403, 499})


def _errors(
    model: type[schemas.ErrorResponse | schemas.ProtocolError], *statuses: int
) -> dict[int | str, dict[str, Any]]:
    """Answers with an error in the shape of `model`, as FastAPI's `responses`."""
    return {
        status: {
            "content": json(model),
            "description": " or ".join(code for code, of in STATUS.items() if of == status),
            "headers": _ERROR_HEADERS.get(status, {}),
        }
        for status in statuses
    }


UNKNOWN = _errors(schemas.ProtocolError, 404)
"""The answer of a route with a model in its path when it is not loaded."""

REPOSITORY = _errors(schemas.ProtocolError, 400, 401, 403, 413, 503)
"""Answers with an error of the routes of the repository."""

# The routes that take images

_FILE: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_FILES = {"type": "array", "minItems": 1, "items": _FILE["schema"]}
*_SINGLE, _FORM = (kind for kind in ACCEPTED if kind != "application/json")
_IMAGES = {
    **json(
        schemas.PredictRequest,
        base64={"images": [ENCODED_SEVEN]},
        nested={"images": [SEVEN]},
        flat={"images": [FLAT_SEVEN]},
        single={"images": SEVEN},
    ),
    **dict.fromkeys(_SINGLE, _FILE),
    _FORM: {
        "schema": {
            "type": "object",
            "description": "At least one file, under any name.",
            "minProperties": 1,
            "properties": {"image": _FILES},
        },
        "encoding": {"image": {"contentType": ", ".join(_SINGLE)}},
    },
}
_IMAGE = {"name": "image", "datatype": "UINT8", "shape": [1, 28, 28], "data": FLAT_SEVEN}
_TENSORS = {
    **json(schemas.InferRequest, flat={"inputs": [_IMAGE]}),
    BINARY: {
        "schema": {
            **_FILE["schema"],
            "description": f"With the header {LENGTH_HEADER}: so many bytes of JSON, then the "
            "binary tensors; with 0 the bytes of images, UINT8.",
        }
    },
}
_INSTANCES = json(
    *(schemas.TensorflowRows, schemas.TensorflowColumns),
    instances={"instances": [SEVEN]},
    inputs={"inputs": [SEVEN]},
    base64={"instances": [{"b64": ENCODED_SEVEN}]},
)
_INVOCATIONS = json(
    *(schemas.PredictRequest, schemas.TensorflowRows, schemas.TensorflowColumns),
    images={"images": [SEVEN]},
    instances={"instances": [SEVEN]},
    inputs={"inputs": [SEVEN]},
    base64={"instances": [{"b64": ENCODED_SEVEN}]},
)
_TIMES = {
    "X-Model-Version": _header("The version that computed the whole answer."),
    "Server-Timing": _header(
        "Milliseconds in each stage of the request; `batch;desc` is how many images the batch had "
        "that completed it, those of other requests included."
    ),
}
_LENGTH = {LENGTH_HEADER: _header("Bytes of JSON in an answer with binary tensors.", "integer")}


def image_route(path: str) -> dict[str, Any]:
    """What the document says of a route that takes images, as arguments of FastAPI's."""
    if path.startswith(PREFIX):
        return _image_route(
            "infer",
            "Inference",
            "JSON, or JSON followed by binary tensors, or the bytes of images.",
            OIP_TAG,
            _TENSORS,
            schemas.InferResponse,
            {"headers": _TIMES | _LENGTH, "content": {BINARY: _FILE}},
        )
    if path.startswith(TENSORFLOW):
        return _image_route(
            "predict_instances",
            "Prediction",
            "Images as `instances`, answered by row, or as `inputs`, by column.",
            TENSORFLOW_TAG,
            _INSTANCES,
            schemas.TensorflowPredictions | schemas.TensorflowOutputs,
            {"headers": _TIMES},
        )
    if path == "/explain":
        return _image_route(
            "explain",
            "See inside",
            "The outputs of each layer for one of at most 64 images, in float32 on the CPU.",
            "predict",
            _IMAGES,
            schemas.ExplainResponse,
            {"headers": _TIMES},
            schemas.ExplainQuery,
        )
    if path == "/invocations":
        return _image_route(
            "invoke",
            "Recognise digits, for SageMaker, MLflow and Vertex AI",
            "As `POST /predict`, or `instances` or `inputs`, answered by row as "
            "TensorFlow Serving's API does.",
            "predict",
            _IMAGES | _INVOCATIONS,
            schemas.PredictResponse | schemas.TensorflowPredictions,
            {"headers": _TIMES, "content": {BINARY: _FILE}},
            schemas.PredictQuery,
        )
    return _image_route(
        "predict",
        "Recognise digits",
        "One or many images of 28x28 pixels, ink high; or a picture of any size.",
        "predict",
        _IMAGES,
        schemas.PredictResponse,
        {"headers": _TIMES, "content": {BINARY: _FILE}},
        schemas.PredictQuery,
    )


def _image_route(
    name: str,
    summary: str,
    description: str,
    tag: str,
    content: Mapping[str, Any],
    answer: Any,
    good: dict[str, Any],
    query: type[BaseModel] | None = None,
) -> dict[str, Any]:
    parameters = [*_parameters("query", query), *_parameters("header", schemas.ImageHeaders)]
    error = schemas.ErrorResponse if query else schemas.ProtocolError
    return {
        "name": name,
        "tags": [tag],
        "summary": summary,
        "description": description,
        "response_model": answer,
        "responses": _errors(error, *_OF_PREDICTIONS) | {200: good},
        "openapi_extra": {
            "parameters": parameters,
            "requestBody": {"content": content, "required": True},
        },
    }


def _parameters(place: str, model: type[BaseModel] | None) -> list[dict[str, Any]]:
    """The fields of `model` as parameters, none of which is required."""
    fields = {} if model is None else model.model_json_schema()["properties"]
    return [
        {"name": name, "in": place, "required": False, "description": field.pop("description")}
        | {"schema": field}
        for name, field in fields.items()
    ]


def complete(document: dict[str, Any], *, needs_key: bool) -> dict[str, Any]:
    """FastAPI's `document` with paths' parameters, models of bodies, and keys if there are any."""
    components = document["components"]
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template=_REF
    )
    schemas = components["schemas"] | definitions["$defs"]
    components["schemas"] = dict(sorted(schemas.items()))
    for path, operations in document["paths"].items():
        placed = [_placeholder(name) for name in re.findall(r"\{(\w+)\}", path)]
        for operation in operations.values() if placed else ():
            operation["parameters"] = placed + operation.get("parameters", [])
    if needs_key:
        components["securitySchemes"] = {
            "bearerAuth": {"type": "http", "scheme": "bearer"},
            "apiKeyAuth": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearerAuth": []}, {"apiKeyAuth": []}]
        for path, operations in document["paths"].items():
            for operation in operations.values() if path_like(path).is_open else ():
                operation["security"] = []
    return document


def _placeholder(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": "404 if it is not loaded.",
        "schema": {"type": "string", "minLength": 1, "title": name.capitalize()},
    }
