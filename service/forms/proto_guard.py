"""Checks a serialized ModelInferRequest before protobuf parses it.

protobuf makes an object of each two bytes `2A 00`, an empty input, and eight bytes of memory of
each byte in `shape`: 32 MB of the former blocked the event loop for 2.7 s and took 1.2 GB, of the
latter 0.4 s and 0.6 GB (protobuf 6.33, 2 cores). So the fields of a message, of its inputs and of
their contents are counted first, and all bytes that are not pixels (names, parameters, outputs,
shapes) are limited together. Raw, float and BYTES contents are only copied and limited by the size
of a message. Integers take 7 ms a MB and up to eight bytes a number, so they are counted, too:
where protobuf gets no memory it ends the process.

A malformed message becomes an InvalidInput.

Source: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from service.errors import InvalidInput, invalid
from service.forms import open_inference_pb2 as pb

MAX_FIELDS = 1024
"""Limit of the fields of a request, its inputs and their contents; each entry of a repeated field
counts. A valid request has under 100, or about 800 if its client does not pack the numbers of an
image."""

MAX_OTHER_BYTES = 64 * 1024
"""Limit on all that is not pixels."""

MAX_NUMBERS = 1 << 24
"""Limit on integers in typed contents: 21,399 images."""

_FIRST_FIELDS = 8
_MAX_NAME_BYTES = 1024
"""Limits on where the names of a message that is refused are looked for."""

_NAMES = (
    pb.ModelInferRequest.MODEL_NAME_FIELD_NUMBER,
    pb.ModelInferRequest.MODEL_VERSION_FIELD_NUMBER,
    pb.ModelInferRequest.ID_FIELD_NUMBER,
)

_LONGEST_VARINT_BYTES = 10
_DELIMITED = 2
_RAW_TAG = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER << 3 | _DELIMITED

_PIXELS: Mapping[int, Any] = {}
_PACKED_PIXELS: Mapping[int, Any] = {}
_CONTENTS = {
    pb.InferTensorContents.BOOL_CONTENTS_FIELD_NUMBER: _PACKED_PIXELS,
    pb.InferTensorContents.INT_CONTENTS_FIELD_NUMBER: _PACKED_PIXELS,
    pb.InferTensorContents.INT64_CONTENTS_FIELD_NUMBER: _PACKED_PIXELS,
    pb.InferTensorContents.UINT_CONTENTS_FIELD_NUMBER: _PACKED_PIXELS,
    pb.InferTensorContents.UINT64_CONTENTS_FIELD_NUMBER: _PACKED_PIXELS,
    pb.InferTensorContents.FP32_CONTENTS_FIELD_NUMBER: _PIXELS,
    pb.InferTensorContents.FP64_CONTENTS_FIELD_NUMBER: _PIXELS,
    pb.InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER: _PIXELS,
}
_INPUT = {pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER: _CONTENTS}
_REQUEST = {
    pb.ModelInferRequest.INPUTS_FIELD_NUMBER: _INPUT,
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER: _PIXELS,
}
"""Fields that may be large, by number: messages with such fields, or pixels."""


def read_infer_request(message: bytes | memoryview) -> pb.ModelInferRequest | InvalidInput:
    """The request in `message`, or the error that its call ends with."""
    try:
        excess = _excess(message)
        if excess is None:
            return pb.ModelInferRequest.FromString(bytes(message))
    except DecodeError:
        return InvalidInput("message: not a ModelInferRequest", field="message")
    expected = "one input with its numbers packed, many as raw bytes, and at most two outputs"
    return invalid("message", f"more than {excess}", expected)


def read_names(message: bytes | memoryview) -> tuple[str, str, str]:
    """Model, version and id of a message that is refused; "" for one that is not found.

    Clients write them first. Only the first fields are looked at.
    """
    found, position = dict.fromkeys(_NAMES, ""), 0
    try:
        for _ in range(_FIRST_FIELDS):
            tag, start, position = _field(message, position)
            if position > len(message):
                break
            is_short = position - start <= _MAX_NAME_BYTES
            if tag & 7 == _DELIMITED and tag >> 3 in found and is_short:
                found[tag >> 3] = bytes(message[start:position]).decode()
    except (DecodeError, UnicodeDecodeError):
        pass
    model, version, name = found.values()
    return model, version, name


def split(message: bytes | memoryview) -> tuple[list[memoryview], list[memoryview]] | None:
    """The fields of `message` without its raw_input_contents, and the values of those, as views.

    None if it is malformed or has more than `MAX_FIELDS` fields: `read_infer_request` says which.
    """
    view, position = memoryview(message), 0
    others: list[memoryview] = []
    raw: list[memoryview] = []
    try:
        for _ in range(MAX_FIELDS):
            begin = position
            tag, start, position = _field(message, position)
            if position > len(message):
                return None
            if tag == _RAW_TAG:
                raw.append(view[start:position])
            else:
                others.append(view[begin:position])
            if position == len(message):
                return others, raw
    except DecodeError:
        pass
    return None


def _excess(message: bytes | memoryview) -> str | None:
    """The limit that `message` exceeds, if any.

    Raises:
        DecodeError: it is truncated, or uses groups, which proto3 does not have.
    """
    fields = other_bytes = 0
    packed: list[slice] = []
    parts: list[tuple[int, int, Mapping[int, Any]]] = [(0, len(message), _REQUEST)]
    while parts:
        position, end, large = parts.pop()
        while position < end:
            fields += 1
            if fields > MAX_FIELDS:
                return f"{MAX_FIELDS} fields"
            tag, start, position = _field(message, position)
            if position > end:
                raise DecodeError("a truncated field")
            inside = large.get(tag >> 3)
            if inside and tag & 7 == _DELIMITED:
                parts.append((start, position, inside))
            elif inside is _PACKED_PIXELS:
                packed.append(slice(start, position))
            elif inside is not _PIXELS:
                other_bytes += position - start
    if other_bytes > MAX_OTHER_BYTES:
        return f"{MAX_OTHER_BYTES} bytes besides the pixels"
    if sum(part.stop - part.start for part in packed) > MAX_NUMBERS:  # bytes
        view = np.frombuffer(message, np.uint8)
        if sum(np.count_nonzero(view[part] < 0x80) for part in packed) > MAX_NUMBERS:  # last bytes
            return f"{MAX_NUMBERS} integers"
    return None


def _field(message: bytes | memoryview, position: int) -> tuple[int, int, int]:
    """Number and wire type of the field at `position`; start, after its size, and end of its value.

    The end may exceed `message`.
    """
    tag, position = _varint(message, position)
    if tag < 8:
        raise DecodeError("a field without a number")
    match tag & 7:
        case 0:
            return tag, position, _varint(message, position)[1]
        case 1:
            return tag, position, position + 8
        case 2:  # _DELIMITED
            size, position = _varint(message, position)
            return tag, position, position + size
        case 5:
            return tag, position, position + 4
        case _:
            raise DecodeError("a group")


def _varint(message: bytes | memoryview, position: int) -> tuple[int, int]:
    """The number at `position`, seven bits a byte, lowest first, and the position after it."""
    if position + 1 < len(message):
        if (first := message[position]) < 0x80:
            return first, position + 1
        if (second := message[position + 1]) < 0x80:
            return first & 0x7F | second << 7, position + 2
    value = 0
    for shift, byte in enumerate(message[position : position + _LONGEST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise DecodeError("an unterminated number")
