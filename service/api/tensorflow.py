"""TensorFlow Serving's REST API, for clients that come from there: prediction, and status.

`POST /v1/models/{model}[/versions/{version}]:predict`, and `GET` of the same without `:predict`.
A prediction has two outputs, `probabilities` and `label`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, cast

import orjson
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from lenet.nvtx import span
from lenet.pixels import Probabilities
from service.api.openapi import OWNERS, TENSORFLOW, ProtocolError, errors
from service.decode.pool import Body, Decoded, TensorflowSource
from service.engine.models import Models
from service.engine.queue import BatchAnswer, Request
from service.errors import ServiceError
from service.forms.tensorflow import read_tensorflow_body
from service.request import ENCODED_ROWS, ImageCall, ImageRoute, Reply, Wanted
from service.transport.answer import JSON, Answer, plain_error_answer

_INLINE_BYTES = 128 * 1024
"""What is decoded on the event loop: 2 to 3 ms of JSON."""
_INLINE_LISTS = 10_000


class TensorflowRoute(ImageRoute):
    """Prediction by the model that the path names."""

    __slots__ = ()

    def read(
        self, query: bytes, headers: Mapping[str, str], path: Mapping[str, str] | None = None
    ) -> Wanted:
        """Read the path and the headers, whose names are in lower case.

        Raises: InvalidInput, UnsupportedMediaType, TooLarge.
        """
        named = path or {}
        return Wanted(
            named.get("model", ""),
            named.get("version", ""),
            self.timeout_s_of(headers),
            self.length_of(headers),
            TensorflowSource(self.limits.max_images),
            _INLINE_BYTES,
        )

    def open(self, wanted: Wanted, reply: Reply) -> TensorflowCall:
        """Begin a request whose body is still to come."""
        return TensorflowCall(self, wanted, reply)

    def error(self, error: ServiceError) -> Answer:
        """`{"error": "..."}`, as TensorFlow Serving's."""
        return plain_error_answer(error)


class TensorflowCall(ImageCall):
    """One request for a prediction."""

    _columnar = False

    def is_quick(self, body: Body) -> bool:
        """Each list takes time, and with a channel axis each number is in one."""
        return bytes(body).count(b"[") <= _INLINE_LISTS

    def decode(self, body: Body) -> None:
        """Images, and the form of the answer."""
        images, self._columnar = read_tensorflow_body(body, self._route.limits.max_images)
        self.decoded(images)

    def take(self, outcome: Decoded) -> None:
        """The same."""
        self._columnar = outcome.wanted["columnar"]
        self.decoded(outcome.images)

    @span("encode")
    def content(self, request: Request) -> tuple[bytes, bytes, bytes]:
        """By row or by column, as the request was."""
        return JSON, b"".join(self._steps(request)), b""

    def steps(self, request: Request) -> Iterator[bytes]:
        """The same in pieces."""
        return self._steps(request)

    def _steps(self, request: Request) -> Iterator[bytes]:
        batch, first = cast("BatchAnswer", request.batch), request.row
        probabilities = batch.probabilities[first : first + request.rows]
        return _columns(probabilities) if self._columnar else _rows(probabilities)


def _columns(probabilities: Probabilities) -> Iterator[bytes]:
    begin = b'{"outputs":{"probabilities":['
    for rows in _parts(probabilities):
        yield begin + orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        begin = b","
    labels = orjson.dumps(probabilities.argmax(axis=1), option=orjson.OPT_SERIALIZE_NUMPY)
    yield b'],"label":%b}}' % labels


def _rows(probabilities: Probabilities) -> Iterator[bytes]:
    begin = b'{"predictions":['
    for rows in _parts(probabilities):
        labels = rows.argmax(axis=1).tolist()
        predictions = [
            {"probabilities": row, "label": label} for row, label in zip(rows, labels, strict=True)
        ]
        yield begin + orjson.dumps(predictions, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        begin = b","
    yield b"]}"


def _parts(probabilities: Probabilities) -> Iterator[Probabilities]:
    for first in range(0, len(probabilities), ENCODED_ROWS):
        yield probabilities[first : first + ENCODED_ROWS]


def verb_of(path: str) -> str:
    """What stands behind the colon of a path of this API, "" if there is none."""
    if not path.startswith(f"{TENSORFLOW}/"):
        return ""
    _, colon, verb = path.rpartition("/")[2].partition(":")
    return verb or "nothing" if colon else ""


class VersionStatus(BaseModel):
    """The state of a version."""

    version: str
    state: Literal["AVAILABLE", "UNLOADING"]
    status: dict[str, str] = {"error_code": "OK", "error_message": ""}


class ModelStatus(BaseModel):
    """The states of the versions of a model."""

    model_version_status: list[VersionStatus]


def status_routes(models: Models) -> APIRouter:
    """`GET` of a model: the state of its versions."""
    router = APIRouter(prefix=TENSORFLOW, tags=["TensorFlow Serving"])

    async def status(request: HttpRequest) -> ModelStatus:
        """Its versions; AVAILABLE until the service stops."""
        name, version = request.path_params["model"], request.path_params.get("version", "")
        if verb_of(request.scope["path"]) and models.find(name, version) is None:
            raise HTTPException(405, headers={"Allow": "POST"})
        # HTTP begins when they are loaded.
        state: Literal["AVAILABLE", "UNLOADING"] = "AVAILABLE" if models.ready else "UNLOADING"
        served = models.select(name, version)
        versions = [VersionStatus(version=one.version.version, state=state) for one in served]
        return ModelStatus(model_version_status=versions)

    unknown = errors(ProtocolError, [404])
    for path, dependencies in OWNERS:
        add = router.get(path, dependencies=dependencies, summary="Model status", responses=unknown)
        add(status)
    return router
