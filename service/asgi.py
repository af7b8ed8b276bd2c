"""The service on any ASGI server: `uvicorn service.asgi:app`, settings in `LENET_` variables.

Nothing is opened by the import: `lifespan` does, when the server starts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from lenet import DISTRIBUTION
from lenet.command_line import parse
from lenet.errors import InvalidSettings
from service.assembly import open_service
from service.errors import STARTUP_ERRORS
from service.settings import CLOUDS, Settings

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
    settings = settings or parse(Settings, (), DISTRIBUTION, variables=CLOUDS)
    async with open_service(settings) as service:
        yield service.asgi


@asynccontextmanager
async def lifespan(_app: object = None) -> AsyncIterator[dict[str, Any]]:
    """Opens the service for `app`, as the lifespan of whatever application `app` is mounted in."""
    async with open_app() as opened:
        yield {_STATE: opened}


async def _run_lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """Opens the service from one message of the server to the next; errors are one line.

    Raises:
        InvalidSettings, InvalidWeightFile, GoldenMismatch, BackendUnavailable, DeviceError: see
            `open_app`; without the frames within the service, since servers log them.
        RuntimeError: the server has no lifespan state; nothing is opened.
    """
    phase = "startup"
    await receive()
    try:
        if "state" not in scope:
            raise RuntimeError(
                "service.asgi: the scope of the lifespan has no `state`, which hands the open "
                "service to each request; use a server with it, such as uvicorn"
            )
        async with lifespan() as state:
            scope["state"].update(state)
            await send({"type": "lifespan.startup.complete"})
            phase = "shutdown"
            await receive()
    except Exception as exc:
        await send({"type": f"lifespan.{phase}.failed", "message": str(exc) or repr(exc)})
        if isinstance(exc, (InvalidSettings, *STARTUP_ERRORS)):
            raise exc.with_traceback(None) from None
        raise
    await send({"type": "lifespan.shutdown.complete"})


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application.

    Raises:
        RuntimeError: the server has not run `lifespan`, or has no lifespan state.
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
