"""`ModelInfer` and `ModelStreamInfer` of the Open Inference Protocol.

A request for inference is an `ImageCall`, as over HTTP. A stream has one for each message, and is
answered in their order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, cast

import numpy as np

from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.decode.pool import Body, Decoded, InferSource
from service.engine.queue import BatchAnswer, Request
from service.errors import InvalidInput, ServiceError, TooLarge
from service.forms import open_inference_pb2 as pb
from service.forms.oip_proto import Asked, decode_inline, decode_request
from service.forms.proto_guard import read_infer_request, split
from service.forms.tensors import (
    MAX_ID_CHARACTERS,
    RequestedOutput,
    answer,
    output_metadata,
    output_values,
)
from service.observe.metrics import NO_MODEL, Transport
from service.request import IN_PLACE, ImageCall, ImageRoute, Reply, Wanted
from service.transport.answer import Answer
from service.transport.grpc import (
    Call,
    GrpcExchange,
    Status,
    StatusCode,
    status_of,
    timeout_s_of,
)
from service.transport.head import FastCall

_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}

_INLINE_BYTES = IN_PLACE - 1
"""Any size: whether a message is decoded at once depends on more, see `decode_inline`."""

_STREAM_AHEAD = 32
"""Requests of a stream that are worked on while the first of them is not written."""

_BYTES_OF_ONE = 400 * 1024
"""A request of a stream counts as another one for each so many bytes."""

_LARGEST_READ_AGAIN = 64 * 1024
"""Bytes of a message without its raw images, that is read again for the id of a refused request."""

_RAW_IMAGE = b"\x3a\x90\x06"
"""What precedes one image in raw_input_contents: field 7, delimited, 784 bytes."""

_LONGEST_HEAD_BYTES = 256


class InferRoute(ImageRoute):
    """Requests for inference over gRPC."""

    __slots__ = ()

    protocol: ClassVar[Transport] = "grpc"

    def read(
        self, query: bytes, headers: Mapping[str, str], path: Mapping[str, str] | None = None
    ) -> Wanted:
        """What the headers of a call ask for; the rest is in its message. Raises: InvalidInput."""
        timeout_s = timeout_s_of(headers)
        limit_s = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        source = InferSource(self.limits.max_images)
        return Wanted("", "", limit_s, None, source, _INLINE_BYTES)

    def error(self, error: ServiceError) -> Answer:
        """The status that reports `error`."""
        return cast("Answer", status_of(error))

    def open(self, wanted: Wanted, reply: Reply) -> InferCall:
        """Begin a request whose message is still to come."""
        return InferCall(self, wanted, reply)

    def too_large(self, found: str) -> TooLarge:
        """The error for a message of more than `max_body_bytes`."""
        return TooLarge(
            f"message: got {found}, expected at most {self.max_body_bytes} bytes; "
            "send fewer images at a time",
            field="message",
        )


class InferCall(ImageCall):
    """One request for inference."""

    timed = copied = names_model = False
    part = "message"
    asked: Asked | None = None
    """What the message asks for besides its pixels."""
    id = ""
    _images: Images | None = None

    def announce(self, size: int | None) -> None:
        """The message has `size` bytes, or so many as come."""
        self._length = size
        if size is not None and size > self._route.max_body_bytes:
            self.fail(cast("InferRoute", self._route).too_large(f"{size} bytes"))

    def is_quick(self, body: Body) -> bool:
        """Whether it could be decoded at once."""
        message = body if isinstance(body, memoryview) else bytes(body)
        limits = self._route.limits
        try:
            found = _read_one_image(message) or decode_inline(message, limits.max_images)
        except ServiceError:
            self._identify(message)
            raise
        if found is None:
            return False
        self._images, self.asked = found
        return True

    def decode(self, body: Body) -> None:
        """What `is_quick` has decoded."""
        assert self._images is not None, "bug: not decoded"
        images, self._images = self._images, None
        self._accept(images)

    def take(self, outcome: Decoded) -> None:
        """Continue with what a decoding process sent."""
        self.asked = Asked.from_json(outcome.wanted)
        self._accept(outcome.images)

    def _accept(self, images: Images) -> None:
        asked = self.asked
        assert asked is not None, "bug: not decoded"
        self.id = asked.id
        if asked.timeout_us:
            limit_s = self._started_s + asked.timeout_us / 1e6
            self.deadline_s = min(self.deadline_s, limit_s)
        self.decoded(images)

    def queue(self, images: Images) -> Request:
        """As in `ImageCall`, on the model that the message names."""
        asked = cast("Asked", self.asked)
        batcher = self._route.models.get(asked.model, asked.version).batcher
        self._batcher, self._model = batcher, batcher.version.key
        return batcher.enqueue(images, self.deadline_s, self._answered)

    def content(self, request: Request) -> tuple[bytes, bytes, bytes]:
        """The serialized answer."""
        return b"", _encode(cast("Asked", self.asked), request), b""

    def steps(self, request: Request) -> None:
        """There are none: the answer is made at once."""

    def _identify(self, message: bytes | memoryview) -> None:
        """Note the id and the model of a request that is refused, as far as they can be read.

        Raises: UnknownModel, which is the one of two mistakes to know first.
        """
        parts = split(message)
        if parts is None or sum(map(len, parts[0])) > _LARGEST_READ_AGAIN:
            return
        head = read_infer_request(b"".join(parts[0]))
        if not isinstance(head, InvalidInput):
            self.id = head.id[:MAX_ID_CHARACTERS]
            models = self._route.models
            self._model = models.get(head.model_name, head.model_version).version.key


def _read_one_image(message: bytes | memoryview) -> tuple[Images, Asked] | None:
    """The short way for the most frequent request, None for others: one raw image, written last.

    What precedes the image is parsed once for all requests in which it is the same.
    """
    start = len(message) - PIXELS
    end = start - len(_RAW_IMAGE)
    if not 0 <= end <= _LONGEST_HEAD_BYTES or message[end:start] != _RAW_IMAGE:
        return None
    asked = _asked_of_one_image(bytes(message[:end]))
    if asked is None:
        return None
    return np.frombuffer(message, np.uint8, PIXELS, start).reshape(1, HEIGHT, WIDTH), asked


@lru_cache(maxsize=64)
def _asked_of_one_image(head: bytes) -> Asked | None:
    """What a request asks for that is `head` and one raw image; None unless that is a valid one.

    `head` has to be valid by itself: then the image is a field of the request and not, for example,
    the end of a longer field. A message is the sequence of its fields.
    """
    request = read_infer_request(head)
    if isinstance(request, InvalidInput):
        return None
    request.raw_input_contents.append(bytes(PIXELS))
    try:
        return decode_request(request, request.raw_input_contents, 1)[1]
    except ServiceError:
        return None


@span("encode")
def _encode(asked: Asked, request: Request) -> bytes:
    batch, version, cut_s = cast("BatchAnswer", request.batch), request.version, request.first_cut_s
    queue_us = round(1e6 * (cut_s - request.arrived_s))
    compute_us = round(1e6 * (request.answered_s - cut_s))
    if asked.raw and not any(output.classes for output in asked.outputs):
        return _encode_raw(asked, request, batch, queue_us, compute_us)
    probabilities = batch.probabilities[request.row : request.row + request.rows]
    tensors = answer(probabilities, asked.outputs, version.weights.training.labels)
    response = pb.ModelInferResponse(
        model_name=version.name, model_version=version.version, id=asked.id
    )
    response.parameters["queue_us"].int64_param = queue_us
    response.parameters["compute_us"].int64_param = compute_us
    for output in tensors:
        tensor = response.outputs.add(
            name=output.name, datatype=output.datatype, shape=output.shape
        )
        if asked.raw:
            response.raw_output_contents.append(output.to_bytes())
            continue
        values = output.values
        contents = getattr(tensor.contents, _OUTPUT_CONTENTS[output.datatype])
        contents.extend(values if isinstance(values, list) else values.ravel().tolist())
    return response.SerializeToString()


def _encode_raw(
    asked: Asked, request: Request, batch: BatchAnswer, queue_us: int, compute_us: int
) -> bytes:
    """The frequent answer, assembled from parts: bytes that follow each other are one message.

    The numbers of a batch are written once, for all its requests.
    """
    version, rows, first = request.version, request.rows, request.row
    count, classes = batch.probabilities.shape
    pieces = [
        _raw_head(version.name, version.version, asked.outputs, rows, classes),
        _parameter("queue_us", queue_us),
        _parameter("compute_us", compute_us),
    ]
    if asked.id:
        pieces.append(pb.ModelInferResponse(id=asked.id).SerializeToString())
    for output in asked.outputs:
        content: bytes | None = batch.encoded.get(output.name)
        if content is None:
            values = output_values(output.name, batch.probabilities)
            content = batch.encoded[output.name] = values.tobytes()
        size = len(content) // count
        pieces += [_raw_prefix(size * rows), content[first * size : (first + rows) * size]]
    return b"".join(pieces)


@lru_cache(maxsize=8192)
def _parameter(name: str, value: int) -> bytes:
    parameters = {name: pb.InferParameter(int64_param=value)}
    return pb.ModelInferResponse(parameters=parameters).SerializeToString()


@lru_cache(maxsize=256)
def _raw_prefix(size: int) -> bytes:
    """What precedes raw contents of so many bytes."""
    found = pb.ModelInferResponse(raw_output_contents=[bytes(size)]).SerializeToString()
    return found[: len(found) - size]


@lru_cache(maxsize=256)
def _raw_head(
    model: str, version: str, outputs: tuple[RequestedOutput, ...], rows: int, classes: int
) -> bytes:
    """What all raw answers with probabilities of this shape have in common."""
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    for output in output_metadata(outputs, rows, classes):
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    return response.SerializeToString()


@dataclass(frozen=True, slots=True)
class _InferMethod:
    """What the two methods of inference share."""

    route: InferRoute
    is_limited: ClassVar[bool] = True
    is_endless: ClassVar[bool] = False

    def read(self, headers: Mapping[str, str]) -> Wanted:
        """See `InferRoute.read`."""
        return self.route.read(b"", headers)

    def refused(self, error: ServiceError) -> None:
        """Count it."""
        self.route.metrics.request_done(NO_MODEL, "grpc", error.code)


class ModelInfer(_InferMethod):
    """The method with one request and one answer."""

    __slots__ = ()

    def open(self, wanted: Wanted, exchange: GrpcExchange) -> Call:
        """Begin a call."""
        return _Single(self.route, wanted, exchange)


class _Single(InferCall):
    """A call of `ModelInfer`, which is its only request."""

    patience_s = math.inf
    _received = False

    def __init__(self, route: InferRoute, wanted: Wanted, exchange: GrpcExchange) -> None:
        super().__init__(route, wanted, self._write)
        self._exchange = exchange

    def _write(self, answer: Answer | Status) -> None:
        if isinstance(answer, Status):
            self._exchange.end(answer)
        else:
            self._exchange.reply(answer.body)

    def message(self, size: int | None) -> FastCall:
        """The request begins."""
        if self._received:
            raise InvalidInput("message: got a second, expected one request", field="message")
        self._received = True
        self.announce(size)
        return self

    def half_close(self) -> None:
        """It has to be there by now."""
        if not self._received:
            raise InvalidInput("message: got none, expected a request", field="message")

    def wait(self) -> None:
        """From here on its time is limited."""
        self.wait_for_body()

    def is_ahead(self) -> bool:
        """It never is."""
        return False

    def stop(self, error: ServiceError) -> None:
        """It is answered, if it has begun."""
        if not self._received:
            self.fail(error)


class ModelStreamInfer(_InferMethod):
    """The method with a stream of requests, answered in their order, errors included."""

    __slots__ = ()

    def open(self, wanted: Wanted, exchange: GrpcExchange) -> Call:
        """Begin a call."""
        return _Stream(self.route, exchange)


@dataclass(slots=True)
class _Slot:
    """The place of an answer."""

    count: int
    """How many requests it counts as."""
    message: bytes | None = None
    call: InferCall | None = field(default=None, repr=False)


class _Stream:
    """A call of `ModelStreamInfer`. Each request has the time that a call of `ModelInfer` has."""

    patience_s = math.inf

    def __init__(self, route: InferRoute, exchange: GrpcExchange) -> None:
        self._route, self._exchange = route, exchange
        self._wanted = route.read(b"", {})
        self._slots: deque[_Slot] = deque()
        self._count = 0
        self._last: Status | None = None
        """How the call ends when all is answered."""

    def message(self, size: int | None) -> FastCall:
        """The next request begins."""
        slot = _Slot(1 + (size or 0) // _BYTES_OF_ONE)
        call = self._route.open(self._wanted, lambda found: self._answered(slot, found))
        slot.call = call
        self._slots.append(slot)
        self._count += slot.count
        call.announce(size)
        return call

    def half_close(self) -> None:
        """There are no further requests."""
        self._last = self._last or Status(StatusCode.OK)
        self._write()

    def wait(self) -> None:
        """A request may come at any time."""

    def is_ahead(self) -> bool:
        """Whether many requests wait for their answers, or many answers for the client."""
        return (
            self._last is not None or self._count >= _STREAM_AHEAD or not self._exchange.is_read()
        )

    def stop(self, error: ServiceError) -> None:
        """Begin no further request."""
        self._last = self._last or status_of(error)
        self._write()

    def fail(self, error: ServiceError) -> None:
        """End the call: what the client sends cannot be read, or a stop takes too long."""
        slots = tuple(self._slots)
        self._last = status_of(error)
        if not slots:
            self._route.metrics.request_done(NO_MODEL, "grpc", error.code)
        for slot in slots:
            if slot.call is not None:
                slot.call.fail(error)
        self._write()

    def cancel(self) -> None:
        """The client is gone."""
        for slot in self._slots:
            if slot.call is not None:
                slot.call.cancel()
        self._slots.clear()

    def _answered(self, slot: _Slot, found: Answer | Status) -> None:
        call, slot.call = slot.call, None
        response = pb.ModelStreamInferResponse()
        if isinstance(found, Status):
            response.error_message = found.details
            response.infer_response.id = "" if call is None else call.id
        else:
            response.infer_response.MergeFromString(found.body)
        # Triton's clients may wait for it, as a model may give several answers to a request there.
        response.infer_response.parameters["triton_final_response"].bool_param = True
        slot.message = response.SerializeToString()
        self._write()

    def _write(self) -> None:
        """Write the answers that are next."""
        slots, ahead = self._slots, self.is_ahead()
        while slots and (message := slots[0].message) is not None:
            self._count -= slots.popleft().count
            self._exchange.write(message)
        if self._last is not None:
            if not slots:
                self._exchange.end(self._last)
        elif ahead and not self.is_ahead():
            self._exchange.read_on()
