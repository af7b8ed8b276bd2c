"""The body of a request by TensorFlow Serving's API."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np

from lenet.pixels import Images
from service.errors import InvalidInput, ServiceError, TooLarge
from service.forms.reader import Reader
from service.forms.tensorflow import read_tensorflow_body
from service.pictures.headers import sniff
from tests.fuzz.bodies import check_images, decoded, leaves, nested, plain_base64
from tests.fuzz.infer import Refused, check_refusal, loaded, must
from tests.fuzz.rpc import LIMITS, MAX_IMAGES, VALUES
from tests.fuzz.target import Finding, MutateBytes, Target, changed_json

_FLOAT = re.compile(rb"\.|[0-9][eE]")


class TensorflowBodyTarget(Target):
    """Compared with a plain reading."""

    max_bytes = 96 * 1024  # beyond the size from which objects are counted before they are parsed

    def run(self, data: bytes) -> None:
        expected = _reference(data)
        try:
            images, columnar = read_tensorflow_body(data, Reader(LIMITS, lambda _: None))
        except (InvalidInput, TooLarge) as exc:
            check_refusal(exc, len(data), None if expected is None else expected[0])
            return
        check_images(images)
        if expected is None:
            raise Finding(f"accepted {images.shape}")
        if columnar != expected[1] or not np.array_equal(images, expected[0]):
            raise Finding("other pixels, or another form, than expected")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.3:
            return mutate(data)
        try:
            return json.dumps(changed_json(json.loads(data), rng, VALUES)).encode()
        except (ValueError, RecursionError):
            return mutate(data)


def _reference(body: bytes) -> tuple[Images, bool] | None:
    """The images and whether they came by column; None where the request is to be refused."""
    try:
        document = loaded(body)
        if type(document) is not dict:
            return None
        document = dict(document)
        document.pop("id", None)
        for name in ("parameters", "params"):
            if document.pop(name, None) not in (None, {}):
                return None
        if document.pop("signature_name", "") not in ("", "serving_default"):
            return None
        ((field, values),) = document.items()
        if field not in ("instances", "inputs"):
            return None
        if field == "inputs" and type(values) is dict:
            values = _only(values, "image")
        if type(values) is not list or not 0 < len(values) <= MAX_IMAGES:
            return None
        if type(values[0]) is dict and "image" in values[0]:
            values = [_only(value, "image") for value in values]
        if type(values[0]) is dict:
            rows = [_bytes(_only(value, "b64")) for value in values]
        else:
            rows = [_row(value, values[0], floats=bool(_FLOAT.search(body))) for value in values]
    except (Refused, ValueError):
        return None
    return np.array(rows, np.uint8).reshape(-1, 28, 28), field == "inputs"


def _only(value: Any, key: str) -> Any:
    must(type(value) is dict and list(value) == [key])
    return value[key]


def _bytes(text: Any) -> list[int]:
    must(type(text) is str)
    content = plain_base64(text)
    must(content is not None)
    assert content is not None
    if kind := sniff(content):
        found = decoded(content, kind)
        must(not isinstance(found, ServiceError))
        return list(found.tobytes())
    must(len(content) == 784)
    return list(content)


def _row(image: Any, first: Any, *, floats: bool) -> list[int]:
    must(nested(image) == nested(first) in ((784,), (28, 28), (28, 28, 1), (1, 28, 28)))
    for value in leaves(image):
        must(type(value) is int or (floats and type(value) is float))
        must(0 <= value <= 255 and value == int(value))
    return [int(value) for value in leaves(image)]
