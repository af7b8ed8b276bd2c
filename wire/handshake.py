"""The TLS handshake of a connection that is accepted already.

A server that is made with a TLS context makes its protocol only after the handshake: clients that
connect and then keep silent would escape the limits of connections and of time. And a request in
the clear could not be answered, so that its client would see a connection that closes for no
reason.

Each step of a handshake computes, the one that signs for 1 ms. The event loop takes one step in an
iteration, of whichever client, so that many handshakes at a time do not keep it from other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ssl import SSLContext
from typing import cast

from wire.receiver import replace_protocol
from wire.turns import SingleSteps

_UNLIMITED = 1 << 30
"""Bytes; `Connection` pauses writing by what its client has not taken."""

_HANDSHAKE = b"\x16"
_RECORD_HEAD_BYTES = 5
"""Type, version and length of a record: RFC 8446, 5.1."""

_EARLY_BYTES = 20 * 1024
"""Maximum bytes of a client before its handshake begins: its first record has 16 KiB at most, and
it waits for an answer to it."""

_SHUTDOWN_S = 3600.0
"""`Connection.check_time` ends it, when the client reads no more."""


class Handshake(asyncio.Protocol):
    """The transport's protocol during the TLS handshake.

    After it, `connection` is the protocol of the encrypted transport, or is lost.

    Args:
        connection: whose transport is `plain`.
        steps: of handshakes, this one's among them.
    """

    def __init__(
        self, connection: asyncio.Protocol, plain: asyncio.Transport, steps: SingleSteps
    ) -> None:
        self._connection, self._plain, self._all_steps = connection, plain, steps
        self._loop = asyncio.get_running_loop()
        self._early: list[bytes] = []
        self._ended = self._lost = False
        self._tls: asyncio.BufferedProtocol | None = None
        """uvloop's, in this one's place at the transport."""
        self._begun = asyncio.Event()  # to send, or gone
        # uvloop begins to read when `connection_made` returns, even if it paused the transport.
        plain.set_protocol(self)

    async def run(
        self,
        tls: SSLContext,
        timeout_s: float,
        secured_by: Callable[[asyncio.Transport], None],
        refuse_clear: Callable[[], None],
    ) -> None:
        """Do it, within `timeout_s` of its first byte; for that one `check_time` waits.

        `secured_by` gets the encrypted transport. `refuse_clear` is called instead where a request
        in the clear came.
        """
        connection, loop, plain = self._connection, self._loop, self._plain
        await self._begun.wait()
        if plain.is_closing():
            return
        if self._ended:  # before the handshake
            plain.abort()
            return
        if self._early[0][:1].isupper():  # a method; TLS begins with a byte below 32
            plain.set_protocol(connection)
            refuse_clear()
            return
        turn = asyncio.Event()
        self._all_steps.add(turn.set)
        await turn.wait()
        if plain.is_closing():
            return
        # `_hand_on` runs after `start_tls` has paused reading, and before TLS begins. Were
        # `start_tls` a task, a reset could come before it, which uvloop logs with a traceback.
        loop.call_soon(self._hand_on)
        secured: asyncio.Transport | None = None
        with suppress(OSError):  # another protocol, no right certificate, too late, gone
            secured = await loop.start_tls(
                plain,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        if secured is None or secured.is_closing():
            plain.abort()
            connection.connection_lost(None)
            return
        assert self._tls is not None, "bug: a handshake without TLS"
        replace_protocol(plain, self._tls)
        secured.set_write_buffer_limits(_UNLIMITED)
        secured_by(secured)
        secured.set_protocol(connection)
        for data in self._early:
            connection.data_received(data)
        if self._ended and not connection.eof_received():
            secured.close()

    def data_received(self, data: bytes) -> None:
        """Keep bytes that arrive before TLS has taken over the transport."""
        self._early.append(data)
        early = b"".join(self._early)
        is_tls = early[:1] == _HANDSHAKE
        if is_tls and len(early) > _EARLY_BYTES:
            self._plain.abort()
            return
        size = _RECORD_HEAD_BYTES + int.from_bytes(early[3:_RECORD_HEAD_BYTES], "big")
        if not is_tls or len(early) >= max(size, _RECORD_HEAD_BYTES):
            self._begun.set()

    def eof_received(self) -> bool:
        """The client has closed its side. Over TLS the whole connection closes then."""
        self._ended = True
        self._begun.set()
        return self._tls is None

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._lost = True
        self._begun.set()
        self._connection.connection_lost(exc)
        self._end_tls()

    def _end_tls(self) -> None:
        """End a handshake that uvloop began after the client had left.

        It would keep 55 KB until the handshake's time is over.
        """
        if self._lost and self._tls is not None:
            self._tls.connection_lost(None)
            self._tls = None

    def _hand_on(self) -> None:
        """Give the early bytes to the protocol by which `start_tls` has replaced this one."""
        found = self._plain.get_protocol()
        if found is self:
            return  # it failed
        self._tls = protocol = cast("asyncio.BufferedProtocol", found)
        self._loop.call_soon(self._end_tls)  # begun by then
        rest = memoryview(b"".join(self._early))
        self._early.clear()
        while rest:
            buffer = memoryview(protocol.get_buffer(len(rest)))
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            protocol.buffer_updated(size)
            rest = rest[size:]
        self._plain.set_protocol(_Steps(self._plain, protocol, self._all_steps))


class _Steps(asyncio.BufferedProtocol):
    """Takes the place of `tls` at the transport, and hands on what arrives as one of `steps`.

    Until then it is in the buffer of `tls`, and reading pauses.
    """

    def __init__(
        self, transport: asyncio.Transport, tls: asyncio.BufferedProtocol, steps: SingleSteps
    ) -> None:
        self._transport, self._tls, self._steps = transport, tls, steps
        # Looked up by the transport at any time.
        self.get_buffer = tls.get_buffer  # type: ignore[method-assign]
        self.connection_lost = tls.connection_lost  # type: ignore[method-assign]
        self.eof_received = tls.eof_received  # type: ignore[method-assign]
        self.pause_writing = tls.pause_writing  # type: ignore[method-assign]
        self.resume_writing = tls.resume_writing  # type: ignore[method-assign]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` bytes were written to the buffer."""
        self._transport.pause_reading()
        self._steps.add(partial(self._hand_on, nbytes))

    def _hand_on(self, nbytes: int) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._tls.buffer_updated(nbytes)
