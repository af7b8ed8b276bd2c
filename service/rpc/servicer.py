"""The calls of the Open Inference Protocol; errors as gRPC statuses.

Statuses are Triton's where its clients act on them, with one difference: a full queue is
RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere". Too
many images are INVALID_ARGUMENT as in Triton, because a retry would not help.
"""

# ruff: noqa: N802 - methods are named like the protocol's calls

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import lru_cache

import numpy as np
from google.protobuf.json_format import ParseDict

from lenet import DISTRIBUTION, distribution_version, nvtx
from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.engine.models import Models
from service.engine.queue import Prediction
from service.errors import (
    BodyTimeout,
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    ServiceError,
    UnknownModel,
)
from service.images.decoders import Decoders, InferSource
from service.metrics import NO_MODEL, Metrics
from service.open_inference import (
    GRPC_EXTENSIONS,
    RequestedOutput,
    TensorMetadata,
    answer,
    model_config,
    model_metadata,
    model_statistics,
    output_metadata,
)
from service.rpc import open_inference_pb2 as pb
from service.rpc.calls import (
    Calls,
    Context,
    Status,
    status_of,
)
from service.rpc.gathering import Gathering
from service.rpc.guard import read_infer_request
from service.rpc.message import Wanted, decode_inline, decode_request

_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}

_GATHERED_IMAGES = 256
"""More images are a batch of their own, nearly, and 12 MB of them should not wait for others."""

_RAW_IMAGE = b"\x3a\x90\x06"
"""What precedes one image in raw_input_contents: field 7, delimited, 784 bytes."""

_LONGEST_HEAD_BYTES = 256


class InferenceServicer:
    """The calls of the protocol, answered by the loaded models.

    A model that is not loaded is not ready, without an error, as in Triton, whose clients poll
    `ModelReady` until a model is loaded; every other call answers NOT_FOUND.
    """

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        decoders: Decoders,
        calls: Calls,
        *,
        max_images: int,
        timeout_s: float,
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._decoders = decoders
        self._calls = calls
        self._max_images = max_images
        self._timeout_s = timeout_s
        self._gathering = Gathering()

    def ServerLive(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """True."""
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Like /readyz."""
        return pb.ServerReadyResponse(ready=self._models.ready)

    def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Whether the model is loaded and the server ready."""
        try:
            self._models.get(request.name, request.version)
        except UnknownModel:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._models.ready)

    def ServerMetadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Name, version and the extensions of the protocol that are supported."""
        return pb.ServerMetadataResponse(
            name=DISTRIBUTION, version=distribution_version(), extensions=GRPC_EXTENSIONS
        )

    def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """The model's tensors."""
        metadata = model_metadata(self._models.get(request.name, request.version).version)
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=map(_tensor_metadata, metadata.inputs),
            outputs=map(_tensor_metadata, metadata.outputs),
        )

    def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """The model's configuration, as Triton's clients read it."""
        version = self._models.get(request.name, request.version).version
        config = model_config(version, self._max_images)
        return ParseDict({"config": config}, pb.ModelConfigResponse())

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest
    ) -> pb.ModelStatisticsResponse:
        """Counts and durations since the start; of all models if the request names none."""
        served = self._models.served
        if request.name or request.version:
            served = (self._models.get(request.name, request.version),)
        totals = await self._metrics.totals()
        found = [model_statistics(one.version, totals[one.version.name]) for one in served]
        return ParseDict({"model_stats": found}, pb.ModelStatisticsResponse())

    async def ModelInfer(self, messages: object, context: Context) -> bytes:
        """Classify the images of a ModelInferRequest; request and response are serialized."""
        # In a coroutine of its own: its frame, and so the message, is gone when a call is aborted.
        began_s = time.monotonic()
        answer = await self._infer(context, began_s)
        if type(answer) is not bytes or self._calls.access is not None:
            self._calls.log(context, "ModelInfer", answer, began_s)
        if type(answer) is bytes and self._calls.may_return(answer):
            return answer
        return await self._calls.answered(context, answer)

    async def _infer(self, context: Context, began_s: float) -> bytes | Status:
        opened = nvtx.begin("request")
        model = NO_MODEL
        call = None
        remaining_s = context.time_remaining()
        timeout_s = self._timeout_s if remaining_s is None else min(remaining_s, self._timeout_s)
        try:
            call = self._calls.open(context, began_s, timeout_s)
            message = await self._calls.receive(call)
            images, wanted = _read_one_image(message) or await self._read(
                message, began_s + timeout_s - time.monotonic()
            )
            del message
            if wanted.timeout_us:
                timeout_s = min(timeout_s, wanted.timeout_us / 1e6)
            if call.held_bytes:
                self._calls.release(call)
            decoded_s = time.monotonic()
            if len(images) <= _GATHERED_IMAGES:
                await self._gathering.join(call.task)
            gathered_s = time.monotonic()
            served = self._models.get(wanted.model, wanted.version)
            model = served.version.name
            left_s = began_s + timeout_s - gathered_s
            prediction = await served.batcher.submit(images, left_s)
            answered_s = time.monotonic()
            queue_s = gathered_s - decoded_s + prediction.queue_s
            compute_s = prediction.compute_s
            response = _encode(wanted, prediction, queue_s)
            now_s = time.monotonic()
            self._metrics.predicted(
                "grpc",
                model,
                (decoded_s - began_s, queue_s, compute_s, now_s - answered_s, now_s - began_s),
            )
            return response
        except asyncio.CancelledError:
            if call is None or call.ended is None:
                self._metrics.request_done(model, "grpc", Cancelled.code)
                raise
            self._metrics.request_done(model, "grpc", call.ended.code)
            return status_of(call.ended)
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            code = exc.code if isinstance(exc, ServiceError) else ServiceError.code
            self._metrics.request_done(model, "grpc", code)
            status = status_of(exc)
            if isinstance(exc, DeadlineExceeded) and not isinstance(exc, BodyTimeout):
                # It gives only the time that was left.
                status = replace(
                    status, details=f"no answer within {round(timeout_s * 1e3, 3):g} ms"
                )
            return status
        finally:
            if call is not None:
                self._calls.close(call)
            nvtx.end(opened)

    async def _read(self, message: bytes, timeout_s: float) -> tuple[Images, Wanted]:
        if (decoded := decode_inline(message, self._max_images)) is not None:
            return decoded
        source = InferSource(self._max_images)
        outcome = await self._decoders.run(source, message, timeout_s)
        return outcome.images, Wanted.from_json(outcome.wanted)


def _read_one_image(message: bytes) -> tuple[Images, Wanted] | None:
    """The short way for the most frequent request, None for others: one raw image, written last.

    What precedes the image is parsed once for all requests in which it is the same.
    """
    start = len(message) - PIXELS
    end = start - len(_RAW_IMAGE)
    if not 0 <= end <= _LONGEST_HEAD_BYTES or not message.startswith(_RAW_IMAGE, end):
        return None
    wanted = _wanted_of_one_image(message[:end])
    if wanted is None:
        return None
    return np.frombuffer(message, np.uint8, PIXELS, start).reshape(1, HEIGHT, WIDTH), wanted


@lru_cache(maxsize=64)
def _wanted_of_one_image(head: bytes) -> Wanted | None:
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
def _encode(wanted: Wanted, prediction: Prediction, queue_s: float) -> bytes:
    probabilities, outputs, version = prediction.probabilities, wanted.outputs, prediction.served
    tensors = answer(probabilities, outputs, version.weights.training.labels)
    response = pb.ModelInferResponse(id=wanted.id)
    parameters = response.parameters
    parameters["queue_us"].int64_param = round(1e6 * queue_s)
    parameters["compute_us"].int64_param = round(1e6 * prediction.compute_s)
    if wanted.raw:
        response.raw_output_contents.extend([tensor.to_bytes() for tensor in tensors])
        head = _raw_head(version.name, version.version, outputs, probabilities.shape)
        # Serialized messages that follow each other are one message with the fields of both.
        return head + response.SerializeToString()
    response.model_name, response.model_version = version.name, version.version
    for output in tensors:
        tensor = response.outputs.add(
            name=output.name, datatype=output.datatype, shape=output.shape
        )
        values = output.values
        contents = getattr(tensor.contents, _OUTPUT_CONTENTS[output.datatype])
        contents.extend(values if isinstance(values, list) else values.ravel().tolist())
    return response.SerializeToString()


@lru_cache(maxsize=64)
def _raw_head(
    model: str, version: str, outputs: tuple[RequestedOutput, ...], shape: tuple[int, int]
) -> bytes:
    """What all raw answers with probabilities of this shape have in common."""
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    for output in output_metadata(outputs, *shape):
        response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    return response.SerializeToString()


def _tensor_metadata(tensor: TensorMetadata) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )
