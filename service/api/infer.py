"""`POST /v2/models/{model}[/versions/{version}]/infer`: the Open Inference Protocol over HTTP.

Its body is read by `http.infer_body`; everything between is `http.predict`'s. Each output comes as
JSON or, where the request asks for it, as bytes behind the JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import orjson

from lenet.nvtx import span
from service.decode.pool import Body, Decoded, TensorsSource
from service.engine.queue import BatchAnswer, Request
from service.errors import ServiceError, invalid, shown
from service.forms.oip_json import LENGTH_HEADER, Asked, read_infer_body
from service.forms.tensors import (
    OutputTensor,
    answer,
)
from service.request import BINARY, ENCODED_ROWS, IN_PLACE, ImageCall, ImageRoute, Reply, Wanted
from service.transport.answer import JSON, Answer, plain_error_answer

_BINARY = BINARY.encode()

_INLINE_JSON_BYTES = 128 * 1024
_INLINE_HEAD_BYTES = 64 * 1024
_INLINE_FLOAT_BYTES = 1024 * 1024
"""What is decoded on the event loop: 2 to 3 ms of JSON, 0.5 ms of float32, and bytes, which need
not be read."""


class InferRoute(ImageRoute):
    """Inference on the model that the path names."""

    __slots__ = ()

    def read(
        self, query: bytes, headers: Mapping[str, str], path: Mapping[str, str] | None = None
    ) -> Wanted:
        """Read the path and the headers, whose names are in lower case.

        Raises: InvalidInput, UnsupportedMediaType, TooLarge.
        """
        length = self.length_of(headers)
        json_bytes = None
        if (text := headers.get(LENGTH_HEADER.lower())) is not None:
            if not (text.isascii() and text.isdecimal() and len(text) <= len(str(2**63))):
                raise invalid(LENGTH_HEADER, shown(text), "the length of the JSON in bytes")
            json_bytes = int(text)
        named = path or {}
        return Wanted(
            named.get("model", ""),
            named.get("version", ""),
            self.timeout_s_of(headers),
            length,
            TensorsSource(json_bytes, self.limits.max_images),
            _INLINE_JSON_BYTES if json_bytes is None else IN_PLACE,
        )

    def open(self, wanted: Wanted, reply: Reply) -> InferCall:
        """Begin a request whose body is still to come."""
        return InferCall(self, wanted, reply)

    def error(self, error: ServiceError) -> Answer:
        """The protocol's form."""
        return plain_error_answer(error)


class InferCall(ImageCall):
    """One request for inference."""

    _asked: Asked

    def __init__(self, route: ImageRoute, wanted: Wanted, reply: Reply) -> None:
        super().__init__(route, wanted, reply)
        self._source = cast("TensorsSource", wanted.source)

    def is_quick(self, body: Body) -> bool:
        """Raw bytes are, however many; numbers to convert are limited."""
        size = self._source.json_bytes
        if not size:  # raw, or JSON, which `inline_bytes` limits
            return True
        if size > _INLINE_HEAD_BYTES:
            return False
        head = bytes(body[:size])  # where an escape might hide the datatype
        return len(body) <= _INLINE_FLOAT_BYTES or not (b"FP32" in head or b"\\" in head)

    def decode(self, body: Body) -> None:
        """Tensors and what else is asked for."""
        source = self._source
        images, self._asked = read_infer_body(body, source.json_bytes, source.max_images)
        self._limit_time()
        self.decoded(images)

    def take(self, outcome: Decoded) -> None:
        """The same."""
        self._asked = Asked.from_json(outcome.wanted)
        self._limit_time()
        self.decoded(outcome.images)

    def steps(self, request: Request) -> Iterator[bytes] | None:
        """Where all outputs are numbers in JSON; of classifications there are few."""
        outputs = self._asked.outputs
        if any(one.binary or one.classes for one in outputs):
            return None
        return self._json_steps(request)

    def _limit_time(self) -> None:
        if self._asked.timeout_us:
            limit_s = self._started_s + self._asked.timeout_us / 1e6
            self.deadline_s = min(self.deadline_s, limit_s)

    def _head(self, request: Request) -> dict[str, Any]:
        version, cut_s = request.version, request.first_cut_s
        head: dict[str, Any] = {"model_name": version.name, "model_version": version.version}
        if self._asked.id is not None:
            head["id"] = self._asked.id
        head["parameters"] = {
            "queue_us": round(1e6 * (cut_s - request.arrived_s)),
            "compute_us": round(1e6 * (request.answered_s - cut_s)),
        }
        return head

    def _tensors(self, request: Request) -> tuple[OutputTensor, ...]:
        batch, first = cast("BatchAnswer", request.batch), request.row
        names = request.version.weights.training.labels
        rows = batch.probabilities[first : first + request.rows]
        return answer(rows, self._asked.outputs, names)

    @span("encode")
    def content(self, request: Request) -> tuple[bytes, bytes, bytes]:
        """JSON, and the outputs that are wanted as bytes behind it."""
        tensors: list[dict[str, Any]] = []
        contents: list[bytes] = []
        for output, tensor in zip(self._asked.outputs, self._tensors(request), strict=True):
            entry: dict[str, Any] = {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
            }
            values = tensor.values
            if output.binary:
                contents.append(tensor.to_bytes())
                entry["parameters"] = {"binary_data_size": len(contents[-1])}
            elif isinstance(values, list):
                entry["data"] = [one.decode() for one in values]
            else:
                entry["data"] = values.ravel()
            tensors.append(entry)
        head = orjson.dumps(
            {**self._head(request), "outputs": tensors}, option=orjson.OPT_SERIALIZE_NUMPY
        )
        if not contents:
            return JSON, head, b""
        lines = b"%s: %d\r\n" % (LENGTH_HEADER.lower().encode(), len(head))
        return _BINARY, b"".join((head, *contents)), lines

    def _json_steps(self, request: Request) -> Iterator[bytes]:
        """The JSON of many images."""
        begin = orjson.dumps({**self._head(request), "outputs": []})[:-2]
        for number, tensor in enumerate(self._tensors(request)):
            entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            begin += (b"," if number else b"") + orjson.dumps({**entry, "data": []})[:-2]
            assert not isinstance(tensor.values, list), "bug: a classification in steps"
            for first in range(0, request.rows, ENCODED_ROWS):
                rows = tensor.values[first : first + ENCODED_ROWS].ravel()
                numbers = orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
                yield (b"," if first else begin) + numbers[1:-1]
            begin = b"]}"
        yield begin + b"]}"
