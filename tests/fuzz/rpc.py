"""ModelInferRequest messages, and tensors of the Open Inference Protocol.

Both are compared with the rules in plain Python.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from lenet.pixels import Images
from service.errors import InvalidInput, ServiceError, TooLarge
from service.forms import open_inference_pb2 as pb
from service.forms.form import Asked, Decoded, RequestedOutput
from service.forms.oip_proto import OipProtoForm
from service.forms.proto_guard import MAX_FIELDS, MAX_OTHER_BYTES, read_infer_request, split
from service.forms.reader import Limits
from service.forms.tensors import (
    ALL_OUTPUTS,
    CLASSIFIED,
    INPUT,
    OUTPUTS,
)
from service.pictures.headers import sniff
from tests.fuzz.bodies import check_error, decoded
from tests.fuzz.target import Finding, MutateBytes, Target, mutate_list

MAX_IMAGES = 8
LIMITS = Limits(MAX_IMAGES, 1 << 16)
_CODES = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "BF16": "H",
    "FP32": "f",
    "FP64": "d",
}
_TYPED = {
    "BOOL": "bool",
    "INT8": "int",
    "INT16": "int",
    "INT32": "int",
    "INT64": "int64",
    "UINT8": "uint",
    "UINT16": "uint",
    "UINT32": "uint",
    "UINT64": "uint64",
    "FP32": "fp32",
    "FP64": "fp64",
    "BYTES": "bytes",
}


# Tensors


@dataclass(frozen=True)
class Tensor:
    """One input of a request, as plain values."""

    name: Any
    datatype: Any
    shape: Sequence[Any]
    data: bytes | Sequence[Any]


def plain_images(tensors: Sequence[Tensor]) -> Images | None:
    """The images of a request by the rules of the documentation; None where it is to be refused."""
    if len(tensors) != 1:
        return None
    (tensor,) = tensors
    if tensor.name != INPUT or tensor.datatype not in (*_CODES, "BYTES"):
        return None
    shape = list(tensor.shape)
    if any(type(size) is not int or not 0 <= size < 2**63 for size in shape):
        return None
    one = shape in ([28, 28], [784], [28, 28, 1])
    many = [28, 28], [1, 28, 28], [784], [28, 28, 1]
    if tensor.datatype == "BYTES":
        one, many = False, ([], [1])
    if not one and (not shape or shape[1:] not in many):
        return None
    rows = 1 if one else shape[0]
    if not 1 <= rows <= MAX_IMAGES:
        return None
    data = tensor.data
    if tensor.datatype == "BYTES":
        return _files(data, rows)
    if isinstance(data, bytes):
        code = _CODES[tensor.datatype]
        if len(data) != rows * 784 * struct.calcsize(code):
            return None
        data = struct.unpack(f"<{rows * 784}{code}", data)
        if tensor.datatype == "BF16":
            data = [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in data]
    if len(data) != rows * 784:
        return None
    if tensor.datatype == "BOOL":
        data = [255 * value for value in data]
    for value in data:
        if not 0 <= value <= 255 or value != int(value):
            return None
    images = np.array([int(value) for value in data], np.uint8).reshape(rows, 28, 28)
    if tensor.datatype in ("FP16", "BF16", "FP32", "FP64") and 1 in images.max(axis=(1, 2)):
        return None  # fractions of 255
    return images


def _files(data: bytes | Sequence[bytes], rows: int) -> Images | None:
    """The images of a BYTES tensor; of a picture what `decode` makes of it."""
    elements = [] if isinstance(data, bytes) else list(data)
    while isinstance(data, bytes) and data:
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 + size:
            return None
        elements.append(data[4 : 4 + size])
        data = data[4 + size :]
    if len(elements) != rows:
        return None
    images = [
        decoded(one, sniff(one) or "application/octet-stream")
        if sniff(one) or len(one) == 784
        else None
        for one in elements
    ]
    if any(one is None or isinstance(one, ServiceError) for one in images):
        return None
    return np.concatenate(images)  # type: ignore[arg-type]


VALUES = (
    *(0, 1, 2, 8, 9, 28, 784, 785, 255, 256, -1, 2**31, 2**63 - 1, 2**63, 10**400, 0.5, 28.0),
    *(
        "",
        "image",
        "label",
        "probabilities",
        "UINT8",
        "FP32",
        "INT64",
        "BOOL",
        "BYTES",
        "00",
        "ff",
        "0000c07f",
    ),
    *(True, None, "0000803f", math.nan, math.inf, -0.0, [], [28, 28], [1, 784]),
)
"""What JSON is changed to."""


# Messages


def decode(message: bytes) -> Decoded:
    """Decode like the service: at once, or in a decoding process."""
    form = OipProtoForm(LIMITS)
    return form.decode_now(message) or form.decode(message, lambda _: None)


class GrpcTarget(Target):
    """A serialized ModelInferRequest, beside protobuf and the plain rules."""

    max_bytes = 16 * 1024
    traced_bytes = 2 << 20

    def run(self, data: bytes) -> None:
        request = self._check_guard(data)
        expected = None if request is None else _expected(request)
        try:
            decoded = decode(data)
            images, wanted = decoded.images, decoded.asked
        except (InvalidInput, TooLarge) as exc:
            check_error(exc)
            if expected is not None:
                raise Finding(f"refused {expected.shape}: {exc.message}") from exc
            return
        if expected is None or request is None:
            raise Finding("accepted what is to be refused")
        if images.dtype != np.uint8 or not np.array_equal(images, expected):
            raise Finding(f"other pixels than the message has, {images.dtype} {images.shape}")
        names = ALL_OUTPUTS
        if request.outputs:
            names = tuple(
                RequestedOutput(one.name, classes=one.parameters["classification"].int64_param)
                for one in map(_copied, request.outputs)
            )
        raw = bool(request.raw_input_contents)
        timeout_us = 0
        if "timeout" in request.parameters:
            given = request.parameters["timeout"]
            timeout_us = given.int64_param or given.uint64_param
        who = request.model_name, request.model_version, request.id
        asked = Asked(*who, names, raw, timeout_us=timeout_us)
        if wanted != asked:
            raise Finding(f"read {wanted}, expected {asked}")

    def _check_guard(self, data: bytes) -> pb.ModelInferRequest | None:
        """The request, if it may be parsed; what is let through is cheap."""
        found = read_infer_request(data)
        try:
            plain = pb.ModelInferRequest.FromString(data)
        except DecodeError:
            plain = None
        if isinstance(found, ServiceError):
            check_error(found)
            if plain is not None and len(data) < 1024 and "more than" not in found.message:
                # Groups and unknown wire types, which protobuf skips, are refused.
                if _has_groups(data):
                    return None
                raise Finding(f"refused what protobuf reads: {found.message}")
            return None
        if plain is None or found != plain:
            raise Finding("accepted another message than protobuf reads")
        counts = [len(plain.outputs), len(plain.inputs), len(plain.raw_input_contents)]
        counts += [len(plain.parameters)]
        others = 0
        for tensor in plain.inputs:
            others += len(tensor.shape)
        if sum(counts) > MAX_FIELDS or others > MAX_OTHER_BYTES:
            raise Finding(f"let {counts} fields and {others} other numbers through")
        if data:
            parts = split(data)
            if parts is None:
                raise Finding("accepted what cannot be split")
            without = pb.ModelInferRequest.FromString(b"".join(parts[0]))
            without.raw_input_contents.extend(map(bytes, parts[1]))
            if without != plain:
                raise Finding("split into another message")
        return plain

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.15:
            return mutate(data)
        return _changed_message(data, rng, mutate, _MESSAGES)


def _copied(output: Any) -> Any:
    """Reading a missing parameter would add it."""
    copy = type(output)()
    copy.CopyFrom(output)
    return copy


def _expected(request: pb.ModelInferRequest) -> Images | None:
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        return None
    tensors = []
    for at, tensor in enumerate(request.inputs):
        if "shared_memory_region" in tensor.parameters:
            return None
        given = [field.name for field, _ in tensor.contents.ListFields()]
        if raw:
            if given:
                return None
            data: bytes | Sequence[Any] = raw[at]
        else:
            field = f"{_TYPED.get(tensor.datatype, '')}_contents"
            if given != [field]:
                return None
            data = list(getattr(tensor.contents, field))
        tensors.append(Tensor(tensor.name, tensor.datatype, list(tensor.shape), data))
    names = [output.name for output in request.outputs]
    if any(name not in OUTPUTS for name in names) or len(set(names)) < len(names):
        return None
    if "timeout" in request.parameters:
        given = request.parameters["timeout"]
        if given.WhichOneof("parameter_choice") not in ("int64_param", "uint64_param"):
            return None
        if not 0 <= (given.int64_param or given.uint64_param) <= 2**53:
            return None
    if len(request.id) > 1024:
        return None
    for output in request.outputs:
        if "shared_memory_region" in output.parameters:
            return None
        if "classification" in output.parameters and (
            output.name != CLASSIFIED or output.parameters["classification"].int64_param < 1
        ):
            return None
    if "scale" in request.parameters and request.parameters["scale"].string_param != "byte":
        return None  # no reference for fractions
    return plain_images(tensors)


# The wire format: https://protobuf.dev/programming-guides/encoding


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


def _fields(data: bytes) -> list[tuple[int, int, bytes]] | None:
    """Number, wire type and content of each field; None if `data` is no message."""
    found: list[tuple[int, int, bytes]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("a number without end")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    try:
        while at < len(data):
            tag = varint()
            start = at
            match tag & 7:
                case 0:
                    varint()
                case 1 | 5 as kind:
                    at += 8 if kind == 1 else 4
                case 2:
                    size = varint()
                    start, at = at, at + size
                case 3 | 4:
                    pass
                case _:
                    return None
            if at > len(data):
                return None
            found.append((tag >> 3, tag & 7, data[start:at]))
    except ValueError:
        return None
    return found


def _serialized(number: int, kind: int, content: bytes) -> bytes:
    tag = _varint(number << 3 | kind)
    return tag + (_varint(len(content)) if kind == 2 else b"") + content


def _has_groups(data: bytes, messages: Mapping[int, Any] | None = None) -> bool:
    messages = _MESSAGES if messages is None else messages
    return any(
        kind in (3, 4)
        or (kind == 2 and number in messages and _has_groups(content, messages[number]))
        for number, kind, content in _fields(data) or ()
    )


_CONTENTS: Mapping[int, Any] = {}
_INPUT: Mapping[int, Any] = {4: {}, 5: _CONTENTS}
_MESSAGES: Mapping[int, Any] = {4: {}, 5: _INPUT, 6: {}}
"""The fields of a ModelInferRequest that are messages, by number."""


def _changed_message(
    data: bytes, rng: random.Random, mutate: MutateBytes, messages: Mapping[int, Any]
) -> bytes:
    fields = _fields(data)
    if fields is None:
        return mutate(data)

    def change(field: bytes) -> bytes:
        inner = _fields(field)
        if not inner:
            number, kind, content = rng.randint(1, 9), 2, b""
        else:
            number, kind, content = inner[0]
        if kind == 2 and number in messages and rng.random() < 0.8:
            return _serialized(number, 2, _changed_message(content, rng, mutate, messages[number]))
        match rng.randrange(6):
            case 0:
                number = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 100, 1 << 28))
            case 1:
                kind = rng.randrange(8)
            case 2:
                content = _varint(rng.choice((0, 1, 28, 784, 255, 256, (1 << 64) - 1)))
            case 3:
                content = rng.choice((b"image", b"UINT8", b"FP32", b"label", bytes(784), b"\xff"))
            case _:
                content = mutate(content)
        return _serialized(number, kind, content)

    items = [_serialized(*field) for field in fields]
    return b"".join(mutate_list(items, rng, change))
