"""What an error is called in gRPC.

The status map follows Triton where Triton's clients act on it, with one difference: a full queue
is RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere".
An image too many is INVALID_ARGUMENT as in Triton, not RESOURCE_EXHAUSTED: sending it again would
not help. It refuses to tell a client anything about an error that is not a `ServiceError`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

from lenet.nvtx import span
from lenet.pixels import Images
from service import DISTRIBUTION, distribution_version
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
)
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
_LONGEST_DETAILS = 500
"""Characters. Trailing metadata over 8 KiB is dropped by the client, each character may take 12."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends: code, sentence, trailing metadata.

    The metadata is `lenet-error-code`, `lenet-error-field` if a field was wrong, and
    `grpc-retry-pushback-ms` (gRFC A6, obeyed by clients with a retry policy) if a later try may
    succeed.
    """

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]


def status_of(error: Exception) -> Status:
    """The status of `error`; one that is no `ServiceError` is logged here and hidden there."""
    if not isinstance(error, ServiceError):
        _log.error("a gRPC call failed unexpectedly", exc_info=error)
        error = ServiceError("internal error; the server's log says more")
    metadata = [("lenet-error-code", error.code)]
    if error.field:
        metadata.append(("lenet-error-field", error.field))
    if error.retry_after_s is not None:
        metadata.append(("grpc-retry-pushback-ms", str(1000 * error.retry_after_s)))
    details = error.message
    if len(details) > _LONGEST_DETAILS:
        details = f"{details[: _LONGEST_DETAILS - 3]}..."
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    return Status(code, details, tuple(metadata))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call of `context` with the status of `error`."""
    status = status_of(error)
    await context.abort(status.code, status.details, status.metadata)


# ruff: noqa: N802 - methods are named as the protocol names its calls


SERVICE = "inference.GRPCInferenceService"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_INPUT_CONTENTS = {"UINT8": "uint_contents", "FP32": "fp32_contents"}
_STAGES_TOLD: tuple[Stage, ...] = ("queue", "compute")
_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents"}

# Decoding holds the event loop up: at up to 25 us an image in typed form, this much is 2 ms.
_DECODE_HERE_IMAGES = 80


class InferenceServicer(GRPCInferenceServiceServicer):
    """The six calls of the protocol on top of a predictor.

    A model that is not loaded is not ready rather than an error, as in Triton, whose clients poll
    `ModelReady` until a model is there; every other call answers NOT_FOUND.
    """

    def __init__(self, models: Models, metrics: Metrics, max_images: int) -> None:
        self._models = models
        self._metrics = metrics
        self._max_images = max_images

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        """True: it answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        """What /readyz says."""
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
        """Name and version; no extension of the protocol works here yet."""
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
            await abort(context, exc)
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
        """Classify the images of a request, or answer what `read_infer_request` found wrong."""
        try:
            with self._metrics.clock("grpc") as clock:
                if isinstance(request, InvalidInput):
                    raise request
                return await self._infer(request, context, clock)
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            await abort(context, exc)

    async def _infer(
        self, request: pb.ModelInferRequest, context: Context, clock: RequestClock
    ) -> pb.ModelInferResponse:
        clock.lap()
        decoding = request, self._max_images
        if _claims_many(request):
            images, wanted = await asyncio.to_thread(_decode, *decoding)
        else:
            images, wanted = _decode(*decoding)
        clock.record("decode")
        prediction = await self._models.predict(
            images,
            clock,
            model=request.model_name,
            version=request.model_version,
            timeout_s=context.time_remaining(),
        )
        clock.lap()
        response = _encode(request, prediction, answer(prediction, wanted))
        for stage in _STAGES_TOLD:
            response.parameters[f"{stage}_us"].int64_param = round(1e6 * clock.stages[stage])
        clock.record("encode")
        return response


def add_inference(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Serve the six calls on `server`, ModelInfer with a reader of our own."""
    add_GRPCInferenceServiceServicer_to_server(servicer, server)
    infer = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer,
        request_deserializer=read_infer_request,
        response_serializer=pb.ModelInferResponse.SerializeToString,
    )
    # Takes the place of the generated one; grpc-stubs 1.53 does not know the method.
    server.add_registered_method_handlers(SERVICE, {"ModelInfer": infer})  # type: ignore[attr-defined]


class HealthServicer:
    """`Check` for grpc-health-probe and Kubernetes; it reads the predictor, so nothing goes stale.

    Known are "" and the inference service, and each model by its name. `Watch` is UNIMPLEMENTED,
    which the health protocol allows: whoever watches also sees the connection close at the stop.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    async def check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """SERVING from the last step of the start to the first of the stop."""
        known = {"", SERVICE, *(model.version.name for model in self._models.served)}
        if request.service not in known:
            names = ", ".join(sorted(known - {""}))
            message = f"service: got an unknown name, expected one of {names}"
            await abort(context, UnknownModel(message, field="service"))
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=serving if self._models.ready else not_serving)

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What to add to a server."""
        check = grpc.unary_unary_rpc_method_handler(
            self.check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})


def _claims_many(request: pb.ModelInferRequest) -> bool:
    """Whether decoding may take long: a shape that claims too little is refused at its length."""
    return any(
        len(tensor.shape) > 1 and tensor.shape[0] > _DECODE_HERE_IMAGES for tensor in request.inputs
    )


@span("decode")
def _decode(request: pb.ModelInferRequest, max_images: int) -> tuple[Images, tuple[str, ...]]:
    return read_images(_inputs(request), max_images), requested_outputs(_outputs(request))


# Tensors are made one by one, as they are asked for: the first that is wrong ends the request.


def _outputs(request: pb.ModelInferRequest) -> Iterator[str]:
    for position, output in enumerate(request.outputs):
        check_parameters(output.parameters, f"outputs[{position}]")
        yield output.name


def _inputs(request: pb.ModelInferRequest) -> Iterator[InputTensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        _refuse(
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
                _refuse(
                    f"{field}.contents",
                    f"{given} beside raw_input_contents",
                    "all inputs in one form",
                )
            source = f"raw_input_contents[{position}]"
            data: bytes | Numbers = raw[position]
        else:
            source = f"{field}.contents"
            data = _numbers(tensor, given, source)
        yield InputTensor(tensor.name, tensor.datatype, tensor.shape, data, source)


def _numbers(tensor: pb.ModelInferRequest.InferInputTensor, given: str, source: str) -> Numbers:
    if tensor.datatype not in _INPUT_CONTENTS:
        return ()  # refused by its datatype before anybody looks
    expected = _INPUT_CONTENTS[tensor.datatype]
    if given != expected:
        _refuse(
            source, given or "no data", f"{expected} for {tensor.datatype}, or raw_input_contents"
        )
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


def _refuse(field: str, got: str, expected: str) -> NoReturn:
    raise InvalidInput(f"{field}: got {got}, expected {expected}", field=field)
