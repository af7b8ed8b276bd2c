"""Accepts connections, or takes those that a supervisor hands over, and stops without a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterable

from wire.door import HttpService
from wire.errors import STOPPED, Unavailable
from wire.sharing import take, take_all

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""When to look for connections again after no descriptor was free."""

_HANDED_OVER_S = 0.25
"""At a stop, how long the supervisor may take to hand over its last connections."""

_LOGGED_EVERY_S = 60.0
"""At most one line about refused connections."""


class HttpServer:
    """Serves the connections of listeners, or those that a supervisor hands over.

    libuv accepts one connection in each turn of the event loop: of 512 under load, the last waited
    3 s. So they are taken here, several in a turn.

    Args:
        stop_timeout_s: at a stop, how long the connections may take to end.
        refused: called for each connection beyond the limit of `door`.
        closed: called with the number of connections that have ended, whenever it grows.
    """

    def __init__(
        self,
        door: HttpService,
        stop_timeout_s: float,
        refused: Callable[[], None] = lambda: None,
        closed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._door = door
        self._stop_timeout_s = stop_timeout_s
        self._refused = refused
        self._closed = closed
        self._stop = asyncio.Event()
        self._sources: set[socket.socket] = set()
        self._exhausted = asyncio.Event()  # no source is left
        self._taken = 0
        self._opening: set[asyncio.Task[object]] = set()
        self._ended = asyncio.Event()  # a connection has, since it was last cleared
        self._refusals = 0
        """Since the last line about them."""
        self._logged_s = -math.inf
        door.removed, door.refused = self._count, self._refuse

    async def serve(self, sockets: Iterable[socket.socket]) -> None:
        """Serve until `stop` is called and every connection has ended.

        Args:
            sockets: each non-blocking, for `take`. They are closed at the end.
        """
        self._sources.update(sockets)
        for source in self._sources:
            self._watch(source)
        await self._stop.wait()
        await self._shut_down()

    def stop(self) -> None:
        """End `serve`: take no more connections, and answer what has begun."""
        self._door.stop()
        self._stop.set()

    async def _shut_down(self) -> None:
        """Take the connections that wait, which the kernel would reset, then end all.

        The supervisor closes its end after the last one.
        """
        for source in tuple(self._sources):
            if source.family != socket.AF_UNIX:
                self._forget(source)
                for connection in take_all(source):
                    self._open(connection)
        if self._sources:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HANDED_OVER_S):
                    await self._exhausted.wait()
        for source in tuple(self._sources):
            self._forget(source)
            source.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        door = self._door
        for open_connection in tuple(door.connections):
            open_connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_timeout_s):
                while door.connections:
                    self._ended.clear()
                    await self._ended.wait()
                if door.tasks:
                    await asyncio.wait(door.tasks)
        if door.tasks:
            _log.error("stop: %d requests of the application did not end in time", len(door.tasks))
        for open_connection in tuple(door.connections):
            open_connection.give_up(Unavailable(STOPPED, retry_after_s=1))
        for task in door.tasks:
            task.cancel()

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
            loop.connect_accepted_socket(lambda: self._door(loop), connection)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        self._count()

    def _count(self) -> None:
        self._ended.set()
        self._closed(self._taken - len(self._opening) - len(self._door.connections))

    def _refuse(self) -> None:
        self._refused()
        self._refusals += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= _LOGGED_EVERY_S:
            _log.warning(
                "connections: %d refused, as %d are open, the limit: raise that of open files",
                *(self._refusals, self._door.max_connections),
            )
            self._refusals, self._logged_s = 0, now_s
