"""Models of parameters, bodies and answers: FastAPI generates the OpenAPI document from them.

Predictions are neither read nor written by these models, which would take too long; tests compare.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Header, Path
from pydantic import BaseModel, ConfigDict, Field

from service.forms.body import Digits, Invert
from service.forms.oip_json import LENGTH_HEADER
from service.request import BINARY, MAX_TIMEOUT_MS, TIMEOUT_HEADER

MAX_EXPLAINED_IMAGES = 64
MAX_NOISE = 10

Responses = dict[int | str, dict[str, Any]]
"""The answers of a route by status, as FastAPI's `responses`."""


def example_seven() -> list[list[int]]:
    """A seven drawn with two strokes, 28 x 28."""
    image = [[0] * 28 for _ in range(28)]
    for row in range(6, 9):
        image[row][7:20] = [254] * 13
    for row in range(9, 23):
        right = 20 - (row - 8) * 2 // 3
        image[row][right - 3 : right] = [254] * 3
    return image


_SEVEN = example_seven()
_FLAT_SEVEN = [pixel for row in _SEVEN for pixel in row]
_ENCODED_SEVEN = base64.b64encode(bytes(_FLAT_SEVEN)).decode()
_PROBABILITIES = [0.00001] * 7 + [0.9998] + [0.00005, 0.00008]
_PREDICTION = {"label": 7, "confidence": 0.9998, "probabilities": _PROBABILITIES}

# Parameters

ModelName = Annotated[str, Path(min_length=1, description="The model.")]
ModelVersion = Annotated[
    str, Path(min_length=1, description="The version of the model; 404 if it is not loaded.")
]
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


class PredictQuery(BaseModel):
    """The query of `POST /predict`."""

    model: str = Field("", description="The model; the default one without.")
    version: str = Field(
        "", description="The version of the model, 404 if it is not loaded; the highest without."
    )
    invert: Invert = Field(
        "auto",
        description="Whether ink is dark on light paper. auto detects it in pictures and leaves "
        "raw pixels as they are.",
    )
    digits: Digits = Field(
        "one",
        description="How many digits each picture shows. With several each separate digit, 64 at "
        "most, is an image of the request, in reading order. Of no effect on raw pixels.",
    )


class ExplainQuery(PredictQuery):
    """The query of `POST /explain`."""

    index: int = Field(
        0, ge=0, le=MAX_EXPLAINED_IMAGES - 1, description="Which image is explained."
    )
    biases: Literal["on", "off"] = Field("on", description="off computes with all biases 0.")
    noisy: str = Field(
        "",
        description="The layer whose weights get normal noise, always the same; with `noise`.",
    )
    noise: float = Field(
        0, ge=0, le=MAX_NOISE, description="In standard deviations of these weights."
    )


# Bodies of requests

_Item = TypeVar("_Item")
_Some = Annotated[list[_Item], Field(min_length=1)]
Pixel = Annotated[int, Field(ge=0, le=255)]
Row = Annotated[list[Pixel], Field(min_length=28, max_length=28)]
Rows = Annotated[list[Row], Field(min_length=28, max_length=28)]
Flat = Annotated[list[Pixel], Field(min_length=784, max_length=784)]
Encoded = Annotated[
    str,
    Field(
        pattern="^[A-Za-z0-9+/]{1046}==$",
        min_length=1048,
        max_length=1048,
        json_schema_extra={"contentEncoding": "base64"},
    ),
]


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PredictRequest(_Exact):
    """Images of 28 x 28 pixels, ink high."""

    images: _Some[Rows | Flat | Encoded] | Rows | Flat | Encoded = Field(
        description="A list of images, or one image. Pixels have no fraction, not even 1.0."
    )


class EncodedImage(_Exact):
    """An image of 784 bytes in base64."""

    b64: Encoded


class NamedRows(_Exact):
    """28 rows of 28 pixels."""

    image: Rows


class NamedFlat(_Exact):
    """784 pixels."""

    image: Flat


class NamedEncoded(_Exact):
    """784 bytes in base64."""

    image: EncodedImage


class NamedImages(_Exact):
    """Images of one form."""

    image: _Some[Rows] | _Some[Flat] | _Some[EncodedImage]


class _Signed(_Exact):
    signature_name: Literal["", "serving_default"] = ""


class TensorflowRows(_Signed):
    """Images that are answered by row."""

    instances: (
        _Some[Rows]
        | _Some[Flat]
        | _Some[EncodedImage]
        | _Some[NamedRows]
        | _Some[NamedFlat]
        | _Some[NamedEncoded]
    ) = Field(
        description="Images of one form: 28 rows of 28 pixels, 784 pixels, or their bytes, each "
        "also as `image` of an object."
    )


class TensorflowColumns(_Signed):
    """Images that are answered by column."""

    inputs: _Some[Rows] | _Some[Flat] | _Some[EncodedImage] | NamedImages


class InferInput(BaseModel):
    """The images."""

    name: Literal["image"]
    datatype: Literal["UINT8", "FP32"]
    shape: list[Annotated[int, Field(ge=0)]]
    data: list[Any] = Field([], description="Whole numbers 0 to 255, flat or nested.")
    parameters: dict[str, Any] = {}


class InferRequestedOutput(BaseModel):
    """An output that is wanted."""

    name: Literal["probabilities", "label"]
    parameters: dict[str, Any] = {}


class InferRequest(BaseModel):
    """A request of the Open Inference Protocol."""

    id: str = Field("", max_length=1024)
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=1)]
    outputs: list[InferRequestedOutput] = []
    parameters: dict[str, Any] = {}


_IMAGE = {"name": "image", "datatype": "UINT8", "shape": [1, 28, 28], "data": _FLAT_SEVEN}
PREDICT_EXAMPLES: dict[str, Any] = {
    "base64": {"summary": "784 bytes in base64", "value": {"images": [_ENCODED_SEVEN]}},
    "nested": {"summary": "28 rows of 28", "value": {"images": [_SEVEN]}},
    "flat": {"summary": "784 integers", "value": {"images": [_FLAT_SEVEN]}},
    "single": {"summary": "one image without a list", "value": {"images": _SEVEN}},
}
INFER_EXAMPLES: dict[str, Any] = {"flat": {"value": {"inputs": [_IMAGE]}}}
TENSORFLOW_EXAMPLES: dict[str, Any] = {
    "instances": {"value": {"instances": [_SEVEN]}},
    "inputs": {"value": {"inputs": [_SEVEN]}},
    "base64": {"value": {"instances": [{"b64": _ENCODED_SEVEN}]}},
}

# Answers


def _example(**document: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": document})


class ImagePrediction(BaseModel):
    """The prediction for one image."""

    label: int = Field(description="The class with the highest probability.", examples=[7])
    name: str = Field(
        "",
        description="The name of the class; only of a model whose classes have other names than "
        "their numbers. `/info` has all names.",
    )
    confidence: float = Field(ge=0, le=1, description="Its probability.", examples=[0.9998])
    probabilities: list[float] = Field(
        min_length=2,
        description="Of the classes, of digits 0 to 9; they sum to 1.",
    )


class PredictionWarning(BaseModel):
    """Why the prediction for an image of a picture may mean nothing."""

    image: int = Field(description="Index of the prediction.", ge=0)
    code: str = Field(
        description="several_shapes: the picture shows several separate shapes, which were read as "
        "one digit. not_a_digit: the shape is unlike any digit. More codes may follow.",
        examples=["several_shapes"],
    )
    message: str = Field(description="What was found, what to do.")


class PredictResponse(BaseModel):
    """The predictions, in the order of the images."""

    model_config = _example(model="lenet", version="1", predictions=[_PREDICTION])

    model: str
    version: str
    predictions: list[ImagePrediction]
    warnings: list[PredictionWarning] = Field(
        default_factory=list,
        description="About pictures; absent if there is none. Raw pixels are never warned of. At "
        "most 256.",
    )


class ExplainedLayer(BaseModel):
    """The values of a layer: low + byte * (high - low) / 255 for each byte of `data`."""

    name: str = Field(description="As its tensors in the weight file.", examples=["conv1"])
    kind: Literal["filters", "convolution", "pooling", "dense", "logits"] = Field(
        description="filters are the weights of a first convolution. A convolution and a dense "
        "layer include bias and activation."
    )
    shape: list[int] = Field(examples=[[20, 24, 24]])
    low: float | None = Field(None, description="The lowest value.")
    high: float | None = Field(None, description="The highest value.")
    data: str | None = Field(
        None,
        description="A byte for each value, in C order, in base64; absent in layers beyond 262,144 "
        "values together.",
    )
    values: list[float] | None = Field(None, description="Of the logits, instead of the above.")


class ExplainResponse(BaseModel):
    """What each layer computes of one image."""

    model_config = _example(
        model="mlp",
        version="1",
        images=[_ENCODED_SEVEN],
        index=0,
        prediction=_PREDICTION,
        layers=[
            {
                "name": "dense1",
                "kind": "dense",
                "shape": [3],
                "low": 0.0,
                "high": 4.1,
                "data": base64.b64encode(bytes((0, 255, 17))).decode(),
            },
            {
                "name": "dense2",
                "kind": "logits",
                "shape": [10],
                "values": [-1.5, 0.2, 1.1, 0.8, -2.0, -0.9, -5.5, 11.2, -0.1, 1.9],
            },
        ],
    )

    model: str
    version: str
    images: list[str] = Field(description="All images as prepared, 784 bytes each in base64.")
    index: int = Field(description="Which of them is explained.")
    prediction: ImagePrediction
    warnings: list[PredictionWarning] = Field(
        default_factory=list, description="As those of a prediction; absent if there is none."
    )
    layers: list[ExplainedLayer]


class InferOutput(BaseModel):
    """An output."""

    name: str
    datatype: Literal["FP32", "INT64", "BYTES"]
    shape: list[int]
    data: list[Any] = Field([], description="Absent of a binary tensor.")
    parameters: dict[str, Any] = {}


class InferResponse(BaseModel):
    """The outputs."""

    model_config = _example(
        model_name="lenet",
        model_version="1",
        outputs=[
            {"name": "probabilities", "datatype": "FP32", "shape": [1, 10], "data": _PROBABILITIES},
            {"name": "label", "datatype": "INT64", "shape": [1], "data": [7]},
        ],
    ) | ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str = Field("", description="That of the request; absent if it has none.")
    parameters: dict[str, Any] = {}
    outputs: list[InferOutput]


class TensorflowRow(BaseModel):
    """The outputs for one image."""

    probabilities: list[float]
    label: int


class TensorflowPredictions(BaseModel):
    """The outputs by row."""

    model_config = _example(predictions=[{"probabilities": _PROBABILITIES, "label": 7}])

    predictions: list[TensorflowRow]


class TensorflowTable(BaseModel):
    """The outputs for all images."""

    probabilities: list[list[float]]
    label: list[int]


class TensorflowOutputs(BaseModel):
    """The outputs by column."""

    model_config = _example(outputs={"probabilities": [_PROBABILITIES], "label": [7]})

    outputs: TensorflowTable


class LoadedModel(BaseModel):
    """A loaded model."""

    name: str
    version: str
    device: str = Field(
        description="What computes it: cpu, or cuda and the numbers of the GPUs.",
        examples=["cpu", "cuda:0,1"],
    )
    sha256: str = Field(description="Of the weight file.")
    parameters: int = Field(description="Number of learned parameters.")
    accuracy: float | None = Field(description="On the test set; null if it was not measured.")
    epochs: int
    seed: int
    dataset_sha256: str = Field(description="Empty if the dataset is not known.")
    labels: list[str]
    loaded_at: datetime = Field(description="When its file was read.")


class InfoResponse(BaseModel):
    """Loaded models, device and limits."""

    name: str
    version: str
    grpc_port: int
    default_model: str
    models: list[LoadedModel]
    limits: dict[str, int]
    explain: bool = Field(description="Whether /explain answers.")


class Health(BaseModel):
    """The answer of the probes."""

    live: bool
    ready: bool


# Errors


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str = Field(description="From a closed set.", examples=["invalid_input"])
    field: str = Field(
        description='The part of the request that is wrong; "" if no single part is.',
        examples=["images"],
    )
    message: str = Field(description="What was received, what was expected, what to do.")


class ErrorResponse(BaseModel):
    """Every answer that is not a prediction."""

    error: ErrorDetail


class ProtocolError(BaseModel):
    """Every answer of the Open Inference Protocol that is not a success."""

    error: str = Field(description="What was received, what was expected.")


def _header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


_RETRY_AFTER = {"Retry-After": _header("Seconds after which a retry may succeed.", "integer")}
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": _header("Bearer.")},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
_ERRORS = {
    400: ("invalid_input", "images[0]", "images[0]: got 783 values, expected 28 rows of 28, ..."),
    401: (
        "unauthorized",
        "authorization",
        "authorization: got none, expected 'Bearer KEY' with one of the service's keys",
    ),
    403: (
        "forbidden",
        "authorization",
        "authorization: expected one of the administrator's keys",
    ),
    404: ("unknown_model", "model", "model 'vgg' is not loaded, expected one of lenet, mlp"),
    408: ("body_timeout", "body", "body: got 100 bytes in 30 s, expected the whole body"),
    413: ("too_large", "images", "images: got 20000 images, expected at most 16384 in a request"),
    415: (
        "unsupported_media_type",
        "content-type",
        "content-type: got 'text/plain', expected one of application/json, ...",
    ),
    429: ("overloaded", "", "32768 rows wait and 1 more would pass the limit of 32768"),
    500: ("internal", "", "internal error; see the server log"),
    503: ("unavailable", "", "the service is stopping; send this to another instance"),
    504: ("deadline_exceeded", "", "no answer within 50 ms"),
}
OF_PREDICTIONS = tuple(status for status in _ERRORS if status != 403)
OF_REPOSITORY = (400, 401, 403, 413, 503)


def errors(
    model: type[ErrorResponse | ProtocolError], statuses: Sequence[int] = OF_PREDICTIONS
) -> Responses:
    """Answers with an error in the shape of `model`, each with its example and headers."""
    responses: Responses = {}
    for status in statuses:
        code, field, message = _ERRORS[status]
        detail = {"code": code, "field": field, "message": message}
        example = {"error": detail if model is ErrorResponse else message}
        responses[status] = {
            "model": model,
            "content": {"application/json": {"example": example}},
            "headers": _ERROR_HEADERS.get(status, {}),
        }
    return responses


FILE: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
TIMES = {
    "X-Model-Version": _header("The version that computed the whole answer."),
    "Server-Timing": _header(
        "Milliseconds in each stage of the request; `batch;desc` is how many images the batch had "
        "that completed it, those of other requests included."
    ),
}
IN_JSON: Responses = {200: {"headers": TIMES}}
# float32, little-endian, one for each class
IN_JSON_OR_BYTES: Responses = {200: {"headers": TIMES, "content": {BINARY: FILE}}}
IN_JSON_AND_BYTES: Responses = {
    200: {
        "headers": {
            LENGTH_HEADER: _header("Bytes of JSON in an answer with binary tensors.", "integer"),
            **TIMES,
        },
        "content": {BINARY: FILE},
    }
}
