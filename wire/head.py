"""The headers of a request, checked after RFC 9110 and 9112, and the route that they lead to.

Clients send the same header section again and again, or one in which few values differ. `Heads`
keeps heads by section, without the fields whose values vary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote_to_bytes

import httptools

from wire.answer import Answer
from wire.errors import InvalidInput, ProtocolError, Refusal, shown
from wire.gate import Gate
from wire.ids import REQUEST_ID, TRACEPARENT, Ids

_LENGTH_DIGITS = 20
"""Digits of 2^64, the parser's limit; it accepts any number of leading zeros."""

MAX_FIELDS = 100
"""Maximum number of header fields of a request. Browsers send fewer than 30."""

MAX_TARGET_BYTES = 8 * 1024
"""Maximum length of a request's target. Unescaping 2,700 percent escapes takes 0.3 ms."""

_MAX_PARAMETERS = 100
"""Maximum number of parameters in a query."""

_KNOWN_HEADS = 512
_KNOWN_HEAD_BYTES = 2048

_PLAIN = re.compile(rb" ?[!-~]*")

HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


class FastCall(Protocol):
    """One request on a fast route."""

    def data(self, data: bytes) -> None:
        """The next piece of the body. Raises Refusal if it is refused."""

    def room(self) -> memoryview | None:
        """Memory for the whole body, of announced length; None if `data` is to be called.

        May be called instead of the first `data`.
        """

    def arrived(self, size: int) -> None:
        """The next `size` bytes of the body are in that memory. Raises as `data`."""

    def wait_for_body(self) -> None:
        """The body has not arrived whole; may be called again. Raises as `data`."""

    def complete(self, body: bytes | memoryview | None = None) -> None:
        """The body is complete; `body` is all of it, if `data` was not called."""

    def fail(self, error: Refusal) -> None:
        """Answer with `error`."""

    def cancel(self) -> None:
        """The client is gone; nothing is to be answered."""


class FastRoute(Protocol):
    """A route of plain calls. Equal headers are read once; see `Head`."""

    def read(self, query: bytes, headers: Mapping[str, str], path: Mapping[str, str] = ...) -> Any:
        """Read the options of a request; `path` has the values of the path's placeholders.

        Raises: Refusal: the request is refused.
        """

    def refuse(self, error: Refusal) -> Answer:
        """The answer to a request that `read` rejected."""

    def open(self, wanted: Any, reply: Callable[[Answer], None]) -> FastCall:
        """Begin a request."""


FastRoutes: TypeAlias = Mapping[tuple[bytes, bytes], FastRoute]
"""Routes by method and path, which may have placeholders: /v2/models/{model}/infer."""


def find(
    routes: FastRoutes, method: bytes, path: bytes
) -> tuple[FastRoute | None, Mapping[str, str]]:
    """The route for a path, and the values of its placeholders."""
    if (route := routes.get((method, path))) is not None:
        return route, {}
    for (wanted, template), route in routes.items():
        if wanted == method and b"{" in template and (found := _pattern(template).fullmatch(path)):
            values = {
                name: value.decode("utf-8", "replace") for name, value in found.groupdict().items()
            }
            return route, values
    return None, {}


@lru_cache
def _pattern(template: bytes) -> re.Pattern[bytes]:
    return re.compile(re.sub(rb"\\\{(\w+)\\\}", rb"(?P<\1>[^/]+)", re.escape(template)))


class RequestHead:
    """The checked headers of a request, in either version of HTTP.

    `answer` is that of a request which the gate does not let pass, `error` what its route found.
    `extra` are header lines of the answer, in HTTP/2 a block of them.
    """

    method: bytes
    version: str
    headers: Sequence[tuple[bytes, bytes]]
    length: int | None
    chunked = False
    expects_continue: bool
    extra: bytes
    ids: Ids
    wanted: Any = None
    answer: Answer | None = None
    error: Refusal | None = None
    route: FastRoute | None = None

    def aim(self, target: bytes) -> None:
        """Take path and query from the target."""
        self.path, _, self.query = target.partition(b"#")[0].partition(b"?")

    def repeated(self, gate: Gate) -> str:
        """The error of a field that is given more often than it may be; "" if there is none."""
        names = [name for name, _ in self.headers if name in gate.single]
        if len(set(names)) == len(names):
            return ""
        name = max(names, key=names.count)
        return f"{name.decode()}: got {names.count(name)} fields, expected at most one"

    def ask(self, named: Mapping[str, str], routes: FastRoutes, gate: Gate) -> None:
        """Find the route, and let the gate and the route decide."""
        if (count := self.query.count(b"&") + 1) > _MAX_PARAMETERS:
            message = f"query: got {count} parameters, expected at most {_MAX_PARAMETERS}"
            self.answer = gate.policy.answer(self.path, InvalidInput(message, field="query"))
            return
        self.route, self._placeholders = find(routes, self.method, unquote_to_bytes(self.path))
        self.answer = gate.check(self.method, self.path, named)
        if self.answer is None and self.route is not None:
            try:
                self.wanted = self.route.read(self.query, named, self._placeholders)
            except Refusal as exc:
                self.error = without_frames(exc)


def without_frames(error: Refusal) -> Refusal:
    """The error without its frames, which hold the connection."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


class Head(RequestHead):
    """The head of a request over HTTP/1.1.

    `is_plain` says whether an equal header section may be taken for this one without parsing it:
    without error, on a connection that is kept. `known_length` is then the length of the body on a
    fast route, else 0. On such a route `headers` are left out, which only the application reads.

    Raises:
        ProtocolError: they break HTTP's rules.
    """

    def __init__(
        self,
        method: bytes,
        url: bytes,
        version: str,
        pairs: Sequence[tuple[bytes, bytes]],
        keep_alive: bool,
        routes: FastRoutes,
        gate: Gate,
        scheme: bytes = b"http",
    ) -> None:
        self.method, self.version = method, version
        # The parser leaves white space behind a value: RFC 9112, 5.1.
        self.headers = tuple((name.lower(), value.strip(b" \t")) for name, value in pairs)
        by_name: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            by_name.setdefault(name, []).append(value)
        options = b",".join(by_name.get(b"connection", []))
        # The parser takes "close, keep-alive" in HTTP/1.0 for keep-alive: RFC 9112, 9.3.
        self.keep_alive = keep_alive and not (
            options and any(option.strip().lower() == b"close" for option in options.split(b","))
        )
        if version not in ("1.0", "1.1"):
            raise ProtocolError(505, f"HTTP version: got {version}, expected 1.0 or 1.1")
        hosts = by_name.get(b"host", [])
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            found = f"{len(hosts)} Host headers" if hosts else "no Host header"
            raise ProtocolError(400, f"host: got {found}, expected exactly one")
        if hosts and not HOST.fullmatch(hosts[0]):
            raise ProtocolError(
                400, f"host: got {shown(hosts[0].decode('latin-1'))}, expected a name"
            )
        if repeated := self.repeated(gate):
            raise ProtocolError(400, repeated)
        codings = by_name.get(b"transfer-encoding", [])
        self.chunked = bool(codings)
        if codings and version == "1.0":
            raise ProtocolError(400, "transfer-encoding: expected none in HTTP/1.0")
        if self.chunked and (len(codings) > 1 or codings[0].lower() != b"chunked"):
            found = shown(b", ".join(codings).decode("latin-1"))
            raise ProtocolError(501, f"transfer-encoding: got {found}, expected chunked")
        lengths = by_name.get(b"content-length", [])
        if lengths and len(lengths[0]) > _LENGTH_DIGITS:
            found = f"{len(lengths[0])} digits"
            raise ProtocolError(
                400, f"content-length: got {found}, expected at most {_LENGTH_DIGITS}"
            )
        self.length = int(lengths[0]) if lengths else None
        expected = [value.lower() for value in by_name.get(b"expect", [])]
        if expected and expected != [b"100-continue"]:
            found = shown(b", ".join(expected).decode("latin-1"))
            raise ProtocolError(417, f"expect: got {found}, expected 100-continue")
        self.expects_continue = bool(expected) and version == "1.1"
        target = url
        if url.startswith(b"*") and (method, url) != (b"OPTIONS", b"*"):
            raise ProtocolError(400, f"target: got {shown(url.decode('latin-1'))}, expected a path")
        if not url.startswith(b"/") and url != b"*":
            parts = httptools.parse_url(url)  # the absolute form, RFC 9112, 3.2.2
            if parts.schema.lower() != scheme:  # RFC 9110, 7.4
                found = shown(parts.schema.decode())
                raise ProtocolError(421, f"target: got scheme {found}, expected {scheme.decode()}")
            target = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
        self.aim(target)
        named = {
            name.decode("latin-1"): found[0].decode("latin-1") for name, found in by_name.items()
        }
        self.ids = Ids.read(named)
        self._named, self._cors_lines = named, gate.cors_lines(named)
        self.extra = self.ids.line + self._cors_lines
        self.ask(named, routes, gate)
        if self.route is not None:
            self.headers = ()
        once = self.expects_continue or self.chunked or not self.keep_alive
        self.is_plain = not once and self.answer is None and self.error is None
        self.known_length = self.length or 0 if self.is_plain and self.route is not None else 0

    def with_values(self, values: Mapping[str, str], without: Iterable[str] = ()) -> Head:
        """The head of a section with other `values` of some fields, and `without` others."""
        head = Head.__new__(Head)  # copy.copy takes 5 us
        head.__dict__.update(self.__dict__)
        without = frozenset(without)
        head._named = named = {**self._named, **values}
        for name in without:
            named.pop(name, None)
        if self.route is None:
            kept = (field for field in self.headers if field[0].decode("latin-1") not in without)
            added = ((name.encode(), value.encode()) for name, value in values.items())
            head.headers = (*kept, *added)
        head.ids = Ids.read(named)
        head.extra = head.ids.line + self._cors_lines
        if self.route is not None:
            try:
                head.wanted = self.route.read(self.query, named, self._placeholders)
            except Refusal as exc:
                head.error, head.wanted = without_frames(exc), None
                head.is_plain, head.known_length = False, 0
        return head


class Heads:
    """Heads of the requests on HTTP/1.1 connections with the same `routes`, `gate` and `scheme`.

    Args:
        most_bytes: the most bytes of a header section.
    """

    def __init__(
        self, routes: FastRoutes, gate: Gate, scheme: bytes, most_bytes: int = _KNOWN_HEAD_BYTES
    ) -> None:
        self.given = routes, gate, scheme
        """The last arguments of `Head`."""
        self._most_bytes = min(most_bytes, _KNOWN_HEAD_BYTES)
        self.known: dict[bytes, Head] = {}
        """By section without its fields that vary."""
        self._latest: dict[bytes, tuple[list[bytes], Head]] = {}
        """Likewise, the latest section with such fields: these, and its head."""
        varying = (REQUEST_ID, TRACEPARENT, *gate.policy.varying)
        self._varying = {name.encode(): name for name in varying}
        names = b"|".join(self._varying)
        self._varying_field = re.compile(rb"(?i)\r\n(%s):([^\r\n]*)(?=\r\n)" % names)

    def find(self, section: bytes) -> Head | None:
        """The head of a section that is known, or whose fields that do not vary are."""
        if (head := self.known.get(section)) is not None:
            return head
        rest, fields = self._cut(section)
        if not fields or (head := self.known.get(rest)) is None:
            return None
        latest = self._latest.get(rest)
        if latest is None or latest[0] != fields:
            names = (self._varying[name.lower()] for name in fields[::2])
            values = (value.decode().strip() for value in fields[1::2])
            changed = dict(zip(names, values, strict=True))
            latest = self._latest[rest] = fields, head.with_values(changed)
        return latest[1]

    def _cut(self, section: bytes) -> tuple[bytes, list[bytes]]:
        """`section` without the fields that vary, and these: name, value, name, value, ...

        None is cut out where the parser could refuse the section, for its size or for a value, or
        read another value, as a field is given twice. A line that folds a value stays in the rest;
        no section that is kept has one.
        """
        if len(section) > self._most_bytes or section.count(b"\n") > MAX_FIELDS:
            return section, []
        first, *found = self._varying_field.split(section)
        if not found:
            return section, []
        names = {name.lower() for name in found[::3]}
        if len(names) < len(found) // 3 or not all(map(_PLAIN.fullmatch, found[1::3])):
            return section, []
        rest = first + b"".join(found[2::3])
        del found[2::3]
        return rest, found

    def keep(self, section: bytes, head: Head) -> None:
        """Keep the head of a section, if an equal one may be taken for it."""
        rest, fields = self._cut(section)
        if not head.is_plain or len(rest) > self._most_bytes or (head.ids and not fields):
            return
        if fields:
            head = head.with_values({}, self._varying.values())
        if head.is_plain:
            if len(self.known) >= _KNOWN_HEADS:
                oldest = next(iter(self.known))
                del self.known[oldest]
                self._latest.pop(oldest, None)
            self.known[rest] = head
