"""uvicorn, which runs the connections of the front door: set up, and stopped without a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from service.process.sharing import take, take_all
from service.transport.door import HttpService

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""When to look for connections again after no descriptor was free."""

_HANDED_OVER_S = 0.25
"""At a stop, how long the supervisor may take to hand over its last connections."""

_LOGGED_EVERY_S = 60.0
"""At most one line about refused connections."""


class HttpServer(uvicorn.Server):
    """uvicorn, without its listeners and without its signal handlers.

    Connections are accepted here, since uvicorn cannot be given one that a supervisor accepted, and
    libuv accepts one in each turn of the event loop: of 512 under load, the last waited 3 s. The
    signal handlers would end the process before the contexts close. Overrides three methods, two of
    which uvicorn does not document; pyproject.toml bounds the version.

    Args:
        refused: called for each connection beyond the limit of `door`.
        closed: called with the number of connections that have ended, whenever it grows.
    """

    def __init__(
        self,
        app: FastAPI,
        door: HttpService,
        stop_timeout_s: float,
        refused: Callable[[], None] = lambda: None,
        closed: Callable[[int], None] = lambda _: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=asyncio.Protocol,  # not used
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
        self._closed = closed
        self._sources: set[socket.socket] = set()
        self._exhausted = asyncio.Event()  # no source is left
        self._taken = 0
        self._opening: set[asyncio.Task[object]] = set()
        self._refusals = 0
        """Since the last line about them."""
        self._logged_s = -math.inf
        door.removed, door.refused = self._count, self._refuse

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve the connections of listeners, or those that a supervisor hands over.

        Args:
            sockets: each non-blocking, for `take`. They are closed at the end.
        """
        self._sources.update(sockets or ())
        for source in self._sources:
            self._watch(source)  # called when the event loop turns, which is after the set-up
        await super().serve([])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait, which the kernel would reset, then stop as uvicorn does.

        The supervisor closes its end after the last one.
        """
        for source in tuple(self._sources):
            if source.family != socket.AF_UNIX:
                self._forget(source)
                for connection in take_all(source):
                    self._open(connection)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HANDED_OVER_S):
                await self._exhausted.wait()
        for source in tuple(self._sources):
            self._forget(source)
            source.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await super().shutdown(sockets)

    def _watch(self, source: socket.socket) -> None:
        if source in self._sources:
            asyncio.get_running_loop().add_reader(source, self._take, source)

    def _forget(self, source: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(source)
        self._sources.discard(source)
        if not self._sources:
            self._exhausted.set()

    def _take(self, source: socket.socket) -> None:
        try:
            for connection in take(source):
                self._open(connection)
        except EOFError:
            self._forget(source)
            source.close()
        except OSError:
            loop = asyncio.get_running_loop()
            loop.remove_reader(source)
            loop.call_later(_RETRY_S, self._watch, source)

    def _open(self, connection: socket.socket) -> None:
        self._taken += 1
        loop = asyncio.get_running_loop()
        opening = loop.create_task(
            loop.connect_accepted_socket(
                lambda: self._door(self.config, self.server_state, self.lifespan.state), connection
            )
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        self._count()

    def _count(self) -> None:
        self._closed(self._taken - len(self._opening) - len(self._door.connections))

    def _refuse(self) -> None:
        self._refused()
        self._refusals += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOGGED_EVERY_S:
            _log.warning(
                "connections: %d refused, as %d are open, the limit: raise that of open files, "
                "see lenet_connections_refused_total",
                *(self._refusals, self._door.max_connections),
            )
            self._refusals, self._logged_s = 0, now_s
