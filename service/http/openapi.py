"""What goes over the wire, for the OpenAPI page and for whoever writes a client.

The hot path does not build these objects; tests hold its answers against them.
"""

from __future__ import annotations

import base64
from typing import Any

from pydantic import BaseModel, Field

MAX_TIMEOUT_MS = 3_600_000
"""The most that a request may state as its timeout."""


class ImagePrediction(BaseModel):
    """What one image was taken for."""

    label: int = Field(description="The digit with the highest probability.", examples=[7])
    confidence: float = Field(ge=0, le=1, description="Its probability.", examples=[0.9998])
    probabilities: list[float] = Field(
        min_length=10, max_length=10, description="Of the digits 0 to 9; they sum to 1."
    )


class PredictResponse(BaseModel):
    """The predictions, in the order of the images."""

    model: str = Field(examples=["lenet"])
    version: str = Field(examples=["1"])
    predictions: list[ImagePrediction]


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str = Field(description="From a closed set.", examples=["invalid_input"])
    field: str = Field(description='What was wrong; "" if nothing single was.', examples=["images"])
    message: str = Field(description="What was found, what was expected, what to do.")


class ErrorResponse(BaseModel):
    """Every answer that is not a prediction."""

    error: ErrorDetail


class LoadedModel(BaseModel):
    """A served model."""

    name: str
    version: str
    device: str = Field(
        description="What computes it: cpu, or cuda and the numbers of the GPUs.",
        examples=["cpu", "cuda:0,1"],
    )
    sha256: str = Field(description="Of the weight file.")
    parameters: int = Field(description="How many numbers it learned.")
    accuracy: float = Field(description="Share of the MNIST test set it classifies correctly.")
    epochs: int
    seed: int
    dataset_sha256: str
    labels: list[str]


class InfoResponse(BaseModel):
    """What runs here, on what and within which limits."""

    name: str
    version: str
    default_model: str
    models: list[LoadedModel]
    limits: dict[str, int]


class Health(BaseModel):
    """The answer of the probes."""

    live: bool
    ready: bool


def example_seven() -> list[list[int]]:
    """A seven drawn with two strokes, 28x28, for the examples of the OpenAPI page."""
    image = [[0] * 28 for _ in range(28)]
    for row in range(6, 9):
        image[row][7:20] = [254] * 13
    for row in range(9, 23):
        right = 20 - (row - 8) * 2 // 3
        image[row][right - 3 : right] = [254] * 3
    return image


def predict_openapi() -> dict[str, Any]:
    """The parts of the OpenAPI operation that FastAPI cannot read off `POST /predict`."""
    seven = example_seven()
    flat_seven = [pixel for row in seven for pixel in row]
    encoded = base64.b64encode(bytes(flat_seven)).decode()
    pixel = {"type": "integer", "minimum": 0, "maximum": 255}
    flat = {"type": "array", "items": pixel, "minItems": 784, "maxItems": 784}
    row = {"type": "array", "items": pixel, "minItems": 28, "maxItems": 28}
    nested = {"type": "array", "items": row, "minItems": 28, "maxItems": 28}
    image = {"anyOf": [nested, flat, {"type": "string", "contentEncoding": "base64"}]}
    body = {
        "type": "object",
        "required": ["images"],
        "additionalProperties": False,
        "properties": {"images": {"type": "array", "minItems": 1, "items": image}},
    }
    binary = {"schema": {"type": "string", "format": "binary"}}
    files = {"type": "array", "items": {"type": "string", "format": "binary"}}
    return {
        "parameters": [
            _parameter("query", "model", {"type": "string"}, "The model; the default one without."),
            _parameter("query", "version", {"type": "string"}, "Its version; any without."),
            _parameter(
                "query",
                "invert",
                {"type": "string", "enum": ["auto", "true", "false"], "default": "auto"},
                "Whether ink is dark on light paper; auto looks at pictures, raw pixels are taken "
                "as they are.",
            ),
            _parameter(
                "header",
                "X-Request-Timeout-Ms",
                {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
                "How long the answer may take, its body's way here included; never longer than "
                "the service's own request_timeout_ms, which /info tells.",
            ),
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": body,
                    "examples": {
                        "base64": {
                            "summary": "784 bytes in base64",
                            "value": {"images": [encoded]},
                        },
                        "nested": {"summary": "28 rows of 28", "value": {"images": [seven]}},
                        "flat": {"summary": "784 integers", "value": {"images": [flat_seven]}},
                    },
                },
                "application/octet-stream": binary,
                "application/x-npy": binary,
                "image/png": binary,
                "image/jpeg": binary,
                "multipart/form-data": {
                    "schema": {"type": "object", "properties": {"image": files}}
                },
            },
        },
    }


def _parameter(place: str, name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"in": place, "name": name, "schema": schema, "description": description}
