"""The form of `POST /predict`: a body is read by `body`, the answer is JSON, or bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import orjson

from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Probabilities
from service.forms.array_doubts import array_doubts
from service.forms.body import NOW_BYTES, accepted_type, read
from service.forms.form import (
    BINARY,
    JSON,
    NOTHING,
    WRITTEN_ROWS,
    Answered,
    Asked,
    Body,
    Content,
    Decoded,
)
from service.forms.pixels import Scale, octets
from service.forms.reader import ARRAYS, OCTETS, PICTURES, Limits, NeedsProcess, Reader
from service.pictures.headers import Between, Digits, Doubt, Invert

WARNINGS: Mapping[Doubt, str] = {
    "several_shapes": "the picture shows several digits, of which one was read; with "
    "?digits=several each is read",
    "not_a_digit": "the shape is unlike any digit, so label and confidence mean nothing; "
    "expected one digit on plain paper",
    "looks_inverted": "most pixels are bright, as of dark ink, but 255 is ink; send 255 - x, or "
    "?invert=true",
    "looks_wider": "the bytes look like float32, so one image was read as four; send a byte a "
    "pixel, in NumPy x.astype('uint8')",
    "looks_transposed": "the images are wider than high, as if transposed; in NumPy "
    "x.transpose(0, 2, 1)",
}

_ARRAYS = ("application/json", *ARRAYS)


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The form of `POST /predict`.

    Args:
        kind: one of `body.ACCEPTED`; `content_type` is all of that header.
        invert: "true" maps x to 255 - x, "false" leaves x; "auto" detects dark ink in pictures
            and leaves all else as it is.
        digits: "several" makes an image of each separate digit of a picture, in reading order. It
            makes no difference to anything but pictures.
        binary: whether the answer is raw bytes.
        scale: of the numbers of arrays.
        is_explained: whether what was considered is wanted, too, if the body is a picture.
    """

    kind: str
    content_type: str
    invert: Invert
    digits: Digits
    max_images: int
    max_picture_pixels: int
    binary: bool = False
    scale: Scale = "byte"
    is_explained: bool = False

    part: ClassVar[str] = "body"
    names_model: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        content_type: str,
        invert: Invert,
        digits: Digits,
        limits: Limits,
        *,
        binary: bool = False,
        scale: Scale = "byte",
        is_explained: bool = False,
    ) -> Self:
        """The form of a body of `content_type`. Raises: UnsupportedMediaType."""
        most = limits.max_images, limits.max_picture_pixels
        kind = accepted_type(content_type)
        return cls(kind, content_type, invert, digits, *most, binary, scale, is_explained)

    @property
    def in_place(self) -> bool:
        """True of raw pixels."""
        return self.kind == OCTETS

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode raw pixels of any number, and other bodies of up to `NOW_BYTES`."""
        if self.kind == OCTETS and self.invert != "true" and self.scale == "byte":
            count, rest = divmod(len(body), PIXELS)
            if rest or not 0 < count <= self.max_images:
                return Decoded(octets(body, "body", self.max_images))  # says what is wrong
            doubts = array_doubts(body, count)
            images = np.ndarray((count, HEIGHT, WIDTH), np.uint8, body)
            return Decoded(images, Asked(doubts=doubts) if doubts else NOTHING)
        if self.kind != OCTETS and len(body) > NOW_BYTES.get(self.kind, 0):
            return None
        try:
            return self._decode(bytes(body), None)
        except NeedsProcess:
            return None

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any body. Large JSON is parsed in slices, which takes a tenth of the memory."""
        return self._decode(body, between)

    def write(self, asked: Asked, answered: Answered) -> Content:
        """Bytes or JSON, as the client prefers, with warnings of doubtful images in JSON."""
        if self.binary:
            return prediction_bytes(answered)
        return prediction_json(answered, asked.doubts)

    def _decode(self, body: bytes, between: Between | None) -> Decoded:
        limits = Limits(self.max_images, self.max_picture_pixels)
        reader = Reader(
            limits,
            between,
            scale=self.scale,
            invert=self.invert,
            digits=self.digits,
            is_explained=self.is_explained and self.kind in PICTURES,
        )
        images = read(body, self.content_type, reader)
        doubts = tuple(reader.doubts)
        if not doubts and self.kind in _ARRAYS:
            doubts = array_doubts(images.data.cast("B"), len(images))
        candidates = reader.candidates
        if not doubts and not candidates:
            return Decoded(images)
        return Decoded(images, Asked(doubts=doubts, candidates=candidates))


_A_ROW = 4
"""Pieces of JSON that one row has."""
_DIGITS = tuple("0123456789")
_OF_DIGITS = ("not_a_digit", "looks_inverted", "looks_transposed")


@span("encode")
def prediction_json(answered: Answered, doubts: Sequence[tuple[int, Doubt]]) -> Content:
    """The JSON of `PredictResponse`: a batch's numbers are written once for all its requests."""
    batch, version, start = answered.batch, answered.version, answered.row
    found = warnings(doubts, version.labels) if doubts else []
    end = b']}],"warnings":%s}' % orjson.dumps(found) if found else b"]}]}"
    if answered.rows > WRITTEN_ROWS:
        return Content(JSON, steps=_steps(answered, end))
    pieces: list[bytes] | None = batch.encoded.get("json")
    if pieces is None:
        pieces = batch.encoded["json"] = _pieces(batch.probabilities, version.labels)
    own = pieces[_A_ROW * start : _A_ROW * (start + answered.rows)]
    # No row comes before: its end makes way for the head.
    own[0] = _head(version.name, version.version) + own[0][len(b"]},") :]
    own.append(end)
    return Content(JSON, b"".join(own))


@span("encode")
def prediction_bytes(answered: Answered) -> Content:
    """float32, little-endian, one for each class."""
    batch, start = answered.batch, answered.row
    content: bytes | None = batch.encoded.get("bytes")
    if content is None:
        content = batch.encoded["bytes"] = batch.probabilities.astype("<f4", copy=False).tobytes()
    size = len(content) // len(batch.probabilities)
    return Content(BINARY, content[start * size : (start + answered.rows) * size])


def _steps(answered: Answered, end: bytes) -> Iterator[bytes]:
    """The answer in pieces of `WRITTEN_ROWS` rows; `end` follows the last number."""
    version = answered.version
    for first in range(0, answered.rows, WRITTEN_ROWS):
        last = min(first + WRITTEN_ROWS, answered.rows)
        rows = answered.batch.probabilities[answered.row + first : answered.row + last]
        pieces = _pieces(rows, version.labels)
        if not first:
            pieces[0] = _head(version.name, version.version) + pieces[0][len(b"]},") :]
        if last == answered.rows:
            pieces.append(end)
        yield b"".join(pieces)


def warnings(
    doubts: Sequence[tuple[int, Doubt]], names: tuple[str, ...]
) -> list[dict[str, object]]:
    """The `warnings` of an answer; those of digits only where `names` are the digits."""
    return [
        {"image": index, "code": doubt, "message": WARNINGS[doubt]}
        for index, doubt in doubts
        if doubt not in _OF_DIGITS or names == _DIGITS
    ]


def _pieces(probabilities: Probabilities, names: tuple[str, ...]) -> list[bytes]:
    """`_A_ROW` pieces of JSON for each row, by a few calls for all of them.

    The first piece of a row begins with the end of the row before.
    """
    count = len(probabilities)
    numpy = orjson.OPT_SERIALIZE_NUMPY
    labels = probabilities.argmax(axis=1)
    largest = probabilities[np.arange(count), labels]
    beginnings = _beginnings(names)
    pieces = [b',"probabilities":['] * (_A_ROW * count)
    pieces[0::_A_ROW] = [beginnings[label] for label in labels.tolist()]
    pieces[1::_A_ROW] = orjson.dumps(largest, option=numpy)[1:-1].split(b",")
    pieces[3::_A_ROW] = orjson.dumps(probabilities, option=numpy)[2:-2].split(b"],[")
    return pieces


def one_prediction(probabilities: Probabilities, names: tuple[str, ...]) -> bytes:
    """The JSON of the prediction for one image with `probabilities`, (classes,)."""
    return b"".join(_pieces(probabilities[np.newaxis], names))[len(b"]},") :] + b"]}"


@lru_cache(maxsize=64)
def _beginnings(names: tuple[str, ...]) -> list[bytes]:
    return [
        b']},{"label":%d,%s"confidence":'
        % (label, b"" if name == str(label) else b'"name":%s,' % orjson.dumps(name))
        for label, name in enumerate(names)
    ]


@lru_cache(maxsize=64)
def _head(model: str, version: str) -> bytes:
    return orjson.dumps({"model": model, "version": version, "predictions": []})[:-2]
