"""Receives the rest of a large body: from the socket to where the body belongs, without a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_READ_BYTES = 512 * 1024
"""The most in one read: others wait for it, 0.1 ms."""


def replace_protocol(transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
    """Have `protocol` receive what arrives at `transport` from now on."""
    if transport.is_closing():
        return
    reading = transport.is_reading()
    if reading:  # uvloop looks at the protocol's kind when it begins to read
        transport.pause_reading()
    transport.set_protocol(protocol)
    if reading:
        transport.resume_reading()


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of `connection` at its transport until `room` is full.

    `arrived` is called with the size of each piece. Everything else is passed on to the connection.
    """

    def __init__(
        self, connection: asyncio.Protocol, room: memoryview, arrived: Callable[[int], None]
    ) -> None:
        self._room, self._arrived = room, arrived
        # Looked up by the transport at any time.
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next bytes."""
        return self._room[:_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` bytes were written to the buffer."""
        self._room = self._room[nbytes:]
        self._arrived(nbytes)

    def release(self) -> None:
        """Forget the body. uvloop keeps this object until another takes its place."""
        self._room = memoryview(b"")
