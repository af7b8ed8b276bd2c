"""A picture file -> grey levels, by Pillow.

The file is not trusted. It is decoded in a process whose memory is limited; the limits here bound
its time: pixels, passes over them, and parts of the file that Pillow reads one by one, in Python.
"""

from __future__ import annotations

import io
import os
import re
import struct
import warnings
import zlib
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile

from service.errors import InvalidInput, TooLarge, invalid
from service.pictures.headers import Between, Invert, describe, recognise, sniff
from service.pictures.ink import Grey

_NAMES = ("Png", "Jpeg", "WebP", "Gif", "Bmp", "Avif", "Tiff")
_PLUGINS = MappingProxyType({f"image/{name.lower()}": name for name in _NAMES})
"""Pillow's module and class by type. Each is imported when a picture of its type comes."""

_WORKING_SIDE = 512
"""Larger pictures are averaged down to about this side first. That removes a photograph's noise and
bounds the time of the later steps; a digit a tenth of the picture high still has 50 pixels."""

_MAX_READS = 65_536
"""Maximum reads of one file: three for a chunk of a PNG, two for a block of a GIF or a run length
of a BMP. 16 million RGBA pixels in libpng's chunks of 8 KiB take 25,000."""

_MAX_WORK_PIXELS = 1 << 28
"""Maximum pixels times the passes over them, one for each scan of a JPEG. Encoders write about ten
scans; 16 of 16 megapixels take 1.1 s in arithmetic coding (one Xeon core, 2026-11-27)."""

_RUN_LENGTH_PASSES = 32
"""Run lengths of a BMP are decoded in Python: 0.12 us a pixel, as long as so many scans take."""

_MAX_COMPRESSED_TEXTS = 64
"""Maximum profiles and compressed texts of a PNG. Pillow unpacks up to 1 MiB of each, in 2.4 ms."""

MAX_WIDE_PIXELS = 1 << 23
"""Maximum pixels of a WebP or AVIF: their decoders take about 18 bytes for each, twice as many as
the others."""
_WIDE = frozenset(("image/webp", "image/avif"))

_UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, SyntaxError, TypeError, ValueError, struct.error, zlib.error),
)
"""What Pillow raises where a file is damaged, in one of its many formats."""

_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")
"""Not a restart or TEM (01), which have no length."""
_JPEG_ENDS = (b"\xff\xd9", bytes.fromhex("a55a3cc396699fe9") * 8 + b"\xff\xd9")
"""Added to a JPEG without an end marker. Where pixels are missing the second is read as some, and
libjpeg assumes zeros before the first."""

_TILE_WIDTH, _TILE_LENGTH = 322, 323

_TIFF_SCANS = 4
"""Maximum scans of a JPEG in a TIFF, which all are counted with: one for each channel."""
os.environ["LIBTIFF_JPEG_MAX_ALLOWED_SCAN_NUMBER"] = str(_TIFF_SCANS + 1)  # excluded

_EXIF_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition by EXIF orientation; 1 is upright."""


class _File(io.BytesIO):
    """A file of which at most `_MAX_READS` pieces are read."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has too many parts: more than {_MAX_READS} reads")
        return super().read(size)


def read_grey(
    body: bytes,
    declared: str,
    *,
    field: str,
    invert: Invert,
    max_pixels: int,
    used_pixels: int,
    between: Between,
) -> tuple[Grey, int]:
    """Luminance, uint8 (height, width), the longer side about 512 at most; and the file's pixels.

    The orientation of EXIF, or else XMP, is applied. Transparent pixels are white, or black where
    the ink is light: by `invert`, and with "auto" where most of the picture is transparent and the
    rest light. `max_pixels` is the limit of the whole request, of which `used_pixels` are taken.
    `between` gets the number of pixels before they are decoded, times the passes over them.

    Raises: InvalidInput (another type, damaged), TooLarge (too many pixels).
    """
    if sniff(body) != declared:
        raise invalid(field, describe(body), declared + recognise(body)[1])
    most = max_pixels - used_pixels
    used = f", {used_pixels} of which are used" if used_pixels else ""
    allowed = f"at most {max_pixels} in a request{used}; scale the picture down"
    if declared in _WIDE and most > MAX_WIDE_PIXELS:
        most = MAX_WIDE_PIXELS
        allowed = f"at most {most} in {declared}; scale it down, or send it as PNG or JPEG"
    pillows_limit = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata, and sizes above half the limit
        # Pillow refuses more than twice this, a WebP before it takes memory for them.
        Image.MAX_IMAGE_PIXELS = -(-max(most, 1) // 2)
        try:
            picture = _opened(body, declared)
            width, height = picture.size
            if width * height > most:
                got = f"{width} x {height} pixels"
                raise TooLarge(f"{field}: got {got}, expected {allowed}", field=field)
            passes = _passes(picture, body)
            if passes * width * height > _MAX_WORK_PIXELS:
                raise ValueError(f"{passes} passes over it are too many; save it as PNG")
            between(passes * width * height)
            frame = picture.tile[0][1] if declared == "image/gif" else None
            picture, orientation = _loaded(picture, body, declared)
            grey, alpha = _luminance(picture)
        except Image.DecompressionBombError as exc:
            got = re.findall(r"\d+", str(exc))[0]
            raise TooLarge(f"{field}: got {got} pixels, expected {allowed}", field=field) from exc
        except _UNREADABLE as exc:
            raise InvalidInput(f"{field}: not a readable {declared}: {exc}", field=field) from exc
        finally:
            Image.MAX_IMAGE_PIXELS = pillows_limit
    if frame is not None and frame != (0, 0, width, height):
        # The rest of the canvas is transparent.
        place = Image.new("L", grey.size, 0)
        place.paste(alpha.crop(frame) if alpha else 255, frame)
        alpha = place
    if alpha is not None:
        paper = Image.new("L", grey.size, 0 if _is_light_on_clear(grey, alpha, invert) else 255)
        grey = Image.composite(grey, paper, alpha)
    factor = -(-max(grey.size) // _WORKING_SIDE)
    if factor > 1:
        grey = grey.reduce(factor)
    if orientation in _EXIF_TRANSPOSE:
        grey = grey.transpose(_EXIF_TRANSPOSE[orientation])
    return np.asarray(grey), width * height


def _opened(body: bytes, kind: str) -> ImageFile:
    """The first frame, not decoded yet. Raises: one of `_UNREADABLE`, DecompressionBombError."""
    name = _PLUGINS[kind]
    plugin: Any = import_module(f"PIL.{name}ImagePlugin")
    if kind == "image/avif":
        plugin.DEFAULT_MAX_THREADS = 1  # each takes memory
    opener: type[ImageFile] = getattr(plugin, f"{name}ImageFile")
    if kind == "image/png":
        if sum(map(body.count, (b"iCCP", b"iTXt", b"zTXt"))) > _MAX_COMPRESSED_TEXTS:
            raise ValueError(f"it has more than {_MAX_COMPRESSED_TEXTS} profiles and texts")
        opener(_File(body)).verify()  # of the pixels' checksums, which decoding skips
    elif kind == "image/bmp":
        body = _with_full_palette(body)
    return opener(_File(body))


def _loaded(picture: ImageFile, body: bytes, kind: str) -> tuple[ImageFile, Any]:
    """The picture, decoded, and what its file says of the orientation. Raises: likewise."""
    # libjpeg can decode to a half, quarter or eighth of the size and to grey: 35 ms instead of 100
    # for a 12-megapixel photograph (EPYC, 2026-11-20). No effect on other formats.
    draft = "L", (2 * _WORKING_SIDE, 2 * _WORKING_SIDE)
    picture.draft(*draft)
    try:
        picture.load()
    except OSError:
        if kind != "image/jpeg" or picture.info.get("progressive"):
            raise
        # It may lack nothing but its end marker: then no pixel depends on what follows.
        ends = [_opened(body.rstrip(b"\xff") + end, kind) for end in _JPEG_ENDS]
        for each in ends:
            each.draft(*draft)
            each.load()
        picture, other = ends
        if picture.tobytes() != other.tobytes():
            raise ValueError("it ends before its last pixels") from None
    if profile := picture.info.get("Raw profile type APP1"):  # as older ImageMagick calls it
        picture.info.setdefault("Raw profile type exif", profile)
    try:
        return picture, picture.getexif().get(274)
    except _UNREADABLE:
        return picture, None


def _passes(picture: ImageFile, body: bytes) -> int:
    """How often each pixel is visited: by scans of a JPEG, opened up to its first, or in a TIFF."""
    if picture.info.get("compression") in (1, 2):
        return _RUN_LENGTH_PASSES
    if picture.format == "TIFF":
        width, height = picture.size
        return max(1, -(-_tiff_pixels(picture, body) // (width * height)))
    if picture.format != "JPEG":
        return 1
    assert picture.fp is not None, "bug: a picture without its file"
    at, scans = picture.fp.tell(), 1
    for _ in range(_MAX_READS):
        marker = _JPEG_MARKER.search(body, at)
        if marker is None or marker[0] == b"\xff\xd9":
            return scans
        scans += marker[0] == b"\xff\xda"
        at = marker.end() + int.from_bytes(body[marker.end() : marker.end() + 2], "big")
    raise ValueError(f"it has too many parts: more than {_MAX_READS} segments")


def _tiff_pixels(picture: Any, body: bytes) -> int:
    """Pixels of all strips that Pillow reads, or whole tiles that libtiff does, times their scans.

    Raises: ValueError (sides of tiles that Pillow may skip, and libtiff would not).
    """
    tags = picture.tag_v2
    order, start = "<" if body[:1] == b"I" else ">", tags.offset + 2
    (count,) = struct.unpack_from(order + "H", body, tags.offset)
    for tag, kind in struct.iter_unpack(order + "HH8x", body[start : start + 12 * count]):
        if tag in (_TILE_WIDTH, _TILE_LENGTH) and kind not in (3, 4):
            raise ValueError(f"the sides of its tiles have type {kind}, expected 3 or 4")
    pixels = sum((right - left) * (low - top) for _, (left, top, right, low), *_ in picture.tile)
    if _TILE_WIDTH in tags:
        across, down = -(-tags[256] // tags[_TILE_WIDTH]), -(-tags[257] // tags[_TILE_LENGTH])
        area = across * tags[_TILE_WIDTH] * down * tags[_TILE_LENGTH]
        pixels = max(pixels, area * (tags[277] if tags.get(284) == 2 else 1))  # planes
    return int(pixels) * (_TIFF_SCANS if picture.info["compression"] == "jpeg" else 1)


def _with_full_palette(body: bytes) -> bytes:
    """The BMP with all colours of its palette, where it has only 1 or 2, for 4 or 8 bits a pixel.

    Pillow 13 reads pixels of black and white as 1 bit each, whatever the file says.
    """
    colours, bits = int.from_bytes(body[46:50], "little"), body[28]
    if body[14] < 40 or bits not in (4, 8) or colours not in (1, 2):
        return body
    at = 14 + body[14]
    palette = body[at : at + 4 * colours].ljust(4 << bits, b"\0")
    start = int.from_bytes(body[10:14], "little") + len(palette) - 4 * colours
    head = body[:10] + start.to_bytes(4, "little") + body[14:46] + (1 << bits).to_bytes(4, "little")
    return head + body[50:at] + palette + body[at + 4 * colours :]


def _luminance(picture: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """ITU-R 601 luma and opacity, both of mode L; no opacity where every pixel is opaque."""
    if picture.mode == "P" and picture.palette is None:
        raise ValueError("it has no palette")
    if picture.mode in ("I", "F"):
        raise ValueError("it has 32 bits a pixel and channel, expected at most 16")
    transparent = picture.info.get("transparency")
    if picture.mode.startswith("I;16"):
        # Pillow clips 16 bits to 255 where it converts them.
        deep, bits = np.asarray(picture), 16
        if tags := getattr(picture, "tag_v2", None):  # of a TIFF
            bits = tags[258][0]
            if tags.get(262, 0) == 0:  # white is zero
                deep = 65_535 - deep
        grey = Image.fromarray((deep >> (bits - 8)).astype(np.uint8))
        if not isinstance(transparent, int):
            return grey, None
        return grey, Image.fromarray(np.where(deep == transparent, 0, 255).astype(np.uint8))
    if picture.mode == "La":
        picture = picture.convert("LA")
    if transparent is not None or picture.mode in ("PA", "RGBa"):
        picture = picture.convert("RGBA")
    if picture.mode not in ("LA", "RGBA"):
        return picture.convert("L"), None
    # Grey first: luminance is linear, so the order makes no difference and saves two RGBA copies.
    return picture.convert("L"), picture.getchannel("A")


def _is_light_on_clear(grey: Image.Image, alpha: Image.Image, invert: Invert) -> bool:
    if invert != "auto":
        return invert == "false"
    visible = grey.histogram(alpha)
    count = sum(visible)
    if count >= 0.5 * grey.width * grey.height:
        return False  # a sheet with transparent corners, for example
    return sum(level * pixels for level, pixels in enumerate(visible)) > 160 * count
