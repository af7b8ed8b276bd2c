"""What the OpenAPI document states: answer models, parameters, bodies, headers and examples.

The answer to `POST /predict` is not built from these models; tests compare the two.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from service.forms.oip_json import LENGTH_HEADER
from service.request import BINARY, MAX_TIMEOUT_MS, TIMEOUT_HEADER

MAX_EXPLAINED_IMAGES = 64
MAX_NOISE = 10

APPLICATION: dict[str, Any] = {
    "title": "lenet-serve",
    "summary": "Handwritten digits, recognised over HTTP and gRPC.",
    "license_info": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
}


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

    model: str = Field(examples=["lenet"])
    version: str = Field(examples=["1"])
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

    model: str = Field(examples=["lenet"])
    version: str = Field(examples=["1"])
    images: list[str] = Field(description="All images as prepared, 784 bytes each in base64.")
    index: int = Field(description="Which of them is explained.")
    prediction: ImagePrediction
    warnings: list[PredictionWarning] = Field(
        default_factory=list, description="As those of a prediction; absent if there is none."
    )
    layers: list[ExplainedLayer]


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


def example_seven() -> list[list[int]]:
    """A seven drawn with two strokes, 28 x 28."""
    image = [[0] * 28 for _ in range(28)]
    for row in range(6, 9):
        image[row][7:20] = [254] * 13
    for row in range(9, 23):
        right = 20 - (row - 8) * 2 // 3
        image[row][right - 3 : right] = [254] * 3
    return image


def _header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


_RETRY_AFTER = {"Retry-After": _header("Seconds after which a retry may succeed.", "integer")}
_CHALLENGE = {"WWW-Authenticate": _header("Bearer.")}
_ERROR_HEADERS = {401: _CHALLENGE, 429: _RETRY_AFTER, 503: _RETRY_AFTER}
_TIMES = {
    "X-Model-Version": _header("The version that computed the whole answer."),
    "Server-Timing": _header(
        "Milliseconds in each stage of the request; `batch;desc` is how many images the batch had "
        "that completed it, those of other requests included."
    ),
}
_SEVEN_PROBABILITIES = [0.00001] * 7 + [0.9998] + [0.00005, 0.00008]
_ERRORS = {
    400: ("invalid_input", "images[0]", "images[0]: got 783 values, expected 28 rows of 28, ..."),
    401: (
        "unauthorized",
        "authorization",
        "authorization: got none, expected Bearer and one of the service's keys",
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


def predict_responses() -> dict[int | str, dict[str, Any]]:
    """The answers of `POST /predict` by status."""
    prediction = {"label": 7, "confidence": 0.9998, "probabilities": _SEVEN_PROBABILITIES}
    example = {"model": "lenet", "version": "1", "predictions": [prediction]}
    responses: dict[int | str, dict[str, Any]] = {
        200: {
            "model": PredictResponse,
            "description": "The predictions",
            "content": {
                "application/json": {"example": example},
                # float32, little-endian, one for each class
                BINARY: {"schema": {"type": "string", "format": "binary"}},
            },
            "headers": _TIMES,
        }
    }
    return responses | _error_responses()


def _error_responses() -> dict[int | str, dict[str, Any]]:
    responses: dict[int | str, dict[str, Any]] = {}
    for status, (code, field, message) in _ERRORS.items():
        error = {"error": {"code": code, "field": field, "message": message}}
        responses[status] = {
            "model": ErrorResponse,
            "content": {"application/json": {"example": error}},
            "headers": _ERROR_HEADERS.get(status, {}),
        }
    return responses


def _several(count: int, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": count, "maxItems": count}


_PIXEL = {"type": "integer", "minimum": 0, "maximum": 255}
_NESTED, _FLAT = _several(28, _several(28, _PIXEL)), _several(784, _PIXEL)
_ENCODED = {
    "type": "string",
    "contentEncoding": "base64",
    "pattern": "^[A-Za-z0-9+/]{1046}==$",
    "minLength": 1048,
    "maxLength": 1048,
}


def predict_openapi() -> dict[str, Any]:
    """Parameters and body of `POST /predict`, which FastAPI cannot derive from its signature."""
    seven = example_seven()
    flat_seven = [pixel for row in seven for pixel in row]
    encoded = base64.b64encode(bytes(flat_seven)).decode()
    image = {"anyOf": [_NESTED, _FLAT, _ENCODED]}
    images = {"anyOf": [{"type": "array", "minItems": 1, "items": image}, *image["anyOf"]]}
    description = "A list of images, or one image. Pixels have no fraction, not even 1.0."
    body = {
        "type": "object",
        "required": ["images"],
        "additionalProperties": False,
        "properties": {"images": {**images, "description": description}},
    }
    examples = {
        "base64": ("784 bytes in base64", [encoded]),
        "nested": ("28 rows of 28", [seven]),
        "flat": ("784 integers", [flat_seven]),
        "single": ("one image without a list", seven),
    }
    binary = {"schema": {"type": "string", "format": "binary"}}
    files = {"type": "array", "minItems": 1, "items": binary["schema"]}
    parts = {
        "type": "object",
        "description": "At least one file, under any name.",
        "minProperties": 1,
        "properties": {"image": files},
        "additionalProperties": files,
    }
    pictures = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
    part_types = ", ".join(("application/octet-stream", "application/x-npy", *pictures))
    return {
        "parameters": [
            _parameter("query", "model", {"type": "string"}, "The model; the default one without."),
            _parameter(
                "query",
                "version",
                {"type": "string"},
                "The version of the model, 404 if it is not loaded; the highest without.",
            ),
            _parameter(
                "query",
                "invert",
                {"type": "string", "enum": ["auto", "true", "false"], "default": "auto"},
                "Whether ink is dark on light paper. auto detects it in pictures and leaves raw "
                "pixels as they are.",
            ),
            _parameter(
                "query",
                "digits",
                {"type": "string", "enum": ["one", "several"], "default": "one"},
                "How many digits each picture shows. With several each separate digit, 64 at most, "
                "is an image of the request, in reading order. Of no effect on raw pixels.",
            ),
            _TIMEOUT,
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": body,
                    "examples": {
                        name: {"summary": summary, "value": {"images": value}}
                        for name, (summary, value) in examples.items()
                    },
                },
                BINARY: binary,
                "application/x-npy": binary,
                **dict.fromkeys(pictures, binary),
                "multipart/form-data": {
                    "schema": parts,
                    "encoding": {"image": {"contentType": part_types}},
                },
            },
        },
    }


def explain_openapi() -> dict[str, Any]:
    """Parameters and body of `POST /explain`: those of `POST /predict`, and some more."""
    number = {"type": "integer", "minimum": 0, "maximum": MAX_EXPLAINED_IMAGES - 1, "default": 0}
    noise = {"type": "number", "minimum": 0, "maximum": MAX_NOISE}
    openapi = predict_openapi()
    openapi["parameters"] += [
        _parameter("query", "index", number, "Which image is explained."),
        _parameter(
            "query",
            "biases",
            {"type": "string", "enum": ["on", "off"], "default": "on"},
            "off computes with all biases 0.",
        ),
        _parameter(
            "query",
            "noisy",
            {"type": "string"},
            "The layer whose weights get normal noise, always the same; with `noise`.",
        ),
        _parameter("query", "noise", noise, "In standard deviations of these weights."),
    ]
    return openapi


def explain_responses() -> dict[int | str, dict[str, Any]]:
    """The answers of `POST /explain` by status."""
    seven = bytes(pixel for row in example_seven() for pixel in row)
    logits = [-1.5, 0.2, 1.1, 0.8, -2.0, -0.9, -5.5, 11.2, -0.1, 1.9]
    example = {
        "model": "mlp",
        "version": "1",
        "images": [base64.b64encode(seven).decode()],
        "index": 0,
        "prediction": {
            "label": 7,
            "confidence": 0.9998,
            "probabilities": _SEVEN_PROBABILITIES,
        },
        "layers": [
            {
                "name": "dense1",
                "kind": "dense",
                "shape": [3],
                "low": 0.0,
                "high": 4.1,
                "data": base64.b64encode(bytes((0, 255, 17))).decode(),
            },
            {"name": "dense2", "kind": "logits", "shape": [10], "values": logits},
        ],
    }
    answer = {
        "model": ExplainResponse,
        "description": "The layers",
        "content": {"application/json": {"example": example}},
        "headers": _TIMES,
    }
    return {200: answer, **_error_responses()}


def infer_responses() -> dict[int | str, dict[str, Any]]:
    """The answers of inference by status."""
    tensors: list[dict[str, Any]] = [
        {
            "name": "probabilities",
            "datatype": "FP32",
            "shape": [1, 10],
            "data": _SEVEN_PROBABILITIES,
        },
        {"name": "label", "datatype": "INT64", "shape": [1], "data": [7]},
    ]
    example = {"model_name": "lenet", "model_version": "1", "outputs": tensors}
    responses: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "The outputs",
            "content": {
                "application/json": {"schema": {"type": "object"}, "example": example},
                BINARY: {"schema": {"type": "string", "format": "binary"}},
            },
            "headers": {
                LENGTH_HEADER: _header(
                    "Bytes of JSON in an answer with binary tensors.", "integer"
                ),
                **_TIMES,
            },
        }
    }
    for status, (_, _, message) in _ERRORS.items():
        responses[status] = {
            "model": ProtocolError,
            "content": {"application/json": {"example": {"error": message}}},
            "headers": _ERROR_HEADERS.get(status, {}),
        }
    return responses


def tensorflow_responses() -> dict[int | str, dict[str, Any]]:
    """The answers of a prediction by TensorFlow Serving's API, by status."""
    row = {"probabilities": _SEVEN_PROBABILITIES, "label": 7}
    columns = {"probabilities": [_SEVEN_PROBABILITIES], "label": [7]}
    examples = {
        "by row": {"value": {"predictions": [row]}},
        "by column": {"value": {"outputs": columns}},
    }
    found = infer_responses()
    found[200] = {
        "description": "The predictions",
        "content": {"application/json": {"schema": {"type": "object"}, "examples": examples}},
        "headers": _TIMES,
    }
    return found


def tensorflow_openapi(*, versioned: bool) -> dict[str, Any]:
    """Parameters and body of such a prediction."""
    seven = example_seven()
    encoded_image = {
        "type": "object",
        "required": ["b64"],
        "properties": {"b64": _ENCODED},
        "additionalProperties": False,
    }
    forms = (_NESTED, _FLAT, encoded_image)
    named = [_named_image(form) for form in forms]
    rows = {
        "description": "Images of one form: 28 rows of 28 pixels, 784 pixels, or their bytes, each "
        "also as `image` of an object.",
        "anyOf": [{"type": "array", "minItems": 1, "items": form} for form in (*forms, *named)],
    }
    lists = [{"type": "array", "minItems": 1, "items": form} for form in forms]
    columns = {"description": "The same.", "anyOf": [*lists, *map(_named_image, lists)]}
    schema = {
        "type": "object",
        "properties": {
            "signature_name": {"enum": ["", "serving_default"]},
            "instances": rows,
            "inputs": columns,
        },
        "additionalProperties": False,
        "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    }
    encoded = base64.b64encode(bytes(pixel for row in seven for pixel in row)).decode()
    examples = {
        "instances": {"value": {"instances": [seven]}},
        "inputs": {"value": {"inputs": [seven]}},
        "base64": {"value": {"instances": [{"b64": encoded}]}},
    }
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {
        "parameters": [*model_parameters(versioned=versioned), _TIMEOUT],
        "requestBody": {"required": True, "content": content},
    }


def _named_image(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with `schema` as its `image`."""
    return {
        "type": "object",
        "required": ["image"],
        "properties": {"image": schema},
        "additionalProperties": False,
    }


def model_parameters(*, versioned: bool) -> list[dict[str, Any]]:
    """The parameters of a path that names a model."""
    text = {"type": "string", "minLength": 1}
    parameters = [_parameter("path", "model", text, "The model.")]
    if versioned:
        description = "The version of the model; 404 if it is not loaded."
        parameters.append(_parameter("path", "version", text, description))
    return [{**parameter, "required": True} for parameter in parameters]


def infer_openapi(*, versioned: bool) -> dict[str, Any]:
    """Parameters and body of inference."""
    parameters = model_parameters(versioned=versioned)
    parameters.append(_TIMEOUT)
    tensor = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"type": "string", "const": "image"},
            "datatype": {"type": "string", "enum": ["UINT8", "FP32"]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "data": {"type": "array", "description": "Whole numbers 0 to 255, flat or nested."},
            "parameters": {"type": "object"},
        },
    }
    output = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "enum": ["probabilities", "label"]},
            "parameters": {"type": "object"},
        },
    }
    body = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string", "maxLength": 1024},
            "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": tensor},
            "outputs": {"type": "array", "items": output},
            "parameters": {"type": "object"},
        },
    }
    seven = [pixel for row in example_seven() for pixel in row]
    image = {"name": "image", "datatype": "UINT8", "shape": [1, 28, 28], "data": seven}
    return {
        "parameters": parameters,
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": body, "example": {"inputs": [image]}},
                BINARY: {
                    "schema": {
                        "type": "string",
                        "format": "binary",
                        "description": f"With the header {LENGTH_HEADER}: so many bytes of JSON, "
                        "then the binary tensors; with 0 the bytes of images, UINT8.",
                    }
                },
            },
        },
    }


def _parameter(place: str, name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"in": place, "name": name, "schema": schema, "description": description}


_TIMEOUT = _parameter(
    "header",
    TIMEOUT_HEADER,
    {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    "Deadline in milliseconds from the request's arrival, the upload of its body included; at most "
    "the service's request_timeout_ms, see /info.",
)
