"""The calls of the Open Inference Protocol and of the health protocol; errors as gRPC statuses.

Statuses are Triton's where its clients act on them, with one difference: a full queue is
RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere". Too
many images are INVALID_ARGUMENT as in Triton, because a retry would not help.
"""

# ruff: noqa: N802 - methods are named like the protocol's calls

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

from lenet import DISTRIBUTION, distribution_version
from lenet.nvtx import span
from lenet.pixels import Images
from service.engine.models import Models
from service.engine.queue import Prediction
from service.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    ServiceError,
    TooLarge,
    Unavailable,
    UnknownModel,
    UnsupportedMediaType,
    invalid,
)
from service.images import DecodingThreads
from service.metrics import Metrics, RequestClock, Stage
from service.open_inference import (
    InputTensor,
    Numbers,
    OutputTensor,
    TensorMetadata,
    answer,
    check_parameters,
    model_metadata,
    read_images,
    requested_outputs,
)
from service.rpc import open_inference_pb2 as pb
from service.rpc.guard import read_infer_request
from service.rpc.open_inference_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

_log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_CODES: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    TooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedMediaType: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}
_MAX_DETAILS_CHARACTERS = 500
"""Clients drop trailing metadata over 8 KiB, and each character may take 12 bytes of it."""

_INPUT_CONTENTS = {"UINT8": "uint_contents", "FP32": "fp32_contents"}
_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents"}
_REPORTED_STAGES: tuple[Stage, ...] = ("queue", "compute")

_INLINE_IMAGES = 80
"""More images are decoded on a thread: at up to 25 us an image in typed form, this many block the
event loop for 2 ms."""


class InferenceServicer(GRPCInferenceServiceServicer):
    """The six calls of the protocol, answered by the loaded models.

    A model that is not loaded is not ready, without an error, as in Triton, whose clients poll
    `ModelReady` until a model is loaded; every other call answers NOT_FOUND.
    """

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        decoding: DecodingThreads,
        *,
        max_images: int,
        timeout_s: float,
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._decoding = decoding
        self._max_images = max_images
        self._timeout_s = timeout_s

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        """True."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        """Like /readyz."""
        return pb.ServerReadyResponse(ready=self._models.ready)

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        """Whether the model is loaded and the server ready."""
        try:
            self._models.get(request.name, request.version)
        except UnknownModel:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._models.ready)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        """Name and version; no extension of the protocol is supported."""
        return pb.ServerMetadataResponse(
            name=DISTRIBUTION, version=distribution_version(), extensions=()
        )

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        """The model's tensors."""
        try:
            metadata = model_metadata(self._models.get(request.name, request.version).version)
        except UnknownModel as exc:
            await _abort(context, exc)
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=map(_tensor_metadata, metadata.inputs),
            outputs=map(_tensor_metadata, metadata.outputs),
        )

    async def ModelInfer(
        self, request: pb.ModelInferRequest | InvalidInput, context: Context
    ) -> pb.ModelInferResponse:
        """Classify the images of a request, or report what `read_infer_request` found wrong."""
        try:
            with self._metrics.clock("grpc") as clock:
                if isinstance(request, InvalidInput):
                    raise request
                return await self._infer(request, context, clock)
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            await _abort(context, exc)

    async def _infer(
        self, request: pb.ModelInferRequest, context: Context, clock: RequestClock
    ) -> pb.ModelInferResponse:
        remaining_s = context.time_remaining()
        timeout_s = self._timeout_s if remaining_s is None else min(remaining_s, self._timeout_s)
        clock.lap()
        try:
            if _claims_many(request):
                work = partial(_decode, request, self._max_images)
                images, wanted = await self._decoding.run(work, timeout_s)
            else:
                images, wanted = _decode(request, self._max_images)
            clock.record("decode")
            prediction = await self._models.predict(
                images,
                clock,
                model=request.model_name,
                version=request.model_version,
                timeout_s=timeout_s - clock.total_s,
            )
        except DeadlineExceeded as exc:  # its message gives only the time that was left
            raise DeadlineExceeded(f"no answer within {timeout_s * 1e3:.0f} ms") from exc
        clock.lap()
        response = _encode(request, prediction, answer(prediction, wanted))
        for stage in _REPORTED_STAGES:
            response.parameters[f"{stage}_us"].int64_param = round(1e6 * clock.stages[stage])
        clock.record("encode")
        return response


class HealthServicer:
    """`Check` of the health protocol, for grpc-health-probe and Kubernetes.

    It knows "", the inference service and each model by its name. `Watch` is UNIMPLEMENTED, as the
    protocol allows: grpc_health's servicer would have to be notified of each change of readiness,
    and its open streams would prolong every stop to its timeout.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    async def check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """SERVING while the server is ready."""
        known = {"", SERVICE, *(model.version.name for model in self._models.served)}
        if request.service not in known:
            names = ", ".join(sorted(known - {""}))
            message = f"service: got an unknown name, expected one of {names}"
            await _abort(context, UnknownModel(message, field="service"))
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=serving if self._models.ready else not_serving)


def add_servicers(
    server: grpc.aio.Server, inference: InferenceServicer, health: HealthServicer
) -> None:
    """Serve both on `server`, ModelInfer with its guarded deserializer."""
    add_GRPCInferenceServiceServicer_to_server(inference, server)
    infer = grpc.unary_unary_rpc_method_handler(
        inference.ModelInfer,
        request_deserializer=read_infer_request,
        response_serializer=pb.ModelInferResponse.SerializeToString,
    )
    # Replaces the generated handler; grpc-stubs 1.53 lacks the method.
    server.add_registered_method_handlers(SERVICE, {"ModelInfer": infer})  # type: ignore[attr-defined]
    check = grpc.unary_unary_rpc_method_handler(
        health.check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
    server.add_generic_rpc_handlers((handler,))


async def _abort(context: Context, error: Exception) -> NoReturn:
    """End the call with the status of `error`, which is logged and hidden if it is unexpected.

    Trailing metadata: `lenet-error-code`, `lenet-error-field` if a field is wrong, and
    `grpc-retry-pushback-ms` (gRFC A6, used by clients with a retry policy) if a retry may succeed.
    """
    if not isinstance(error, ServiceError):
        _log.error("a gRPC call failed", exc_info=error)
        error = ServiceError("internal error; see the server log")
    metadata = [("lenet-error-code", error.code)]
    if error.field:
        metadata.append(("lenet-error-field", error.field))
    if error.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(1000 * error.retry_after_s)))
    details = error.message
    if len(details) > _MAX_DETAILS_CHARACTERS:
        details = f"{details[: _MAX_DETAILS_CHARACTERS - 3]}..."
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    await context.abort(code, details, tuple(metadata))


def _claims_many(request: pb.ModelInferRequest) -> bool:
    """Whether decoding may take long. A shape that claims too few images is an error anyway."""
    return any(
        len(tensor.shape) > 1 and tensor.shape[0] > _INLINE_IMAGES for tensor in request.inputs
    )


@span("decode")
def _decode(request: pb.ModelInferRequest, max_images: int) -> tuple[Images, tuple[str, ...]]:
    return read_images(_inputs(request), max_images), requested_outputs(_outputs(request))


# Both are generators, so that the first wrong tensor ends the request before the others are read.


def _outputs(request: pb.ModelInferRequest) -> Iterator[str]:
    for position, output in enumerate(request.outputs):
        check_parameters(output.parameters, f"outputs[{position}]")
        yield output.name


def _inputs(request: pb.ModelInferRequest) -> Iterator[InputTensor]:
    raw = request.raw_input_contents
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
            data: bytes | Numbers = raw[position]
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


def _encode(
    request: pb.ModelInferRequest, prediction: Prediction, outputs: Sequence[OutputTensor]
) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(
        model_name=prediction.model, model_version=prediction.version, id=request.id
    )
    for output in outputs:
        tensor = response.outputs.add(
            name=output.name, datatype=output.datatype, shape=output.shape
        )
        if request.raw_input_contents:
            response.raw_output_contents.append(output.values.tobytes())
        else:
            contents = getattr(tensor.contents, _OUTPUT_CONTENTS[output.datatype])
            contents.extend(output.values.ravel().tolist())
    return response


def _tensor_metadata(tensor: TensorMetadata) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )
