"""HTTP/1.1 as uvicorn speaks it, to clients that do not.

uvicorn 0.54 with httptools waits for ever for a request that does not come or does not end, keeps
headers of any length, and logs a warning for each that is malformed, whose sender gets plain text.
Here headers have a time and a size, and what is malformed is answered in the service's JSON. It
refuses to watch over bodies and answers: those are the application's.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import InvalidInput
from service.http.app import error_response


class HttpProtocol(HttpToolsProtocol):
    """One connection; closed where the headers of a request take too long or too much.

    The time begins with the connection and, on one that is kept alive, with the next byte; between
    the two counts uvicorn's `timeout_keep_alive`. A request that comes whole sets no timer.
    """

    header_timeout_s = 10.0
    max_header_bytes = 64 * 1024

    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its time."""
        super().connection_made(transport)
        self._set_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._unset_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Uvicorn's, without its warnings: what a client sends is no event of the service."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("connection: got bytes that are no HTTP/1.1, expected a request")
            return
        except httptools.HttpParserUpgrade:
            pass  # answered as what it is without the upgrade
        cycle = self.cycle
        if cycle is None or self.scope is not cycle.scope:  # the headers of a request have begun
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                self.send_400_response(
                    f"headers: got more than {self.max_header_bytes} bytes, expected fewer"
                )
                return
        if self._header_timer is None and (cycle is None or cycle.response_complete):
            self._set_header_timer()

    def on_headers_complete(self) -> None:
        """From here on the application watches over the time."""
        self._unset_header_timer()
        self._header_bytes = 0
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer `msg` in the shape of every error, and close."""
        response = error_response(InvalidInput(msg))
        headers = (
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"connection", b"close"),
        )
        lines = [b"%s: %s\r\n" % header for header in headers]
        self.transport.write(b"".join((STATUS_LINE[400], *lines, b"\r\n", response.body)))
        self.transport.close()

    def _set_header_timer(self) -> None:
        # Not close: that would wait until the client has read all it was ever sent.
        self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _unset_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
