"""The service on any ASGI server: `uvicorn service.asgi:app`, settings in `LENET_` variables.

Nothing is opened by the import: `lifespan` does, when the server starts.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lenet import DISTRIBUTION
from lenet.command_line import parse
from lenet.errors import InvalidSettings
from service.assembly import open_service
from service.errors import STARTUP_ERRORS
from service.settings import Settings

_STATE = "lenet_serve"
"""What the server hands from the lifespan to each request, by name."""


@asynccontextmanager
async def open_app(settings: Settings | None = None) -> AsyncIterator[ASGIApp]:
    """The service as an ASGI application, open while the block runs.

    `settings`: those of the environment by default. Those of listeners, workers and TLS are the
    server's business.

    Raises:
        InvalidSettings: a variable is wrong.
        InvalidWeightFile, GoldenMismatch: the weights must not be served.
        BackendUnavailable, DeviceError: the device cannot be used.
    """
    async with open_service(settings or parse(Settings, (), DISTRIBUTION)) as service:
        yield service.asgi


@asynccontextmanager
async def lifespan(_app: object = None) -> AsyncIterator[dict[str, Any]]:
    """Opens the service for `app`, as the lifespan of whatever application `app` is mounted in."""
    async with open_app() as opened:
        yield {_STATE: opened}


_lifespan = Router(lifespan=lifespan)
_START_ERRORS = (InvalidSettings, *STARTUP_ERRORS)


async def _run_lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """The lifespan by Starlette, for which a failed start is a traceback of 30 lines.

    Raises:
        InvalidSettings, InvalidWeightFile, GoldenMismatch, BackendUnavailable, DeviceError: see
            `open_app`; without the frames within the service, since servers log them.
    """

    async def send_in_words(message: Message) -> None:
        error = sys.exception()  # Starlette sends while it handles the error
        if isinstance(error, _START_ERRORS):
            message = {**message, "message": str(error)}
        await send(message)

    try:
        await _lifespan(scope, receive, send_in_words)
    except _START_ERRORS as exc:
        raise exc.with_traceback(None) from None


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application.

    Raises:
        RuntimeError: the server has not run `lifespan`.
    """
    if scope["type"] == "lifespan":
        await _run_lifespan(scope, receive, send)
        return
    opened = scope.get("state", {}).get(_STATE)
    if opened is None:
        raise RuntimeError(
            "service.asgi: the service is not open; an application that mounts it needs "
            "FastAPI(lifespan=service.asgi.lifespan), a test `async with open_app() as app`"
        )
    await opened(scope, receive, send)
