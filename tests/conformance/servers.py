"""What serves the doors: our own server, uvicorn, and none.

Each is a context with what clients open (a port, or an application), a function that stops it, and
the task that ends when it has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib

from service import server
from wire.listener import allow_connections, listen


@contextlib.asynccontextmanager
async def own(service, settings):
    stop, listeners = asyncio.Event(), listen("127.0.0.1", 0)
    allow_connections(listeners)
    serving = server._answer(service, (listeners,), stop, settings)
    async with _stopped(stop.set, serving) as task:
        yield listeners[0].getsockname()[1], stop.set, task


def uvicorn(service, settings):
    return own(service, settings.model_copy(update={"http_server": "uvicorn", "grpc_port": "off"}))


@contextlib.asynccontextmanager
async def none(service, settings):
    yield service.asgi, None, None


@contextlib.asynccontextmanager
async def _stopped(stop, serving):
    """The task `serving`, stopped at the end."""
    task = asyncio.create_task(serving)
    try:
        yield task
    finally:
        stop()
        await task
