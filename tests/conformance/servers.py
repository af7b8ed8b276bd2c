"""What serves the doors: our own server, uvicorn, and none.

Each is a context with what clients open (a port, or an application), a function that stops it, and
the task that ends when it has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from uvicorn import Config, Server

from service import server
from service.process.listener import allow_connections, listen


@contextlib.asynccontextmanager
async def own(service, settings):
    stop, listeners = asyncio.Event(), listen("127.0.0.1", 0)
    allow_connections(listeners)
    serving = server._answer(service, (listeners,), None, stop, settings, None, os.getpid(), None)
    async with _stopped(stop.set, serving) as task:
        yield listeners[0].getsockname()[1], stop.set, task


@contextlib.asynccontextmanager
async def uvicorn(service, settings):
    config = Config(service.asgi, lifespan="off", log_config=None, access_log=False)
    serving, listeners = Server(config), listen("127.0.0.1", 0)
    allow_connections(listeners)

    def stop():
        service.models.ready = False  # its lifespan does
        serving.should_exit = True

    async with _stopped(stop, serving.serve(sockets=[*listeners])) as task:
        yield listeners[0].getsockname()[1], stop, task


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
