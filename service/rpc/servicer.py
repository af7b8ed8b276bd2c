"""The calls of the Open Inference Protocol; errors as gRPC statuses.

Statuses are Triton's where its clients act on them, with one difference: a full queue is
RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere". Too
many images are INVALID_ARGUMENT as in Triton, because a retry would not help.
"""

# ruff: noqa: N802 - methods are named like the protocol's calls

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from google.protobuf.json_format import ParseDict

from lenet import DISTRIBUTION, distribution_version, nvtx
from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.engine.models import Models
from service.engine.queue import Prediction
from service.engine.repository import Repository
from service.errors import (
    BodyTimeout,
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    ServiceError,
    TooLarge,
    Unavailable,
    UnknownModel,
)
from service.images.decoders import Decoders, InferSource
from service.metrics import NO_MODEL, Metrics, ModelKey
from service.open_inference import (
    GRPC_EXTENSIONS,
    MAX_ID_CHARACTERS,
    RequestedOutput,
    TensorMetadata,
    answer,
    check_repository_parameters,
    model_config,
    model_metadata,
    model_statistics,
    output_metadata,
    repository_entries,
)
from service.rpc import open_inference_pb2 as pb
from service.rpc.calls import (
    LEFT,
    Calls,
    Context,
    OpenCall,
    Status,
    abort,
    status_of,
)
from service.rpc.gathering import Gathering
from service.rpc.guard import read_infer_request, split
from service.rpc.message import Wanted, decode_inline, decode_request

_OUTPUT_CONTENTS = {"FP32": "fp32_contents", "INT64": "int64_contents", "BYTES": "bytes_contents"}

_GATHERED_IMAGES = 256
"""More images are a batch of their own, nearly, and 12 MB of them should not wait for others."""

_STREAM_AHEAD = 32
"""Requests of a stream that are worked on while the first of them is not written. One of many
images counts as several, so that of a client that does not read 2 MB are held beside the budget."""

_IMAGES_OF_ONE = 512
_LARGEST_READ_AGAIN = 64 * 1024
"""Of a message without its raw images."""

_RAW_IMAGE = b"\x3a\x90\x06"
"""What precedes one image in raw_input_contents: field 7, delimited, 784 bytes."""

_LONGEST_HEAD_BYTES = 256


_Answers: TypeAlias = "asyncio.Queue[tuple[asyncio.Task[bytes], int] | None]"
"""Of a stream, in their order: each with how many it counts as."""


@dataclass(slots=True)
class _Request:
    """A request for inference that came at `began_s` and has `timeout_s`."""

    began_s: float
    timeout_s: float
    decoded_s: float = 0.0
    id: str = ""
    wanted: Wanted | None = None
    model: ModelKey = NO_MODEL

    @property
    def end_s(self) -> float:
        return self.began_s + self.timeout_s


class InferenceServicer:
    """The calls of the protocol, answered by the loaded models.

    A model that is not loaded is not ready, without an error, as in Triton, whose clients poll
    `ModelReady` until a model is loaded; every other call answers NOT_FOUND.
    """

    def __init__(
        self,
        models: Models,
        repository: Repository,
        metrics: Metrics,
        decoders: Decoders,
        calls: Calls,
        *,
        max_images: int,
        timeout_s: float,
    ) -> None:
        self._models, self._repository = models, repository
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
        version = self._models.get(request.name, request.version).version
        loaded = [one.version.version for one in self._models.select(version.name)]
        metadata = model_metadata(version, loaded)
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
        named = request.name or request.version
        served = (
            self._models.select(request.name, request.version) if named else self._models.served
        )
        totals = await self._metrics.totals()
        found = [model_statistics(one.version, totals[one.version.key]) for one in served]
        return ParseDict({"model_stats": found}, pb.ModelStatisticsResponse())

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest
    ) -> pb.RepositoryIndexResponse:
        """Every version of a model in the weights folder, or those that are loaded."""
        entries = repository_entries(await self._repository.index(), request.ready)
        return ParseDict({"models": entries}, pb.RepositoryIndexResponse())

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest
    ) -> pb.RepositoryModelLoadResponse:
        """Load a model, or what its files are now if it is loaded."""
        check_repository_parameters(request.parameters)
        await self._repository.load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; requests that came before are answered."""
        await self._repository.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

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

    async def ModelStreamInfer(self, messages: object, context: Context) -> None:
        """The same for each message of a stream, answered in their order, errors included."""
        began_s = time.monotonic()
        try:
            outcome = await self._stream(context)
        except asyncio.CancelledError:
            self._calls.log(context, "ModelStreamInfer", LEFT, began_s)
            raise
        self._calls.log(context, "ModelStreamInfer", outcome, began_s)
        if isinstance(outcome, Status):
            await abort(context, outcome)

    async def _infer(self, context: Context, began_s: float) -> bytes | Status:
        opened = nvtx.begin("request")
        call = None
        remaining_s = context.time_remaining()
        timeout_s = self._timeout_s if remaining_s is None else min(remaining_s, self._timeout_s)
        request = _Request(began_s, timeout_s)
        try:
            call = self._calls.open(context, began_s, timeout_s)
            message = await self._calls.receive(call)
            images = await self._decode(request, message)
            del message
            if call.held_bytes:
                self._calls.release(call)
            if len(images) <= _GATHERED_IMAGES:
                await self._gathering.join(call.task)
            return await self._classify(request, images)
        except asyncio.CancelledError:
            if call is None or call.ended is None:
                self._metrics.request_done(request.model, "grpc", Cancelled.code)
                raise
            return self._failed(request, call.ended)
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            return self._failed(request, exc)
        finally:
            if call is not None:
                self._calls.close(call)
            nvtx.end(opened)

    async def _stream(self, context: Context) -> bytes | Status:
        try:
            call = self._calls.open_stream(context, "inference")
        except ServiceError as exc:
            return self._failed(_Request(time.monotonic(), self._timeout_s), exc)
        answers: _Answers = asyncio.Queue()
        room = asyncio.Semaphore(_STREAM_AHEAD)
        writing = asyncio.create_task(_write_answers(call, answers, room))
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        outcome: bytes | Status = b""
        try:
            try:
                await self._receive_all(call, answers, room)
            except asyncio.CancelledError:
                if not isinstance(call.ended, Unavailable):
                    raise
                outcome = status_of(call.ended)  # a stop
            except Unavailable as exc:  # a stop, too
                outcome = status_of(exc)
            except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
                if call.ended is not None:  # another has its place, whether it reads or not
                    return status_of(exc)
                outcome = self._failed(_Request(time.monotonic(), self._timeout_s), exc)
            answers.put_nowait(None)
            await asyncio.shield(writing)  # what was received is answered
        except asyncio.CancelledError:
            if call.ended is None:  # the client left
                raise
            return status_of(call.ended)
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            return status_of(exc)
        finally:
            writing.cancel()
            while not answers.empty():
                if (rest := answers.get_nowait()) is not None:
                    rest[0].cancel()
            self._calls.close(call)
        return outcome

    async def _receive_all(
        self, call: OpenCall, answers: _Answers, room: asyncio.Semaphore
    ) -> None:
        """Begin to answer each message of a stream, until its client sends no more.

        Raises: what `Calls.receive_next` raises.
        """
        while await room.acquire():
            message = await self._calls.receive_next(call)
            if message is None:
                return
            request = _Request(time.monotonic(), self._timeout_s)
            images: Images | Exception
            try:
                images = await self._decode(request, message)
            except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
                images = exc
            del message
            count = 1
            if not isinstance(images, Exception):
                for _ in range(min(len(images) // _IMAGES_OF_ONE, _STREAM_AHEAD - 1)):
                    await room.acquire()
                    count += 1
            if call.held_bytes:  # the images count until there is room for their answer
                self._calls.release(call)
            answer = asyncio.create_task(self._stream_answer(request, images))
            answers.put_nowait((answer, count))

    async def _stream_answer(self, request: _Request, images: Images | Exception) -> bytes:
        """One answer of a stream, serialized; an error is one, too."""
        response = pb.ModelStreamInferResponse()
        try:
            if isinstance(images, Exception):
                raise images
            response.infer_response.MergeFromString(await self._classify(request, images))
        except asyncio.CancelledError:
            self._metrics.request_done(request.model, "grpc", Cancelled.code)
            raise
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            response.error_message = self._failed(request, exc).details
            response.infer_response.id = request.id
        # Triton's clients may wait for it, as a model may give several answers to a request there.
        response.infer_response.parameters["triton_final_response"].bool_param = True
        return response.SerializeToString()

    async def _decode(self, request: _Request, message: bytes) -> Images:
        try:
            if len(message) > (most := self._calls.max_message_bytes):
                raise TooLarge(
                    f"message: got {len(message)} bytes, expected at most {most}; "
                    "send fewer images at a time",
                    field="message",
                )
            images, request.wanted = _read_one_image(message) or await self._read(
                message, request.end_s - time.monotonic()
            )
        except Exception:
            self._identify(request, message)
            raise
        request.id = request.wanted.id
        if request.wanted.timeout_us:
            request.timeout_s = min(request.timeout_s, request.wanted.timeout_us / 1e6)
        request.decoded_s = time.monotonic()
        return images

    async def _classify(self, request: _Request, images: Images) -> bytes:
        """The answer, serialized. Raises: ServiceError."""
        wanted, gathered_s = request.wanted, time.monotonic()
        assert wanted is not None, "bug: not decoded"
        served = self._models.get(wanted.model, wanted.version)
        request.model = served.version.key
        prediction = await served.batcher.submit(images, request.end_s - gathered_s)
        answered_s = time.monotonic()
        queue_s = gathered_s - request.decoded_s + prediction.queue_s
        response = _encode(wanted, prediction, queue_s)
        now_s = time.monotonic()
        self._metrics.predicted(
            "grpc",
            request.model,
            (
                *(request.decoded_s - request.began_s, queue_s, prediction.compute_s),
                *(now_s - answered_s, now_s - request.began_s),
            ),
        )
        return response

    def _failed(self, request: _Request, error: Exception) -> Status:
        """Count a request that failed; its status."""
        code = error.code if isinstance(error, ServiceError) else ServiceError.code
        self._metrics.request_done(request.model, "grpc", code)
        status = status_of(error)
        if isinstance(error, DeadlineExceeded) and not isinstance(error, BodyTimeout):
            # It gives only the time that was left.
            milliseconds = round(request.timeout_s * 1e3, 3)
            status = replace(status, details=f"no answer within {milliseconds:g} ms")
        return status

    def _identify(self, request: _Request, message: bytes) -> None:
        """Note the id and the model of a request that is refused, as far as they can be read.

        Raises: UnknownModel, which is the one of two mistakes to know first.
        """
        parts = split(message)
        if parts is None or sum(map(len, parts[0])) > _LARGEST_READ_AGAIN:
            return
        head = read_infer_request(b"".join(parts[0]))
        if isinstance(head, InvalidInput):
            return
        request.id = head.id[:MAX_ID_CHARACTERS]
        request.model = self._models.get(head.model_name, head.model_version).version.key

    async def _read(self, message: bytes, timeout_s: float) -> tuple[Images, Wanted]:
        if (decoded := decode_inline(message, self._max_images)) is not None:
            return decoded
        source = InferSource(self._max_images)
        outcome = await self._decoders.run(source, message, timeout_s)
        return outcome.images, Wanted.from_json(outcome.wanted)


async def _write_answers(call: OpenCall, answers: _Answers, room: asyncio.Semaphore) -> None:
    """Write the answers of a stream in their order, until None; each makes `room` for others."""
    while (next_one := await answers.get()) is not None:
        answer, count = next_one
        try:
            call.computing = True
            made = await answer
            call.computing = False
            await call.context.write(made)
            call.moved_s = time.monotonic()
        finally:
            answer.cancel()
        for _ in range(count):
            room.release()


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
