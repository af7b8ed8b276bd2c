"""The OpenAPI document: parameters, errors, and the routes that take images.

Those routes are answered on the connection, before the application: see `transport.head`. Here
FastAPI generates their documentation from the models of `schemas`, and the answers to other methods
of their paths.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from service.api.schemas import (
    ENCODED_SEVEN,
    FLAT_SEVEN,
    SEVEN,
    ErrorResponse,
    ExplainQuery,
    ExplainResponse,
    InferRequest,
    InferResponse,
    PredictQuery,
    PredictRequest,
    PredictResponse,
    ProtocolError,
    TensorflowColumns,
    TensorflowOutputs,
    TensorflowPredictions,
    TensorflowRows,
)
from service.forms.body import ACCEPTED
from service.forms.body import OCTETS as BINARY
from service.forms.oip_json import LENGTH_HEADER
from service.transport.answer import STATUS

PROTOCOL = "open inference protocol"
TIMEOUT_HEADER = "X-Request-Timeout-Ms"
MAX_TIMEOUT_MS = 3_600_000

PREFIX = "/v2"
TENSORFLOW = "/v1"
MODEL = "/models/{model}"
MODEL_VERSION = f"{MODEL}/versions/{{version}}"


# Parameters


_Name = Annotated[str, Path(min_length=1, description="404 if it is not loaded.")]


def _model(model: _Name) -> None: ...


def _version(version: _Name) -> None: ...


OF_MODEL, _OF_VERSION = [Depends(_model)], [Depends(_model), Depends(_version)]
OWNERS = ((MODEL, OF_MODEL), (MODEL_VERSION, _OF_VERSION))
"""Paths that name a model, and a version of it, with the dependencies that document these names.

They check nothing; endpoints read `Request.path_params`.
"""

Timeout = Annotated[
    int,
    Header(
        alias=TIMEOUT_HEADER,
        ge=1,
        le=MAX_TIMEOUT_MS,
        description="Deadline in milliseconds from the request's arrival, the upload of its body "
        "included; at most the service's request_timeout_ms, see /info.",
    ),
]


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
OF_REPOSITORY = (400, 401, 403, 413, 503)


def errors(
    model: type[ErrorResponse | ProtocolError], statuses: Sequence[int] = _OF_PREDICTIONS
) -> dict[int | str, dict[str, Any]]:
    """Answers with an error in the shape of `model`, as FastAPI's `responses`."""
    return {
        status: {
            "model": model,
            "description": " or ".join(code for code, of in STATUS.items() if of == status),
            "headers": _ERROR_HEADERS.get(status, {}),
        }
        for status in statuses
    }


# The routes that take images

_FILE: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_FILES = {"type": "array", "minItems": 1, "items": _FILE["schema"]}
*_SINGLE, _FORM = (kind for kind in ACCEPTED if kind != "application/json")
_IMAGES = {
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
_TENSORS = {
    "schema": {
        **_FILE["schema"],
        "description": f"With the header {LENGTH_HEADER}: so many bytes of JSON, then the binary "
        "tensors; with 0 the bytes of images, UINT8.",
    }
}
_TIMES = {
    "X-Model-Version": _header("The version that computed the whole answer."),
    "Server-Timing": _header(
        "Milliseconds in each stage of the request; `batch;desc` is how many images the batch had "
        "that completed it, those of other requests included."
    ),
}
_LENGTH = {LENGTH_HEADER: _header("Bytes of JSON in an answer with binary tensors.", "integer")}


def _examples(**documents: dict[str, Any]) -> Any:
    return Body(openapi_examples={name: {"value": one} for name, one in documents.items()})


_Images = Annotated[
    PredictRequest,
    _examples(
        base64={"images": [ENCODED_SEVEN]},
        nested={"images": [SEVEN]},
        flat={"images": [FLAT_SEVEN]},
        single={"images": SEVEN},
    ),
]
_IMAGE = {"name": "image", "datatype": "UINT8", "shape": [1, 28, 28], "data": FLAT_SEVEN}
_Inputs = Annotated[InferRequest, _examples(flat={"inputs": [_IMAGE]})]
_Instances = Annotated[
    TensorflowRows | TensorflowColumns,
    _examples(
        instances={"instances": [SEVEN]},
        inputs={"inputs": [SEVEN]},
        base64={"instances": [{"b64": ENCODED_SEVEN}]},
    ),
]


_OfPredict = Annotated[PredictQuery, Query()]
_OfExplain = Annotated[ExplainQuery, Query()]
_LIMIT = MAX_TIMEOUT_MS


class _Documented(APIRoute):
    """A route whose endpoint is never called; it has the signature to document."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def not_found(_: Request) -> Response:
            # Starlette takes a path that ends in a line break for the path before it.
            raise HTTPException(404)

        return not_found


def image_routes(*, explained: bool) -> APIRouter:
    """The routes that take images, with `POST /explain` if it is on."""
    router = APIRouter(route_class=_Documented)
    add = partial(router.add_api_route, methods=["POST"])

    def predict(query: _OfPredict, body: _Images, timeout_ms: Timeout = _LIMIT) -> None:
        """One or many images of 28x28 pixels, ink high; or a picture of any size."""

    add(
        "/predict",
        predict,
        tags=["predict"],
        summary="Recognise digits",
        operation_id="predict",
        response_model=PredictResponse,
        responses=errors(ErrorResponse) | {200: {"headers": _TIMES, "content": {BINARY: _FILE}}},
        openapi_extra={"requestBody": {"content": _IMAGES}},
    )

    def explain(query: _OfExplain, body: _Images, timeout_ms: Timeout = _LIMIT) -> None:
        """The outputs of each layer for one of at most 64 images, in float32 on the CPU."""

    if explained:
        add(
            "/explain",
            explain,
            tags=["predict"],
            summary="See inside",
            operation_id="explain",
            response_model=ExplainResponse,
            responses=errors(ErrorResponse) | {200: {"headers": _TIMES}},
            openapi_extra={"requestBody": {"content": _IMAGES}},
        )

    def infer(body: _Inputs, timeout_ms: Timeout = _LIMIT) -> None:
        """JSON, or JSON followed by binary tensors, or the bytes of images."""

    def predict_instances(body: _Instances, timeout_ms: Timeout = _LIMIT) -> None:
        """Images as `instances`, answered by row, or as `inputs`, by column."""

    outputs = {"headers": _TIMES | _LENGTH, "content": {BINARY: _FILE}}
    for owner, dependencies in OWNERS:
        suffix = "_by_version" if owner == MODEL_VERSION else ""
        add(
            f"{PREFIX}{owner}/infer",
            infer,
            dependencies=dependencies,
            tags=[PROTOCOL],
            summary="Inference",
            operation_id=f"infer{suffix}",
            response_model=InferResponse,
            responses=errors(ProtocolError) | {200: outputs},
            openapi_extra={"requestBody": {"content": {BINARY: _TENSORS}}},
        )
        add(
            f"{TENSORFLOW}{owner}:predict",
            predict_instances,
            dependencies=dependencies,
            tags=["TensorFlow Serving"],
            summary="Prediction",
            operation_id=f"predict_instances{suffix}",
            response_model=TensorflowPredictions | TensorflowOutputs,
            responses=errors(ProtocolError) | {200: {"headers": _TIMES}},
        )
    return router
