"""Reads the format and size of a picture from its first bytes, without a library."""

from __future__ import annotations

import re
import struct
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import Literal, TypeAlias

from service.errors import TooLarge, shown

Invert: TypeAlias = Literal["auto", "true", "false"]
Digits: TypeAlias = Literal["one", "several"]
"""How many digits each picture shows."""
Doubt: TypeAlias = Literal["several_shapes", "not_a_digit"]
"""Why the answer for an image may mean nothing."""
Between: TypeAlias = Callable[[int], None]
"""Called between two steps of decoding, with the pixels that the next one decodes, times the passes
over them; with 0 for bytes of no picture. It raises to end the work."""

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_CONVERT = "; convert it to PNG or JPEG"
_AS_BYTES = "; send its bytes as they are"
_DECODED = "; decode it and send the bytes"
_UNCOMPRESSED = "; send the body uncompressed"
_ONE_ARRAY = "; save one array with np.save"
_SIGNATURES = {
    PNG_MAGIC: ("image/png", "; send it with Content-Type: image/png"),
    b"\xff\xd8\xff": ("image/jpeg", "; send it with Content-Type: image/jpeg"),
    b"GIF87a": ("image/gif", "; send it with Content-Type: image/gif"),
    b"GIF89a": ("image/gif", "; send it with Content-Type: image/gif"),
    b"%PDF": ("a PDF file", _CONVERT),
    b"II*\0": ("image/tiff", "; send it with Content-Type: image/tiff"),
    b"MM\0*": ("image/tiff", "; send it with Content-Type: image/tiff"),
    b"PK\x03\x04": ("an npz or zip archive", _ONE_ARRAY),
    b"\x80\x04\x95": ("a Python pickle", _ONE_ARRAY),
    b"\x93NUMPY": ("an npy file", "; send it with Content-Type: application/x-npy"),
    b"\0\0\x08\x03": ("an IDX file", "; send what follows its header of 16 bytes"),
    b"\x1f\x8b": ("gzip data", _UNCOMPRESSED),
    b"\x28\xb5\x2f\xfd": ("zstd data", _UNCOMPRESSED),
    b"\x89PNG": ("a PNG without its line ends", f"{_AS_BYTES}, with curl: --data-binary @FILE"),
    b"\xef\xbf\xbd": ("a file that was read as text", _AS_BYTES),
    b"\xc2\x89PNG": ("a PNG that was read as text", _AS_BYTES),
    b"iVBORw0KGgo": ("a PNG in base64", _DECODED),
    b"/9j/": ("a JPEG in base64", _DECODED),
    b"data:": ("a data: URL", _DECODED),
}
"""File signatures: name of the format, and advice."""

_BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC"}
"""Brands at byte 8 of ISO base media files."""

_FILE = re.compile(r"@?[\w./~\\:-]{1,250}\.\w{1,5}", re.ASCII)
_NUMBERS = re.compile(r"[\d\s.,;+-]+", re.ASCII)
_READ_BYTES = 256

WEBP = re.compile(rb"RIFF.{4}WEBP", re.DOTALL)
BMP = re.compile(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL)
"""Two bytes would be too few: pixels may have them. The length of the second header follows."""
_AVIF = re.compile(rb".{4}ftypavi[fs]", re.DOTALL)
_PATTERNS = ((WEBP, "image/webp"), (BMP, "image/bmp"), (_AVIF, "image/avif"))
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_MAX_JPEG_SEGMENTS = 64
"""Looked at for a JPEG's size. Cameras write about ten before it."""


def sniff(content: bytes) -> str | None:
    """The picture type that the first bytes state, None if they are of no picture read here."""
    found, _ = _signature(content)
    return found if found.startswith("image/") else None


def describe(content: bytes) -> str:
    """The format that `content` appears to have, for a message."""
    return recognise(content)[0] or f"bytes that begin with {content[:8].hex(' ')}"


def recognise(content: bytes) -> tuple[str, str]:
    """Apparent format of `content` and advice, for a message; "" if it is unknown."""
    found, advice = _signature(content)
    if found:
        return found, advice
    beginning = content[:_READ_BYTES]
    if beginning[4:8] == b"ftyp" and (brand := _BRANDS.get(beginning[8:12])):
        return f"a file in {brand}", _CONVERT
    text = _text(beginning)
    if not text:
        return "", ""
    if "<svg" in text:
        return "an SVG file", _CONVERT
    if text.startswith("{"):
        advice = "; send it with Content-Type: application/json"
    elif len(content) < _READ_BYTES and _FILE.fullmatch(text):
        advice = "; with curl: --data-binary @FILE"
    elif _NUMBERS.fullmatch(text):
        advice = '; send numbers as JSON, {"images": [...]}'
    return f"the text {shown(text)}", advice


def _signature(content: bytes) -> tuple[str, str]:
    for signature, found in _SIGNATURES.items():
        if content.startswith(signature):
            return found
    for pattern, name in _PATTERNS:
        if pattern.match(content):
            return name, f"; send it with Content-Type: {name}"
    return "", ""


def _text(beginning: bytes) -> str:
    """The text that begins so, "" if it is none."""
    try:
        text = getincrementaldecoder("utf-8")().decode(beginning).strip()
    except UnicodeDecodeError:
        return ""
    return text if all(one.isprintable() or one.isspace() for one in text) else ""


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
