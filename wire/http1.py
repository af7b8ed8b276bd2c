"""The server's side of an HTTP/1.1 connection (RFC 9112): bytes in, heads and pieces of bodies out.

No socket, clock or event loop. A header section is parsed by httptools; how long the body behind it
is, and where it ends, is decided here. What a client sends behind a request stays in `Http1`,
unparsed, until the next head is asked for.

The rules are RFC 9112's: one Host (3.2), Transfer-Encoding only `chunked` (6.1), trailers dropped
(7.1.2). Requests for an upgrade are answered as if they did not ask.
"""

from __future__ import annotations

import re

import httptools

from wire.errors import ProtocolError, shown
from wire.head import MAX_FIELDS, MAX_TARGET_BYTES, Head, Heads

_COPIED_BYTES = 16 * 1024
"""A body of fewer bytes is copied out of what was read: for it, a view costs more."""

_FRAMING_BYTES = 64 * 1024
"""The most bytes of chunk extensions and trailers in a body."""

_LINE_BYTES = 4096
"""The most bytes of one line of them."""

_CHUNKS_AT_ONCE = 2000
"""Most chunks decoded by one call: 2 ms of work. Other connections run in between."""


class Http1:
    """The state of one connection.

    Args:
        heads: checks headers, and knows those of earlier requests.
        max_header_bytes: the most bytes of a header section.
        expected: what malformed requests are not, for their answer.
    """

    def __init__(self, heads: Heads, max_header_bytes: int, expected: str) -> None:
        self._heads, self._expected = heads, expected
        self._max_header_bytes = max_header_bytes
        self.used = False
        """Whether a request has begun."""
        self.receiving = False
        """Whether the body of the latest request is not complete."""
        self.closed = False
        """Whether nothing more is read."""
        self.body_left = 0
        """Bytes still to be received of a body with Content-Length."""
        self._chunks: Chunks | None = None
        self.buffer = b""
        """What came and is not parsed, from `_position` on."""
        self._position = 0
        self._parser: httptools.HttpRequestParser | None = None
        """Parses the header section that arrives."""
        self.header_bytes = 0
        """Bytes of that section so far, and of empty lines before it."""
        self._url = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._start: tuple[bytes, str, bool] | None = None
        """Method, version and whether the connection is kept, once the section is complete."""
        self._tail = b""
        """The last bytes of the section so far, in which its end may begin."""
        self._line = b""
        """The request line, as far as it has come."""
        self._lines = 0
        """Line ends in that section so far."""

    @property
    def unparsed_bytes(self) -> int:
        """Bytes that came and are not parsed."""
        chunks = 0 if self._chunks is None else len(self._chunks.rest) * self._chunks.more
        return len(self.buffer) - self._position + chunks

    @property
    def in_headers(self) -> bool:
        """Whether a header section is not complete."""
        return self._parser is not None

    @property
    def has_more(self) -> bool:
        """Whether there is something to parse."""
        more = self._chunks is not None and (self._chunks.more or bool(self._chunks.error))
        return more or bool(self.buffer)

    # Bytes of the client.

    def whole(self, data: bytes) -> tuple[Head, bytes | memoryview] | None:
        """A request and its body, if `data` is all of it, behind a header section that is known.

        Else None, and `receive` is to be called. The request before is complete.
        """
        end = data.find(b"\r\n\r\n") + 4
        if end == len(data) or end < 4 or self.buffer or self._parser is not None or self.closed:
            return None
        section = data[:end]
        head = self._heads.known.get(section) or self._heads.find(section)
        if head is None or len(data) - end != head.known_length:
            return None
        self.used, self.header_bytes = True, 0
        return head, data[end:] if head.known_length < _COPIED_BYTES else memoryview(data)[end:]

    def receive(self, data: bytes) -> None:
        """Keep what came."""
        if not self.closed:
            self.buffer, self._position = self.buffer[self._position :] + data, 0

    def next_head(self) -> Head | None:
        """The next head, once it is complete; its body is to be read. Raises: ProtocolError."""
        head = self._read_head()
        self._forget_parsed()
        if head is not None:
            self.used = self.receiving = True
            self.body_left = 0 if head.chunked else head.length or 0
            self._chunks = Chunks() if head.chunked else None
        return head

    def next_piece(self) -> tuple[bytes, bool] | None:
        """The next piece of the body, and whether it is the last; None: none has come.

        Raises: ProtocolError.
        """
        start, data, chunks = self._position, self.buffer, self._chunks
        if chunks is not None:
            piece = chunks.decode(data[start:])
            self.buffer, self._position = chunks.rest if chunks.complete else b"", 0
            self.receiving = not chunks.complete
            if chunks.error and not piece:
                raise self._refused(400, chunks.error)
            if chunks.complete:
                self._chunks = None
            elif not piece:
                return None
            return piece, not self.receiving
        if not self.receiving or (start == len(data) and self.body_left):
            return None
        piece = data[start : start + self.body_left]
        self._position += len(piece)
        self._forget_parsed()
        return piece, self.took(len(piece))

    def took(self, size: int) -> bool:
        """The next `size` bytes of the body came; returns whether it is complete."""
        self.body_left -= size
        self.receiving = self.body_left > 0
        return not self.receiving

    def close(self) -> None:
        """Parse nothing more."""
        self.closed, self.receiving, self.body_left = True, False, 0
        self.buffer, self._position, self._chunks = b"", 0, None
        self._parser, self._pairs, self.header_bytes = None, [], 0

    def _forget_parsed(self) -> None:
        if self._position == len(self.buffer):
            self.buffer, self._position = b"", 0

    # The header section.

    def _read_head(self) -> Head | None:
        data, start = self.buffer, self._position
        found = data.find(b"\r\n\r\n", start)
        end = found + 4 if found >= 0 else 0
        if self._parser is None:
            if end and (head := self._heads.find(data[start:end])) is not None:
                self._position, self.header_bytes = end, 0
                return head
            first = start
            while data[first : first + 1] in (b"\r", b"\n"):  # empty lines, RFC 9112, 2.2
                first += 1
            self.header_bytes += first - start
            if self.header_bytes > self._max_header_bytes:
                raise self._headers_too_long()
            if first == len(data):
                self._position = first
                return None
            if first > start:
                start, found = first, data.find(b"\r\n\r\n", first)
                end = found + 4 if found >= 0 else 0
            self._parser = httptools.HttpRequestParser(self)
            self._url, self._pairs, self._start = b"", [], None
            self._tail = self._line = b""
            self._lines = 0
            self.used = True
        elif self._tail:
            across = (self._tail + data[start : start + 3]).find(b"\r\n\r\n")
            if across >= 0:
                end = start + across + 4 - len(self._tail)
        complete = end > 0
        section = data[start : end if complete else len(data)]
        self._position = start + len(section)
        is_well_formed = self._feed(section, complete)
        self.header_bytes += len(section)
        if self.header_bytes > self._max_header_bytes:
            raise self._headers_too_long()
        if not complete:
            self._tail = (self._tail + section)[-3:]
            return None
        is_first = not self._tail and self.header_bytes == len(section)
        self._parser, self.header_bytes = None, 0
        head = self._check()
        if not is_well_formed:
            raise self._malformed()
        if is_first:
            self._heads.keep(section, head)
        return head

    def _feed(self, section: bytes, complete: bool) -> bool:
        """Parse a part of a header section.

        Returns: whether it is well-formed. Its head may say better what is wrong.

        Raises: ProtocolError.
        """
        assert self._parser is not None, "bug: no header section"
        ends = section.count(b"\n")
        self._lines += ends
        if (fields := self._lines - 1 - complete) > MAX_FIELDS:
            found = f"got at least {fields} fields"
            raise self._refused(431, f"headers: {found}, expected at most {MAX_FIELDS}")
        room = self._max_header_bytes - self.header_bytes
        is_well_formed = True
        try:
            self._parser.feed_data(section[: room + 1])
        except httptools.HttpParserUpgrade:
            pass  # the parser would read no body
        except httptools.HttpParserError:
            if not complete or self._start is None:
                raise self._malformed() from None
            is_well_formed = False
        if (size := len(self._url)) > MAX_TARGET_BYTES:
            found = f"got at least {size} bytes"
            raise self._refused(414, f"target: {found}, expected at most {MAX_TARGET_BYTES}")
        if len(section) > room:
            return is_well_formed
        if not self._line.endswith(b"\n"):
            self._line += section[: section.find(b"\n") + 1 or len(section)]
        # The parser takes several spaces for one: RFC 9112, 3.
        is_broken = b"  " in self._line
        # A lone LF could end the section for the parser, and not here.
        is_broken |= (self._tail[-1:] + section).count(b"\r\n") != ends
        if is_broken or complete == (self._start is None):
            raise self._malformed()
        return is_well_formed

    def _check(self) -> Head:
        """The head of the section that is parsed. Raises: ProtocolError."""
        assert self._start is not None, "bug: the section is not complete"
        method, version, keep_alive = self._start
        self._line = b""
        if method == b"CONNECT":
            raise self._refused(501, "method: got CONNECT, expected another")
        pairs, self._pairs = self._pairs, []
        try:
            return Head(method, self._url, version, pairs, keep_alive, *self._heads.given)
        except ProtocolError:
            self.close()
            raise
        except httptools.HttpParserError:
            found = shown(self._url.decode("latin-1"))
            raise self._refused(400, f"target: got {found}, expected a path") from None

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

    # Errors.

    def _malformed(self) -> ProtocolError:
        return self._refused(400, f"malformed HTTP request; expected {self._expected}")

    def _headers_too_long(self) -> ProtocolError:
        return self._refused(431, f"headers: got more than {self._max_header_bytes} bytes")

    def _refused(self, status: int, message: str) -> ProtocolError:
        self.close()
        return ProtocolError(status, message)


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
        self.more = False
        """Whether another call would decode some of them."""
        self._in_trailers = self._begun = False
        self._framing_bytes = 0

    def decode(self, data: bytes) -> bytes:
        """The body's bytes in `data`; few at a time, see `more`."""
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
        self.more = not steps and not self.complete and bool(self.rest)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _count(self, size: int) -> None:
        self._framing_bytes += size
        if self._framing_bytes > _FRAMING_BYTES or size > _LINE_BYTES:
            self.error = _EXPECTED

    def _check_part(self, part: re.Pattern[bytes], rest: bytes) -> None:
        if len(rest) > _LINE_BYTES or part.fullmatch(rest) is None:
            self.error = _EXPECTED
