"""A serialized ModelInferRequest -> images, and what else it asks for.

Needs neither grpc nor a model, so that a decoding process does it for large messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lenet.nvtx import span
from lenet.pixels import Images
from service.errors import InvalidInput, invalid, shown
from service.forms import open_inference_pb2 as pb
from service.forms.proto_guard import read_infer_request, split
from service.forms.tensors import (
    ALL_OUTPUTS,
    MAX_ID_CHARACTERS,
    InputTensor,
    Numbers,
    RequestedOutput,
    check_parameters,
    read_images,
    requested_outputs,
)

_INPUT_CONTENTS = {"UINT8": "uint_contents", "FP32": "fp32_contents"}
_INLINE_BYTES = 64 * 1024
"""A message up to this size is decoded on the event loop: 80 images as small numbers, which at up
to 25 us each take 2 ms. So is a larger one whose images are raw: they need not be read."""

_INLINE_FLOAT_BYTES = 1024 * 1024
"""Likewise of raw FP32, which takes 2 ns a number to convert."""

_MOST_US = 2**53


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for besides its pixels."""

    model: str
    version: str
    id: str
    outputs: tuple[RequestedOutput, ...]
    raw: bool
    """Whether the images came as raw bytes, as then do the outputs."""
    timeout_us: int = 0
    """How long the request may take, 0 without a limit of its own."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Asked:
        """From the fields of another, as JSON brings them."""
        outputs = tuple(RequestedOutput(**one) for one in values["outputs"])
        return cls(**{**values, "outputs": outputs})


def decode_inline(message: bytes | memoryview, max_images: int) -> tuple[Images, Asked] | None:
    """As `decode_message`, without copying raw images; None if that would take more than 2 ms."""
    if len(message) <= _INLINE_BYTES:
        return decode_message(bytes(message), max_images)
    parts = split(message)
    if parts is None:
        return decode_message(bytes(message), max_images)  # says what is wrong
    others, raw = parts
    if sum(map(len, others)) > _INLINE_BYTES:
        return None
    head = b"".join(others)
    if len(message) > _INLINE_FLOAT_BYTES and b"FP32" in head:
        return None
    return decode_request(_parsed(head), raw, max_images)


def decode_message(message: bytes, max_images: int) -> tuple[Images, Asked]:
    """The images of a serialized request, uint8 (n, 28, 28), and what else it asks for.

    Raises: InvalidInput, TooLarge.
    """
    request = _parsed(message)
    return decode_request(request, request.raw_input_contents, max_images)


def _parsed(message: bytes) -> pb.ModelInferRequest:
    """Raises: InvalidInput."""
    request = read_infer_request(message)
    if isinstance(request, InvalidInput):
        try:
            raise request
        finally:
            del request  # else the error and this frame would keep each other, and the message
    return request


@span("decode")
def decode_request(
    request: pb.ModelInferRequest, raw: Sequence[bytes | memoryview], max_images: int
) -> tuple[Images, Asked]:
    """What `decode_message` does, of a request that is parsed, and its raw_input_contents."""
    images = read_images(_inputs(request, raw), max_images)
    outputs = requested_outputs(_outputs(request), len(images)) or ALL_OUTPUTS
    if len(request.id) > MAX_ID_CHARACTERS:
        raise invalid("id", shown(request.id), f"at most {MAX_ID_CHARACTERS} characters")
    model, version = request.model_name, request.model_version
    return images, Asked(
        model, version, request.id, outputs, raw=bool(raw), timeout_us=_timeout_us(request)
    )


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
            data: bytes | memoryview | Numbers = raw[position]
        else:
            source = f"{field}.contents"
            data = _numbers(tensor, given, source)
        yield InputTensor(tensor.name, tensor.datatype, tensor.shape, data, source)


def _numbers(tensor: pb.ModelInferRequest.InferInputTensor, given: str, source: str) -> Numbers:
    if tensor.datatype not in _INPUT_CONTENTS:
        return ()  # read_images rejects the datatype
    expected = _INPUT_CONTENTS[tensor.datatype]
    if given != expected:
        expected = f"{expected} for {tensor.datatype}, or raw_input_contents"
        raise invalid(source, given or "no data", expected)
    numbers: Numbers = getattr(tensor.contents, expected)
    return numbers
