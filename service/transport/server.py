"""uvicorn, which runs the connections of the front door: set up, and stopped without a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from service.process.listener import cannot_listen
from service.transport.connection import Connection
from service.transport.door import FrontDoor

_log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""New connections in one turn of the event loop. libuv accepts one a turn from each descriptor that
it watches: under load the last of 512 waited 3 s, with so many duplicates of one 0.2 s."""

_QUEUED_S = 0.25
"""How long connections in the accept queue are accepted at a stop."""

_LOGGED_EVERY_S = 60.0
"""At most one line about refused connections."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the contexts close.

    Overrides two methods that uvicorn does not document; pyproject.toml bounds the version.
    `refused` is called for each connection beyond the limit of `door`.
    """

    def __init__(
        self,
        app: FastAPI,
        door: FrontDoor,
        stop_timeout_s: float,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=self._connect,  # type: ignore[arg-type]  # called as a class is
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # Never 0: Python 3.11's wait_for then gives up before it looks. An int only for
            # uvicorn's command line; it goes to asyncio.wait_for.
            timeout_graceful_shutdown=max(1e-3, stop_timeout_s),  # type: ignore[arg-type]
        )
        super().__init__(config)
        self._door = door
        self._refused = refused
        self._refusals = 0
        """Since the last line about them."""
        self._logged_s = -math.inf

    def _connect(self, *args: Any, **kwargs: Any) -> Connection:
        """A connection of `door`, which closes it if too many are open."""
        door = self._door
        if len(door.connections) >= door.max_connections:
            self._refused()
            self._refusals += 1
            now_s = asyncio.get_running_loop().time()
            if now_s - self._logged_s >= _LOGGED_EVERY_S:
                _log.warning(
                    "connections: %d refused, as %d are open, the limit: raise that of open files, "
                    "see lenet_connections_refused_total",
                    *(self._refusals, door.max_connections),
                )
                self._refusals, self._logged_s = 0, now_s
        return door(*args, **kwargs)

    def listen(self, listeners: Sequence[socket.socket]) -> list[socket.socket]:
        """Let clients connect; returns the sockets to `serve`. Raises: CannotListen."""
        host, port = listeners[0].getsockname()[:2]
        for listener in listeners:
            try:
                listener.listen(self.config.backlog)
            except OSError as exc:  # another process bound the port, too, and was faster
                raise cannot_listen(host, port, exc) from exc
        # Few where descriptors are few.
        at_once = min(ACCEPTED_AT_ONCE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 64)
        return [*listeners, *(one.dup() for one in listeners for _ in range(at_once - 1))]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept what the kernel has queued, which it would reset, then stop as uvicorn does."""
        late: list[socket.socket] = []
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # no descriptor is free
            queues = {listener.getsockname(): listener for listener in sockets or ()}.values()
            last = [stack.enter_context(listener.dup()) for listener in queues]
            await _accept_queued(last)
            for server in self.servers:
                server.close()
            for listener in sockets or ():
                listener.close()
            for listener in last:  # a queue lives as long as the last descriptor
                listener.setblocking(False)
                with contextlib.suppress(BlockingIOError):  # it is empty
                    while True:
                        late.append(listener.accept()[0])
                listener.close()
        loop = asyncio.get_running_loop()
        for connection in late:
            await loop.connect_accepted_socket(
                lambda: self._connect(self.config, self.server_state, self.lifespan.state),
                connection,
            )
        await super().shutdown(sockets)


async def _accept_queued(listeners: Sequence[socket.socket]) -> None:
    """Wait until the event loop has accepted the connections in the queues of `listeners`."""
    loop = asyncio.get_running_loop()
    waiting = select.poll()
    for listener in listeners:
        waiting.register(listener, select.POLLIN)
    deadline_s = loop.time() + _QUEUED_S
    while waiting.poll(0) and loop.time() < deadline_s:  # noqa: ASYNC110 - the kernel's queue
        await asyncio.sleep(0)
