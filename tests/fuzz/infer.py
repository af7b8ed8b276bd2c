"""The body of an infer request over HTTP: JSON, and the binary tensors behind it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from lenet.pixels import Images
from service.errors import InvalidInput, ServiceError, TooLarge
from service.forms.form import asked_from
from service.forms.oip_json import read_infer_body
from service.forms.reader import Reader
from service.forms.tensors import (
    CLASSIFIED,
    OUTPUTS,
)
from service.pictures.headers import sniff
from tests.fuzz.bodies import check_error, check_images, has_surrogate, leaves, nested, plain_base64
from tests.fuzz.rpc import LIMITS, VALUES, Tensor, plain_images
from tests.fuzz.target import Finding, MutateBytes, Target, changed_json

_LARGEST_INTEGER = 2**53
_UNCHECKED_BYTES = 64 * 1024


class InferBodyTarget(Target):
    """The first line of an input is the header's number, or nothing; the rest is the body."""

    max_bytes = 96 * 1024  # beyond the size from which objects are counted before they are parsed

    def run(self, data: bytes) -> None:
        line, _, body = data.partition(b"\n")
        json_bytes = int(line) if re.fullmatch(rb"\d{1,6}", line) else None
        expected = reference(body, json_bytes)
        try:
            images, asked = read_infer_body(body, json_bytes, Reader(LIMITS, lambda _: None))
        except (InvalidInput, TooLarge) as exc:
            check_refusal(exc, len(body), None if expected is None else expected[0])
            return
        check_images(images)
        if expected is None:
            raise Finding(f"accepted {images.shape}, {asked}")
        if not np.array_equal(images, expected[0]):
            raise Finding("other pixels than expected")
        found = (asked.id, [(one.name, one.binary, one.classes) for one in asked.outputs])
        if (*found, asked.timeout_us) != expected[1:]:
            raise Finding(f"read {asked}, expected {expected[1:]}")
        if asked_from(json.loads(json.dumps(asdict(asked))), len(images)) != asked:
            raise Finding(f"{asked} is another after a decoding process")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        line, _, body = data.partition(b"\n")
        size = int(line) if re.fullmatch(rb"\d{1,6}", line) else None
        text, rest = (body, b"") if size is None else (body[:size], body[size:])
        if rng.random() < 0.2:
            return mutate(data)
        if rest and rng.random() < 0.2:
            return b"%s\n%s%s" % (line, text, mutate(rest))
        try:
            document = changed_json(json.loads(text), rng, VALUES)
        except (ValueError, RecursionError):
            return mutate(data)
        text = json.dumps(document).encode()
        kept = size is None or rng.random() < 0.05
        return b"%s\n%s%s" % (line if kept else b"%d" % len(text), text, rest)


def check_refusal(error: ServiceError, size: int, expected: Images | None) -> None:
    """Check the error for a body of `size` bytes. Raises: Finding, if images were `expected`."""
    check_error(error)
    counted = size > _UNCHECKED_BYTES and "more" in error.message  # before it was parsed
    if expected is not None and not counted:
        raise Finding(f"refused {expected.shape}: {error.message}") from error


class Refused(Exception):
    """The documented rules refuse the body."""


def reference(
    body: bytes, json_bytes: int | None
) -> tuple[Images, str | None, list[tuple[str, bool, int]], int] | None:
    """Images, id, outputs and timeout; None where the request is to be refused."""
    try:
        if json_bytes == 0:
            tensor = Tensor("image", "UINT8", [len(body) // 784, 784], body)
            if len(body) % 784 and sniff(body):
                tensor = Tensor("image", "BYTES", [1], [body])
            images = plain_images([tensor])
            if images is None:
                return None
            return images, None, [(name, True, 0) for name in OUTPUTS], 0
        if json_bytes is not None and json_bytes > len(body):
            return None
        text = body if json_bytes is None else body[:json_bytes]
        return _read(loaded(text), body[len(text) :])
    except Refused:
        return None


def loaded(text: bytes) -> Any:
    """The JSON in `text`, read strictly. Raises: Refused."""

    def reject(constant: str) -> None:
        raise ValueError(constant)

    try:
        document = json.loads(
            text.decode("utf-8-sig"),
            parse_constant=reject,
            parse_int=_finite(int),
            parse_float=_finite(float),
        )
    except (ValueError, RecursionError) as exc:
        raise Refused from exc
    if has_surrogate(document):  # json reads them, though no UTF-8 has them
        raise Refused
    return document


def _finite(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Numbers are doubles to many readers of JSON: one beyond them is refused."""

    def read(text: str) -> float:
        value = kind(text)
        if not abs(value) < 2**1024:
            raise ValueError(text)
        return value

    return read


def _read(document: Any, rest: bytes) -> Any:
    must(type(document) is dict)
    parameters = _parameters(document)
    tensors = []
    must(type(document.get("inputs")) is list)
    for entry in document["inputs"]:
        must(type(entry) is dict)
        own = _parameters(entry)
        must(type(entry.get("shape")) is list)
        must(type(entry.get("name")) is type(entry.get("datatype")) is str)
        must("shared_memory_region" not in own)
        data: Any
        if "binary_data_size" in own:
            size = _integer(own, "binary_data_size")
            must("data" not in entry and size <= len(rest))
            data, rest = rest[:size], rest[size:]
        elif "data" not in entry:  # the only tensor needs no size
            must(len(document["inputs"]) == 1 and rest)
            data, rest = rest, b""
            bare = int.from_bytes(data[:4], "little") != len(data) - 4
            if entry["datatype"] == "BYTES" and entry["shape"] in ([1], [1, 1]) and bare:
                data = [data] if sniff(data) else data
        else:
            data = _flat(entry["data"], entry["shape"])
            datatype = entry["datatype"]
            kinds = (int, float) if "F" in datatype else (int,)
            if datatype == "BYTES":
                must(all(type(text) is str for text in data))
                data = [plain_base64(text) for text in data]
                must(None not in data)
            else:
                kinds = (bool,) if datatype == "BOOL" else kinds
                must(all(type(value) in kinds for value in data))
        tensors.append(Tensor(entry.get("name"), entry.get("datatype"), entry["shape"], data))
    images = plain_images(tensors)
    must(images is not None and not rest)
    binary = parameters.get("binary_data_output", False)
    must(type(binary) is bool)
    outputs = []
    wanted = document.get("outputs")
    must(wanted is None or type(wanted) is list)
    for entry in wanted or ():
        must(type(entry) is dict)
        own = _parameters(entry)
        name, flag = entry.get("name"), own.get("binary_data", binary)
        classes = _integer(own, "classification")
        must(classes > 0 or "classification" not in own)
        must(type(name) is str and name in OUTPUTS and type(flag) is bool)
        must("shared_memory_region" not in own)
        must(not classes or name == CLASSIFIED)
        outputs.append((name, flag, classes))
    must(len({name for name, _, _ in outputs}) == len(outputs))
    identity = document.get("id")
    must(identity is None or (type(identity) is str and len(identity) <= 1024))
    timeout_us = _integer(parameters, "timeout")
    return images, identity, outputs or [(name, binary, 0) for name in OUTPUTS], timeout_us


def must(holds: bool) -> None:
    """Raises: Refused, unless it `holds`."""
    if not holds:
        raise Refused


def _parameters(owner: Any) -> Any:
    found = owner.get("parameters")
    must(found is None or type(found) is dict)
    return found or {}


def _integer(owner: Any, name: str) -> int:
    found = owner.get(name, 0)
    must(type(found) is int and 0 <= found <= _LARGEST_INTEGER)
    return int(found)


def _flat(data: Any, shape: list[Any]) -> list[Any]:
    must(type(data) is list)
    if any(type(one) is list for one in data):
        must(all(type(size) is int for size in shape) and nested(data) == tuple(shape))
    return leaves(data)
