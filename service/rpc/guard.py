"""Reading a ModelInferRequest that may be hostile.

protobuf makes an object of each two bytes `2A 00`, an empty input, and eight bytes of memory of
each byte in `shape`: 32 MB of the one took 2.7 s of the event loop and 1.2 GB here, of the other
0.4 s and 0.6 GB (protobuf 6.33, 2 cores). So the fields of a message are counted before it is
read, those of its inputs and their contents with them, and all bytes that are not pixels are few:
names, parameters, outputs, shapes and contents of other types, together. What may still be large
are raw_input_contents and fp32_contents, which are only copied, and uint_contents, which take six
times their bytes and 7 ms each MB. Their limit is that of a message.

And a message that is none is an answer here, not an exception: grpcio 1.85 would answer UNKNOWN
and log a stack trace for each. It refuses to look at a value.

Source: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from service.errors import InvalidInput
from service.rpc import open_inference_pb2 as pb

MAX_FIELDS = 1024
"""Of a request, its inputs and their contents, each entry of a repeated field counted. One with
every right has under 100; the rest is for an image whose 784 numbers a client does not pack."""

MAX_OTHER_BYTES = 64 * 1024
"""Of all that is no pixel."""

_LONGEST_VARINT_BYTES = 10
_DELIMITED = 2

_PIXELS: Mapping[int, Any] = {}
_CONTENTS = {
    pb.InferTensorContents.UINT_CONTENTS_FIELD_NUMBER: _PIXELS,
    pb.InferTensorContents.FP32_CONTENTS_FIELD_NUMBER: _PIXELS,
}
_INPUT = {pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER: _CONTENTS}
_REQUEST = {
    pb.ModelInferRequest.INPUTS_FIELD_NUMBER: _INPUT,
    pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER: _PIXELS,
}
"""By number the fields that may be large: looked into, or pixels."""


def read_infer_request(message: bytes) -> pb.ModelInferRequest | InvalidInput:
    """The request in `message`, or what is wrong with it, for the servicer to raise."""
    try:
        excess = _excess(message)
        if excess is None:
            return pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return InvalidInput("message: got bytes that are no ModelInferRequest", field="message")
    return InvalidInput(
        f"message: got more than {excess}, expected one input with its numbers packed and at most "
        "two outputs",
        field="message",
    )


def _excess(message: bytes) -> str | None:
    """Which limit `message` is over, if any.

    Raises:
        DecodeError: it is cut off, or uses groups, which proto3 has not.
    """
    fields = other_bytes = 0
    parts: list[tuple[int, int, Mapping[int, Any]]] = [(0, len(message), _REQUEST)]
    while parts:
        position, end, large = parts.pop()
        while position < end:
            fields += 1
            if fields > MAX_FIELDS:
                return f"{MAX_FIELDS} fields"
            tag, position = _varint(message, position)
            start, position = _value(message, position, tag & 7)
            if position > end:
                raise DecodeError("a field is cut off")
            inside = large.get(tag >> 3)
            if inside and tag & 7 == _DELIMITED:
                parts.append((start, position, inside))
            elif inside is not _PIXELS:
                other_bytes += position - start
    return f"{MAX_OTHER_BYTES} bytes beside the pixels" if other_bytes > MAX_OTHER_BYTES else None


def _value(message: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Where the value at `position` begins, its size left out, and where it ends."""
    match wire_type:
        case 0:
            return position, _varint(message, position)[1]
        case 1:
            return position, position + 8
        case 2:  # _DELIMITED
            size, position = _varint(message, position)
            return position, position + size
        case 5:
            return position, position + 4
        case _:
            raise DecodeError("a group")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, seven bits a byte, lowest first, and the position behind it."""
    value = 0
    for shift, byte in enumerate(message[position : position + _LONGEST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise DecodeError("a number without an end")
