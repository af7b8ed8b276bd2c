"""How long a body will take to decode, estimated from what its headers state."""

from __future__ import annotations

import re

from service.pictures.headers import BMP, PNG_MAGIC, WEBP, check_size, stated_size

CHEAP_S = 0.03
"""Longer jobs leave one process free for short ones. A picture of a megapixel takes 5 to 15 ms."""

# One core of a Xeon at 2.1 GHz, 2026-11-22.
_PICTURE_S = 3e-4
_SMALL_PICTURE_S = 1e-3
"""Time of a picture in a small form: 0.3 ms, up to 6 ms if surroundings are searched."""
_PIXEL_S = 1.2e-8
_WEBP_PIXEL_S = 3e-8
_BODY_BYTE_S = 1.8e-8
_MESSAGE_BYTE_S = 2.5e-8

_SMALL_MULTIPART_BYTES = 256 * 1024
_COUNTED_BYTES = 1 << 20
"""Parts and scans are counted up to this size, in 0.5 ms. Larger bodies are costly anyway."""

_FEW_PICTURES = 64
"""Pictures of a small multipart body whose headers are read before it is decoded."""

_PICTURE = re.compile(
    b"|".join((re.escape(PNG_MAGIC), rb"\xff\xd8\xff", rb"GIF8[79]a", WEBP.pattern, BMP.pattern)),
    re.DOTALL,
)
_BOUNDARY = re.compile(r"""boundary="?([^";]+)""", re.IGNORECASE)
_JPEG = b"\xff\xd8"
_SCAN = b"\xff\xda"


def message_cost_s(message_bytes: int) -> float:
    """Seconds for a ModelInferRequest with typed contents."""
    return _MESSAGE_BYTE_S * message_bytes


def body_cost_s(
    content_type: str, body: bytes | bytearray | memoryview, max_picture_pixels: int
) -> float:
    """Seconds for a body of HTTP.

    Raises:
        TooLarge: it is a picture that states more pixels than allowed.
    """
    seconds = _BODY_BYTE_S * len(body)
    kind = content_type.lower()
    size, body = len(body), bytes(body[:_COUNTED_BYTES])
    if kind.startswith("multipart/"):
        return seconds + _multipart_s(content_type, body, size, max_picture_pixels)
    if not kind.startswith("image/"):
        return seconds
    stated = stated_size(body)
    if stated is None:
        # Only of a JPEG it may be further on.
        pixels = max_picture_pixels if body.startswith(_JPEG) else 0
        return seconds + _PIXEL_S * pixels
    check_size(*stated, "body", max_picture_pixels)
    pixels = stated[0] * stated[1]
    if WEBP.match(body):
        return seconds + _PICTURE_S + _WEBP_PIXEL_S * pixels
    if _PIXEL_S * pixels < CHEAP_S and body.startswith(_JPEG):
        pixels *= max(1, body.count(_SCAN))
    return seconds + _PICTURE_S + _PIXEL_S * pixels


def _multipart_s(content_type: str, body: bytes, size: int, max_picture_pixels: int) -> float:
    """Seconds for the pictures of a multipart body of `size` bytes that begins with `body`."""
    if size > _SMALL_MULTIPART_BYTES:
        boundary = _BOUNDARY.search(content_type)
        line = b"--" + boundary[1].encode("latin-1", "replace") if boundary else b"--"
        parts = body.count(line) * max(1, size / _COUNTED_BYTES)
        return CHEAP_S + _PICTURE_S * parts
    pictures, pixels_s = 0, 0.0
    for found in _PICTURE.finditer(body):
        stated = stated_size(body, found.start())
        pictures += 1
        if stated is None or pictures > _FEW_PICTURES:
            return _PIXEL_S * max_picture_pixels
        pixel_s = _WEBP_PIXEL_S if found[0].startswith(b"RIFF") else _PIXEL_S
        pixels_s += pixel_s * stated[0] * stated[1]
    return _SMALL_PICTURE_S * pictures + pixels_s * max(1, body.count(_SCAN))
