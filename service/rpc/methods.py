"""The methods that the gRPC server offers: how each is admitted, read and answered.

Besides the inference service these are the health protocol's and reflection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isawaitable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from service.engine.models import Models
from service.errors import InvalidInput, UnknownModel, invalid, shown
from service.rpc import open_inference_pb2 as pb
from service.rpc.calls import (
    LEFT,
    MESSAGE_S,
    SPARE_CALLS,
    Access,
    Calls,
    Context,
    OpenCall,
    Status,
    Stream,
    abort,
    status_of,
)
from service.rpc.servicer import InferenceServicer

SERVICE = "inference.GRPCInferenceService"

_HEALTH_SERVICE = "grpc.health.v1.Health"
_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The messages of both are the same on the wire."""

_WATCH_S = 0.2
"""How often a watched status is looked at."""

_SMALL_METHODS: dict[str, Access] = {
    **dict.fromkeys(("ServerLive", "ServerReady"), "public"),  # probes have no keys
    **dict.fromkeys(("ModelReady", "ServerMetadata", "ModelMetadata"), "user"),
    **dict.fromkeys(("ModelConfig", "ModelStatistics"), "user"),
    **dict.fromkeys(("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"), "admin"),
}
"""Those of the inference service that take no images, and who may call them."""

_MAX_SMALL_BYTES = 4096
"""Limit of a message without images. That of a load may hold a model's files, which are not taken
from it."""


class HealthServicer:
    """The health protocol, for grpc-health-probe, Kubernetes and clients that watch.

    It knows "", the inference service and each model by its name, which it tells nobody unless
    `tells_names`. Not grpc_health's servicer: when one of several watchers of a name leaves, the
    others hear of no change any more (1.81).
    """

    def __init__(self, models: Models, *, tells_names: bool) -> None:
        self._models = models
        self._tells_names = tells_names

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
        """The same now, and at each change; SERVICE_UNKNOWN while the name is not known."""
        request = await anext(requests, health_pb2.HealthCheckRequest())
        last = None
        while True:
            found = self._status(request.service)
            if found != last:
                yield health_pb2.HealthCheckResponse(status=found)
            last = found
            await asyncio.sleep(_WATCH_S)

    def _known(self) -> set[str]:
        return {"", SERVICE, *(model.version.name for model in self._models.served)}

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if name not in self._known():
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._models.ready:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING


def add_methods(
    server: grpc.aio.Server, inference: InferenceServicer, health: HealthServicer, calls: Calls
) -> None:
    """Serve all methods on `server`.

    Not by the generated function, which registers each method: with every call, grpcio 1.85 then
    waits anew for the next call of each of them. And as methods with a stream of requests, because
    the handlers read their only message themselves; see `rpc.calls`.
    """
    handler = grpc.stream_unary_rpc_method_handler
    stream = grpc.stream_stream_rpc_method_handler
    methods = _Methods(calls)
    small = {
        name: handler(
            methods.single(name, getattr(inference, name), getattr(pb, f"{name}Request"), access)
        )
        for name, access in _SMALL_METHODS.items()
    }
    request = health_pb2.HealthCheckRequest
    names = SERVICE, _HEALTH_SERVICE, *_REFLECTION
    reflected: Any = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]

    def reflect(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        found: AsyncIterator[Message] = reflected.ServerReflectionInfo(requests, None)
        return found

    name, kind = "ServerReflectionInfo", reflection_pb2.ServerReflectionRequest
    info = stream(methods.stream(name, reflect, kind, "reflection"))
    services = {
        SERVICE: {
            **small,
            "ModelInfer": handler(inference.ModelInfer),
            "ModelStreamInfer": stream(inference.ModelStreamInfer),
        },
        _HEALTH_SERVICE: {
            "Check": handler(methods.single("Check", health.check, request, "public")),
            "Watch": stream(methods.stream("Watch", health.watch, request, "health")),
        },
        **{service: {name: info} for service in _REFLECTION},
    }
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, found) for name, found in services.items())
    )


class _Methods:
    """Makes handlers for methods whose messages are small."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def single(
        self,
        name: str,
        answer: Callable[[Any], Message | Awaitable[Message]],
        request: type[Message],
        access: Access = "user",
    ) -> Callable[[object, Context], Any]:
        """Of the method `name`, with one `answer` to one `request`."""
        calls = self._calls

        async def work(call: OpenCall) -> bytes:
            found = answer(_parsed(request, await calls.receive(call, small=True)))
            response: Message = await found if isawaitable(found) else found
            return response.SerializeToString()

        async def handle(messages: object, context: Context) -> bytes:
            began_s = time.monotonic()

            def admit() -> OpenCall:
                return calls.open(context, began_s, MESSAGE_S, spare=SPARE_CALLS, access=access)

            found = await self._outcome(admit, work)
            calls.log(context, name, found, began_s)
            return await calls.answered(context, found)

        return handle

    def stream(
        self,
        name: str,
        answers: Callable[[AsyncIterator[Any]], AsyncIterator[Message]],
        request: type[Message],
        kind: Stream,
    ) -> Callable[[object, Context], Any]:
        """Of the method `name`, which makes a stream of `answers` of a stream of `request`."""
        calls = self._calls

        async def requests(call: OpenCall) -> AsyncIterator[Message]:
            while (message := await calls.receive_next(call)) is not None:
                yield _parsed(request, message)

        async def work(call: OpenCall) -> bytes:
            async for answer in answers(requests(call)):
                await call.context.write(answer.SerializeToString())
            return b""

        async def handle(messages: object, context: Context) -> None:
            began_s = time.monotonic()
            try:
                found = await self._outcome(lambda: calls.open_stream(context, kind), work)
            except asyncio.CancelledError:
                calls.log(context, name, LEFT, began_s)
                raise
            calls.log(context, name, found, began_s)
            if isinstance(found, Status):
                await abort(context, found)

        return handle

    async def _outcome(
        self, admit: Callable[[], OpenCall], work: Callable[[OpenCall], Awaitable[bytes]]
    ) -> bytes | Status:
        """What `work` does with the call that `admit` opens, or how it fails."""
        call = None
        try:
            call = admit()
            return await work(call)
        except asyncio.CancelledError:
            if call is None or call.ended is None:
                raise
            return status_of(call.ended)
        except Exception as exc:  # noqa: BLE001 - the transport's edge: the client gets it
            return status_of(exc)
        finally:
            if call is not None:
                self._calls.close(call)


def _parsed(request: type[Message], message: bytes) -> Message:
    name = request.DESCRIPTOR.name
    if len(message) > _MAX_SMALL_BYTES:
        got = f"{len(message)} bytes"
        expected = f"at most {_MAX_SMALL_BYTES} of a {name}"
        if request is pb.RepositoryModelLoadRequest:
            expected += "; models are read from the folder, and not from requests"
        raise invalid("message", got, expected)
    try:
        return request.FromString(message)
    except DecodeError:
        raise InvalidInput(f"message: not a {name}", field="message") from None
