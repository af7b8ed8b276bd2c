"""The methods that are offered over gRPC: who may call them, and how each is answered.

Besides the inference service these are the health protocol's and reflection.

Statuses are Triton's where its clients act on them, with one difference: a full queue is
RESOURCE_EXHAUSTED, so that a client can tell "send less" from UNAVAILABLE, "send elsewhere". Too
many images are INVALID_ARGUMENT as in Triton, because a retry would not help.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from inspect import isawaitable
from typing import Any, Literal, TypeAlias

from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message

from service.api.errors import status_of
from service.api.grpc_infer import SERVICE, infer_methods
from service.api.health_pb2 import HealthCheckRequest, HealthCheckResponse
from service.api.open_inference import GRPC_EXTENSIONS, OpenInference
from service.api.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from service.engine.models import Models
from service.errors import DeadlineExceeded, InvalidInput, UnknownModel, invalid, shown
from service.forms import open_inference_pb2 as pb
from service.request import Requests
from wire.errors import INTERNAL, BodyTimeout, Refusal
from wire.grpc import Caller, Method, timeout_s_of
from wire.head import FastCall
from wire.keys import Keys

_log = logging.getLogger(__name__)

_HEALTH = "grpc.health.v1.Health"
_REFLECTION = "grpc.reflection.v1.ServerReflection"
_EARLIER_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
"""The messages of both are the same on the wire."""

_WATCH_S = 0.5
"""Seconds between two looks at a watched status. 1,024 watches, the most that may be open, take 2 %
of a core (EPYC, 2026-11-26)."""

_MESSAGE_S = 10.0
"""How long a message of a method without images may take."""

_STREAM_AHEAD = 16
"""Messages of a stream that wait to be answered."""

_MAX_SMALL_BYTES = 4096
"""Limit of a message without images. That of a load may hold a model's files, which are not taken
from it."""

Access: TypeAlias = Literal["public", "user", "admin"]
"""Required rights: none, a key if keys are configured, or an administrator's key."""


def methods(requests: Requests, answers: OpenInference, keys: Keys) -> dict[bytes, Method]:
    """All methods, by the path of a call."""
    tasks: set[asyncio.Task[None]] = set()
    health = HealthServicer(answers.models, tells_names=not keys)

    def small(answer: Any, request: type[Message], *, is_stream: bool = False) -> Method:
        open_call = partial(_SmallCall, answer, request, is_stream, tasks)
        return Method(timeout_s_of, open_call, is_endless=is_stream)

    reflect = small(answer_reflection, ServerReflectionRequest, is_stream=True)
    found: dict[str, tuple[Access, Method]] = {
        f"/{_HEALTH}/Check": ("public", small(health.check, HealthCheckRequest)),
        f"/{_HEALTH}/Watch": ("public", small(health.watch, HealthCheckRequest, is_stream=True)),
        f"/{_REFLECTION}/ServerReflectionInfo": ("user", reflect),
        f"/{_EARLIER_REFLECTION}/ServerReflectionInfo": ("user", reflect),
    }
    found |= {f"/{SERVICE}/{name}": ("user", one) for name, one in infer_methods(requests).items()}
    for name, (access, answer) in _small_methods(answers).items():
        found[f"/{SERVICE}/{name}"] = access, small(answer, getattr(pb, f"{name}Request"))
    return {
        path.encode(): _guarded(method, keys, access) for path, (access, method) in found.items()
    }


def _small_methods(answers: OpenInference) -> dict[str, tuple[Access, Callable[[Any], Any]]]:
    """The inference service's methods without images; each gets a message and returns fields.

    A model that is not loaded is not ready, without an error, as in Triton, whose clients poll
    `ModelReady` until a model is loaded; every other call answers NOT_FOUND.
    """
    models = answers.models

    def model_ready(request: Any) -> dict[str, Any]:
        found = models.find(request.name, request.version)
        return {"ready": found is not None and models.ready}

    def config(request: Any) -> dict[str, Any]:
        return {"config": answers.config(request.name, request.version)}

    async def index(request: Any) -> dict[str, Any]:
        return {"models": [asdict(one) for one in await answers.index(request.ready)]}

    return {
        "ServerLive": ("public", lambda _: {"live": True}),  # probes have no keys
        "ServerReady": ("public", lambda _: {"ready": models.ready}),
        "ServerMetadata": ("user", lambda _: asdict(answers.server(GRPC_EXTENSIONS))),
        "ModelReady": ("user", model_ready),
        "ModelMetadata": ("user", lambda one: asdict(answers.metadata(one.name, one.version))),
        "ModelConfig": ("user", config),
        "ModelStatistics": ("user", lambda one: answers.statistics(one.name, one.version)),
        "RepositoryIndex": ("admin", index),
        "RepositoryModelLoad": ("admin", lambda one: answers.load(one.model_name, one.parameters)),
        "RepositoryModelUnload": ("admin", lambda one: answers.unload(one.model_name)),
    }


def _guarded(method: Method, keys: Keys, access: Access) -> Method:
    """`method` for those who have the right; the gate asks users for their key."""

    def read(headers: Mapping[str, str]) -> Any:
        if (error := keys.check(headers, admin=True)) is not None:
            raise error
        return method.read(headers)

    if access == "user":
        return method
    return replace(method, is_open=True, read=method.read if access == "public" else read)


class HealthServicer:
    """The health protocol, for grpc-health-probe, Kubernetes and clients that watch.

    It knows "", the inference service and each model by its name, which it tells nobody unless
    `tells_names`.
    """

    def __init__(self, models: Models, *, tells_names: bool) -> None:
        self._models = models
        self._tells_names = tells_names

    def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        """SERVING while the server is ready."""
        found = self._status(request.service)
        if found == HealthCheckResponse.SERVICE_UNKNOWN:
            names = {SERVICE, *(self._models.names if self._tells_names else ())}
            expected = f"one of {', '.join(sorted(names))}"
            message = f"service: got {shown(request.service)}, expected {expected}"
            raise UnknownModel(message, field="service")
        return HealthCheckResponse(status=found)

    async def watch(
        self, requests: AsyncIterator[HealthCheckRequest]
    ) -> AsyncIterator[HealthCheckResponse]:
        """Yield the status now and at each change; SERVICE_UNKNOWN for an unknown name."""
        request = await anext(requests, HealthCheckRequest())
        last = None
        while True:
            if (found := self._status(request.service)) != last:
                yield HealthCheckResponse(status=found)
                last = found
            else:
                await asyncio.sleep(_WATCH_S)

    def _status(self, name: str) -> HealthCheckResponse.ServingStatus:
        if name not in ("", SERVICE) and self._models.find(name) is None:
            return HealthCheckResponse.SERVICE_UNKNOWN
        ready = self._models.ready
        return HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING


async def answer_reflection(
    requests: AsyncIterator[ServerReflectionRequest],
) -> AsyncIterator[ServerReflectionResponse]:
    """Answer reflection requests: service names and file descriptors."""
    pool: Any = Default()
    async for request in requests:
        response = ServerReflectionResponse(valid_host=request.host, original_request=request)
        files = response.file_descriptor_response.file_descriptor_proto
        try:
            match request.WhichOneof("message_request"):
                case "list_services":
                    for name in (SERVICE, _HEALTH, _REFLECTION):
                        response.list_services_response.service.add(name=name)
                case "file_by_filename":
                    files.append(pool.FindFileByName(request.file_by_filename).serialized_pb)
                case "file_containing_symbol":
                    files.append(_file_of(pool, request.file_containing_symbol).serialized_pb)
                case "all_extension_numbers_of_type":  # proto3 has no extensions
                    name = request.all_extension_numbers_of_type
                    pool.FindMessageTypeByName(name)
                    response.all_extension_numbers_response.base_type_name = name
                case _:
                    raise KeyError("no such request")
        except KeyError as exc:
            response.error_response.error_code = UnknownModel.grpc_status
            response.error_response.error_message = str(exc.args[0])[:200]
        yield response


def _file_of(pool: Any, symbol: str) -> Any:
    """The file that defines `symbol`. The pool's own search knows no methods. Raises: KeyError."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        return pool.FindMethodByName(symbol).containing_service.file


class _SmallCall:
    """A call with small messages, see `Call` and `FastCall`: collects them, and answers in a task.

    Args:
        answer: of a stream, yields the answers to the requests that it is given; else returns or
            awaits the answer to the only one: a message, or its fields.
        kind: the class of the requests.
    """

    def __init__(
        self,
        answer: Callable[[Any], Any],
        kind: type[Message],
        is_stream: bool,
        tasks: set[asyncio.Task[None]],
        timeout_s: float | None,
        exchange: Caller,
    ) -> None:
        self._answer, self._kind, self._is_stream = answer, kind, is_stream
        self._name, self._exchange = kind.DESCRIPTOR.name, exchange
        self._body = b""
        self._received = 0
        self._requests: asyncio.Queue[Message | None] = asyncio.Queue()
        self._tasks, self._timeout_s = tasks, math.inf if timeout_s is None else timeout_s
        self._late_s = asyncio.get_running_loop().time() + self._timeout_s
        self._task: asyncio.Task[None] | None = None
        self.body_timeout_s = min(_MESSAGE_S, self._timeout_s)
        if is_stream:
            self._start()

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._run())
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    # `body_timeout_s` limits the time, and messages are small.
    def wait(self) -> None: ...
    def wait_for_body(self) -> None: ...
    def room(self) -> None: ...
    def arrived(self, size: int) -> None: ...

    def message(self, size: int | None) -> FastCall:
        if size is not None and size > _MAX_SMALL_BYTES:
            raise self._too_large(f"{size} bytes")
        if self._received and not self._is_stream:
            raise InvalidInput(f"message: got a second {self._name}, expected one", field="message")
        self._received += 1
        self._body = b""
        if not self._is_stream:  # the time of a message begins with it, that of the call before
            left_s = self._late_s - asyncio.get_running_loop().time()
            self.body_timeout_s = min(_MESSAGE_S, left_s)
        return self

    def data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > _MAX_SMALL_BYTES:
            raise self._too_large("more")

    def complete(self, body: bytes | memoryview | None = None) -> None:
        try:
            request = self._kind.FromString(self._body if body is None else bytes(body))
        except DecodeError:
            raise InvalidInput(f"message: not a {self._name}", field="message") from None
        self._requests.put_nowait(request)

    def half_close(self) -> None:
        if not self._received:
            raise InvalidInput("message: got none, expected a request", field="message")
        self._requests.put_nowait(None)
        if self._task is None:  # not before the end, until which a second message may come
            self._start()

    @property
    def is_ahead(self) -> bool:
        return self._requests.qsize() >= _STREAM_AHEAD

    def stop(self, error: Refusal) -> None:
        if self._is_stream or self._task is None:  # a stream has no end of its own
            self.fail(error)

    def fail(self, error: Refusal) -> None:
        if isinstance(error, BodyTimeout):
            error = BodyTimeout("message: it did not arrive in time", field="message")
            if self._timeout_s < _MESSAGE_S:
                error = self._late()
        self.cancel()
        self._exchange.end(status_of(error))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within {round(self._timeout_s * 1e3, 3):g} ms")

    def _too_large(self, found: str) -> InvalidInput:
        expected = f"at most {_MAX_SMALL_BYTES} of a {self._name}"
        if self._kind is pb.RepositoryModelLoadRequest:
            expected += "; models are read from the folder, and not from requests"
        return invalid("message", found, expected)

    async def _run(self) -> None:
        limit = asyncio.timeout_at(self._late_s if self._late_s < math.inf else None)
        try:
            async with limit:
                await (self._answer_all() if self._is_stream else self._answer_one())
        except Refusal as exc:
            self._exchange.end(status_of(exc))
        except Exception:  # noqa: BLE001 - the transport's edge: the client gets it
            if limit.expired():
                self._exchange.end(status_of(self._late()))
            else:
                _log.exception("a gRPC call failed")
                self._exchange.end(status_of(Refusal(INTERNAL)))

    async def _answer_one(self) -> None:
        found = self._answer(await self._requests.get())
        if isawaitable(found):
            found = await found
        if not isinstance(found, Message):
            name = self._name.removesuffix("Request")
            found = ParseDict(found or {}, getattr(pb, f"{name}Response")())
        self._exchange.reply(found.SerializeToString())

    async def _answer_all(self) -> None:
        async for answer in self._answer(self._received_requests()):
            self._exchange.write(answer.SerializeToString())
            await self._exchange.drained()
        self._exchange.end()

    async def _received_requests(self) -> AsyncIterator[Message]:
        while (request := await self._requests.get()) is not None:
            self._exchange.read_on()
            yield request
