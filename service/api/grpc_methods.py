"""The methods that are offered over gRPC: who may call them, and how each is answered.

Besides the inference service these are the health protocol's and reflection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Literal, TypeAlias

from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message

from service.api import health_pb2, reflection_pb2
from service.api.grpc_infer import SERVICE, infer_methods
from service.engine.models import Models
from service.errors import (
    BodyTimeout,
    DeadlineExceeded,
    InvalidInput,
    ServiceError,
    UnknownModel,
    invalid,
    shown,
)
from service.forms import open_inference_pb2 as pb
from service.process.keys import Keys
from service.request import Requests
from service.transport.grpc import GrpcStream, Method, timeout_s_of
from service.transport.grpc_status import Status, StatusCode, internal_error, status_of
from service.transport.head import FastCall

_HEALTH = "grpc.health.v1.Health"
_REFLECTION = "grpc.reflection.v1.ServerReflection"
_EARLIER_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
"""The messages of both are the same on the wire."""

_WATCH_S = 0.2
"""How often watched statuses are looked at."""

_MESSAGE_S = 10.0
"""How long a message of a method without images may take."""

_STREAM_AHEAD = 16
"""Messages of a stream that wait to be answered."""

_MAX_SMALL_BYTES = 4096
"""Limit of a message without images. That of a load may hold a model's files, which are not taken
from it."""

Access: TypeAlias = Literal["public", "user", "admin"]
"""Required rights: none, a key if keys are configured, or an administrator's key."""

_SMALL_METHODS: dict[str, Access] = {
    **dict.fromkeys(("ServerLive", "ServerReady"), "public"),  # probes have no keys
    **dict.fromkeys(("ModelReady", "ServerMetadata", "ModelMetadata"), "user"),
    **dict.fromkeys(("ModelConfig", "ModelStatistics"), "user"),
    **dict.fromkeys(("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"), "admin"),
}
"""Methods of the inference service that take no images."""


def methods(
    requests: Requests, inference: Mapping[str, Callable[[Any], Any]], models: Models, keys: Keys
) -> dict[bytes, Method]:
    """All methods, by the path of a call."""
    tasks: set[asyncio.Task[None]] = set()
    health = HealthServicer(models, tells_names=not keys)
    check = health_pb2.HealthCheckRequest

    def small(call: type[_SmallCall], answer: Any, request: type[Message]) -> Method:
        open_call = partial(call, answer, request, tasks)
        return Method(timeout_s_of, open_call, is_endless=call is _StreamCall)

    reflect = small(_StreamCall, answer_reflection, reflection_pb2.ServerReflectionRequest)
    found: dict[str, tuple[Access, Method]] = {
        f"/{_HEALTH}/Check": ("public", small(_UnaryCall, health.check, check)),
        f"/{_HEALTH}/Watch": ("public", small(_StreamCall, health.watch, check)),
        f"/{_REFLECTION}/ServerReflectionInfo": ("user", reflect),
        f"/{_EARLIER_REFLECTION}/ServerReflectionInfo": ("user", reflect),
    }
    for name, method in infer_methods(requests).items():
        found[f"/{SERVICE}/{name}"] = "user", method
    for name, access in _SMALL_METHODS.items():
        unary = small(_UnaryCall, inference[name], getattr(pb, f"{name}Request"))
        found[f"/{SERVICE}/{name}"] = access, unary
    return {
        path.encode(): _guarded(method, keys, access) for path, (access, method) in found.items()
    }


def _guarded(method: Method, keys: Keys, access: Access) -> Method:
    """`method`, which needs a key where there are keys, or in any case an administrator's."""

    def read(headers: Mapping[str, str]) -> Any:
        error = keys.check(headers.get("authorization"), admin=access == "admin")
        if error is not None:
            raise error
        return method.read(headers)

    return method if access == "public" else replace(method, read=read)


class HealthServicer:
    """The health protocol, for grpc-health-probe, Kubernetes and clients that watch.

    It knows "", the inference service and each model by its name, which it tells nobody unless
    `tells_names`.
    """

    def __init__(self, models: Models, *, tells_names: bool) -> None:
        self._models = models
        self._tells_names = tells_names
        self._watches = 0
        self._change: asyncio.Task[None] | None = None  # while something is watched

    def check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """SERVING while the server is ready."""
        found = self._status(request.service)
        if found == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            known = self._known() if self._tells_names else {SERVICE}
            names = ", ".join(sorted(known - {""}))
            message = f"service: got {shown(request.service)}, expected one of {names}"
            raise UnknownModel(message, field="service")
        return health_pb2.HealthCheckResponse(status=found)

    async def watch(
        self, requests: AsyncIterator[health_pb2.HealthCheckRequest]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the status now and at each change; SERVICE_UNKNOWN for an unknown name."""
        request = await anext(requests, health_pb2.HealthCheckRequest())
        last = None
        self._watches += 1
        try:
            while True:
                if (found := self._status(request.service)) != last:
                    yield health_pb2.HealthCheckResponse(status=found)
                    last = found
                else:
                    await self._changed()
        finally:
            self._watches -= 1
            if not self._watches and self._change is not None:
                self._change.cancel()
                self._change = None

    async def _changed(self) -> None:
        """Wait for a change, with all others that do: one timer for all."""
        if self._change is None or self._change.done():
            # Read before the task begins: a change until then must end its wait.
            self._change = asyncio.ensure_future(self._wait_for_change(self._snapshot()))
        await asyncio.shield(self._change)

    async def _wait_for_change(self, before: tuple[bool, set[str]]) -> None:
        while before == self._snapshot():  # noqa: ASYNC110 - no event of the models
            await asyncio.sleep(_WATCH_S)

    def _snapshot(self) -> tuple[bool, set[str]]:
        """Everything that statuses depend on."""
        return self._models.ready, self._known()

    def _known(self) -> set[str]:
        return {"", SERVICE, *self._models.names}

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if name not in self._known():
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._models.ready:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING


async def answer_reflection(
    requests: AsyncIterator[reflection_pb2.ServerReflectionRequest],
) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
    """Answer reflection requests: service names and file descriptors."""
    pool: Any = Default()
    async for request in requests:
        response = reflection_pb2.ServerReflectionResponse(
            valid_host=request.host, original_request=request
        )
        try:
            match request.WhichOneof("message_request"):
                case "list_services":
                    for name in (SERVICE, _HEALTH, _REFLECTION):
                        response.list_services_response.service.add(name=name)
                case "file_by_filename":
                    _describe(response, pool.FindFileByName(request.file_by_filename))
                case "file_containing_symbol":
                    symbol = request.file_containing_symbol
                    _describe(response, _file_of(pool, symbol))
                case "all_extension_numbers_of_type":  # proto3 has no extensions
                    name = request.all_extension_numbers_of_type
                    pool.FindMessageTypeByName(name)
                    response.all_extension_numbers_response.base_type_name = name
                case _:
                    raise KeyError("no such request")
        except KeyError as exc:
            response.error_response.error_code = StatusCode.NOT_FOUND
            response.error_response.error_message = str(exc.args[0])[:200]
        yield response


def _file_of(pool: Any, symbol: str) -> Any:
    """The file that defines `symbol`. The pool's own search knows no methods. Raises: KeyError."""
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        return pool.FindMethodByName(symbol).containing_service.file


def _describe(response: reflection_pb2.ServerReflectionResponse, file: Any) -> None:
    response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)


class _SmallCall:
    """A call with small messages: collects them and runs a task that answers."""

    body_timeout_s = _MESSAGE_S

    def __init__(
        self,
        answer: Any,
        request: type[Message],
        tasks: set[asyncio.Task[None]],
        timeout_s: float | None,
        exchange: GrpcStream,
    ) -> None:
        self._answer, self._kind, self._tasks, self._exchange = answer, request, tasks, exchange
        self._body = b""
        self._received = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            late = DeadlineExceeded(f"no answer within {round(timeout_s * 1e3, 3):g} ms")
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_s, self.fail, late)

    # The message that arrives.

    def message(self, size: int | None) -> FastCall:
        """A message begins."""
        name = self._kind.DESCRIPTOR.name
        if size is not None and size > _MAX_SMALL_BYTES:
            raise self._too_large(f"{size} bytes")
        if self._received and isinstance(self, _UnaryCall):
            raise InvalidInput(f"message: got a second {name}, expected one", field="message")
        self._received += 1
        self._body = b""
        return self

    def data(self, data: bytes) -> None:
        """Receive the next piece of the message."""
        self._body += data
        if len(self._body) > _MAX_SMALL_BYTES:
            raise self._too_large("more")

    def room(self) -> None:
        """Returns None: messages are small."""

    def arrived(self, size: int) -> None:
        """Not called."""

    def wait_for_body(self) -> None:
        """Does nothing: `body_timeout_s` limits the time."""

    def complete(self, body: bytes | memoryview | None = None) -> None:
        """The message is complete."""
        try:
            request = self._kind.FromString(self._body if body is None else bytes(body))
        except DecodeError:
            name = self._kind.DESCRIPTOR.name
            raise InvalidInput(f"message: not a {name}", field="message") from None
        self.received(request)

    def _too_large(self, found: str) -> InvalidInput:
        expected = f"at most {_MAX_SMALL_BYTES} of a {self._kind.DESCRIPTOR.name}"
        if self._kind is pb.RepositoryModelLoadRequest:
            expected += "; models are read from the folder, and not from requests"
        return invalid("message", found, expected)

    def received(self, request: Message) -> None:
        """Handle the next request."""
        raise NotImplementedError

    # The call.

    def half_close(self) -> None:
        """The client sends no more. Raises: InvalidInput, if no request was received."""
        if not self._received:
            raise InvalidInput("message: got none, expected a request", field="message")

    def wait(self) -> None:
        """Does nothing: `body_timeout_s` limits the time."""

    def is_ahead(self) -> bool:
        """Returns False: there is one answer."""
        return False

    def stop(self, error: ServiceError) -> None:
        """The service stops: a call that received a request is still answered."""
        if not self._received:
            self.fail(error)

    def fail(self, error: ServiceError) -> None:
        """End the call with `error`."""
        if isinstance(error, BodyTimeout):
            error = BodyTimeout("message: it did not arrive in time", field="message")
        self.cancel()
        self._exchange.end(status_of(error))

    def cancel(self) -> None:
        """The client is gone."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Answer in a task."""
        self._task = task = asyncio.ensure_future(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except ServiceError as exc:
            self._exchange.end(status_of(exc))
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            self._exchange.end(internal_error(exc))
        finally:
            if self._timer is not None:
                self._timer.cancel()


class _UnaryCall(_SmallCall):
    """A call with one request and one answer."""

    def received(self, request: Message) -> None:
        """Answer it."""
        if iscoroutinefunction(self._answer):
            self.run(lambda: self._reply(request))
            return
        try:
            found = self._answer(request)
        except ServiceError as exc:
            self.fail(exc)
            return
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            self._exchange.end(internal_error(exc))
            return
        self._write(found)

    async def _reply(self, request: Message) -> None:
        self._write(await self._answer(request))

    def _write(self, found: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(found, dict):
            name = self._kind.DESCRIPTOR.name.removesuffix("Request")
            found = ParseDict(found, getattr(pb, f"{name}Response")())
        self._exchange.reply(found.SerializeToString())


class _StreamCall(_SmallCall):
    """A call with streams of requests and answers."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._requests: asyncio.Queue[Message | None] = asyncio.Queue()

    def received(self, request: Message) -> None:
        """Have it answered."""
        self._requests.put_nowait(request)
        if self._task is None:
            self.run(self._answer_all)

    def half_close(self) -> None:
        """There are no further requests."""
        super().half_close()
        self._requests.put_nowait(None)

    def is_ahead(self) -> bool:
        """Whether many requests wait."""
        return self._requests.qsize() >= _STREAM_AHEAD

    def stop(self, error: ServiceError) -> None:
        """A stream has no end of its own."""
        self.fail(error)

    async def _answer_all(self) -> None:
        async for answer in self._answer(self._next()):
            self._exchange.write(answer.SerializeToString())
            await self._exchange.drained()
        self._exchange.end(Status(StatusCode.OK))

    async def _next(self) -> AsyncIterator[Message]:
        while (request := await self._requests.get()) is not None:
            self._exchange.read_on()
            yield request
