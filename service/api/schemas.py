"""The pydantic models of parameters, bodies and answers, for the OpenAPI document.

Predictions are neither read nor written by them, which would take too long; tests compare. The
names of the query's parameters, and what repositories are asked, are read by them.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from service.forms.pixels import Scale
from service.forms.tensors import DATATYPES
from service.pictures.headers import Digits, Invert

MAX_EXPLAINED_IMAGES = 64
MAX_NOISE = 10
TIMEOUT_HEADER, MAX_TIMEOUT_MS = "X-Request-Timeout-Ms", 3_600_000


def example_seven() -> list[list[int]]:
    """A seven drawn with two strokes, 28 x 28."""
    image = [[0] * 28 for _ in range(28)]
    for row in range(6, 9):
        image[row][7:20] = [254] * 13
    for row in range(9, 23):
        right = 20 - (row - 8) * 2 // 3
        image[row][right - 3 : right] = [254] * 3
    return image


SEVEN = example_seven()
FLAT_SEVEN = [pixel for row in SEVEN for pixel in row]
ENCODED_SEVEN = base64.b64encode(bytes(FLAT_SEVEN)).decode()
_PROBABILITIES = [0.00001] * 7 + [0.9998] + [0.00005, 0.00008]

# Queries


class PredictQuery(BaseModel):
    """The query of `POST /predict`."""

    model: str = Field("", description="The model; the default one without.")
    version: str = Field("", description="The model's version; the highest without.")
    invert: Invert = Field("auto", description="auto: ink that is dark in pictures is detected.")
    digits: Digits = Field("one", description="several: each digit of a picture, 64 at most.")
    scale: Scale = Field("byte", description="unit: numbers are 0 to 1, and not 0 to 255.")


class ExplainQuery(PredictQuery):
    """The query of `POST /explain`."""

    index: int = Field(0, ge=0, lt=MAX_EXPLAINED_IMAGES, description="Which image is explained.")
    biases: Literal["on", "off"] = Field("on", description="off computes with all biases 0.")
    noisy: str = Field("", description="The layer whose weights get normal noise of one seed.")
    noise: float = Field(0, ge=0, le=MAX_NOISE, description="In deviations of these weights.")


class ImageHeaders(BaseModel):
    """The headers of a request with images that are read, besides those of HTTP."""

    timeout_ms: int = Field(
        MAX_TIMEOUT_MS,
        validation_alias=TIMEOUT_HEADER,
        ge=1,
        le=MAX_TIMEOUT_MS,
        description="Deadline in milliseconds from the request's arrival, the upload of its body "
        "included; at most the service's request_timeout_ms, see /info.",
    )


# Bodies of requests

_Item = TypeVar("_Item")
_Some = Annotated[list[_Item], Field(min_length=1)]
Pixel = Annotated[
    float, Field(ge=0, le=255, description="Whole, 0 to 255; with scale=unit any number 0 to 1.")
]
Row = Annotated[list[Pixel], Field(min_length=28, max_length=28)]
Rows = Annotated[list[Row], Field(min_length=28, max_length=28)]
Flat = Annotated[list[Pixel], Field(min_length=784, max_length=784)]
Encoded = Annotated[
    str,
    Field(
        min_length=1,
        description="The file of a picture, or 784 bytes.",
        json_schema_extra={"contentEncoding": "base64"},
    ),
]


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PredictRequest(_Exact):
    """Images of 28 x 28 pixels, ink high, or one; or pictures in base64."""

    images: _Some[Rows | Flat | Encoded] | Rows | Flat | Encoded


class EncodedImage(_Exact):
    """A picture, or an image of 784 bytes, in base64."""

    b64: Encoded


class NamedRows(_Exact):
    """28 rows of 28 pixels."""

    image: Rows


class NamedFlat(_Exact):
    """784 pixels."""

    image: Flat


class NamedEncoded(_Exact):
    """A picture or 784 bytes in base64."""

    image: EncodedImage


_OneForm: TypeAlias = _Some[Rows] | _Some[Flat] | _Some[EncodedImage]


class _Signed(_Exact):
    signature_name: Literal["", "serving_default"] = ""
    parameters: dict[str, Any] | None = Field(None, description="scale is read, see /predict.")


class NamedImages(_Exact):
    """Images of one form."""

    image: _OneForm


class TensorflowRows(_Signed):
    """Images of one form that are answered by row."""

    instances: _OneForm | _Some[NamedRows] | _Some[NamedFlat] | _Some[NamedEncoded]


class TensorflowColumns(_Signed):
    """Images of one form that are answered by column."""

    inputs: _OneForm | NamedImages


class InferInput(BaseModel):
    """The images."""

    name: Literal["image"]
    datatype: str = Field(json_schema_extra={"enum": list(DATATYPES)})
    shape: list[Annotated[int, Field(ge=0)]]
    data: list[Any] = Field([], description="Numbers, flat or nested; of BYTES texts in base64.")
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


class IndexRequest(BaseModel):
    """The filter of the model index."""

    ready: StrictBool = Field(False, description="Only those that are loaded.")


class ChangeRequest(BaseModel):
    """A request to load or unload a model."""

    parameters: dict[str, Any] = {}


# Answers


class ImagePrediction(BaseModel):
    """The prediction for one image."""

    label: int = Field(description="The class with the highest probability.", examples=[7])
    name: str = Field("", description="Name of the class; absent if it is the class's number.")
    confidence: float = Field(ge=0, le=1, description="Its probability.", examples=[0.9998])
    probabilities: list[float] = Field(min_length=2, examples=[_PROBABILITIES])


class PredictionWarning(BaseModel):
    """Why the prediction for an image may mean nothing."""

    image: int = Field(description="Index of the prediction.", ge=0)
    code: str = Field(
        description="several_shapes: the picture shows several digits, of which one was read. "
        "not_a_digit: the shape is unlike any digit. looks_inverted, looks_wider, "
        "looks_transposed: an array is bright, of float32, or transposed. More codes may follow.",
        examples=["several_shapes"],
    )
    message: str = Field(description="What was found, what to do.")


class _Computed(BaseModel):
    model: str = Field(examples=["lenet"])
    version: str = Field(examples=["1"])
    warnings: list[PredictionWarning] = Field([], description="At most 256.")


class PredictResponse(_Computed):
    """The predictions, in the order of the images."""

    predictions: list[ImagePrediction]


class ExplainedLayer(BaseModel):
    """The values of a layer: low + byte * (high - low) / 255 for each byte of `data`.

    filters are the weights of a first convolution; the others include bias and activation.
    """

    name: str = Field(description="As its tensors in the weight file.", examples=["conv1"])
    kind: Literal["filters", "convolution", "pooling", "dense", "logits"]
    shape: list[int] = Field(examples=[[20, 24, 24]])
    low: float | None = Field(None, description="The lowest value.")
    high: float | None = Field(None, description="The highest value.")
    data: str | None = Field(None, description="In base64; absent beyond 262,144 values in all.")
    values: list[float] | None = Field(None, description="Of the logits, instead of the above.")


class ExplainedCandidate(BaseModel):
    """A mark in a picture, and the probabilities of a small network that judges it."""

    box: list[float] = Field(
        min_length=4,
        max_length=4,
        description="Top, bottom, left and right in shares of the picture's longer side.",
        examples=[[0.25, 0.5, 0.3, 0.45]],
    )
    image: str = Field(description="What the judge saw, 28 x 28: 784 bytes in base64.")
    digit: float = Field(ge=0, le=1, description="Probability that it is a digit.")
    mark: float = Field(ge=0, le=1, description="That it is another whole mark, as a letter.")
    chosen: bool = Field(description="Whether it became an image.")


class ExplainResponse(_Computed):
    """The outputs of each layer for one image."""

    images: list[str] = Field(description="All images as prepared, 784 bytes each in base64.")
    candidates: list[ExplainedCandidate] = Field(
        [],
        max_length=MAX_EXPLAINED_IMAGES,
        description="Marks of a picture that was searched for digits: those of the images, in "
        "their order, and the others, the best first; at most 24, or as many as images. Absent "
        "of ink alone on even paper, and of bodies that are not a picture.",
    )
    index: int = Field(description="Which of them is explained.")
    prediction: ImagePrediction
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

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str = Field("", description="That of the request; absent if it has none.")
    parameters: dict[str, Any] = {}
    outputs: list[InferOutput]


class TensorflowRow(BaseModel):
    """The outputs for one image."""

    probabilities: list[float] = Field(examples=[_PROBABILITIES])
    label: int = Field(examples=[7])
    name: str = Field("", description="Name of the class; absent if classes are their numbers.")


class TensorflowPredictions(BaseModel):
    """The outputs by row."""

    predictions: list[TensorflowRow]


class TensorflowTable(BaseModel):
    """The outputs for all images."""

    probabilities: list[list[float]]
    label: list[int]
    name: list[str] = Field([], description="Names; absent if classes are their numbers.")


class TensorflowOutputs(BaseModel):
    """The outputs by column."""

    outputs: TensorflowTable


class LoadedModel(BaseModel):
    """A loaded model."""

    name: str
    version: str
    version_labels: list[str] = Field(description="Of labels.json.", examples=[["canary"]])
    device: str = Field(description="cpu, or cuda and numbers.", examples=["cpu", "cuda:0,1"])
    precision: str = Field(description="fp32 on the CPU.", examples=["fp32", "fp16"])
    strategies: dict[int, str] = Field(
        description="How batches of up to so many rows are computed.",
        examples=[{"1": "fused_network", "64": "layer_by_layer"}],
    )
    layers: dict[int, dict[str, str]] = Field(
        description="Who computes each layer of such a batch: a library, or a kernel of ours.",
        examples=[{"64": {"conv1": "convolutions", "conv2": "cudnn", "dense1": "cublas"}}],
    )
    sha256: str = Field(description="Of the weight file.")
    parameters: int = Field(description="Number of learned parameters.")
    accuracy: float | None = Field(description="On the test set; null if it was not measured.")
    epochs: int | None = Field(description="Null if the weights were trained elsewhere.")
    seed: int | None = Field(description="Null if the weights were trained elsewhere.")
    dataset_sha256: str = Field(description="Empty if the dataset is not known.")
    labels: list[str]
    loaded_at: datetime = Field(description="When its file was read.")


class InfoResponse(BaseModel):
    """Loaded models, device and limits."""

    name: str
    version: str
    commit: str = Field(description="Of the build; empty in a checkout.")
    python: str
    grpc_port: int | None = Field(description="null if gRPC is not served.")
    default_model: str
    models: list[LoadedModel]
    limits: dict[str, int]
    explain: bool = Field(description="Whether /explain answers.")


class ModelNames(BaseModel):
    """The loaded models."""

    models: list[str] = Field(description="The default one first, a second name of it last.")


class Health(BaseModel):
    """The answer of the probes."""

    live: bool
    ready: bool


# Errors


class ErrorDetail(BaseModel):
    """Code and message of an error."""

    code: str = Field(description="From a closed set.", examples=["invalid_input"])
    field: str = Field(description='What is wrong; "" if no single part is.', examples=["images"])
    message: str = Field(examples=["images[0]: got 783 values, expected 28 rows of 28"])


class ErrorResponse(BaseModel):
    """Every answer that is not a prediction."""

    error: ErrorDetail


class ProtocolError(BaseModel):
    """Every answer of the Open Inference Protocol that is not a success."""

    error: str = Field(description="What was received, what was expected.")
