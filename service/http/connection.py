"""An HTTP/1.1 connection: uvicorn's, with limits on headers and errors in the service's JSON.

uvicorn 0.54 with httptools waits for ever for headers that do not come or do not end, accepts
headers of any size, and answers a malformed request in plain text, with a warning in the log.
Bodies and answers are limited by the application.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import InvalidInput
from service.http.app import error_response


class HttpProtocol(HttpToolsProtocol):
    """One connection; closed when the headers of a request take too long or are too large.

    The time starts with the connection and, when it is kept alive, with the next byte; between
    requests uvicorn's `timeout_keep_alive` applies. A request that arrives whole sets no timer.
    """

    header_timeout_s = 10.0
    max_header_bytes = 64 * 1024

    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _in_headers = True
    _message_ended = False  # in the latest data
    _unanswered = 0  # requests whose body has arrived
    _rejection: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request's headers."""
        super().connection_made(transport)
        self._set_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._unset_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data`; as in uvicorn, without its warnings about clients' errors."""
        if self._rejection is not None:
            return
        self._unset_keepalive_if_required()
        self._message_ended = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._reject("malformed HTTP request; expected HTTP/1.1 without TLS")
            return
        except httptools.HttpParserUpgrade:
            pass  # answered like any other request
        # Data that ends another message is not counted: how much of it are headers is not known.
        if self._in_headers and not self._message_ended:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                self._reject(f"headers: got more than {self.max_header_bytes} bytes")
                return
        waiting = self.cycle is None or self.cycle.response_complete
        if self._header_timer is None and waiting:
            self._set_header_timer()

    def on_headers_complete(self) -> None:
        """Stop the timer; from here on the application applies the deadline."""
        self._unset_header_timer()
        self._header_bytes = 0
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        self._unanswered += 1
        self._in_headers = self._message_ended = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or reject what followed the last one."""
        self._unanswered -= 1
        if self._rejection is not None and self._unanswered <= 0:
            self._write_rejection(self._rejection)
        else:
            super().on_response_complete()

    def _reject(self, message: str) -> None:
        """Answer 400 and close, after the answers to the requests before."""
        self._unset_header_timer()
        self._rejection = message
        if self._unanswered <= 0:
            self._write_rejection(message)

    def _write_rejection(self, message: str) -> None:
        response = error_response(InvalidInput(message))
        headers = (
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"connection", b"close"),
        )
        lines = [b"%s: %s\r\n" % header for header in headers]
        head = b"HTTP/1.1 400 Bad Request\r\n"
        self.transport.write(b"".join((head, *lines, b"\r\n", response.body)))
        self.transport.close()

    def _set_header_timer(self) -> None:
        # abort, because close waits until the client has read all that was sent.
        self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _unset_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
