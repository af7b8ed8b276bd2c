"""The header fields of a request over HTTP/2, checked after RFC 9113, and where they lead to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from wire.answer import error_answer
from wire.errors import (
    InvalidInput,
    ProtocolError,
    Refusal,
    StatusCode,
    shown,
)
from wire.gate import Gate
from wire.grpc import Method, timeout_s_of
from wire.head import (
    HOST,
    MAX_FIELDS,
    MAX_TARGET_BYTES,
    FastRoutes,
    RequestHead,
    without_frames,
)
from wire.http2_blocks import MAX_HEADER_BYTES
from wire.http2_fields import Fields, Malformed, is_field, is_value, lines_block, list_bytes
from wire.ids import Ids
from wire.inflate import CODINGS

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH = re.compile(rb"/[!-~]*")
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))

_METHOD_CHARACTERS = 100
"""Characters of an unknown method in a message: a service's name alone has 40."""

_KNOWN_TIMEOUTS = 16
"""Maximum number of heads that are kept for one block with other timeouts, 1.2 KB each."""

_LENGTH = re.compile(rb"[0-9]{1,20}")

Methods = Mapping[bytes, Method]
"""The methods of gRPC, by path."""


class Http2Head(RequestHead):
    """The head of a request over HTTP/2.

    `method_of_grpc` is what a call of gRPC asks for, if it is one and known.

    Raises:
        Malformed: they break HTTP's rules.
    """

    version = "2"
    extra = b""
    encoding = "identity"
    _excess = ""
    method_of_grpc: Method | None = None

    def __init__(self, fields: Fields, routes: FastRoutes, methods: Methods, gate: Gate) -> None:
        pseudo, self.headers = _checked(fields[: MAX_FIELDS + len(_PSEUDO)])
        self.method = pseudo[b":method"]
        target = pseudo.get(b":path", b"")
        self.aim(target)
        self.length = _length(self.headers)
        size, count = list_bytes(fields), len(fields) - len(pseudo)
        if size > MAX_HEADER_BYTES:
            self._excess = f"got {size} bytes, expected at most {MAX_HEADER_BYTES}"
        elif count > MAX_FIELDS:
            self._excess = f"got {count} fields, expected at most {MAX_FIELDS}"
        self._target_bytes, self._led_by = len(target), (routes, methods, gate)
        named = _named(self.headers)
        self.expects_continue = named.get("expect", "").lower() == "100-continue"
        kind = named.get("content-type", "")
        self.is_grpc = self.method == b"POST" and (
            kind.startswith("application/grpc") and not kind.startswith("application/grpc-web")
        )
        self._lead(named)
        self.once = self.expects_continue or bool(self.ids) or self.answer is not None

    def _lead(self, named: Mapping[str, str]) -> None:
        """Find who answers the request with the fields `named`."""
        routes, methods, gate = self._led_by
        self.ids = Ids.read(named)
        if self.is_grpc:
            self._read_call(named, methods, gate)
        else:
            self._read_request(named, routes, gate)

    def _read_request(self, named: Mapping[str, str], routes: FastRoutes, gate: Gate) -> None:
        self.extra = lines_block(self.ids.line + gate.cors_lines(named))
        if self._excess:
            self.answer = error_answer(ProtocolError(431, f"headers: {self._excess}"))
            return
        if self._target_bytes > MAX_TARGET_BYTES:
            message = f"target: got {self._target_bytes} bytes, expected at most {MAX_TARGET_BYTES}"
            self.answer = error_answer(ProtocolError(414, message))
            return
        if repeated := self.repeated(gate):
            self.answer = error_answer(ProtocolError(400, repeated))
            return
        if self.method == b"CONNECT":
            message = "method: got CONNECT, expected another"
            self.answer = error_answer(ProtocolError(501, message))
            return
        self.ask(named, routes, gate)

    def _read_call(self, named: Mapping[str, str], methods: Methods, gate: Gate) -> None:
        self.method_of_grpc = method = methods.get(self.path)
        self.encoding = named.get("grpc-encoding", "identity")
        try:
            if self._excess:
                text = f"metadata: {self._excess}"
                raise InvalidInput(
                    text, field="metadata", grpc_status=StatusCode.RESOURCE_EXHAUSTED
                )
            if repeated := self.repeated(gate):
                raise InvalidInput(repeated, field=repeated.partition(":")[0])
            if method is None:
                found = shown(self.path.decode("latin-1"), _METHOD_CHARACTERS)
                raise _unimplemented(f"method: got {found}, expected one that is served here")
            kind = named["content-type"]
            if kind.partition(";")[0] not in ("application/grpc", "application/grpc+proto"):
                raise _unimplemented(f"content-type: got {shown(kind)}, expected application/grpc")
            if self.encoding not in CODINGS:
                expected = ", ".join(CODINGS)
                found = shown(self.encoding)
                raise _unimplemented(f"grpc-encoding: got {found}, expected one of {expected}")
            if not method.is_open and (error := gate.key_error(named)) is not None:
                raise error
            self.wanted = method.read(named)
        except Refusal as exc:
            self.error = without_frames(exc)

    def for_values(self, fields: Fields) -> Callable[[Fields], Http2Head] | None:
        """Makes heads that differ in the values of some fields; None where each is to be read."""
        led = self.method_of_grpc is not None or self.route is not None
        if not led or self.error is not None or self.answer is not None or self.expects_continue:
            return None
        return partial(self._with_values, _named(_checked(fields)[1]), {})

    def _with_values(
        self, named: Mapping[str, str], known: dict[float | None, Http2Head], changed: Fields
    ) -> Http2Head:
        values, timeout_s = _named(changed), None
        if self.method_of_grpc is not None and values.keys() == {"grpc-timeout"}:
            with suppress(InvalidInput):  # which is the call's error, below
                timeout_s = timeout_s_of(values)
            if timeout_s in known:
                return known[timeout_s]
        if not all(is_value(value) for _, value in changed):
            raise Malformed
        head = Http2Head.__new__(Http2Head)  # copy.copy takes 5 us
        head.__dict__.update(self.__dict__)
        head.wanted = None
        head._lead({**named, **values})
        if timeout_s is not None:
            if len(known) >= _KNOWN_TIMEOUTS:
                del known[next(iter(known))]
            known[timeout_s] = head
        return head


def _unimplemented(message: str) -> InvalidInput:
    return InvalidInput(message, grpc_status=StatusCode.UNIMPLEMENTED)


def _named(fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The first value of each field."""
    named: dict[str, str] = {}
    for name, value in fields:
        named.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return named


def _checked(fields: Fields) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    """The pseudo-header fields, and the others with the authority as `host`. Raises: Malformed."""
    pseudo: dict[bytes, bytes] = {}
    headers: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        if name.startswith(b":"):
            if headers or name not in _PSEUDO or name in pseudo or not is_value(value):
                raise Malformed
            pseudo[name] = value
        elif is_field(name, value):
            headers.append((name, value))
        else:
            raise Malformed
    method = pseudo.get(b":method", b"")
    if not _METHOD.fullmatch(method):
        raise Malformed
    path = pseudo.get(b":path", b"")
    has_target = bool(_PATH.fullmatch(path)) or (method, path) == (b"OPTIONS", b"*")
    if method == b"CONNECT":
        has_target = pseudo.keys() == {b":method", b":authority"}
    if not has_target or (method != b"CONNECT" and not pseudo.get(b":scheme")):
        raise Malformed
    hosts = [value for name, value in headers if name == b"host"]
    authority = pseudo.get(b":authority")
    if len(hosts) > 1 or (hosts and authority is not None and hosts[0] != authority):
        raise Malformed
    if not HOST.fullmatch(authority or (hosts[0] if hosts else b"")):
        raise Malformed
    if authority is not None and not hosts:
        headers.insert(0, (b"host", authority))
    return pseudo, headers


def _length(headers: list[tuple[bytes, bytes]]) -> int | None:
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return None
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise Malformed
    return int(lengths[0])
