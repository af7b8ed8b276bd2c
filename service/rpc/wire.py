"""Reading a ModelInferRequest that may be hostile.

protobuf makes an object of each two bytes `2A 00`, an empty input: 32 MB of them took 2.7 s of the
event loop and 1.2 GB here (protobuf 6.33, 2 cores). So the fields of a message are counted before
it is read. And a message that is none is an answer here, not an exception: grpcio 1.85 would
answer UNKNOWN and log a stack trace for each. It refuses to look inside a field.

Source: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from service.errors import InvalidInput
from service.rpc import open_inference_pb2 as pb

MAX_FIELDS = 64
"""Of a message, each entry of a repeated field counted; a request with every right has under 20."""

_LONGEST_VARINT_BYTES = 10


def read_infer_request(message: bytes) -> pb.ModelInferRequest | InvalidInput:
    """The request in `message`, or what is wrong with it, for the servicer to raise."""
    try:
        if not _has_at_most(MAX_FIELDS, message):
            return InvalidInput(
                f"message: got more than {MAX_FIELDS} fields, expected one input and at most two "
                "outputs",
                field="message",
            )
        return pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return InvalidInput("message: got bytes that are no ModelInferRequest", field="message")


def _has_at_most(limit: int, message: bytes) -> bool:
    """Whether `message` has at most `limit` fields at its top level.

    Raises:
        DecodeError: it is cut off, or uses groups, which proto3 has not.
    """
    position = 0
    for _ in range(limit):
        if position == len(message):
            return True
        tag, position = _varint(message, position)
        match tag & 7:
            case 0:
                _, position = _varint(message, position)
            case 1:
                position += 8
            case 2:
                size, position = _varint(message, position)
                position += size
            case 5:
                position += 4
            case _:
                raise DecodeError("a group")
        if position > len(message):
            raise DecodeError("a field is cut off")
    return position == len(message)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, seven bits a byte, lowest first, and the position behind it."""
    value = 0
    for shift, byte in enumerate(message[position : position + _LONGEST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise DecodeError("a number without an end")
