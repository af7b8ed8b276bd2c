"""Inference of the Open Inference Protocol over gRPC: a ModelInferRequest and its answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, ServiceError, invalid, shown
from service.forms import open_inference_pb2 as pb
from service.forms.form import Answered, Asked, Body, Content, Decoded, RequestedOutput
from service.forms.pixels import Scale, scale_of
from service.forms.proto_guard import read_infer_request, read_names, split
from service.forms.reader import Limits, NeedsProcess, Reader
from service.forms.tensors import (
    ALL_OUTPUTS,
    DATATYPES,
    MAX_ID_CHARACTERS,
    OUTPUTS,
    Elements,
    InputTensor,
    Numbers,
    answer,
    check_parameters,
    output_metadata,
    read_images,
    requested_outputs,
)
from service.pictures.headers import Between

SCALE = "x-scale"
"""Metadata: the scale of requests whose parameters state none."""

_INPUT_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The typed form of each datatype that has one."""
_INLINE_BYTES = 64 * 1024
"""A message up to this size is decoded on the event loop: 80 images as small numbers, which at up
to 25 us each take 2 ms. So is a larger one whose images are raw: they need not be read."""

_INLINE_FLOAT_BYTES = 1024 * 1024
"""Raw FP32 up to this size is decoded on the event loop: 2 ns a number."""

_FLOATS = re.compile(rb"FP|BF|INT[136]")
"""In the head of a message whose numbers are no UINT8."""

_MOST_US = 2**53

_RAW_IMAGE = b"\x3a\x90\x06"
"""Prefix of one image in raw_input_contents: field 7, delimited, 784 bytes."""

_LONGEST_HEAD_BYTES = 256

_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}


@dataclass(frozen=True, slots=True)
class OipProtoForm:
    """The form of inference over gRPC. `scale` is that of requests that state none."""

    limits: Limits
    scale: Scale = "byte"

    part: ClassVar[str] = "message"
    names_model: ClassVar[bool] = True
    in_place: ClassVar[bool] = False

    @property
    def max_images(self) -> int:
        """The most that one request may have."""
        return self.limits.max_images

    def decode_now(self, body: Body) -> Decoded | None:
        """Decode raw images of any number, and few numbers. Raw images are not copied."""
        message = memoryview(body) if isinstance(body, bytearray) else body
        if self.scale == "byte" and (found := _read_one_image(message)) is not None:
            return found
        try:
            return _decode_now(message, Reader(self.limits, scale=self.scale))
        except NeedsProcess:
            return None

    def decode(self, body: bytes, between: Between) -> Decoded:
        """Decode any message."""
        return Decoded(*decode_message(body, Reader(self.limits, between, scale=self.scale)))

    @span("encode")
    def write(self, asked: Asked, answered: Answered) -> Content:
        """A serialized ModelInferResponse. Outputs are raw if the images were.

        The frequent answer is assembled from parts: bytes that follow each other are one message.
        The numbers of a batch are written once, for all its requests.
        """
        if not asked.raw or any(output.classes for output in asked.outputs):
            return Content(b"", _encode(asked, answered))
        batch, version, rows, first = answered.batch, answered.version, answered.rows, answered.row
        count, classes = batch.probabilities.shape
        pieces = [
            _raw_head(version.name, version.version, asked.outputs, rows, classes),
            _parameter("queue_us", round(1e6 * answered.queue_s)),
            _parameter("compute_us", round(1e6 * answered.compute_s)),
        ]
        if asked.id:
            pieces.append(pb.ModelInferResponse(id=asked.id).SerializeToString())
        for output in asked.outputs:
            content: bytes | None = batch.encoded.get(output.name)
            if content is None:
                found = batch.probabilities
                values = found.argmax(axis=1) if output.name == "label" else found
                content = values.astype(OUTPUTS[output.name], copy=False).tobytes()
                batch.encoded[output.name] = content
            size = len(content) // count
            pieces += [_raw_prefix(size * rows), content[first * size : (first + rows) * size]]
        return Content(b"", b"".join(pieces))


def _decode_now(message: bytes | memoryview, reader: Reader) -> Decoded | None:
    """Decode without copying raw images; None if that would take more than 2 ms."""
    if len(message) <= _INLINE_BYTES:
        return Decoded(*decode_message(message, reader))
    parts = split(message)
    if parts is None:
        return Decoded(*decode_message(message, reader))  # says what is wrong
    others, raw = parts
    if sum(map(len, others)) > _INLINE_BYTES:
        return None
    head = b"".join(others)
    if len(message) > _INLINE_FLOAT_BYTES and _FLOATS.search(head):
        return None
    return Decoded(*decode_request(_parsed(head), raw, reader))


def decode_message(message: bytes | memoryview, reader: Reader) -> tuple[Images, Asked]:
    """The images of a serialized request, uint8 (n, 28, 28), and what else it asks for.

    Raises: InvalidInput, TooLarge.
    """
    request = _parsed(message)
    return decode_request(request, request.raw_input_contents, reader)


def _parsed(message: bytes | memoryview) -> pb.ModelInferRequest:
    """Raises: InvalidInput."""
    request = read_infer_request(message)
    if isinstance(request, InvalidInput):
        names = read_names(message)
        if any(names):
            request.asked = Asked(*names)
        try:
            raise request
        finally:
            del request  # else the error and this frame would keep each other, and the message
    return request


@span("decode")
def decode_request(
    request: pb.ModelInferRequest, raw: Sequence[bytes | memoryview], reader: Reader
) -> tuple[Images, Asked]:
    """Decode a parsed request and its raw_input_contents, see `decode_message`."""
    model, version, name = request.model_name, request.model_version, request.id
    try:
        if "scale" in request.parameters:
            given = request.parameters["scale"].string_param
            reader.scale = scale_of(given, "parameters.scale")
        images = read_images(_inputs(request, raw), reader)
        outputs = requested_outputs(_outputs(request), len(images)) or ALL_OUTPUTS
        if len(name) > MAX_ID_CHARACTERS:
            raise invalid("id", shown(name), f"at most {MAX_ID_CHARACTERS} characters")
        timeout_us = _timeout_us(request)
    except ServiceError as exc:
        exc.asked = Asked(model, version, name[:MAX_ID_CHARACTERS])
        raise
    return images, Asked(model, version, name, outputs, bool(raw), timeout_us=timeout_us)


def _timeout_us(request: pb.ModelInferRequest) -> int:
    if "timeout" not in request.parameters:
        return 0
    given = request.parameters["timeout"]
    kind = given.WhichOneof("parameter_choice")
    value: int = getattr(given, kind) if kind in ("int64_param", "uint64_param") else -1
    if not 0 <= value <= _MOST_US:
        expected = "int64_param, microseconds, at least 0"
        raise invalid("parameters.timeout", shown(str(given).strip()), expected)
    return value


# Both are generators, so that the first wrong tensor ends the request before the others are read.


def _outputs(request: pb.ModelInferRequest) -> Iterator[RequestedOutput]:
    for position, output in enumerate(request.outputs):
        field = f"outputs[{position}]"
        check_parameters(output.parameters, field)
        classes = 0
        if "classification" in output.parameters:
            given = output.parameters["classification"]
            classes = given.int64_param
            if given.WhichOneof("parameter_choice") != "int64_param" or classes < 1:
                name = f"{field}.parameters.classification"
                raise invalid(name, str(given).strip() or "nothing", "int64_param of at least 1")
        yield RequestedOutput(output.name, classes=classes)


def _inputs(
    request: pb.ModelInferRequest, raw: Sequence[bytes | memoryview]
) -> Iterator[InputTensor]:
    if raw and len(raw) != len(request.inputs):
        raise invalid(
            "raw_input_contents",
            f"{len(raw)} entries for {len(request.inputs)} inputs",
            "one for each input",
        )
    for position, tensor in enumerate(request.inputs):
        field = f"inputs[{position}]"
        check_parameters(tensor.parameters, field)
        given = ", ".join(descriptor.name for descriptor, _ in tensor.contents.ListFields())
        if raw:
            if given:
                got = f"{given} beside raw_input_contents"
                raise invalid(f"{field}.contents", got, "all inputs in one form")
            source = f"raw_input_contents[{position}]"
            data: bytes | memoryview | Numbers | Elements = raw[position]
        else:
            source = f"{field}.contents"
            data = _typed(tensor, given, source)
        yield InputTensor(tensor.name, tensor.datatype, tensor.shape, data, source)


def _typed(
    tensor: pb.ModelInferRequest.InferInputTensor, given: str, source: str
) -> Numbers | Elements:
    if tensor.datatype not in DATATYPES:
        return ()  # read_images rejects the datatype
    expected = _INPUT_CONTENTS.get(tensor.datatype, "")
    if given != expected or not given:
        choice = f"{expected} for {tensor.datatype}, or " if expected else ""
        raise invalid(source, given or "no data", f"{choice}raw_input_contents")
    values: Numbers | Elements = getattr(tensor.contents, expected)
    return values


def _read_one_image(message: bytes | memoryview) -> Decoded | None:
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
    return Decoded(np.frombuffer(message, np.uint8, PIXELS, start).reshape(1, HEIGHT, WIDTH), asked)


@lru_cache(maxsize=64)
def _asked_of_one_image(head: bytes) -> Asked | None:
    """The options of a request that is `head` and one raw image of bytes; None if it is not.

    `head` has to be valid by itself: then the image is a field of the request and not, for example,
    the end of a longer field. A message is the sequence of its fields.
    """
    request = read_infer_request(head)
    if isinstance(request, InvalidInput) or "scale" in request.parameters:
        return None
    if [one.datatype for one in request.inputs] != ["UINT8"]:
        return None
    request.raw_input_contents.append(bytes(PIXELS))
    try:
        return decode_request(request, request.raw_input_contents, Reader(Limits(1)))[1]
    except ServiceError:
        return None


def _encode(asked: Asked, answered: Answered) -> bytes:
    version = answered.version
    response = pb.ModelInferResponse(
        model_name=version.name, model_version=version.version, id=asked.id
    )
    response.parameters["queue_us"].int64_param = round(1e6 * answered.queue_s)
    response.parameters["compute_us"].int64_param = round(1e6 * answered.compute_s)
    for output in answer(answered, asked.outputs):
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


@lru_cache(maxsize=8192)
def _parameter(name: str, value: int) -> bytes:
    parameters = {name: pb.InferParameter(int64_param=value)}
    return pb.ModelInferResponse(parameters=parameters).SerializeToString()


@lru_cache(maxsize=256)
def _raw_prefix(size: int) -> bytes:
    """Prefix of raw contents of `size` bytes."""
    found = pb.ModelInferResponse(raw_output_contents=[bytes(size)]).SerializeToString()
    return found[: len(found) - size]


@lru_cache(maxsize=256)
def _raw_head(
    model: str, version: str, outputs: tuple[RequestedOutput, ...], rows: int, classes: int
) -> bytes:
    """The part that all raw answers with probabilities of this shape share."""
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    for output in output_metadata(outputs, rows, classes):
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    return response.SerializeToString()
