"""What our own server does before it calls the application, for any other ASGI server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.endpoints import DRAINED, fields, path_of, response
from service.errors import invalid, stopped
from wire.access_log import AccessLog
from wire.answer import FAILURES, error_answer, log_failure
from wire.errors import ProtocolError
from wire.gate import Gate
from wire.head import MAX_FIELDS, MAX_TARGET_BYTES, RequestHead
from wire.ids import Ids
from wire.listener import at

_MAX_EMPTY_PIECES = 1000
"""Maximum number of empty pieces before the end of a body: 1 ms without a turn for others."""


class _Head(RequestHead):
    """The headers of a request that another server has parsed."""

    def __init__(self, scope: Mapping[str, Any], gate: Gate) -> None:
        self.method = scope["method"].encode("latin-1")
        headers = scope["headers"]
        self.headers = headers[:MAX_FIELDS]
        self.path, self.query = path_of(scope).encode(), scope["query_string"]
        named: dict[str, str] = {}
        for name, value in self.headers:
            named.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        self.ids = Ids.read(named)
        self.extra = self.ids.line + gate.cors_lines(named)
        path = scope.get("raw_path") or self.path
        target_bytes = len(path) + bool(self.query) + len(self.query)
        if len(headers) > MAX_FIELDS:
            self._refuse(431, f"headers: got {len(headers)} fields, expected at most {MAX_FIELDS}")
        elif target_bytes > MAX_TARGET_BYTES:
            self._refuse(
                414, f"target: got {target_bytes} bytes, expected at most {MAX_TARGET_BYTES}"
            )
        elif "content-length" in named and "transfer-encoding" in named:
            self._refuse(400, "malformed HTTP request; expected HTTP/1.1")
        elif repeated := self.repeated(gate):
            self._refuse(400, repeated)
        else:
            self.ask(named, {}, gate)

    def _refuse(self, status: int, message: str) -> None:
        self.answer = error_answer(ProtocolError(status, message))


class _Exchange:
    """One request between the server and the application, and what was sent of its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, gate: Gate, access: AccessLog | None
    ) -> None:
        self._began_s = time.perf_counter()
        self._scope, self._receive, self._send, self._access = scope, receive, send, access
        self.head = head = _Head(scope, gate)
        path = scope.get("raw_path") or quote(scope["path"]).encode()
        target = path + b"?" * bool(head.query) + head.query
        self._request = (head.method + b" " + target).decode("latin-1")
        self._extra = fields(head.extra)
        self._is_whole = self._is_logged = False
        self._empty_pieces = self._sent_bytes = 0
        self.status = 0
        """That of the answer, once its beginning is sent."""

    async def receive(self) -> Message:
        """The next piece of the body; after the last, the client's leaving.

        A middleware may repeat the body for ever.

        Raises:
            InvalidInput: the body has too many empty pieces.
        """
        message = await self._receive()
        if message["type"] == "http.request":
            if self._is_whole:
                await asyncio.Event().wait()  # until the answer is sent
            self._is_whole = not message.get("more_body", False)
            self._empty_pieces += not (self._is_whole or message.get("body"))
            if (count := self._empty_pieces) > _MAX_EMPTY_PIECES:
                raise invalid("body", f"{count} empty pieces", f"at most {_MAX_EMPTY_PIECES}")
        return message

    async def send(self, message: Message) -> None:
        """Send the next part of the answer."""
        if message["type"] == "http.response.start":
            self.status = status = message["status"]
            if status in FAILURES and self.head.ids:
                log_failure(self._request, status, self.head.ids)
            message = {**message, "headers": [*message.get("headers", ()), *self._extra]}
        else:
            if self.head.method != b"HEAD":
                self._sent_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                self.log()  # before the client has the answer and can ask again
        await self._send(message)

    def log(self) -> None:
        """Add the answer to the access log, if there is one and if this is the first call."""
        if self._access is None or self._is_logged or not self.status:
            return
        self._is_logged = True
        scope, seconds = self._scope, time.perf_counter() - self._began_s
        client = at(*scope["client"]) if scope.get("client") else "-"
        answer = self.status, self._sent_bytes, seconds, self.head.ids
        self._access.add(scope.get("scheme", "http"), client, self._request, *answer)


class Middleware:
    """What surrounds `app`: keys, CORS, ids, limits of a head, HEAD, the access log and a drain."""

    def __init__(self, app: ASGIApp, gate: Gate, access: AccessLog | None) -> None:
        self._app, self._gate, self._access = app, gate, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have `app` answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._gate, self._access)
        head = exchange.head
        # A mount changes the scope. The answer to HEAD is that to GET; servers leave the body out.
        inner = {**scope, "method": "GET" if head.method == b"HEAD" else scope["method"]}
        app = self._app if head.answer is None else response(head.answer)
        try:
            await app(inner, exchange.receive, exchange.send)
        except asyncio.CancelledError as exc:
            if exchange.status or exc.args != (DRAINED,):  # by an application around this one
                raise
            answer = response(self._gate.policy.answer(head.path, stopped()))
            await answer(inner, exchange.receive, exchange.send)
        finally:
            exchange.log()  # an answer that was broken off
