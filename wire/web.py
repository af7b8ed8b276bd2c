"""gRPC-Web and unary Connect: methods of gRPC for browsers, over either version of HTTP.

    application/grpc-web, +proto    frames as in gRPC; the last, flagged 0x80, holds the trailers
    application/proto               Connect: a message alone; an error is JSON and a status of HTTP

A call has one request. Keys, deadlines, limits and statuses are those of gRPC; CORS that of HTTP.
Compressed requests are refused, and base64 (application/grpc-web-text), which the client
`grpc-web` needs only where a server streams.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md,
https://connectrpc.com/docs/protocol
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from wire.answer import JSON, Answer, error_answer
from wire.budget import Budget
from wire.errors import InvalidInput, ProtocolError, Refusal, StatusCode, shown
from wire.gate import Gate
from wire.grpc import PREFIX_BYTES, Call, Method, framed
from wire.grpc_status import OK, Status
from wire.head import FastCall

_CONNECT = "application/proto"
_KINDS = ("application/grpc-web", "application/grpc-web+proto", _CONNECT)

_STATUS = dict(
    zip(StatusCode, (200, 499, 400, 504, 404, 403, 429, 501, 500, 503, 401), strict=True)
)
"""Connect's statuses of HTTP."""


class _Refused(Refusal):
    """A call of a content type that fails at its headers."""

    def __init__(self, kind: str, error: Refusal) -> None:
        super().__init__(error.message)
        self.kind, self.error = kind, error


class WebRoute:
    """The route of a method of gRPC; see `FastRoute`."""

    def __init__(self, method: Method, gate: Gate, budget: Budget) -> None:
        self.method, self.gate, self.budget = method, gate, budget

    def read(
        self, _query: bytes, headers: Mapping[str, str], _path: Mapping[str, str] | None = None
    ) -> tuple[str, int | None, Any]:
        """Content type of a call, length of its body if known, and what the method read.

        Raises: Refusal.
        """
        given = headers.get("content-type", "")
        kind = given.partition(";")[0].strip().lower()
        if kind not in _KINDS:
            expected = ", ".join(_KINDS)
            raise ProtocolError(415, f"content-type: got {shown(given)}, expected {expected}")
        length = headers.get("content-length")
        try:
            options = self._options(kind, headers)
        except Refusal as exc:
            raise _Refused(kind, exc) from None
        return kind, None if length is None else int(length), options

    def _options(self, kind: str, headers: Mapping[str, str]) -> Any:
        if not self.method.is_open and (error := self.gate.key_error(headers)) is not None:
            raise error
        if self.method.is_endless:
            raise _unimplemented("method: got an endless stream, expected another; call it by gRPC")
        coding = "content-encoding" if kind == _CONNECT else "grpc-encoding"
        if (found := headers.get(coding, "identity")) != "identity":
            raise _unimplemented(f"{coding}: got {shown(found)}, expected identity", coding)
        if (text := headers.get("connect-timeout-ms")) is not None and kind == _CONNECT:
            if not (text.isascii() and text.isdecimal() and len(text) <= 10):
                message = f"connect-timeout-ms: got {shown(text)}, expected up to 10 digits"
                raise InvalidInput(message, field="connect-timeout-ms")
            timeout = f"{text}m" if len(text) <= 8 else f"{text[:-3]}S"
            headers = {**headers, "grpc-timeout": timeout}
        return self.method.read(headers)

    def refuse(self, error: Refusal) -> Answer:
        """The answer to a call that `read` rejected."""
        if not isinstance(error, _Refused):
            return error_answer(error)
        self.method.refused(error.error)
        return _answer(error.kind, self.gate.policy.status(error.error), b"")

    def open(self, wanted: Any, reply: Callable[[Answer], None]) -> FastCall:
        """Begin a call."""
        return _WebCall(self, wanted, reply)


class _WebCall:
    """One call: takes the message out of a request, as a `FastCall`, and answers."""

    def __init__(self, route: WebRoute, wanted: Any, reply: Callable[[Answer], None]) -> None:
        self._kind, self._length, options = wanted
        self._gate, self._reply, self.budget = route.gate, reply, route.budget
        self._message: FastCall | None = None
        self._unread = b""
        """The part of a prefix that has arrived."""
        self._left: float = 0
        """Missing bytes of the message; infinite where the length of the body is not known."""
        self._sent = b""
        self._call: Call | None = route.method.open(options, self)
        self.body_timeout_s = self._call.body_timeout_s

    def data(self, data: bytes) -> None:
        if self._call is None:
            return
        if self._message is None:
            size, data, self._unread = self._length, self._unread + data, b""
            if self._kind != _CONNECT:
                if len(data) < PREFIX_BYTES:
                    self._unread = data
                    return
                if compressed := data[0]:
                    text = f"message: got {compressed} as its first byte, expected 0"
                    raise _unimplemented(text)
                size, data = int.from_bytes(data[1:PREFIX_BYTES], "big"), data[PREFIX_BYTES:]
            self._message = self._call.message(size)
            self._left = math.inf if size is None else size
        self._left -= len(data)
        if self._left < 0:
            raise InvalidInput("message: got a second, expected one request", field="message")
        if data:
            self._message.data(data)

    def room(self) -> None: ...

    def arrived(self, size: int) -> None: ...

    def wait_for_body(self) -> None:
        self.data(b"")
        if self._message is not None:
            self._message.wait_for_body()
        elif self._call is not None:
            self._call.wait()

    def complete(self, body: bytes | memoryview | None = None) -> None:
        try:
            self.data(b"" if body is None else bytes(body))
            if self._unread or 0 < self._left < math.inf:
                missing = self._left or PREFIX_BYTES - len(self._unread)
                text = f"message: the request ended {missing} bytes before its message"
                raise InvalidInput(text, field="message")
            if self._message is not None:
                self._message.complete()
            if self._call is not None:
                self._call.half_close()
        except Refusal as exc:
            self.fail(exc)

    def fail(self, error: Refusal) -> None:
        if self._call is not None:
            self._call.fail(error)

    def cancel(self) -> None:
        call, self._call, self._message = self._call, None, None
        if call is not None:
            call.cancel()

    # Called by the call, see `GrpcStream`. Answers are kept until the last.

    def reply(self, message: bytes) -> None:
        self.write(message)
        self.end()

    def write(self, message: bytes) -> None:
        self._sent += message if self._kind == _CONNECT else framed(message)

    def end(self, status: Status = OK) -> None:
        if self._call is not None:
            self._call = self._message = None
            self._reply(_answer(self._kind, status, self._sent))

    def refuse(self, error: Refusal) -> None:
        self.end(self._gate.policy.status(error))

    def is_read(self) -> bool:
        return True

    def read_on(self) -> None: ...

    async def drained(self) -> None: ...


def _unimplemented(message: str, field: str = "") -> InvalidInput:
    return InvalidInput(message, field=field, grpc_status=StatusCode.UNIMPLEMENTED)


def _answer(kind: str, status: Status, content: bytes) -> Answer:
    """The answer to a call; `content` are its messages."""
    if kind != _CONNECT:
        trailers = b"".join(b"%b: %b\r\n" % field for field in status.fields())
        content += b"\x80%b%b" % (len(trailers).to_bytes(4, "big"), trailers)
    elif status.code is not StatusCode.OK:
        code = status.code.name.lower().replace("cancelled", "canceled")
        text = status.details.encode("utf-8", "replace").decode()
        body = orjson.dumps({"code": code, "message": text})
        return Answer(_STATUS[status.code], JSON, body, call=status.code)
    return Answer(200, kind.encode(), content, call=status.code)
