"""Header fields of HTTP/2: what is valid (RFC 9113), how large it is, and how ours are written.

Our own header blocks hold literals alone, which need no table and no Huffman code (RFC 7541).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Fields: TypeAlias = Sequence[tuple[bytes, bytes]]


class Malformed(Exception):
    """The header fields of a request break the rules of RFC 9113, 8."""


_FIELD_BYTES = 32  # what a field counts beside its name and value
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"[^\0\r\n \t]([^\0\r\n]*[^\0\r\n \t])?|")
OF_CONNECTIONS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
"""Fields of a connection, for which HTTP/2 has no use: RFC 9113, 8.2.2."""

VARYING = (b"grpc-timeout", b"traceparent", b"x-request-id")
"""Names of fields to which a client may give another value in each request."""

_VARYING_FIELD = re.compile(
    rb"[\0\x10@](?:\x0cgrpc-timeout|\x89\x9a\xca\xc8\xb2MIOj\x7f|"
    rb"\x0btraceparent|\x88M\x83!k\x1d\x85\xa9\?|\x0cx-request-id|\x89\xf2\xb5\x85\xediP\x95\x8d\x27)"
)
"""The beginning of a literal with such a name, as it is or in Huffman's code."""
_LONG = 127
"""The length of a longer value takes further bytes."""


def is_value(value: bytes) -> bool:
    """Whether a field may have this value: RFC 9113, 8.2.1."""
    return _VALUE.fullmatch(value) is not None


def is_field(name: bytes, value: bytes) -> bool:
    """Whether a header section or trailers may have this field: RFC 9113, 8.2."""
    if not _NAME.fullmatch(name) or name in OF_CONNECTIONS or not is_value(value):
        return False
    return name != b"te" or value.lower() == b"trailers"


def list_bytes(fields: Fields) -> int:
    """Size of a header list (RFC 9113, 6.5.2)."""
    return sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields)


def cut(block: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
    """`block` without the values of `VARYING` fields, in pieces, and these values, encoded.

    What looks like such a field may be a part of another one.
    """
    pieces, values, at = [], [], 0
    while found := _VARYING_FIELD.search(block, at):
        value = found.end()
        size = block[value] & _LONG if value < len(block) else _LONG
        end = value + 1 + size
        if size == _LONG or end > len(block):
            break
        pieces.append(block[at:value])
        values.append(block[value:end])
        at = end
    pieces.append(block[at:])
    return tuple(pieces), values


def literals(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block of `fields` that needs no table (RFC 7541, 6.2.2); names in lower case."""
    return b"".join(
        b"\0%b%b%b%b" % (_length(name), name, _length(value), value) for name, value in fields
    )


def lines_block(lines: bytes) -> bytes:
    """A header block of `lines`, header lines as in HTTP/1.1, each with its line end."""
    return literals(line.split(b": ", 1) for line in lines.split(b"\r\n") if line)  # type: ignore[misc]


def _length(text: bytes) -> bytes:
    """RFC 7541, 5.1, with a prefix of 7 bits and without Huffman's code."""
    size = len(text)
    if size < 127:
        return bytes((size,))
    size -= 127
    found = bytearray((127,))
    while size >= 128:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found)


def status_field(status: int) -> bytes:
    """The field :status."""
    return b"\x88" if status == 200 else b"\x08\x03%d" % status
