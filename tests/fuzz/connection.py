"""The HTTP/1.1 connection on a transport in memory, beside h11 as a second reading of the bytes.

Every input is sent three times: in one piece; in pieces, to the same server, which knows the header
sections by then; and again in one piece. The answers have to be the same. Requests that h11 reads
have to be those that are answered with 200, in their order.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import h11

from service.errors import InvalidInput, Overloaded, TooLarge
from tests.fuzz.target import Finding, MutateBytes, Target, corpus, mutate_list, pick
from tests.fuzz.turns import Turns
from tests.wire.test_http1 import ROWS
from wire.answer import Answer, error_answer
from wire.budget import Budget
from wire.door import HttpService
from wire.http2_exchanges import Http2Exchanges

MAX_HEADER_BYTES = 2048
MAX_BODY_BYTES = 4096
STATUSES = {200, 400, 408, 413, 417, 421, 429, 431, 501, 505}
"""Allowed statuses. 501 and 505 are RFC 9112's, for codings and versions."""

_DATE_S = 1795341600.0
_LIFETIME_S = 600.0


class Found(NamedTuple):
    """A final answer."""

    status: int
    closes: bool
    body: bytes


class Transport(asyncio.Transport):
    """Keeps what is written; the client reads all of it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.paused = self.shut = self.closed = self.lost = False
        self.protocol: Any = None

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if self.shut:
            raise Finding(f"wrote behind the end of data: {data[:80]!r}")
        if not self.closed:
            self.written += data

    def write_eof(self) -> None:
        self.shut = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        if self.paused:
            raise Finding("paused reading twice")
        self.paused = True

    def resume_reading(self) -> None:
        if not self.paused:
            raise Finding("resumed reading twice")
        self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2), "socket": self}[name]

    def getsockopt(self, *_: object) -> int:
        """Report no error of the socket."""
        return 0


class Call:
    """A request on the fast route: answers with its body, at a time that its body chooses."""

    def __init__(self, route: Route, reply: Callable[[Answer], None]) -> None:
        self._route, self._reply, self._body, self._open = route, reply, b"", True

    def data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > MAX_BODY_BYTES:
            raise TooLarge("too many bytes", field="body")

    def room(self) -> None:
        """None: bodies are small here."""

    def arrived(self, size: int) -> None:
        raise NotImplementedError

    def wait_for_body(self) -> None:
        if self._open and self._body.startswith(b"overload"):
            raise Overloaded("planted", retry_after_s=1)

    def complete(self, body: bytes | memoryview | None = None) -> None:
        self._body = self._body if body is None else bytes(body)
        if len(self._body) > MAX_BODY_BYTES:
            self.fail(TooLarge("too many bytes", field="body"))
        elif self._body.startswith(b"overload"):
            self.fail(Overloaded("planted", retry_after_s=1))
        elif self._body.startswith(b"now"):
            self._answer()
        elif self._body.startswith(b"later"):
            self._route.loop.call_later(0.1 / (1 + self._route.ended), self._answer)
        else:
            self._route.loop.call_soon(self._answer)
        self._route.ended += 1

    def _answer(self) -> None:
        if self._open:
            self._open = False
            self._reply(Answer(200, b"text/plain", b"#/fast " + self._body))

    def fail(self, error: Any) -> None:
        if self._open:
            self._open = False
            self._reply(error_answer(error))

    def cancel(self) -> None:
        if not self._open:
            raise Finding("cancelled a call that was answered")
        self._open = False


class Route:
    """`POST /fast`; a query is refused."""

    def __init__(self, loop: Turns) -> None:
        self.loop, self.ended = loop, 0

    def read(self, query: bytes, headers: Any, path: Any = None) -> None:
        if query:
            raise InvalidInput("no query expected", field="query")
        if int(headers.get("content-length", "0")) > MAX_BODY_BYTES:
            raise TooLarge("too many bytes", field="body")

    def refuse(self, error: Any) -> Answer:
        return error_answer(error)

    def open(self, wanted: Any, reply: Callable[[Answer], None]) -> Call:
        return Call(self, reply)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with path and body; /early before the body came, /pieces in chunks."""
    body, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
    content = b"#%s %s" % (scope["raw_path"], body)
    if scope["path"] == "/pieces":
        for start in range(0, len(content), 7):
            piece = content[start : start + 7]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        content = b""
    await send({"type": "http.response.body", "body": content})


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise Finding(record.getMessage()) from (record.exc_info or (None, None))[1]


class ConnectionTarget(Target):
    """The bytes of one connection, from its client."""

    max_bytes = 16 * 1024

    def __init__(self) -> None:
        super().__init__()
        logger, handler = logging.getLogger("wire"), _Log()
        logger.addHandler(handler)
        self.undo.callback(logger.removeHandler, handler)

    def serve(self, data: bytes) -> list[Found]:
        """The answers to `data` in one piece, with the service's own limit of headers."""
        door, loop = self._opened(64 * 1024)
        return self._answers([data], door, loop)

    def _opened(self, max_header_bytes: int) -> tuple[HttpService, Turns]:
        # A new loop and door for each case, so that none depends on the one before.
        loop = Turns()
        route = Route(loop)
        budget = Budget(1 << 20)
        routes = {(b"POST", b"/fast"): route}
        limits = {"max_header_bytes": max_header_bytes}
        door = HttpService(routes, budget, app=application, clock=lambda: _DATE_S, **limits)
        return door, loop

    def run(self, data: bytes) -> None:
        door, loop = self._opened(MAX_HEADER_BYTES)
        rng = random.Random(zlib.crc32(data))
        pieces, at = [], 0
        while at < len(data):
            size = rng.choice((1, 2, 3, 10, 100, 1000))
            pieces.append(data[at : at + size])
            at += size
        ways = [self._answers(way, door, loop) for way in ([data], pieces, [data])]
        for answers in ways[1:]:
            compare(ways[0], answers)
        if len(door.heads.known) > 512:
            raise Finding(f"{len(door.heads.known)} header sections are kept")
        self._compare_with_h11(data, ways[0])

    def _answers(self, pieces: list[bytes], door: HttpService, loop: Turns) -> list[Found]:
        transport = Transport()
        connection = loop.call(lambda: door(loop))
        transport.protocol = connection
        loop.call(connection.connection_made, transport)
        end_s = loop.time() + _LIFETIME_S
        for piece in pieces:
            loop.wait(end_s, lambda: not transport.paused or transport.closed)
            if transport.closed:
                break
            if transport.paused:
                raise Finding("reading stays paused")
            loop.call(transport.protocol.data_received, piece)
            if len(pieces) < 100:
                loop.settle()
        if not transport.closed:
            if not loop.call(transport.protocol.eof_received):
                transport.close()
            loop.wait(end_s, lambda: transport.closed)
        if not transport.closed:
            raise Finding("the connection is still open long after its client's end of data")
        loop.call(transport.protocol.connection_lost, None)
        loop.wait(loop.time() + 10)
        if door.connections or door.tasks:
            raise Finding("something is left of a closed connection")
        if door.budget.held_bytes:
            raise Finding(f"{door.budget.held_bytes} bytes are held for a closed connection")
        if isinstance(connection.exchanges, Http2Exchanges):
            return []
        return read_answers(bytes(transport.written))

    def _compare_with_h11(self, data: bytes, answers: list[Found]) -> None:
        for (target, body), answer in zip(h11_requests(data), answers, strict=False):
            if answer.status != 200:
                if answer.closes:
                    return
                continue
            path = target.partition(b"?")[0].partition(b"#")[0]
            if not path.startswith(b"/"):
                continue
            if path == b"/early":
                body = b""
            if answer.body not in (b"#%s %s" % (path, body), b"#/fast " + body, b""):
                raise Finding(f"{answer.body[:100]!r} answers {path!r} {body[:100]!r}")
            if answer.closes:
                return

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.1:
            return mutate(data)
        if rng.random() < 0.15:
            other = rng.choice(corpus("connection"))
            return data + other if rng.random() < 0.5 else other + data
        lines = re.split(rb"(?<=\n)", data)

        def change(line: bytes) -> bytes:
            if rng.random() < 0.3:
                return mutate(line)
            end = rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"", b"\r\n\r\n", b"\r"))
            return pick(rng, LINES) + end

        data = b"".join(mutate_list(lines, rng, change))
        if rng.random() < 0.3:
            data = _with_length(data, rng)
        return data


def _with_length(data: bytes, rng: random.Random) -> bytes:
    """A Content-Length that fits up to the next request, or to the end."""
    found = list(re.finditer(rb"(?i)content-length: *(\d+)", data))
    if not found:
        return data
    match = rng.choice(found)
    start = data.find(b"\r\n\r\n", match.end()) + 4
    ends = [len(data)] + [m.start() for m in re.finditer(rb"POST |GET ", data) if m.start() > start]
    length = max(0, rng.choice(ends) - start)
    return data[: match.start(1)] + b"%d" % length + data[match.end(1) :]


def compare(first: list[Found], other: list[Found]) -> None:
    """Both are the answers to the same bytes.

    How much of padded headers counts depends on the pieces: where one is refused for their size,
    the other may be answered, or refused for what follows. A request that is answered before its
    body has arrived ends the connection.
    """
    for a, b in zip(first, other, strict=False):
        if a != b:
            if 431 in (a.status, b.status):
                return
            early = a.status in (400, 413, 429) or a.body.startswith(b"#/early")
            if early and a._replace(closes=b.closes) == b:
                return
            raise Finding(f"{a!r:.200} in one piece, {b!r:.200} in pieces or when known")
    if len(first) != len(other) and 431 not in (first + other)[-1]:
        raise Finding(f"{len(first)} answers in one piece, {len(other)} otherwise")


_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]*\r\n((?:[a-z0-9-]+: [^\r\n]*\r\n)*)\r\n")


def read_answers(written: bytes) -> list[Found]:
    """The final answers. Bodies begin with # or {, so that one to HEAD is seen to have none."""
    found: list[Found] = []
    at = interim = 0
    while at < len(written):
        match = _HEAD.match(written, at)
        if match is None:
            raise Finding(f"no answer begins here: {written[at : at + 100]!r}")
        at = match.end()
        status = int(match[1])
        if status == 100:
            interim += 1
            continue
        if found and found[-1].closes:
            raise Finding(f"{status} behind an answer that closes")
        if status not in STATUSES:
            raise Finding(f"answered {status}: {written[at : at + 200]!r}")
        headers = [line.split(b": ", 1) for line in match[2].split(b"\r\n")[:-1]]
        named = dict(headers)
        framing = [name for name, _ in headers if name in (b"content-length", b"transfer-encoding")]
        closes = named.get(b"connection") == b"close"
        if len(framing) + closes < 1 or len(framing) > 1:
            raise Finding(f"framed by {framing}")
        body = b""
        if written[at : at + 5] == b"HTTP/" or at == len(written):
            pass  # to HEAD
        elif b"content-length" in named:
            body = written[at : at + int(named[b"content-length"])]
            at += int(named[b"content-length"])
        elif not framing:  # to HTTP/1.0, in pieces
            body, at = written[at:], len(written)
        else:
            while (line := written[at : written.index(b"\r\n", at)]) != b"0":
                at += len(line) + 2
                body += written[at : at + int(line, 16)]
                at += int(line, 16) + 2
            at += 5
        if at > len(written) or (body and body[:1] not in b"#{"):
            raise Finding(f"the body of {status} is {body[:100]!r}")
        found.append(Found(status, closes, body))
    return found


def h11_requests(data: bytes) -> list[tuple[bytes, bytes]]:
    """Target and body of the requests that h11 reads, up to the first that it refuses."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    parser.receive_data(data)
    found: list[tuple[bytes, bytes]] = []
    try:
        while True:
            event = parser.next_event()
            if not isinstance(event, h11.Request):
                return found
            target, body = event.target, b""
            while not isinstance(event, h11.EndOfMessage):
                event = parser.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    return found
                body += bytes(event.data) if isinstance(event, h11.Data) else b""
            found.append((target, body))
            parser.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            parser.send(h11.EndOfMessage())
            parser.start_next_cycle()
    except h11.ProtocolError:
        return found


LINES = (
    *{line for data, _ in ROWS.values() for line in data.split(b"\r\n") if len(line) < 2000},
    *(b"now", b"later", b"overload", b"POST /pieces HTTP/1.1", b"POST /early HTTP/1.0"),
)
"""Lines of the table in tests/wire/test_http1.py, and what this target's routes read."""
