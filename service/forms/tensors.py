"""Tensors of the Open Inference Protocol: a request's tensors to images, answers to tensors.

Defines names, shapes and datatypes of the tensors of requests and answers. A shape is compared with
the size of the data before any of it is read, and no memory is allocated by it.

Source: https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images, Probabilities, joined
from service.errors import TooLarge, invalid, shown
from service.forms import advice
from service.forms.form import Answered, RequestedOutput
from service.forms.pixels import as_pixels, rows_of
from service.forms.reader import Reader

INPUT = "image"
OUTPUTS: dict[str, np.dtype[Any]] = {"probabilities": np.dtype("<f4"), "label": np.dtype("<i8")}
"""The outputs, and how their bytes are written."""
MAX_ID_CHARACTERS = 1024

_MOST_CLASSES = 256  # of any model that can be trained
_MOST_NAMED = 4096
"""Classes of a classification in one answer: their texts are made on the event loop, in 3 ms."""

CLASSIFIED = "probabilities"
"""The output of which a request may ask for the best classes."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "UINT8": np.dtype(np.uint8),
    **{
        f"{kind}{8 * size}": np.dtype(f"<{kind[0].lower()}{size}")
        for kind, sizes in (("FP", (2, 4, 8)), ("INT", (1, 2, 4, 8)), ("UINT", (2, 4, 8)))
        for size in sizes
    },
    "BF16": np.dtype("<u2"),
    "BOOL": np.dtype(np.bool_),
}
"""Datatypes of numbers, as they lie in bytes."""

_BYTES = "BYTES"
"""The datatype of files, one an element."""

DATATYPES = (*_DTYPES, _BYTES)
_SLICE_NUMBERS = 16 * PIXELS
_SHAPES = "[n, 28, 28], [n, 784], [n, 1, 28, 28], [n, 28, 28, 1], or [28, 28] or [784] of one image"
_LONGEST_SHAPE = 4
_INT64 = 2**63
_BYTES_LENGTH = struct.Struct("<I")
_LENGTH = "before each element its length, 4 bytes, little-endian"

Values: TypeAlias = NDArray[Any]
"""Numbers of one real dtype, row-major."""

Numbers: TypeAlias = Sequence[float]
"""Numbers of a message, flat, row-major; each that is read makes an object."""

Elements: TypeAlias = Sequence[bytes]
"""Elements of a BYTES tensor, in order."""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor of the model; -1 in `shape` is the number of images."""

    name: str
    datatype: str
    shape: tuple[int, ...]


INPUT_METADATA = TensorMetadata(INPUT, "UINT8", (-1, HEIGHT, WIDTH))


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor as the client sent it, not validated.

    `data` is raw bytes, little-endian and row-major, of BYTES each element behind its length; or
    the numbers or elements of a typed form. `source` names the data in errors, such as
    `raw_input_contents[0]`.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | Numbers | Elements
    source: str


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the answer.

    `values`: little-endian and contiguous, of shape `shape`; of BYTES its elements in order.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Values | list[bytes]

    def to_bytes(self) -> bytes:
        """The tensor's bytes on the wire: a BYTES element follows its length, 4 bytes."""
        if isinstance(self.values, list):
            return b"".join([_BYTES_LENGTH.pack(len(one)) + one for one in self.values])
        return self.values.tobytes()


ALL_OUTPUTS = tuple(map(RequestedOutput, OUTPUTS))


def read_images(inputs: Iterable[InputTensor], reader: Reader) -> Images:
    """The images in a request's inputs, uint8 (n, 28, 28), 1 <= n <= max_images.

    Raw UINT8 is not copied: the result is a read-only view of the bytes.

    Raises:
        InvalidInput: not exactly one valid tensor called `image`; `field` names the wrong part.
        TooLarge: more than `max_images`, or too many pixels of pictures.
        NeedsProcess: as `Reader`.
    """
    images: Images | None = None
    for position, tensor in enumerate(inputs):
        field = f"inputs[{position}]"
        if tensor.name != INPUT:
            raise invalid(f"{field}.name", shown(tensor.name), f"{INPUT!r}, the only input")
        if images is not None:
            raise invalid(f"{field}.name", f"{INPUT!r} a second time", "each input once")
        images = _images(tensor, field, reader)
    if images is None:
        raise invalid("inputs", "none", f"one tensor called {INPUT!r}")
    return images


def requested_outputs(outputs: Iterable[RequestedOutput], rows: int) -> tuple[RequestedOutput, ...]:
    """The outputs that a request with `rows` images names, checked.

    Raises:
        InvalidInput: an unknown output, one twice, or a classification of labels.
        TooLarge: a classification of too many images.
    """
    wanted: dict[str, RequestedOutput] = {}
    for position, output in enumerate(outputs):
        field, name = f"outputs[{position}]", output.name
        if name not in OUTPUTS:
            raise invalid(f"{field}.name", shown(name), f"one of {', '.join(OUTPUTS)}")
        if name in wanted:
            raise invalid(f"{field}.name", f"{name!r} a second time", "each output once")
        if output.classes and name != CLASSIFIED:
            got = f"the output {name!r}"
            raise invalid(f"{field}.parameters.classification", got, f"it on {CLASSIFIED!r} alone")
        if rows * min(output.classes, _MOST_CLASSES) > _MOST_NAMED:
            name = f"{field}.parameters.classification"
            raise TooLarge(
                f"{name}: got {output.classes} classes of {rows} images, expected at most "
                f"{_MOST_NAMED} in a request; send fewer images at a time",
                field=name,
            )
        wanted[name] = output
    return tuple(wanted.values())


def check_parameters(names: Container[str], field: str) -> None:
    """Reject parameters of a tensor that would change where its data is.

    Unknown ones are ignored, as the protocol allows: the answer is right without them.

    Raises:
        InvalidInput: the request uses shared memory.
    """
    if "shared_memory_region" in names:
        name = f"{field}.parameters.shared_memory_region"
        raise invalid(name, "shared memory", "none, it is not supported")


def output_metadata(
    outputs: Iterable[RequestedOutput], rows: int, classes: int
) -> tuple[TensorMetadata, ...]:
    """`outputs`, in that order, for `rows` images; one image is a batch of one."""
    known = {
        "probabilities": TensorMetadata("probabilities", "FP32", (rows, classes)),
        "label": TensorMetadata("label", "INT64", (rows,)),
    }
    return tuple(
        TensorMetadata(one.name, "BYTES", (rows, min(one.classes, classes)))
        if one.classes
        else known[one.name]
        for one in outputs
    )


def answer(answered: Answered, outputs: Sequence[RequestedOutput]) -> tuple[OutputTensor, ...]:
    """The tensors of `outputs`, in that order."""
    first, names = answered.row, answered.version.labels
    probabilities = answered.batch.probabilities[first : first + answered.rows]
    return tuple(
        OutputTensor(
            tensor.name,
            tensor.datatype,
            tensor.shape,
            _classified(probabilities, tensor.shape[1], names)
            if output.classes
            else np.ascontiguousarray(
                probabilities.argmax(axis=1) if output.name == "label" else probabilities,
                OUTPUTS[output.name],
            ),
        )
        for output, tensor in zip(
            outputs, output_metadata(outputs, *probabilities.shape), strict=True
        )
    )


def _classified(probabilities: Probabilities, count: int, names: Sequence[str]) -> list[bytes]:
    """The `count` most probable classes of each row, the best first, in Triton's format."""
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    values = np.take_along_axis(probabilities, best, axis=1)
    return [
        b"%f:%d:%s" % (value, index, names[index].encode())
        for value, index in zip(values.ravel().tolist(), best.ravel().tolist(), strict=True)
    ]


def check_form(datatype: str, shape: Sequence[int], field: str, max_images: int) -> int:
    """How many images a tensor of this form has.

    Raises:
        InvalidInput: its datatype or shape is none of those that are read.
        TooLarge: more than `max_images`.
    """
    if datatype not in DATATYPES:
        raise invalid(f"{field}.datatype", shown(datatype), f"one of {', '.join(DATATYPES)}")
    rows = _rows(shape, f"{field}.shape", datatype)
    if rows > max_images:
        raise TooLarge(
            f"{field}.shape: got {rows} images, expected at most {max_images} in one request; "
            "send fewer at a time",
            field=f"{field}.shape",
        )
    return rows


def _images(tensor: InputTensor, field: str, reader: Reader) -> Images:
    rows = check_form(tensor.datatype, tensor.shape, field, reader.limits.max_images)
    data: Any = tensor.data
    expected = f"for shape {_format_shape(tensor.shape)} of {tensor.datatype}"
    if tensor.datatype == _BYTES:
        if isinstance(data, (bytes, memoryview)):
            data = elements(memoryview(data), rows, tensor.source)
        if len(data) != rows:
            raise invalid(tensor.source, f"{len(data)} elements", f"{rows} {expected}")
        return joined(
            [reader.element(one, f"{tensor.source}[{i}]", i) for i, one in enumerate(data)]
        )
    dtype, numbers = _DTYPES[tensor.datatype], rows * PIXELS
    if isinstance(data, (bytes, memoryview)):
        size = memoryview(data).nbytes
        if size != numbers * dtype.itemsize:
            expected = f"{numbers * dtype.itemsize} {expected}"
            fitting = [other for other, kind in _DTYPES.items() if size == numbers * kind.itemsize]
            if fitting:
                expected += f"; so many are {' or '.join(fitting[:2])}: state that as the datatype"
            raise invalid(tensor.source, f"{size} bytes", expected)
        values = np.frombuffer(data, dtype)
        if tensor.datatype == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        pixels = as_pixels(values, tensor.source, reader.scale)
    else:
        if len(data) != numbers:
            raise invalid(tensor.source, f"{len(data)} numbers", f"{numbers} {expected}")
        pixels = _typed_pixels(data, tensor.source, reader)
    return pixels.reshape(rows, HEIGHT, WIDTH)


def elements(data: memoryview, most: int, source: str) -> list[memoryview]:
    """The elements in the bytes of a BYTES tensor, views of `data`, each behind 4 bytes of length.

    Raises: InvalidInput (a length beyond the end, or more elements than `most`).
    """
    found: list[memoryview] = []
    at = 0
    while at < len(data):
        if len(found) == most:
            raise invalid(source, f"{len(data) - at} bytes more", f"{most} elements, as the shape")
        start = at + _BYTES_LENGTH.size
        if start > len(data):
            raise invalid(source, f"{len(data) - at} bytes at the end", _LENGTH)
        (size,) = _BYTES_LENGTH.unpack_from(data, at)
        at = start + size
        if at > len(data):
            got = f"element {len(found)} of {size} bytes, of which {len(data) - start} are there"
            raise invalid(source, got, _LENGTH)
        found.append(data[start:at])
    return found


def _rows(shape: Sequence[int], field: str, datatype: str) -> int:
    sizes = tuple(shape[: _LONGEST_SHAPE + 1])
    shapes = "[n] or [n, 1]" if datatype == _BYTES else _SHAPES
    for size in sizes:
        # A JSON body could bring true, 28.0 or a number of any length.
        if type(size) is not int or not 0 <= size < _INT64:
            raise invalid(field, _format_shape(shape), f"integers >= 0 in the form {shapes}")
    if datatype == _BYTES:
        rows = sizes[0] if sizes[1:] in ((), (1,)) and sizes else None
    else:
        rows = rows_of(sizes)
    if rows is None:
        hint = "" if datatype == _BYTES else advice.for_shape(sizes)
        raise invalid(field, _format_shape(shape), shapes + hint)
    if not rows:
        raise invalid(field, _format_shape(shape), "at least one image")
    return rows


def _typed_pixels(numbers: Numbers, source: str, reader: Reader) -> NDArray[np.uint8]:
    pixels = np.empty(len(numbers), np.uint8)
    # In slices, between which other threads may run: reading holds the interpreter lock, and 16,384
    # images take 0.3 s (2 cores, 2026-11).
    for start in range(0, len(numbers), _SLICE_NUMBERS):
        values = np.array(numbers[start : start + _SLICE_NUMBERS])
        end = start + _SLICE_NUMBERS
        pixels[start:end] = as_pixels(values, source, reader.scale, start)
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
