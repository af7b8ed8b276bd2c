"""The Open Inference Protocol, independent of a transport: tensors to images, answers to tensors.

Defines names, shapes and datatypes of tensors and what comes back. A shape is compared with the
size of the data before any of it is read, and no memory is allocated by it.

Source: https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images, Probabilities
from service.engine.queue import Prediction
from service.engine.versions import ModelVersion
from service.errors import TooLarge, invalid, shown

PLATFORM = "lenet_safetensors"
INPUT = "image"
OUTPUTS = ("probabilities", "label")

_DTYPES: dict[str, np.dtype[Any]] = {"UINT8": np.dtype(np.uint8), "FP32": np.dtype("<f4")}
_LABEL = np.dtype("<i8")
_SLICE_NUMBERS = 16 * PIXELS
_ONE_IMAGE = ((HEIGHT, WIDTH), (PIXELS,))
_MANY_IMAGES = ((HEIGHT, WIDTH), (PIXELS,), (1, HEIGHT, WIDTH))
_LONGEST_SHAPE = 1 + max(map(len, _MANY_IMAGES))
_SHAPES = "[n, 28, 28], [n, 1, 28, 28], [n, 784] or one image as [28, 28] or [784]"
_INT64 = 2**63
_UNSUPPORTED = {
    "classification": "the classification extension",
    "shared_memory_region": "shared memory",
}

Values: TypeAlias = NDArray[Any]
"""Numbers of one real dtype, flat, row-major."""

Numbers: TypeAlias = Sequence[float]
"""Numbers of a message, flat, row-major; each that is read makes an object."""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor of the model; -1 in `shape` is the number of images."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Description of a model for its clients."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor as the client sent it, not validated.

    `data` is raw bytes, little-endian and row-major, or the numbers of a typed form. `source` names
    the data in errors, such as `raw_input_contents[0]`.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | Numbers
    source: str


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the answer; `values` is little-endian and contiguous, of shape `shape`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values


def model_metadata(version: ModelVersion) -> ModelMetadata:
    """The description of a model; FP32 images are accepted besides the stated UINT8."""
    return ModelMetadata(
        version.name,
        (version.version,),
        PLATFORM,
        (TensorMetadata(INPUT, "UINT8", (-1, HEIGHT, WIDTH)),),
        output_metadata(OUTPUTS, -1, version.weights.model.classes),
    )


def read_images(inputs: Iterable[InputTensor], max_images: int) -> Images:
    """The images in a request's inputs, uint8 (n, 28, 28), 1 <= n <= max_images.

    Raw UINT8 is not copied: the result is a read-only view of the bytes.

    Raises:
        InvalidInput: not exactly one valid tensor called `image`; `field` names the wrong part.
        TooLarge: more than `max_images`.
    """
    images: Images | None = None
    for position, tensor in enumerate(inputs):
        field = f"inputs[{position}]"
        if tensor.name != INPUT:
            raise invalid(f"{field}.name", shown(tensor.name), f"{INPUT!r}, the only input")
        if images is not None:
            raise invalid(f"{field}.name", f"{INPUT!r} a second time", "each input once")
        images = _images(tensor, field, max_images)
    if images is None:
        raise invalid("inputs", "none", f"one tensor called {INPUT!r}")
    return images


def requested_outputs(names: Iterable[str]) -> tuple[str, ...]:
    """The outputs that a request names, in its order; all of them if it names none.

    Raises:
        InvalidInput: an unknown output, or one twice.
    """
    wanted: list[str] = []
    for position, name in enumerate(names):
        field = f"outputs[{position}].name"
        if name not in OUTPUTS:
            raise invalid(field, shown(name), f"one of {', '.join(OUTPUTS)}")
        if name in wanted:
            raise invalid(field, f"{name!r} a second time", "each output once")
        wanted.append(name)
    return tuple(wanted) or OUTPUTS


def check_parameters(names: Container[str], field: str) -> None:
    """Reject parameters of a tensor that would change where or how its data is transferred.

    Others are ignored, as the protocol allows: the answer is right without them.

    Raises:
        InvalidInput: the request uses an extension that this server does not list.
    """
    for name, extension in _UNSUPPORTED.items():
        if name in names:
            raise invalid(f"{field}.parameters.{name}", extension, "none, it is not supported")


def output_metadata(names: Iterable[str], rows: int, classes: int) -> tuple[TensorMetadata, ...]:
    """The outputs `names`, in that order, for `rows` images; one image is a batch of one."""
    known = {
        "probabilities": TensorMetadata("probabilities", "FP32", (rows, classes)),
        "label": TensorMetadata("label", "INT64", (rows,)),
    }
    return tuple(known[name] for name in names)


def output_values(name: str, probabilities: Probabilities) -> Values:
    """The output called `name`, little-endian and contiguous."""
    if name == "label":
        labels: Values = probabilities.argmax(axis=1).astype(_LABEL, copy=False)
        return labels
    return np.ascontiguousarray(probabilities, _DTYPES["FP32"])


def answer(prediction: Prediction, wanted: Iterable[str]) -> tuple[OutputTensor, ...]:
    """The outputs `wanted`, in that order."""
    probabilities = prediction.probabilities
    return tuple(
        OutputTensor(one.name, one.datatype, one.shape, output_values(one.name, probabilities))
        for one in output_metadata(wanted, *probabilities.shape)
    )


def _images(tensor: InputTensor, field: str, max_images: int) -> Images:
    dtype = _DTYPES.get(tensor.datatype)
    if dtype is None:
        raise invalid(f"{field}.datatype", shown(tensor.datatype), f"one of {', '.join(_DTYPES)}")
    rows = _rows(tensor.shape, f"{field}.shape")
    if rows > max_images:
        raise TooLarge(
            f"{field}.shape: got {rows} images, expected at most {max_images} in one request; "
            "send fewer at a time",
            field=f"{field}.shape",
        )
    data, numbers = tensor.data, rows * PIXELS
    expected = f"for shape {_format_shape(tensor.shape)} of {tensor.datatype}"
    if isinstance(data, (bytes, memoryview)):
        size = memoryview(data).nbytes
        if size != numbers * dtype.itemsize:
            expected = f"{numbers * dtype.itemsize} {expected}"
            raise invalid(tensor.source, f"{size} bytes", expected)
        pixels = _pixels(np.frombuffer(data, dtype), tensor.source)
    else:
        if len(data) != numbers:
            raise invalid(tensor.source, f"{len(data)} numbers", f"{numbers} {expected}")
        pixels = _typed_pixels(data, tensor.source)
    return pixels.reshape(rows, HEIGHT, WIDTH)


def _rows(shape: Sequence[int], field: str) -> int:
    sizes = tuple(shape[: _LONGEST_SHAPE + 1])
    for size in sizes:
        # A JSON body could bring true, 28.0 or a number of any length.
        if type(size) is not int or not 0 <= size < _INT64:
            raise invalid(field, _format_shape(shape), f"integers >= 0 in the form {_SHAPES}")
    if sizes in _ONE_IMAGE:
        return 1
    if sizes[1:] not in _MANY_IMAGES:
        raise invalid(field, _format_shape(shape), _SHAPES)
    if not sizes[0]:
        raise invalid(field, _format_shape(shape), "at least one image")
    return sizes[0]


def _typed_pixels(numbers: Numbers, source: str) -> NDArray[np.uint8]:
    pixels = np.empty(len(numbers), np.uint8)
    # In slices, between which other threads may run: reading holds the interpreter lock, and 16,384
    # images take 0.3 s (2 cores, 2026-11).
    for start in range(0, len(numbers), _SLICE_NUMBERS):
        end = start + _SLICE_NUMBERS
        pixels[start:end] = _pixels(np.array(numbers[start:end]), source, start)
    return pixels


def _pixels(values: Values, source: str, first: int = 0) -> NDArray[np.uint8]:
    """The values as uint8, if each is whole and 0 to 255; `first` is the first one's index."""
    if values.dtype == np.uint8:
        return values
    # NaN, infinity or 300.0 become some byte, which differs from them.
    with np.errstate(invalid="ignore"):
        pixels = values.astype(np.uint8)
    wrong = pixels != values
    if wrong.any():
        index = int(wrong.argmax())
        value = values.flat[index]
        index += first
        hint = ""
        if 0 < value < 1:
            hint = "; values from 0 to 1 are a common mistake: multiply by 255 and round"
        image, pixel = divmod(index, PIXELS)
        where = f"image {image}, row {pixel // WIDTH}, column {pixel % WIDTH}"
        raise invalid(
            source, f"{value} at index {index} ({where})", f"whole numbers 0 to 255{hint}"
        )
    return pixels


def _format_shape(shape: Sequence[object]) -> str:
    # At most six sizes; one that is not an integer is shown by its type.
    sizes = [
        (str(size) if abs(size) < _INT64 else "beyond int64")
        if type(size) is int
        else type(size).__name__
        for size in shape[: _LONGEST_SHAPE + 1]
    ]
    more = ", ..." if len(shape) > len(sizes) else ""
    return f"[{', '.join(sizes)}{more}]"
