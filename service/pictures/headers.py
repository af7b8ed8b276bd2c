"""Recognises a format by its first bytes, without a library."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import Literal, TypeAlias

from service.errors import shown

Invert: TypeAlias = Literal["auto", "true", "false"]
Digits: TypeAlias = Literal["one", "several"]
"""How many digits each picture shows."""
Doubt: TypeAlias = Literal[
    "several_shapes", "not_a_digit", "looks_inverted", "looks_wider", "looks_transposed"
]
"""Why the answer for an image may mean nothing."""
Doubts: TypeAlias = list[tuple[int, Doubt]]
"""Images of a picture or a request, by their index, and why."""
Between: TypeAlias = Callable[[int], None]
"""Called between two steps of decoding, with the pixels that the next one decodes, times the passes
over them; with 0 for bytes of no picture. It raises to end the work."""

MAX_PIXELS = 1 << 26
"""Maximum pixels of all pictures of a request, and of a picture that a network is trained on."""

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_CONVERT = "; convert it to PNG or JPEG"
_AS_BYTES = "; send its bytes as they are"
_DECODED = "; decode it and send the bytes"
_UNCOMPRESSED = "; send the body uncompressed, or gzip with Content-Encoding: gzip"
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

_PATTERNS = (
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb".{4}ftypavi[fs]", re.DOTALL), "image/avif"),
    # Two bytes would be too few: pixels may have them. The length of the second header follows.
    (re.compile(rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL), "image/bmp"),
)


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
        advice = '; send numbers as JSON, {"images": [...]}, or as text/csv'
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
