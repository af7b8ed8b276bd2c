"""Predictions of TensorFlow Serving's REST API, with the outputs `probabilities` and `label`.

Where classes have names that are not their numbers, there is a third, `name`.

    {"instances": [IMAGE, ...]}      answered as {"predictions": [...]}, by row
    {"inputs": [IMAGE, ...]}         answered as {"outputs": {...}}, by column

An image is 28 rows of 28 numbers, each of which may be a list of one, or 784 numbers, or
`{"b64": ...}` of a picture or 784 bytes. It may have its name before it: by row each
`{"image": IMAGE}`, by column all of them, `{"image": [...]}`.

Source: https://www.tensorflow.org/tfx/serving/api_rest
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import orjson

from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images, Probabilities, joined
from service.errors import InvalidInput, invalid, shown
from service.forms.form import (
    JSON,
    NOTHING,
    WRITTEN_ROWS,
    Answered,
    Asked,
    Body,
    Content,
    Decoded,
)
from service.forms.oip_json import json_document, numbers
from service.forms.pixel_json import lengths
from service.forms.pixels import Scale, check_count, scale_of
from service.forms.reader import Limits, NeedsProcess, Reader
from service.forms.tensors import (
    INPUT,
    InputTensor,
    check_form,
    read_images,
)
from service.pictures.headers import Between

_NOW_BYTES = 128 * 1024
"""Bodies up to this size are decoded on the event loop: 2 to 3 ms of JSON."""
_NOW_LISTS = 10_000

_BY_COLUMN = Asked(by_column=True)

_SIGNATURES = ("", "serving_default")
_EXPONENT = re.compile(rb"[0-9][eE]")


@dataclass(frozen=True, slots=True)
class TensorflowForm:
    """The form of predictions by TensorFlow Serving's API."""

    limits: Limits
    scale: Scale = "byte"

    part: ClassVar[str] = "body"
    names_model: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    @property
    def max_images(self) -> int:
        """The most that one request may have."""
        return self.limits.max_images

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode small bodies. Each list takes time, and with a channel axis each number is one."""
        if len(body) > _NOW_BYTES or bytes(body).count(b"[") > _NOW_LISTS:
            return None
        try:
            return self._decode(body, None)
        except NeedsProcess:
            return None

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any body."""
        return self._decode(body, between)

    def _decode(self, body: Body, between: Between | None) -> Decoded:
        reader = Reader(self.limits, between, scale=self.scale)
        images, by_column = read_tensorflow_body(body, reader)
        return Decoded(images, _BY_COLUMN if by_column else NOTHING)

    @span("encode")
    def write(self, asked: Asked, answered: Answered) -> Content:
        """Outputs by row or by column, as the images were."""
        first = answered.row
        probabilities = answered.batch.probabilities[first : first + answered.rows]
        steps = (_columns if asked.by_column else _rows)(probabilities, answered.version.labels)
        if answered.rows > WRITTEN_ROWS:
            return Content(JSON, steps=steps)
        return Content(JSON, b"".join(steps))


@span("decode")
def read_tensorflow_body(body: Body, reader: Reader) -> tuple[Images, bool]:
    """The images, uint8 (n, 28, 28), and whether the answer is by column.

    Raises: InvalidInput, TooLarge, MemoryError (JSON that takes more than there is), NeedsProcess.
    """
    max_images = reader.limits.max_images
    text = bytes(body)
    document = json_document(
        text,
        '{"instances": [...]}',
        objects=2 * max_images + 2,  # {"image": {"b64": ...}}
        lists=(1 + HEIGHT + PIXELS) * max_images + 2,  # each number may be in one
    )
    signature = document.pop("signature_name", "")
    if signature not in _SIGNATURES:
        raise invalid("signature_name", shown(signature), f"none, or {_SIGNATURES[1]!r}")
    document.pop("id", None)  # of a line of a batch job; the API's answer has no place for it
    for name in ("parameters", "params"):  # Vertex AI's and MLflow's
        parameters = document.pop(name, None)
        if parameters is not None and type(parameters) is not dict:
            raise invalid(name, shown(parameters), "an object")
        if parameters and "scale" in parameters:
            reader.scale = scale_of(parameters["scale"], f"{name}.scale")
    if len(document) != 1 or not document.keys() <= {"instances", "inputs"}:
        names = " and ".join(sorted(map(shown, islice(document, 3)))) or "nothing"
        hint = "; images as /predict takes them go there" if "images" in document else ""
        raise invalid("body", names[:100], f'"instances" or "inputs"{hint}')
    ((field, values),) = document.items()
    columnar = field == "inputs"
    if columnar and type(values) is dict:
        values = _only(values, "image", field)
    if type(values) is not list or not values:
        found = shown(values) if type(values) is not list else "no image"
        raise invalid(field, found, "a list of images")
    if type(values[0]) is dict and "image" in values[0]:
        values = [
            _only(one, "image", f"{field}[{number}]", ", as the first")
            for number, one in enumerate(values)
        ]
    check_count(len(values), field, max_images)
    if type(values[0]) is dict:
        images = [_encoded(one, field, number, reader) for number, one in enumerate(values)]
        return joined(images), columnar
    sizes = lengths(values)
    shape = sizes[:-1] if sizes[1:] == [HEIGHT, WIDTH, 1] else sizes
    if len(shape) == 1 or shape == [HEIGHT, WIDTH]:
        expected = "a list of images, also for one: put it in another list"
        raise invalid(field, f"lists nested as {sizes}", expected)
    datatype = "FP32" if b"." in text else "UINT8"  # whether any number may be a float
    check_form(datatype, shape, field, max_images)
    booleans = b"true" in text or b"false" in text
    flat: Any
    try:
        flat = numbers(values, datatype, sizes, field, booleans)
    except InvalidInput:
        if datatype == "FP32" or not _EXPONENT.search(text):
            raise
        datatype = "FP32"  # 1e2
        flat = numbers(values, datatype, sizes, field, booleans)
    return read_images([InputTensor(INPUT, datatype, shape, flat, field)], reader), columnar


def _only(value: Any, key: str, field: str, also: str = "") -> Any:
    """The value of `key`, the only one; an error adds what is expected `also`."""
    if type(value) is not dict or value.keys() != {key}:
        found = ", ".join(map(shown, list(value)[:3])) if type(value) is dict else shown(value)
        raise invalid(field, found or "nothing", f'{{"{key}": ...}}{also}')
    return value[key]


def _encoded(value: Any, field: str, number: int, reader: Reader) -> Images:
    name = f"{field}[{number}]"
    text = _only(value, "b64", name, ' or a list, each alone or as {"image": ...}')
    return reader.base64(text, f"{name}.b64", number)


def _columns(probabilities: Probabilities, names: tuple[str, ...]) -> Iterator[bytes]:
    begin = b'{"outputs":{"probabilities":['
    for rows in _parts(probabilities):
        yield begin + orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        begin = b","
    labels = probabilities.argmax(axis=1).tolist()
    own = b',"name":%b' % orjson.dumps([names[one] for one in labels]) if has_names(names) else b""
    yield b'],"label":%b%b}}' % (orjson.dumps(labels), own)


def _rows(probabilities: Probabilities, names: tuple[str, ...]) -> Iterator[bytes]:
    begin = b'{"predictions":['
    for rows in _parts(probabilities):
        labels = rows.argmax(axis=1).tolist()
        predictions = [
            {"probabilities": row, "label": label} for row, label in zip(rows, labels, strict=True)
        ]
        if has_names(names):
            for one in predictions:
                one["name"] = names[one["label"]]
        yield begin + orjson.dumps(predictions, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        begin = b","
    yield b"]}"


@lru_cache(maxsize=64)
def has_names(names: tuple[str, ...]) -> bool:
    """Whether the classes have other names than their numbers."""
    return any(name != str(label) for label, name in enumerate(names))


def _parts(probabilities: Probabilities) -> Iterator[Probabilities]:
    for first in range(0, len(probabilities), WRITTEN_ROWS):
        yield probabilities[first : first + WRITTEN_ROWS]
