"""What our own server does before it calls the application, for any other ASGI server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.endpoints import fields, path_of, response
from service.transport.access_log import AccessLog
from service.transport.answer import refusal
from service.transport.gate import Gate
from service.transport.head import MAX_FIELDS, MAX_TARGET_BYTES, RequestHead
from service.transport.ids import Ids
from service.transport.listener import at


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
        self.answer = refusal(status, "invalid_input", message)


class Middleware:
    """Keys, CORS, request ids, the limits of a head, HEAD and the access log, around `app`."""

    def __init__(self, app: ASGIApp, gate: Gate, access: AccessLog | None) -> None:
        self._app, self._gate, self._access = app, gate, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have `app` answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        head = _Head(scope, self._gate)
        extra = fields(head.extra)
        is_head = scope["method"] == "HEAD"
        status, size = 0, 0

        async def send_with_extra(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            elif not is_head:
                size += len(message.get("body", b""))
            await send(message)

        if is_head:  # its answer is that to GET; servers leave the body out
            scope = {**scope, "method": "GET"}
        app = self._app if head.answer is None else response(head.answer)
        path = scope.get("raw_path") or scope["path"].encode()  # a mount changes the scope
        target = path + b"?" * bool(head.query) + head.query
        try:
            await app(scope, receive, send_with_extra)
        finally:
            if self._access is not None and status:
                client = at(*scope["client"]) if scope.get("client") else "-"
                request = (head.method + b" " + target).decode("latin-1")
                seconds = time.perf_counter() - began_s
                scheme = scope.get("scheme", "http")
                self._access.add(scheme, client, request, status, size, seconds, head.ids)
