"""Inference of the Open Inference Protocol over HTTP: JSON, and tensors as bytes behind it.

    no header length     all of it is JSON
    n                    n bytes of JSON, then the binary tensors, in the order of the inputs
    0                    no JSON: the bytes of images, as UINT8; the answer is binary, too

Source: the binary tensor data extension of https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import orjson
from numpy.typing import NDArray

from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, TooLarge, invalid, shown
from service.forms import advice, base64_text
from service.forms.form import (
    BINARY,
    JSON,
    WRITTEN_ROWS,
    Answered,
    Asked,
    Body,
    Content,
    Decoded,
    RequestedOutput,
)
from service.forms.pixel_json import check_containers, json_object, lengths
from service.forms.pixels import Scale, check_count, scale_of, where
from service.forms.reader import Limits, NeedsProcess, Reader
from service.forms.tensors import (
    INPUT,
    MAX_ID_CHARACTERS,
    OUTPUTS,
    InputTensor,
    OutputTensor,
    answer,
    check_form,
    check_parameters,
    read_images,
    requested_outputs,
)
from service.pictures.headers import Between, recognise, sniff

LENGTH_HEADER = "Inference-Header-Content-Length"

_MAX_OBJECTS = 64
"""Maximum number of inputs, outputs and their parameters in a large document."""

_MOST_US = 2**53
_MOST_JSON_BYTES = 8 * 1024 * 1024
"""Parsing takes 12 bytes of memory and more for each byte."""

_NOW_JSON_BYTES = 128 * 1024
_NOW_HEAD_BYTES = 64 * 1024
_NOW_FLOAT_BYTES = 1024 * 1024
"""Limits of decoding on the event loop: 2 to 3 ms of JSON, 0.5 ms of float32. Raw uint8 has no
limit: it is not read."""

_READ_BYTES = 4096
_FLOATS = re.compile(rb"\\\\|FP|BF|INT[136]")
"""In the JSON before bytes that are no UINT8; an escape might hide the datatype."""
_FORM = (
    f'an object, {{"name": "{INPUT}", "datatype": "UINT8", "shape": [n, 28, 28], "data": [...]}}'
)
_OTHER_KEYS = {
    "images": "; images as /predict takes them go there",
    "instances": "; TensorFlow Serving's requests go to /v1/models/MODEL:predict",
}
"""Advice by the key of another form's document."""

_RAW = Asked(outputs=tuple(RequestedOutput(name, binary=True) for name in OUTPUTS))


@dataclass(frozen=True, slots=True)
class OipJsonForm:
    """The form of inference over HTTP. `json_bytes`: see the module, None without the header."""

    json_bytes: int | None
    limits: Limits
    scale: Scale = "byte"

    part: ClassVar[str] = "body"
    names_model: ClassVar[bool] = False

    @property
    def max_images(self) -> int:
        """The most that one request may have."""
        return self.limits.max_images

    @property
    def in_place(self) -> bool:
        """Whether tensors may follow the JSON as bytes."""
        return self.json_bytes is not None

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode bytes of any number, and few numbers."""
        size = self.json_bytes
        if size is None:
            if len(body) > _NOW_JSON_BYTES:
                return None
        elif size:
            if size > _NOW_HEAD_BYTES:
                return None
            if len(body) > _NOW_FLOAT_BYTES and _FLOATS.search(bytes(body[:size])):
                return None
        try:
            return Decoded(*read_infer_body(body, size, Reader(self.limits, scale=self.scale)))
        except NeedsProcess:
            return None

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any body."""
        reader = Reader(self.limits, between, scale=self.scale)
        return Decoded(*read_infer_body(body, self.json_bytes, reader))

    @span("encode")
    def write(self, asked: Asked, answered: Answered) -> Content:
        """JSON, and the outputs that are wanted as bytes behind it."""
        outputs = asked.outputs
        as_numbers = not any(one.binary or one.classes for one in outputs)
        if as_numbers and answered.rows > WRITTEN_ROWS:
            return Content(JSON, steps=_steps(asked, answered))
        tensors: list[dict[str, Any]] = []
        contents: list[bytes] = []
        for output, tensor in zip(outputs, answer(answered, outputs), strict=True):
            entry = _described(tensor)
            values = tensor.values
            if output.binary:
                contents.append(tensor.to_bytes())
                entry["parameters"] = {"binary_data_size": len(contents[-1])}
            elif isinstance(values, list):
                entry["data"] = [one.decode() for one in values]
            else:
                entry["data"] = values.ravel()
            tensors.append(entry)
        document = {**_head(asked, answered), "outputs": tensors}
        head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
        if not contents:
            return Content(JSON, head)
        lines = b"%s: %d\r\n" % (LENGTH_HEADER.lower().encode(), len(head))
        return Content(BINARY, b"".join((head, *contents)), lines)


def _head(asked: Asked, answered: Answered) -> dict[str, Any]:
    version = answered.version
    head: dict[str, Any] = {"model_name": version.name, "model_version": version.version}
    if asked.id is not None:
        head["id"] = asked.id
    times_s = {"queue_us": answered.queue_s, "compute_us": answered.compute_s}
    head["parameters"] = {name: round(1e6 * seconds) for name, seconds in times_s.items()}
    return head


def _described(tensor: OutputTensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def _steps(asked: Asked, answered: Answered) -> Iterator[bytes]:
    """JSON of many images in pieces."""
    begin = orjson.dumps({**_head(asked, answered), "outputs": []})[:-2]
    for number, tensor in enumerate(answer(answered, asked.outputs)):
        begin += b"," * bool(number) + orjson.dumps({**_described(tensor), "data": []})[:-2]
        assert not isinstance(tensor.values, list), "bug: a classification in steps"
        for first in range(0, answered.rows, WRITTEN_ROWS):
            rows = tensor.values[first : first + WRITTEN_ROWS].ravel()
            numbers = orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
            yield (b"," if first else begin) + numbers[1:-1]
        begin = b"]}"
    yield begin + b"]}"


@span("decode")
def read_infer_body(body: Body, json_bytes: int | None, reader: Reader) -> tuple[Images, Asked]:
    """The images, uint8 (n, 28, 28), and what else the request asks for.

    `json_bytes`: the header `Inference-Header-Content-Length`, None without. Raw UINT8 is not
    copied.

    Raises: InvalidInput, TooLarge, MemoryError (JSON that takes more than there is), NeedsProcess.
    """
    max_images = reader.limits.max_images
    if json_bytes == 0:
        shape = [len(body) // PIXELS, HEIGHT, WIDTH]
        if len(body) % PIXELS and sniff(bytes(body[:_READ_BYTES])):
            return reader.element(bytes(body), "body", 0), _RAW
        if not body or len(body) % PIXELS:
            raise invalid("body", f"{len(body)} bytes", f"{PIXELS} for each image, or a picture")
        check_count(shape[0], "body", max_images)
        return read_images([InputTensor(INPUT, "UINT8", shape, body, "body")], reader), _RAW
    if json_bytes is not None and json_bytes > len(body):
        expected = f"at most the {len(body)} bytes of the body"
        raise invalid(LENGTH_HEADER, str(json_bytes), expected)
    text = bytes(body) if json_bytes is None else bytes(body[:json_bytes])
    tensors = _Tensors(memoryview(body)[len(text) :], json_bytes is None)
    lists = _MAX_OBJECTS + (2 + HEIGHT) * max_images
    try:
        document = json_document(text, '{"inputs": [...]}', _MAX_OBJECTS, lists)
    except InvalidInput as exc:
        if json_bytes is None and (hint := _without_length(text)):
            raise InvalidInput(exc.message + hint, field=exc.field) from exc
        raise
    parameters = _parameters(document, "")
    if "scale" in parameters:
        reader.scale = scale_of(parameters["scale"], "parameters.scale")
    booleans = b"true" in text or b"false" in text
    images = read_images(_inputs(document, tensors, booleans, max_images), reader)
    if tensors.left:
        got = f"{len(tensors.left)} bytes behind the last tensor"
        raise invalid("body", got, "the binary_data_size of all inputs together")
    binary = _boolean(parameters, "binary_data_output", "parameters")
    outputs = requested_outputs(_outputs(document, binary), len(images)) or tuple(
        RequestedOutput(name, binary) for name in OUTPUTS
    )
    name = document.get("id")
    if name is not None and (type(name) is not str or len(name) > MAX_ID_CHARACTERS):
        raise invalid("id", shown(name), f"a string of at most {MAX_ID_CHARACTERS} characters")
    timeout_us = _integer(parameters, "timeout", "parameters")
    return images, Asked(id=name, outputs=outputs, timeout_us=timeout_us)


def _without_length(body: bytes) -> str:
    """Advice for a body with more than JSON, for the end of the message."""
    if b"binary_data_size" in body[:_READ_BYTES]:
        return f"; binary tensors need the header {LENGTH_HEADER}, the length of the JSON"
    if body and len(body) % PIXELS == 0 and not recognise(body)[0]:
        return f"; the bytes of images alone need the header {LENGTH_HEADER}: 0"
    return ""


class _Tensors:
    """Reads the bytes after the JSON."""

    def __init__(self, left: memoryview, without_length: bool) -> None:
        self.left, self._without_length = left, without_length

    def take(self, size: int, field: str) -> memoryview:
        """The next `size` bytes."""
        if size > len(self.left):
            expected = f"at most {len(self.left)}, which follow the JSON"
            if self._without_length:
                expected = f"the header {LENGTH_HEADER}, which says where the JSON ends"
            raise invalid(field, str(size), expected)
        taken, self.left = self.left[:size], self.left[size:]
        return taken


def json_document(text: bytes, form: str, objects: int, lists: int) -> dict[str, Any]:
    """The object in `text`, with at most so many objects and lists; messages expect `form`.

    Raises: InvalidInput, TooLarge, MemoryError.
    """
    if len(text) > _MOST_JSON_BYTES:
        raise TooLarge(
            f"body: got {len(text)} bytes of JSON, expected at most {_MOST_JSON_BYTES}; send fewer "
            "images at a time, or bytes to /predict or /v2",
            field="body",
        )
    check_containers(text, form, objects, lists)
    return json_object(text, form)


def _inputs(
    document: Mapping[str, Any], tensors: _Tensors, booleans: bool, max_images: int
) -> Iterator[InputTensor]:
    for field, tensor in _entries(document, "inputs", required=True):
        parameters = _parameters(tensor, f"{field}.")
        check_parameters(parameters, field)
        name, datatype = (_string(tensor, key, field) for key in ("name", "datatype"))
        shape = tensor.get("shape")
        if type(shape) is not list:
            raise invalid(f"{field}.shape", _found(shape), "a list of integers")
        size_field = f"{field}.parameters.binary_data_size"
        source = f"{field}.data"
        data: Any
        if "binary_data_size" in parameters:
            if "data" in tensor:
                raise invalid(source, "numbers beside binary_data_size", "one of the two")
            source = f"{field}'s binary data"
            size = _integer(parameters, "binary_data_size", f"{field}.parameters")
            data = tensors.take(size, size_field)
        elif "data" in tensor:
            # Before the numbers are read: those of another form are not worth the time.
            if name == INPUT:
                check_form(datatype, shape, field, max_images)
                if datatype == "BYTES":
                    data = _elements(tensor["data"], shape, source)
                else:
                    data = numbers(tensor["data"], datatype, shape, source, booleans)
            else:
                data = ()  # its name is refused
        elif tensors.left and len(document["inputs"]) == 1:
            source = f"{field}'s binary data"
            data = tensors.take(len(tensors.left), source)
            if datatype == "BYTES" and shape in ([1], [1, 1]) and _is_bare(data):
                data = [data]
        else:
            raise invalid(source, "nothing", "numbers, or the parameter binary_data_size")
        yield InputTensor(name, datatype, shape, data, source)


def _is_bare(data: memoryview) -> bool:
    """Whether these bytes are a picture, without its length before it."""
    has_length = int.from_bytes(data[:4], "little") == len(data) - 4
    return not has_length and sniff(bytes(data[:_READ_BYTES])) is not None


def _outputs(document: Mapping[str, Any], binary: bool) -> Iterator[RequestedOutput]:
    for field, output in _entries(document, "outputs", required=False):
        parameters = _parameters(output, f"{field}.")
        check_parameters(parameters, field)
        name = _string(output, "name", field)
        one = _boolean(parameters, "binary_data", f"{field}.parameters", binary)
        classes = _integer(parameters, "classification", f"{field}.parameters")
        if not classes and "classification" in parameters:
            raise invalid(f"{field}.parameters.classification", "0", "at least 1")
        yield RequestedOutput(name, one, classes)


def _entries(
    document: Mapping[str, Any], key: str, *, required: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = document.get(key)
    if entries is None and not required:
        return
    if type(entries) is not list:
        hint = "".join(hint for other, hint in _OTHER_KEYS.items() if other in document)
        raise invalid(key, _found(entries), f"a list of objects{hint}")
    for position, entry in enumerate(entries):
        field = f"{key}[{position}]"
        if type(entry) is not dict:
            raise invalid(field, shown(entry), _FORM if required else "an object")
        yield field, entry


def _parameters(owner: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = owner.get("parameters")
    if found is None:
        return {}
    if type(found) is not dict:
        raise invalid(f"{prefix}parameters", shown(found), "an object")
    return found


def _string(owner: Mapping[str, Any], key: str, field: str) -> str:
    value = owner.get(key)
    if type(value) is not str:
        raise invalid(f"{field}.{key}", _found(value), "a string")
    return value


def _boolean(parameters: Mapping[str, Any], name: str, owner: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise invalid(f"{owner}.{name}", shown(value), "true or false")
    return value


def _integer(parameters: Mapping[str, Any], name: str, owner: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= _MOST_US:
        raise invalid(f"{owner}.{name}", shown(value), f"a whole number from 0 to {_MOST_US}")
    return value


def _found(value: object) -> str:
    return "nothing" if value is None else shown(value)


def numbers(
    data: object, datatype: str, shape: Sequence[object], source: str, booleans: bool
) -> NDArray[Any]:
    """The numbers of `data`, flat: a list that is flat, or nested as `shape` says.

    Of integers (INT and UINT), any numbers (FP and BF16), or true and false; `booleans`: whether
    some may be true or false.

    Raises: InvalidInput, which names `source`.
    """
    values = _flat(data, shape, source)
    if datatype == "BOOL":
        for index, value in enumerate(values):
            if type(value) is not bool:
                raise invalid(source, f"{shown(value)} at {where(index)}", "true or false")
        return np.array(values, np.bool_)
    integers = "INT" in datatype
    try:
        if not integers:
            if set(map(type, values)) <= {int, float}:
                return np.array(values, np.float64)
        elif not booleans or set(map(type, values)) == {int}:  # bytes([True]) is b"\x01"
            return np.frombuffer(bytes(values), np.uint8)
    except (TypeError, ValueError, OverflowError):
        pass  # one of them is wrong
    for index, value in enumerate(values):
        kinds = (int,) if integers else (int, float)
        if type(value) not in kinds or not 0 <= value <= 255:
            hint = ""
            if type(value) is float:
                image = index - index % PIXELS
                hint = advice.for_numbers(values[image : image + PIXELS])
            expected = f"{'integers' if integers else 'numbers'} 0 to 255{hint}"
            raise invalid(source, f"{shown(value)} at {where(index)}", expected)
    return np.array(values, np.float64)


def _elements(data: object, shape: Sequence[object], source: str) -> list[bytes]:
    """The elements of a BYTES tensor, which JSON has in base64. Raises: InvalidInput."""
    found: list[bytes] = []
    for number, text in enumerate(_flat(data, shape, source)):
        try:
            found.append(base64_text.bytes_of(text))
        except ValueError as exc:
            expected = f"a picture in {base64_text.ALPHABET}"
            raise invalid(f"{source}[{number}]", shown(text), expected) from exc
    return found


def _flat(data: object, shape: Sequence[object], source: str) -> list[Any]:
    shape = list(shape)
    if type(data) is not list:
        raise invalid(source, shown(data), "a list of numbers")
    values, sizes = data, [len(data)]
    while values and type(values[0]) is list and sizes == shape[: len(sizes)] != shape:
        inner = len(values[0])
        if set(map(type, values)) != {list} or set(map(len, values)) != {inner}:
            raise invalid(source, "lists of different lengths", "lists nested as the shape says")
        sizes.append(inner)
        values = list(chain.from_iterable(values))
    nested = len(sizes) > 1 or (values and type(values[0]) is list)
    if nested and sizes != shape:
        expected = f"one flat list, or lists nested as the shape, {shape}"
        raise invalid(source, f"lists nested as {lengths(data)}", expected)
    return values
