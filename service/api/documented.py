"""The routes that take images, as the OpenAPI document has them.

They are answered on the connection, before the application: see `transport.head`. Here FastAPI
generates their documentation, and the answers to other methods of their paths.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from service.api.openapi import (
    FILE,
    IN_JSON,
    IN_JSON_AND_BYTES,
    IN_JSON_OR_BYTES,
    INFER_EXAMPLES,
    PREDICT_EXAMPLES,
    TENSORFLOW_EXAMPLES,
    ErrorResponse,
    ExplainQuery,
    ExplainResponse,
    InferRequest,
    InferResponse,
    ModelName,
    ModelVersion,
    PredictQuery,
    PredictRequest,
    PredictResponse,
    ProtocolError,
    TensorflowColumns,
    TensorflowOutputs,
    TensorflowPredictions,
    TensorflowRows,
    Timeout,
    errors,
)
from service.api.tensorflow import PREFIX as TENSORFLOW
from service.api.v2 import MODEL, MODEL_VERSION, PREFIX
from service.forms.oip_json import LENGTH_HEADER
from service.request import BINARY
from service.request import MAX_TIMEOUT_MS as LIMIT

_PICTURES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
_FILES = {"type": "array", "minItems": 1, "items": FILE["schema"]}
_FORM = {
    "schema": {
        "type": "object",
        "description": "At least one file, under any name.",
        "minProperties": 1,
        "properties": {"image": _FILES},
        "additionalProperties": _FILES,
    },
    "encoding": {"image": {"contentType": ", ".join((BINARY, "application/x-npy", *_PICTURES))}},
}
_IMAGES = {
    **dict.fromkeys((BINARY, "application/x-npy", *_PICTURES), FILE),
    "multipart/form-data": _FORM,
}
_BYTES = {
    "schema": {
        **FILE["schema"],
        "description": f"With the header {LENGTH_HEADER}: so many bytes of JSON, then the binary "
        "tensors; with 0 the bytes of images, UINT8.",
    }
}

_PredictQuery = Annotated[PredictQuery, Query()]
_ExplainQuery = Annotated[ExplainQuery, Query()]
_Images = Annotated[PredictRequest, Body(openapi_examples=PREDICT_EXAMPLES)]
_Tensors = Annotated[InferRequest, Body(openapi_examples=INFER_EXAMPLES)]
_Instances = Annotated[
    TensorflowRows | TensorflowColumns, Body(openapi_examples=TENSORFLOW_EXAMPLES)
]


class _Documented(APIRoute):
    """A route whose endpoint is never called; it has the signature to document."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def not_found(_: Request) -> Response:
            # Starlette takes a path that ends in a line break for the path before it.
            raise HTTPException(404)

        return not_found


def documented_routes(*, explain: bool) -> APIRouter:
    """The routes that take images, with `POST /explain` if it is on."""
    router = APIRouter(route_class=_Documented)

    @router.post(
        "/predict",
        tags=["predict"],
        summary="Recognise digits",
        operation_id="predict",
        response_model=PredictResponse,
        responses={**IN_JSON_OR_BYTES, **errors(ErrorResponse)},
        openapi_extra={"requestBody": {"content": _IMAGES}},
    )
    async def predict(query: _PredictQuery, body: _Images, timeout_ms: Timeout = LIMIT) -> None:
        """One or many images of 28x28 pixels, ink high; or a picture of any size."""

    async def explain_digit(
        query: _ExplainQuery, body: _Images, timeout_ms: Timeout = LIMIT
    ) -> None:
        """What each layer of a model computes of an image, in float32 on the CPU.

        At most 64 images, of which one is explained.
        """

    if explain:
        router.post(
            "/explain",
            tags=["predict"],
            summary="See inside",
            operation_id="explain",
            response_model=ExplainResponse,
            responses={**IN_JSON, **errors(ErrorResponse)},
            openapi_extra={"requestBody": {"content": _IMAGES}},
        )(explain_digit)

    async def infer(model: ModelName, body: _Tensors, timeout_ms: Timeout = LIMIT) -> None:
        """JSON, or JSON followed by binary tensors, or the bytes of images."""

    async def infer_by_version(
        model: ModelName, version: ModelVersion, body: _Tensors, timeout_ms: Timeout = LIMIT
    ) -> None: ...

    for owner, endpoint in ((MODEL, infer), (MODEL_VERSION, infer_by_version)):
        router.post(
            f"{PREFIX}{owner}/infer",
            tags=["open inference protocol"],
            summary="Inference",
            description=infer.__doc__,
            operation_id=endpoint.__name__,
            response_model=InferResponse,
            responses={**IN_JSON_AND_BYTES, **errors(ProtocolError)},
            openapi_extra={"requestBody": {"content": {BINARY: _BYTES}}},
        )(endpoint)

    async def predict_instances(
        model: ModelName, body: _Instances, timeout_ms: Timeout = LIMIT
    ) -> None:
        """Images as `instances`, answered by row, or as `inputs`, by column."""

    async def predict_instances_by_version(
        model: ModelName, version: ModelVersion, body: _Instances, timeout_ms: Timeout = LIMIT
    ) -> None: ...

    tensorflow = ((MODEL, predict_instances), (MODEL_VERSION, predict_instances_by_version))
    for owner, function in tensorflow:
        router.post(
            f"{TENSORFLOW}{owner}:predict",
            tags=["TensorFlow Serving"],
            summary="Prediction",
            description=predict_instances.__doc__,
            operation_id=function.__name__,
            response_model=TensorflowPredictions | TensorflowOutputs,
            responses={**IN_JSON, **errors(ProtocolError)},
        )(function)
    return router
