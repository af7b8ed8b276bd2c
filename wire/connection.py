"""One connection: an asyncio protocol for HTTP/1.1 and HTTP/2.

What comes goes to `Http1Exchanges` or, behind the preface of HTTP/2, to `Http2Exchanges`. Here is
what both share: TLS, time, back-pressure, a stop and the end.

What ends a connection:

    TLS -------- a request in the clear -> 400, then lingering; anything else -> closed
    headers ---- too slow -> closed; malformed, too long -> 400, 431, 501, 505 or GOAWAY; lingering
    any -------- client gone -> requests cancelled; client does not read -> aborted
    answered --- "Connection: close", HTTP/1.0 -> lingering
    idle ------- keep-alive time over, or no answer to a PING -> closed
    old -------- HTTP/1.1: after the next answer; HTTP/2: as at a stop, but streams go on
    stop ------- HTTP/1.1: after the answers that are due; HTTP/2: GOAWAY for later, what comes
                 meanwhile is answered, GOAWAY for good; then lingering
    lingering -- our side is shut, what the client still sends is read and dropped, for a while:
                 closed with unread bytes in it, a socket resets, and the client loses the answer
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from socket import SO_ERROR, SOL_SOCKET
from typing import TYPE_CHECKING, cast

from wire.errors import ProtocolError, Refusal
from wire.http1_exchanges import Http1Exchanges
from wire.http2 import PREFACE
from wire.http2_exchanges import Http2Exchanges
from wire.receiver import BodyReceiver, replace_protocol
from wire.tls_transport import TlsTransport
from wire.turns import SMALL_BYTES

if TYPE_CHECKING:
    from wire.door import HttpService

_log = logging.getLogger(__name__)

_STOP_LINGER_S = 0.2
_STOP_S = 1.0
"""At a stop, the most that a client may take for headers, or to read its answers."""
_LARGE_READ_BYTES = 128 * 1024
"""After such a read others come first. libuv would read up to 32 times in a row, 8 MB, which takes
up to 7 ms (H200 machine, 2026-11-22)."""
_COUNTED_BYTES = 4096
"""Received bytes that are not used are counted from so many on."""


class Connection(asyncio.Protocol):
    """The asyncio protocol of one connection."""

    def __init__(self, service: HttpService, loop: asyncio.AbstractEventLoop) -> None:
        self.service, self.loop = service, loop
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        self.exchanges: Http1Exchanges | Http2Exchanges = None  # type: ignore[assignment]
        self._preface: bytes | None = b""  # of HTTP/2, as far as it has come; None: decided
        self._receiver: BodyReceiver | None = None  # in this one's place at the transport
        self.reading = True
        self._turn_planned = False
        self._waiting: list[bytes] = []  # what came when its turn was over
        self._arrived_bytes = 0  # likewise, of a large body
        self.ended = False  # the client sends no more
        self.closing = False  # nothing more is read but what lingers
        self.stopping = service.stopping
        self.is_old = False  # and so stopping, though the service is not
        self.since_s = loop.time()  # of being idle, or of the headers that arrive
        # Connections that began together do not end together.
        jitter = random.uniform(0.9, 1.1)  # noqa: S311 - no secret
        self._old_at_s = self.since_s + jitter * service.max_connection_age_s
        self.blocked_since_s = self._closed_since_s = 0.0
        self._lingering_until_s = 0.0
        self._lingered_bytes = 0
        self._unread_bytes = 0  # when the client's reading was last looked at
        self._unsent_bytes = 0  # of answers, held in the budget
        self._received_bytes = 0  # and not used, held in the budget
        self._written_bytes = 0  # since answers are held
        self._drained: asyncio.Event | None = None

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        service = self.service
        self.transport = cast("asyncio.Transport", transport)
        self.client = _address(self.transport, "peername")
        self.server = _address(self.transport, "sockname")
        self.exchanges = Http1Exchanges(self)
        if len(service.connections) >= service.max_connections:
            self.closing = True
            self.transport.abort()
            service.refused()
            return
        service.add(self)
        self.stopping = service.stopping
        if service.certificate is not None:
            context, steps = service.certificate.context, service.handshake_steps
            self.transport = TlsTransport(self, self.transport, context, steps)

    def secured(self) -> None:
        self.since_s = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.service.remove(self)
        self.closing = True
        self._waiting.clear()
        self.stop_receiving()
        self.exchanges.end()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._preface is not None and not (data := self._without_preface(data)):
            return
        if self.closing:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > self.exchanges.linger_bytes:
                self.transport.abort()
            return
        if self._turn_planned or not self.service.turns.has_time(len(data) <= SMALL_BYTES):
            self._waiting.append(data)
            self.turn()
            self.hold()
            return
        if len(data) > _LARGE_READ_BYTES:
            self.turn()
        self.exchanges.receive(data)

    def _without_preface(self, data: bytes) -> bytes:
        """Choose the HTTP version by the first bytes; returns the bytes for its parser."""
        begun = cast("bytes", self._preface) + data
        if len(begun) < len(PREFACE) and PREFACE.startswith(begun):
            self._preface = begun
            return b""
        self._preface = None
        if begun.startswith(PREFACE) and not self.closing:
            self.exchanges = Http2Exchanges(self)
            if self.stopping:
                self.exchanges.stop()
        return begun

    def eof_received(self) -> bool:
        self.ended = True
        return bool(self._waiting) or (not self.closing and self.exchanges.eof())

    def pause_writing(self) -> None:
        self.blocked_since_s = self.loop.time()
        self._drained = asyncio.Event()
        self.hold()
        self.set_reading()

    def resume_writing(self) -> None:
        self.blocked_since_s = 0.0
        self.hold()
        if self._drained is not None:
            self._drained.set()
            self._drained = None
        if not self.closing:
            for exchange in self.exchanges.open:
                exchange.sent()
            self.turn()
            self.set_reading()

    # Large bodies over HTTP/1.1.

    def receive_into(self, room: memoryview) -> None:
        """Write data that arrives from now on to `room`, and call `body_arrived` at its end."""
        self._receiver = BodyReceiver(self, room, self.body_arrived)
        replace_protocol(self.transport, self._receiver)

    def body_arrived(self, size: int) -> None:
        """The next `size` bytes are there."""
        if self._turn_planned or not self.service.turns.has_time():
            self._arrived_bytes += size
            self.turn()
            return
        if size > _LARGE_READ_BYTES:
            self.turn()
        self.exchanges.body_arrived(size)

    def stop_receiving(self) -> None:
        """End a `BodyReceiver`: nobody waits for its body any more, or it is complete."""
        if self._receiver is not None:
            self._receiver.release()
            self._receiver = None
            replace_protocol(self.transport, self)

    # Turns, see `turns`.

    def turn(self) -> None:
        """Serve what came in the next turn, and read no more until then."""
        if not self._turn_planned:
            self._turn_planned = True
            self.service.turns.add(self._turn)
            self.set_reading()

    @property
    def waits(self) -> bool:
        """Whether something came that waits for this connection's turn."""
        return bool(self._waiting or self._arrived_bytes)

    def _turn(self) -> bool:
        self._turn_planned = False
        data, size = b"".join(self._waiting), self._arrived_bytes
        self._waiting.clear()
        self._arrived_bytes = 0
        if not self.closing and self.is_there():
            try:
                if size:
                    self.exchanges.body_arrived(size)
                elif data:
                    self.exchanges.receive(data)
                elif self.may_parse:
                    self.exchanges.go_on()
                if data and self.ended and not self.closing and not self.exchanges.eof():
                    self.finish()
            except Exception:  # noqa: BLE001 - the transport's edge: the client gets no answer
                _log.exception("a connection failed")
                self.transport.abort()
        self.hold()
        self.set_reading()
        return False

    @property
    def may_parse(self) -> bool:
        """Whether requests may begin: the client reads the answers to those before."""
        return not (self.closing or self.blocked_since_s or self.transport.is_closing())

    def is_there(self) -> bool:
        """Whether the client has not reset the connection, which ends it here.

        Nothing else says so while reading pauses.
        """
        if self.transport.is_closing():
            return False
        if self.transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
            self.transport.abort()
            return False
        return True

    def set_reading(self) -> None:
        """Pause while the client does not read, or sends faster than it is served."""
        if self.closing:
            wanted = not self.exchanges.is_broken
        else:
            wanted = not self.blocked_since_s and self.exchanges.wants_data
        wanted = wanted and not self._turn_planned
        if wanted != self.reading and not self.transport.is_closing():
            self.reading = wanted
            if wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # Writing.

    def write(self, data: bytes) -> None:
        """Send `data`."""
        self.transport.write(data)
        if self._unsent_bytes:
            self._written_bytes += len(data)
            self.hold()

    def hold(self) -> None:
        """Hold in the budget what is answered and not sent, and what came and is not used."""
        unread = self.transport.get_write_buffer_size() if self.blocked_since_s else 0
        unsent = unread + self.exchanges.held_bytes
        received = self.exchanges.received_bytes + sum(map(len, self._waiting))
        if self.closing or received < _COUNTED_BYTES:
            received = 0
        if (unsent, received) == (self._unsent_bytes, self._received_bytes):
            return
        budget = self.service.budget
        unsent_before, received_before = self._unsent_bytes, self._received_bytes
        self._unsent_bytes, self._received_bytes = unsent, received
        budget.add(unsent - unsent_before + received - received_before)
        if unsent and not unsent_before:
            self._written_bytes = self.transport.get_write_buffer_size()
            budget.watch(self)
        elif unsent_before and not unsent:
            budget.unwatch(self)
        if received != received_before:
            budget.keep(self, received)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the client has read of its unread answers."""
        return self._written_bytes - self.transport.get_write_buffer_size()

    def evict(self) -> None:
        """Others need the memory of what came, or of answers that the client reads slowly."""
        self.closing = True
        self._waiting.clear()
        self.exchanges.end()
        self.blocked_since_s = 0.0
        self.hold()
        self.transport.abort()

    async def drained(self) -> None:
        """Wait until the client has read enough."""
        if self._drained is not None:
            await self._drained.wait()

    # The end.

    def refuse_clear(self, plain: asyncio.Transport) -> None:
        """Answer a request in the clear where TLS is expected, without reading it."""
        self.transport = plain
        assert isinstance(self.exchanges, Http1Exchanges), "bug: HTTP/2 before TLS"
        message = "scheme: got a request in the clear, expected TLS; use https://"
        self.exchanges.refuse(ProtocolError(400, message))

    def finish(self) -> None:
        """Shut our side, and linger: closed with unread bytes, a socket resets the answers."""
        if self.closing:
            return
        self.closing = True
        self._waiting.clear()
        self.stop_receiving()
        exchanges, transport = self.exchanges, self.transport
        exchanges.end()
        self.hold()
        if transport.is_closing():
            return
        if exchanges.is_broken:  # nothing after it can be parsed
            transport.write_eof()
            self.set_reading()
            self.loop.call_later(exchanges.linger_s, transport.abort)
        elif self.ended:
            transport.close()
        else:
            stopping = self.service.stopping
            linger_s = min(exchanges.linger_s, _STOP_LINGER_S if stopping else math.inf)
            self._lingering_until_s = self.loop.time() + linger_s
            self.set_reading()
            transport.write_eof()

    def shutdown(self) -> None:
        """The server stops: answer what has begun, and close."""
        if (self.is_old or not self.stopping) and not self.closing:
            self.is_old, self.stopping = False, True
            self.exchanges.stop()

    def retire(self) -> None:
        """The connection is old: answer what has begun and what its client still sends."""
        self._old_at_s = math.inf
        if not (self.stopping or self.closing):
            self.is_old = self.stopping = True
            self.exchanges.retire()

    def give_up(self, error: Refusal) -> None:
        """The stop takes too long."""
        for exchange in self.exchanges.open:
            exchange.fail(error)

    def check_time(self, now_s: float) -> None:
        """Close the connection, or end a request, if it waited too long for its client."""
        service, transport = self.service, self.transport
        unread_bytes, before = self.transport.get_write_buffer_size(), self._unread_bytes
        self._unread_bytes = unread_bytes
        if now_s >= self._old_at_s:
            self.retire()
        most_s = _STOP_S if service.stopping else math.inf
        write_s, header_s = (
            min(service.write_timeout_s, most_s),
            min(service.header_timeout_s, most_s),
        )
        if self._unsent_bytes or self._received_bytes or self.blocked_since_s:
            self.hold()
        if transport.is_closing():  # once all is written, which a client may prevent
            self._closed_since_s = self._closed_since_s or now_s
            if unread_bytes < before:
                self._closed_since_s = now_s
            if now_s - self._closed_since_s > write_s:
                transport.abort()
        elif self.blocked_since_s:
            if unread_bytes < before:
                self.blocked_since_s = now_s
            if now_s - self.blocked_since_s > write_s:
                transport.abort()
        elif self.closing:
            if unread_bytes < before:
                self._lingering_until_s = max(self._lingering_until_s, now_s + _STOP_LINGER_S)
            if self._lingering_until_s and now_s > self._lingering_until_s:
                transport.abort()
        elif not self.waits:
            self.exchanges.check_time(now_s, header_s, write_s)


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(name)
    return (str(address[0]), int(address[1])) if isinstance(address, (tuple, list)) else None
