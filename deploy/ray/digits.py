"""The service's engine as a deployment of Ray Serve: docs/ray.md says when to use it.

`cd deploy/ray && serve run digits:app device=cpu models=lenet`. Arguments are settings of the
service, and `gpus`, the part of a GPU that each replica takes: `gpus=0.1 device=cuda`.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from lenet.command_line import parse
from lenet.errors import InvalidSettings
from service.assembly import open_service
from service.errors import ServiceError, Unavailable
from service.settings import Settings
from wire.answer import Answer

RAW = {"content-type": "application/octet-stream", "accept": "application/octet-stream"}


@serve.deployment(
    # No @serve.batch: the engine makes the batches, for which it needs many requests at a time.
    max_ongoing_requests=256,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 32},
    health_check_period_s=2,
    graceful_shutdown_timeout_s=15,
)
class Digits:
    """`POST /predict` over HTTP, and `predict` for other deployments."""

    async def __init__(self, arguments: dict[str, str]) -> None:
        self._closing = AsyncExitStack()
        opened = open_service(settings(arguments), grpc_port=0)
        self._service = await self._closing.enter_async_context(opened)
        self._route = self._service.fast_routes[b"POST", b"/predict"]

    async def __call__(self, http: Request) -> Response:
        """Answer as the service does, also to a request that is wrong."""
        answer = await self._answer(
            http.scope["query_string"], dict(http.headers), await http.body()
        )
        lines = answer.headers.decode().splitlines()
        headers = dict(line.split(": ", 1) for line in lines)
        kind = answer.media_type.decode()
        return Response(answer.content, answer.status, headers, media_type=kind)

    async def predict(self, images: np.ndarray) -> np.ndarray:
        """Classify uint8 (n, 28, 28). Returns float32 (n, classes)."""
        answer = await self._answer(b"", RAW, images.tobytes())
        if answer.status != 200:
            raise RuntimeError(answer.content.decode())
        return np.frombuffer(answer.content, "<f4").reshape(len(images), -1)

    async def _answer(self, query: bytes, headers: dict[str, str], body: bytes) -> Answer:
        answered = asyncio.get_running_loop().create_future()
        try:
            request = self._route.open(self._route.read(query, headers), answered.set_result)
        except ServiceError as exc:
            return self._route.refuse(exc)
        request.complete(body)
        try:
            return await answered
        finally:
            request.cancel()  # if the client left; else it is done

    async def check_health(self) -> None:
        """Ray replaces the replica if this raises."""
        if self._service.models.lost.is_set():
            raise Unavailable("the replica lost its device")

    async def __del__(self) -> None:
        await self._closing.aclose()


def settings(arguments: dict[str, str]) -> Settings:
    """The settings of a replica. Raises: InvalidSettings."""
    # Without CLOUDS: the port and the routes that these variables set are Ray's.
    found = parse(Settings, [f"--{name}={text}" for name, text in arguments.items()], "app")
    if found.api_keys or found.certificate:
        raise InvalidSettings("Ray's proxy checks no keys and has no TLS: put them in front of it")
    return found


def app(arguments: dict[str, str]) -> serve.Application:
    """The application, for `serve run` and configuration files."""
    actor = {"num_cpus": 1, "num_gpus": float(arguments.get("gpus", 0))}
    rest = {name: text for name, text in arguments.items() if name != "gpus"}
    settings(rest)  # so that a wrong one is reported before any replica starts
    return Digits.options(ray_actor_options=actor).bind(rest)
