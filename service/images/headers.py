"""What the first bytes of a picture state, read without a picture library."""

from __future__ import annotations

from typing import Literal, TypeAlias

from service.errors import TooLarge

Invert: TypeAlias = Literal["auto", "true", "false"]

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_SIGNATURES = {
    PNG_MAGIC: "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "a GIF file",
    b"BM": "a BMP file",
    b"RIFF": "a WebP file",
    b"%PDF": "a PDF file",
    b"PK\x03\x04": "an npz or zip archive",
    b"\x93NUMPY": "an npy file",
}
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
    return f"bytes that begin with {content[:8].hex(' ')}"


def stated_size(content: bytes | bytearray, start: int = 0) -> tuple[int, int] | None:
    """Width and height that the PNG or JPEG at `start` states; None if they are not found.

    `content` may end before the picture does, whose rest may be damaged.
    """
    if content.startswith(PNG_MAGIC, start):
        header = content[start + 12 : start + 24]
        if len(header) < 12 or not header.startswith(b"IHDR"):
            return None
        return int.from_bytes(header[4:8], "big"), int.from_bytes(header[8:], "big")
    at = start + 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        segment = content[at : at + 9]
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        if segment[1] in _JPEG_FRAMES:
            return int.from_bytes(segment[7:], "big"), int.from_bytes(segment[5:7], "big")
        # Any number of bytes 0xFF may precede a marker.
        at += 1 if segment[1] == 0xFF else 2 + int.from_bytes(segment[2:4], "big")
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
