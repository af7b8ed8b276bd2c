"""The Open Inference Protocol without a transport: tensors in, images; answers, tensors out.

The gRPC and the HTTP form of the protocol differ in spelling only; what a tensor may be called,
what shape and values it may have and what comes back is decided here. A shape is a claim: it is
compared with what came, before any of that is read, and nothing is ever allocated from it. It
refuses to know messages, JSON and status codes.

Source: https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.engine.queue import Prediction
from service.engine.versions import ModelVersion
from service.errors import InvalidInput, TooLarge

PLATFORM = "lenet_safetensors"
INPUT = "image"
OUTPUTS = ("probabilities", "label")

_DTYPES: dict[str, np.dtype[Any]] = {"UINT8": np.dtype(np.uint8), "FP32": np.dtype("<f4")}
_NUMBERS_AT_ONCE = 16 * PIXELS
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
"""Numbers of a message, flat, row-major; each one that is read costs an object."""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor of the model; -1 in `shape` is the number of images."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a client must know to call a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor as the client sent it, still to be doubted.

    `data` is raw bytes, little-endian and row-major, or the numbers of a typed form. `source` is
    what errors call the data, such as `raw_input_contents[0]`.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | Numbers
    source: str


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the answer; `values` is little-endian, contiguous and of shape `shape`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values


def model_metadata(file: ModelVersion) -> ModelMetadata:
    """The description of a model; FP32 images are accepted beside the UINT8 that is stated."""
    probabilities, label = OUTPUTS
    return ModelMetadata(
        file.name,
        (file.version,),
        PLATFORM,
        (TensorMetadata(INPUT, "UINT8", (-1, HEIGHT, WIDTH)),),
        (
            TensorMetadata(probabilities, "FP32", (-1, file.weights.model.classes)),
            TensorMetadata(label, "INT64", (-1,)),
        ),
    )


def read_images(inputs: Iterable[InputTensor], max_images: int) -> Images:
    """The images in a request's inputs, uint8 (n, 28, 28), 1 <= n <= max_images.

    Raw UINT8 is not copied: the result is a read-only view of the bytes.

    Raises:
        InvalidInput: not exactly one sound tensor called `image`; `field` says where.
        TooLarge: more than `max_images`.
    """
    images: Images | None = None
    for position, tensor in enumerate(inputs):
        field = f"inputs[{position}]"
        if tensor.name != INPUT:
            _refuse(f"{field}.name", _quoted(tensor.name), f"{INPUT!r}, the model's only input")
        if images is not None:
            _refuse(f"{field}.name", f"{INPUT!r} a second time", "each input once")
        images = _images(tensor, field, max_images)
    if images is None:
        _refuse("inputs", "none", f"one tensor called {INPUT!r}")
    return images


def requested_outputs(names: Iterable[str]) -> tuple[str, ...]:
    """The outputs that a request asks for, in its order; all of them if it names none.

    Raises:
        InvalidInput: an unknown output, or one twice.
    """
    wanted: list[str] = []
    for position, name in enumerate(names):
        field = f"outputs[{position}].name"
        if name not in OUTPUTS:
            _refuse(field, _quoted(name), f"one of {', '.join(OUTPUTS)}")
        if name in wanted:
            _refuse(field, f"{name!r} a second time", "each output once")
        wanted.append(name)
    return tuple(wanted) or OUTPUTS


def check_parameters(names: Container[str], field: str) -> None:
    """Refuse the parameters of a tensor that would change where or how its data travels.

    Others are ignored, as the protocol allows: an answer without them is still a right answer.

    Raises:
        InvalidInput: an extension that this server does not list is asked for.
    """
    for name, extension in _UNSUPPORTED.items():
        if name in names:
            _refuse(f"{field}.parameters.{name}", extension, "no use of it, it is not offered")


def answer(prediction: Prediction, wanted: Iterable[str]) -> tuple[OutputTensor, ...]:
    """The outputs `wanted`, in that order; a single image is answered as a batch of one."""
    probabilities = prediction.probabilities
    outputs: list[OutputTensor] = []
    for name in wanted:
        if name == "label":
            values: Values = probabilities.argmax(axis=1).astype("<i8", copy=False)
            outputs.append(OutputTensor(name, "INT64", values.shape, values))
        else:
            values = np.ascontiguousarray(probabilities, "<f4")
            outputs.append(OutputTensor(name, "FP32", values.shape, values))
    return tuple(outputs)


def _images(tensor: InputTensor, field: str, max_images: int) -> Images:
    dtype = _DTYPES.get(tensor.datatype)
    if dtype is None:
        _refuse(f"{field}.datatype", _quoted(tensor.datatype), f"one of {', '.join(_DTYPES)}")
    rows = _rows(tensor.shape, f"{field}.shape")
    if rows > max_images:
        raise TooLarge(
            f"{field}.shape: got {rows} images, expected at most {max_images} in one request; "
            "send fewer at a time",
            field=f"{field}.shape",
        )
    data, numbers = tensor.data, rows * PIXELS
    expected = f"for shape {_shown(tensor.shape)} of {tensor.datatype}"
    if isinstance(data, (bytes, memoryview)):
        size = memoryview(data).nbytes
        if size != numbers * dtype.itemsize:
            _refuse(tensor.source, f"{size} bytes", f"{numbers * dtype.itemsize} {expected}")
        pixels = _pixels(np.frombuffer(data, dtype), tensor.source)
    else:
        if len(data) != numbers:
            _refuse(tensor.source, f"{len(data)} numbers", f"{numbers} {expected}")
        pixels = _typed_pixels(data, tensor.source)
    return pixels.reshape(rows, HEIGHT, WIDTH)


def _rows(shape: Sequence[int], field: str) -> int:
    sizes = tuple(shape[: _LONGEST_SHAPE + 1])
    for size in sizes:
        # A JSON body could bring true, 28.0 or a number of any length.
        if type(size) is not int or not 0 <= size < _INT64:
            _refuse(field, _shown(shape), f"integers >= 0 in the form {_SHAPES}")
    if sizes in _ONE_IMAGE:
        return 1
    if sizes[1:] not in _MANY_IMAGES:
        _refuse(field, _shown(shape), _SHAPES)
    if not sizes[0]:
        _refuse(field, _shown(shape), "at least one image")
    return sizes[0]


def _typed_pixels(numbers: Numbers, source: str) -> NDArray[np.uint8]:
    pixels = np.empty(len(numbers), np.uint8)
    # A slice at a time, between which other threads may run: reading holds the interpreter's lock,
    # and 16,384 images take 0.3 s (2 cores, 2026-11).
    for start in range(0, len(numbers), _NUMBERS_AT_ONCE):
        end = start + _NUMBERS_AT_ONCE
        pixels[start:end] = _pixels(np.array(numbers[start:end]), source, start)
    return pixels


def _pixels(values: Values, source: str, first: int = 0) -> NDArray[np.uint8]:
    """The values, of which `first` is the first's index, as uint8 if each is whole and 0 to 255."""
    if values.dtype == np.uint8:
        return values
    # A cast of NaN, infinity or 300.0 gives some byte or other, which then differs from it.
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
        _refuse(source, f"{value} at index {index} ({where})", f"whole numbers 0 to 255{hint}")
    return pixels


def _refuse(field: str, got: str, expected: str) -> NoReturn:
    raise InvalidInput(f"{field}: got {got}, expected {expected}", field=field)


def _quoted(text: str) -> str:
    return repr(text) if len(text) <= 64 else f"{text[:64]!r}... ({len(text)} characters)"


def _shown(shape: Sequence[object]) -> str:
    # Bounded whatever it is: a size that is no integer is shown by its type.
    sizes = [
        (str(size) if abs(size) < _INT64 else "beyond int64")
        if type(size) is int
        else type(size).__name__
        for size in shape[: _LONGEST_SHAPE + 1]
    ]
    more = ", ..." if len(shape) > len(sizes) else ""
    return f"[{', '.join(sizes)}{more}]"
