"""What the first bytes of a picture state, read without a picture library."""

from __future__ import annotations

import re
import struct
from typing import Literal, TypeAlias

from service.errors import TooLarge

Invert: TypeAlias = Literal["auto", "true", "false"]
Digits: TypeAlias = Literal["one", "several"]
"""How many digits each picture shows."""
Doubt: TypeAlias = Literal["several_shapes", "not_a_digit"]
"""Why the answer for an image may mean nothing."""

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_SIGNATURES = {
    PNG_MAGIC: "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"%PDF": "a PDF file",
    b"PK\x03\x04": "an npz or zip archive",
    b"\x93NUMPY": "an npy file",
}
WEBP = re.compile(rb"RIFF.{4}WEBP", re.DOTALL)
BMP = re.compile(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL)
"""Two bytes would be too few: pixels may have them. The length of the second header follows."""
_PATTERNS = ((WEBP, "image/webp"), (BMP, "image/bmp"))
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_MAX_JPEG_SEGMENTS = 64
"""Looked at for a JPEG's size. Cameras write about ten before it."""


def sniff(content: bytes) -> str | None:
    """The picture type that the first bytes state, None if they are of no picture read here."""
    found = describe(content)
    return found if found.startswith("image/") else None


def describe(content: bytes) -> str:
    """What `content` appears to be, for a message."""
    for signature, name in _SIGNATURES.items():
        if content.startswith(signature):
            return name
    for pattern, name in _PATTERNS:
        if pattern.match(content):
            return name
    return f"bytes that begin with {content[:8].hex(' ')}"


def stated_size(content: bytes | bytearray, start: int = 0) -> tuple[int, int] | None:
    """Width and height that the picture at `start` states; None if they are not found.

    `content` may end before the picture does, whose rest may be damaged.
    """
    if content.startswith(PNG_MAGIC, start):
        header = content[start + 12 : start + 24]
        if len(header) < 12 or not header.startswith(b"IHDR"):
            return None
        return int.from_bytes(header[4:8], "big"), int.from_bytes(header[8:], "big")
    if content.startswith(b"\xff\xd8", start):
        return _jpeg_size(content, start + 2)
    header = content[start : start + 30]
    if header.startswith((b"GIF87a", b"GIF89a")) and len(header) >= 10:
        return int.from_bytes(header[6:8], "little"), int.from_bytes(header[8:10], "little")
    if WEBP.match(header):
        return _webp_size(header)
    if BMP.match(header) and len(header) >= 26:
        if header[14] == 12:
            return int.from_bytes(header[18:20], "little"), int.from_bytes(header[20:22], "little")
        width, height = struct.unpack_from("<Ii", header, 18)
        return width, abs(height)  # negative where rows begin at the top
    return None


def _jpeg_size(content: bytes | bytearray, at: int) -> tuple[int, int] | None:
    for _ in range(_MAX_JPEG_SEGMENTS):
        segment = content[at : at + 9]
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        if segment[1] in _JPEG_FRAMES:
            return int.from_bytes(segment[7:], "big"), int.from_bytes(segment[5:7], "big")
        # Any number of bytes 0xFF may precede a marker.
        at += 1 if segment[1] == 0xFF else 2 + int.from_bytes(segment[2:4], "big")
    return None


def _webp_size(header: bytes | bytearray) -> tuple[int, int] | None:
    """Size of the canvas, or of the only frame."""
    kind = header[12:16]
    if kind == b"VP8X" and len(header) == 30:
        width, height = (int.from_bytes(header[at : at + 3], "little") for at in (24, 27))
        return width + 1, height + 1
    if kind == b"VP8 " and len(header) == 30 and header[23:26] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and len(header) >= 25 and header[20] == 0x2F:
        bits = int.from_bytes(header[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


def check_size(width: int, height: int, field: str, max_pixels: int, used_pixels: int = 0) -> None:
    """Raise TooLarge if a picture has more pixels than are left of a request's `max_pixels`."""
    if width * height > max_pixels - used_pixels:
        used = f", {used_pixels} of which are used" if used_pixels else ""
        raise TooLarge(
            f"{field}: got {width} x {height} pixels, expected at most {max_pixels} in a "
            f"request{used}; scale the picture down",
            field=field,
        )
