"""The server's side of an HTTP/1.1 connection (RFC 9112): bytes in, calls of a handler out.

No socket, clock or event loop. A header section is parsed by httptools; how long the body behind it
is, and where it ends, is decided here. Requests are served one at a time: what a client sends
behind one that is not answered stays in `Http1`, unparsed, until `answered` and `go_on` are called.

The rules are RFC 9112's: one Host (3.2), Transfer-Encoding only `chunked` (6.1), trailers dropped
(7.1.2). Requests for an upgrade are answered as if they did not ask.
"""

from __future__ import annotations

import re
from typing import Protocol

import httptools

from wire.answer import Answer, refusal
from wire.errors import shown
from wire.head import MAX_FIELDS, MAX_TARGET_BYTES, Head, Heads, Refused

COPIED_BYTES = 16 * 1024
"""A body of fewer bytes is copied out of what was read: for it, a view costs more."""

LARGE_BYTES = 128 * 1024
"""A body with more to come may be received without a copy, see `Handler.placed`."""

_FRAMING_BYTES = 64 * 1024
"""The most bytes of chunk extensions and trailers in a body."""

_LINE_BYTES = 4096
"""The most bytes of one line of them."""

_CHUNKS_AT_ONCE = 2000
"""Most chunks decoded by one call: 2 ms of work. Other connections run in between."""


class Handler(Protocol):
    """Callbacks of `Http1`, for one request at a time."""

    def whole(self, head: Head, body: bytes | memoryview) -> None:
        """A request that came with all of its body, on a fast route and without error."""
        ...

    def opened(self, head: Head) -> None:
        """A request whose body, perhaps empty, follows."""
        ...

    def placed(self, body: bytes) -> bool:
        """Whether the rest of a large body, which begins with `body`, is received elsewhere.

        Then `Http1.body_arrived` is called, and `receive` is not.
        """
        ...

    def received(self, data: bytes, end: bool) -> None:
        """A piece of the body, perhaps empty; `end`: the last."""
        ...

    def refused(self, answer: Answer) -> None:
        """The input is malformed: `answer` is the last one. A body may be arriving."""
        ...


class Http1:
    """The state of one connection.

    Args:
        handler: gets requests.
        heads: checks headers, and knows those of earlier requests.
        max_header_bytes: the most bytes of a header section.
        expected: what malformed requests are not, for their answer.
    """

    def __init__(
        self, handler: Handler, heads: Heads, max_header_bytes: int, expected: str
    ) -> None:
        self._handler, self._heads, self._expected = handler, heads, expected
        self._max_header_bytes = max_header_bytes
        self.idle = True
        """Whether nothing of a request has come that is not answered."""
        self.used = False
        """Whether anything has come."""
        self.serving = False
        """Whether a request is not answered."""
        self.receiving = False
        """Whether its body is not complete."""
        self.closed = False
        """Whether nothing more is read."""
        self.body_left = 0
        """Bytes still to be received of a body with Content-Length."""
        self._chunks: Chunks | None = None
        self._buffer = b""
        self._position = 0
        self._parser: httptools.HttpRequestParser | None = None
        """Parses the header section that arrives."""
        self.header_bytes = 0
        """Bytes of that section so far, and of empty lines before it."""
        self._url = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._start: tuple[bytes, str, bool] | None = None
        """Method, version and whether the connection is kept, once the section is complete."""
        self._is_broken = False
        self._tail = b""
        """The last bytes of the section so far, in which its end may begin."""
        self._line = b""
        """The request line, as far as it has come."""
        self._lines = 0
        """Line ends in that section so far."""

    @property
    def unparsed_bytes(self) -> int:
        """Bytes that wait for the answer to the request before them, or for `go_on`."""
        chunks = 0 if self._chunks is None else self._chunks.waiting_bytes
        return len(self._buffer) - self._position + chunks

    @property
    def in_headers(self) -> bool:
        """Whether a header section is not complete."""
        return self._parser is not None

    @property
    def can_go_on(self) -> bool:
        """Whether `go_on` has something to parse."""
        if self._chunks is not None and self._chunks.waiting_bytes:
            return not self.closed
        return not (self.serving or self.closed) and self._position < len(self._buffer)

    # Bytes of the client.

    def receive(self, data: bytes) -> bool:
        """Parse `data`; whether it was one whole request whose header section is known."""
        if self.idle:
            end = data.find(b"\r\n\r\n") + 4
            head = self._heads.find(data[:end])
            if head is not None and len(data) - end == head.known_length:
                self.idle = False
                self.serving = self.used = True
                body = data[end:] if head.known_length < COPIED_BYTES else memoryview(data)[end:]
                self._handler.whole(head, body)
                return True
        if not self.closed:
            self._buffer, self._position = self._buffer[self._position :] + data, 0
            self.go_on()
        return False

    def go_on(self) -> None:
        """Parse what has come, up to the end of one request."""
        if not (self.serving or self.closed) and self._position < len(self._buffer):
            self._read_head()
        if self.receiving and not self.closed:
            self._read_body()
        if self._position == len(self._buffer):
            self._buffer, self._position = b"", 0

    def answered(self) -> None:
        """The request is answered; what has come behind it may be parsed."""
        self.serving = False
        self.idle = self._position == len(self._buffer)

    def close(self) -> None:
        """Parse nothing more."""
        self.closed = True
        self.idle = self.receiving = False
        self.body_left = 0
        self._buffer, self._position, self._chunks = b"", 0, None
        self._parser, self._pairs, self.header_bytes = None, [], 0

    # The header section.

    def _read_head(self) -> None:
        data, start = self._buffer, self._position
        found = data.find(b"\r\n\r\n", start)
        end = found + 4 if found >= 0 else 0
        if self._parser is None:
            if end and (head := self._heads.find(data[start:end])) is not None:
                self._position = end
                self._open(head)
                return
            first = start
            while data[first : first + 1] in (b"\r", b"\n"):  # empty lines, RFC 9112, 2.2
                first += 1
            self.header_bytes += first - start
            if self.header_bytes > self._max_header_bytes:
                self._headers_too_long()
                return
            if first == len(data):
                self._position = first
                return
            if first > start:
                start, found = first, data.find(b"\r\n\r\n", first)
                end = found + 4 if found >= 0 else 0
            self._parser = httptools.HttpRequestParser(self)
            self._url, self._pairs, self._start = b"", [], None
            self._tail = self._line = b""
            self._lines = 0
            self.used, self.idle = True, False
        elif self._tail:
            across = (self._tail + data[start : start + 3]).find(b"\r\n\r\n")
            if across >= 0:
                end = start + across + 4 - len(self._tail)
        complete = end > 0
        section = data[start : end if complete else len(data)]
        self._position = start + len(section)
        if not self._feed(section, complete):
            return
        self.header_bytes += len(section)
        if self.header_bytes > self._max_header_bytes:
            self._headers_too_long()
        elif not complete:
            self._tail = (self._tail + section)[-3:]
        else:
            is_first = not self._tail and self.header_bytes == len(section)
            self._parser, self.header_bytes = None, 0
            self._check(section if is_first else b"")

    def _feed(self, section: bytes, complete: bool) -> bool:
        """Parse a part of a header section; whether it is well-formed, or too long."""
        assert self._parser is not None, "bug: no header section"
        ends = section.count(b"\n")
        self._lines += ends
        if (fields := self._lines - 1 - complete) > MAX_FIELDS:
            self.refuse(
                431, f"headers: got at least {fields} fields, expected at most {MAX_FIELDS}"
            )
            return False
        room = self._max_header_bytes - self.header_bytes
        try:
            self._parser.feed_data(section[: room + 1])
        except httptools.HttpParserUpgrade:
            pass  # the parser would read no body
        except httptools.HttpParserError:
            self._is_broken = complete and self._start is not None
            if not self._is_broken:  # else the head may say better what is wrong
                self._malformed()
                return False
        if (size := len(self._url)) > MAX_TARGET_BYTES:
            self.refuse(
                414, f"target: got at least {size} bytes, expected at most {MAX_TARGET_BYTES}"
            )
            return False
        if len(section) > room:
            return True
        if not self._line.endswith(b"\n"):
            self._line += section[: section.find(b"\n") + 1 or len(section)]
        # The parser takes several spaces for one: RFC 9112, 3.
        is_broken = b"  " in self._line
        # A lone LF could end the section for the parser, and not here.
        is_broken |= (self._tail[-1:] + section).count(b"\r\n") != ends
        if is_broken or complete == (self._start is None):
            self._malformed()
            return False
        return True

    def _check(self, section: bytes) -> None:
        """Check the parsed headers, and remember them by `section` if it is not empty."""
        assert self._start is not None, "bug: the section is not complete"
        method, version, keep_alive = self._start
        self._line = b""
        if method == b"CONNECT":
            self.refuse(501, "method: got CONNECT, expected another")
            return
        pairs, self._pairs = self._pairs, []
        try:
            head = self._heads.read(method, self._url, version, pairs, keep_alive)
        except Refused as exc:
            self._refuse(exc.answer)
            return
        except httptools.HttpParserError:
            self.refuse(400, f"target: got {shown(self._url.decode('latin-1'))}, expected a path")
            return
        if self._is_broken:
            self._malformed()
            return
        if section:
            self._heads.keep(section, head)
        self._open(head)

    def _open(self, head: Head) -> None:
        self.idle, self.used, self.serving = False, True, True
        size = head.known_length
        if size and len(self._buffer) - self._position >= size:
            start, self._position = self._position, self._position + size
            body = memoryview(self._buffer)[start : start + size]
            self._handler.whole(head, bytes(body) if size < COPIED_BYTES else body)
            return
        self.receiving = True
        self.body_left = 0 if head.chunked else head.length or 0
        self._chunks = Chunks() if head.chunked else None
        self._handler.opened(head)
        if self.body_left - (len(self._buffer) - self._position) > LARGE_BYTES and self.receiving:
            piece = self._buffer[self._position :]
            if self._handler.placed(piece) and self.receiving:
                self._position = len(self._buffer)
                self.body_left -= len(piece)

    def on_url(self, url: bytes) -> None:
        """Part of the target. Called by the parser, as the following."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field."""
        self._pairs.append((name, value))

    def on_headers_complete(self) -> None:
        """The header section is complete."""
        parser = self._parser
        assert parser is not None, "bug: no header section"
        version = parser.get_http_version()
        self._start = parser.get_method(), version, parser.should_keep_alive()

    # The body.

    def _read_body(self) -> None:
        start, data = self._position, self._buffer
        if self._chunks is not None:
            self._position = len(data)
            self._read_chunks(self._chunks, data[start:])
            return
        if start == len(data) and self.body_left:
            return
        piece = data[start : start + self.body_left]
        self._position += len(piece)
        self.body_left -= len(piece)
        self.receiving = self.body_left > 0
        self._handler.received(piece, not self.receiving)

    def _read_chunks(self, chunks: Chunks, data: bytes) -> None:
        body = chunks.decode(data)
        if chunks.complete:
            self._buffer, self._position = chunks.rest, 0
            self._chunks, self.receiving = None, False
        if body or chunks.complete:
            self._handler.received(body, chunks.complete)
        if chunks.error and not self.closed:
            self.refuse(400, chunks.error)

    def body_arrived(self, size: int) -> bool:
        """`size` bytes were received into the request's buffer; returns whether it is complete."""
        self.body_left -= size
        self.receiving = self.body_left > 0
        return not self.receiving

    # Errors.

    def _malformed(self) -> None:
        self.refuse(400, f"malformed HTTP request; expected {self._expected}")

    def _headers_too_long(self) -> None:
        self.refuse(431, f"headers: got more than {self._max_header_bytes} bytes")

    def refuse(self, status: int, message: str) -> None:
        """Read nothing more, and answer with an error."""
        self._refuse(refusal(status, "invalid_input", message))

    def _refuse(self, answer: Answer) -> None:
        self.close()
        self._handler.refused(answer)


_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_TEXT = rb"[\t -~\x80-\xff]"
_SIZE = rb"([0-9A-Fa-f]{1,16})(;" + _TOKEN + _TEXT + rb"*)?"
_FIRST = re.compile(_SIZE + rb"\r\n")
_NEXT = re.compile(rb"\r\n" + _SIZE + rb"\r\n")
_TRAILER = re.compile(rb"(" + _TOKEN + rb"+):" + _TEXT + rb"*\r\n")
_PART_OF_SIZE = rb"([0-9A-Fa-f]{1,16}(;(" + _TOKEN + _TEXT + rb"*)?)?\r?)?"
_PART_OF_FIRST = re.compile(_PART_OF_SIZE)
_PART_OF_NEXT = re.compile(rb"\r?|\r\n" + _PART_OF_SIZE)
_PART_OF_TRAILER = re.compile(rb"\r?|" + _TOKEN + rb"+(:" + _TEXT + rb"*\r?)?")
_EXPECTED = (
    "chunks: malformed or too long; expected a size, its bytes and CRLF, and beside them at most "
    f"{_FRAMING_BYTES} bytes, {_LINE_BYTES} in a line"
)
_OF_FRAMING = (b"content-length", b"transfer-encoding")


class Chunks:
    """Decodes a body in chunks. Extensions and trailers are dropped."""

    def __init__(self) -> None:
        self.complete = False
        self.error = ""
        """The error after the decoded bytes, "" if there is none."""
        self.rest = b""
        """Undecoded bytes; once the body is complete, the bytes after it."""
        self._left = 0
        """Bytes still to be received of the current chunk."""
        self._in_trailers = self._begun = self._more = False
        self._framing_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that another call would decode."""
        return len(self.rest) if self._more else 0

    def decode(self, data: bytes) -> bytes:
        """The body's bytes in `data`; few at a time, see `waiting_bytes`."""
        if self.rest:
            data = self.rest + data
        pieces: list[bytes] = []
        position, size, steps = 0, len(data), _CHUNKS_AT_ONCE
        while steps and not (self.complete or self.error):
            steps -= 1
            if self._left:
                piece = data[position : position + self._left]
                pieces.append(piece)
                position += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            elif self._in_trailers:
                if data.startswith(b"\r\n", position):
                    position += 2
                    self.complete = True
                    break
                match = _TRAILER.match(data, position)
                if match is None:
                    self._check_part(_PART_OF_TRAILER, data[position:])
                    break
                if match[1].lower() in _OF_FRAMING:
                    self.error = f"trailer: got {match[1].decode()}, expected it as a header"
                self._count(match.end() - position)
                position = match.end()
            else:
                match = (_NEXT if self._begun else _FIRST).match(data, position)
                if match is None:
                    part = _PART_OF_NEXT if self._begun else _PART_OF_FIRST
                    self._check_part(part, data[position:])
                    break
                self._begun = True
                if match[2]:
                    self._count(len(match[2]))
                position = match.end()
                self._left = int(match[1], 16)
                self._in_trailers = not self._left
        self.rest = data[position:] if position < size else b""
        self._more = not steps and not self.complete and bool(self.rest)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _count(self, size: int) -> None:
        self._framing_bytes += size
        if self._framing_bytes > _FRAMING_BYTES or size > _LINE_BYTES:
            self.error = _EXPECTED

    def _check_part(self, part: re.Pattern[bytes], rest: bytes) -> None:
        if len(rest) > _LINE_BYTES or part.fullmatch(rest) is None:
            self.error = _EXPECTED
