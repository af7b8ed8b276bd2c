"""TLS on a connection that is accepted already, by the ssl module's objects in memory.

A server that is made with a TLS context makes its protocol only after the handshake: clients that
connect and then keep silent would escape the limits of connections and of time. And a request in
the clear could not be answered, so that its client would see a connection that closes for no
reason.

Each step of a handshake computes, the one that signs for 1 ms. The event loop takes one step in an
iteration, of whichever client, so that many handshakes at a time do not keep it from other work.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from wire.turns import SingleSteps

if TYPE_CHECKING:
    from wire.connection import Connection

_AT_ONCE_BYTES = 256 * 1024
"""Bytes that are encrypted before they are written: the buffer of encrypted ones never shrinks."""


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The transport of `connection`, and the protocol of `plain`.

    Args:
        steps: of handshakes, this one's among them.
    """

    def __init__(
        self,
        connection: Connection,
        plain: asyncio.Transport,
        context: ssl.SSLContext,
        steps: SingleSteps,
    ) -> None:
        super().__init__()
        self._connection, self._plain, self._steps = connection, plain, steps
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._begun = self._complete = False
        """The handshake."""
        self._step_planned = False
        self._wants_data = True
        self._at_end = self._ended = self._closed = False
        """The client's side, whether the connection has heard of that, and ours."""
        # Looked up by the plain transport at any time.
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]
        plain.set_protocol(self)

    # Called by the plain transport.

    def data_received(self, data: bytes) -> None:
        """Decrypt it, or take the next step of the handshake when its turn comes."""
        if self._closed:
            self._connection.data_received(data)  # which drops it
            return
        if not self._begun:
            self._begun = True
            if data[:1].isupper():  # a method; TLS begins with a byte below 32
                self._plain.set_protocol(self._connection)
                self._connection.refuse_clear(self._plain)
                return
        if self._at_end:
            return  # RFC 8446, 6.1: what follows the end is ignored
        self._incoming.write(data)
        if self._complete:
            self._read()
        elif not self._step_planned:
            self._step_planned = True
            self._plain.pause_reading()
            self._steps.add(self._step)

    def eof_received(self) -> bool:
        if not self._complete or self._closed:
            return False
        self._end()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._connection.connection_lost(exc)
        del self._tls, self._incoming, self._outgoing  # 50 KB, in a cycle

    # The handshake.

    def _step(self) -> None:
        self._step_planned = False
        if self._plain.is_closing():
            return
        try:
            self._tls.do_handshake()
            self._complete = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLError, ssl.CertificateError):  # another protocol, no right certificate
            self._flush()
            self._plain.close()
            return
        self._flush()
        if self._complete:
            self._connection.secured()
            self._read()
        if self._wants_data and not self._plain.is_closing():
            self._plain.resume_reading()

    # Data.

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._plain.write(self._outgoing.read())

    def _read(self) -> None:
        """Hand on all that can be decrypted."""
        tls, incoming, ended = self._tls, self._incoming, False
        pieces = []
        try:
            while not ended and (incoming.pending or tls.pending()):
                pieces.append(tls.read(_AT_ONCE_BYTES))
                ended = not pieces[-1]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._plain.abort()
            return
        self._flush()
        if data := b"".join(pieces):
            self._connection.data_received(data)
        if ended:
            self._end()

    def _end(self) -> None:
        """The client has sent all; a connection that has not read all hears of it when it has."""
        self._at_end = True
        if self._wants_data and not (self._ended or self._closed):
            self._ended = True
            if not self._connection.eof_received():
                self.close()

    def _close(self) -> None:
        """Tell the client that nothing follows."""
        if self._complete and not self._closed:
            with suppress(ssl.SSLError):  # it has not said so, too
                self._tls.unwrap()
            self._flush()
        self._closed = True

    # Called by the connection.

    def write(self, data: Any) -> None:
        if self._closed or self._plain.is_closing():
            return
        if len(data) > _AT_ONCE_BYTES:
            view = memoryview(data)
            for start in range(0, len(data), _AT_ONCE_BYTES):
                self.write(view[start : start + _AT_ONCE_BYTES])
        else:
            self._tls.write(data)
            self._plain.write(self._outgoing.read())

    def write_eof(self) -> None:
        """Shut our side of TLS. Clients lose data where the connection is shut before them."""
        self._close()

    def close(self) -> None:
        if not self._plain.is_closing():
            self._close()
            self._plain.close()

    def abort(self) -> None:
        self._plain.abort()

    def is_closing(self) -> bool:
        return self._plain.is_closing()

    def pause_reading(self) -> None:
        self._wants_data = False
        if not self._step_planned:
            self._plain.pause_reading()

    def resume_reading(self) -> None:
        self._wants_data = True
        if self._at_end and not self._ended:
            self._connection.loop.call_soon(self._end)
        if not self._step_planned:
            self._plain.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._plain.get_extra_info(name, default)
