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
from numpy.typing import NDArray
from PIL import Image, ImageChops
from PIL.ImageFile import ImageFile

from service.errors import InvalidInput, TooLarge, invalid
from service.pictures.headers import Between, Invert, describe, recognise, sniff
from service.pictures.shapes import Grey

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

_MAX_DECODED_BYTES = 144 << 20
"""Maximum bytes of one picture's decoded pixels, with what its decoder keeps beside them."""

_MAX_WIDE_PIXELS = 1 << 23
"""Maximum pixels of a WebP or AVIF: their decoders take about 18 bytes for each."""
_WIDE = frozenset(("image/webp", "image/avif"))

_MODE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}
"""Bytes of a pixel in Pillow's memory. Other modes have 4."""

_STRIP_PIXELS = 1 << 18
"""Pixels that are made grey at a time."""

_DRAFT = "L", (2 * _WORKING_SIDE, 2 * _WORKING_SIDE)
"""libjpeg can decode to a half, quarter or eighth of the size and to grey: 35 ms instead of 100 for
a 12-megapixel photograph (EPYC, 2026-11-20). No effect on other formats."""

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

    Raises: InvalidInput (another type, damaged), TooLarge (too many pixels, too much memory).
    """
    if sniff(body) != declared:
        raise invalid(field, describe(body), declared + recognise(body)[1])
    most = max_pixels - used_pixels
    used = f", {used_pixels} of which are used" if used_pixels else ""
    allowed = f"at most {max_pixels} in a request{used}; scale the picture down"
    if declared in _WIDE and most > _MAX_WIDE_PIXELS:
        most = _MAX_WIDE_PIXELS
        allowed = f"at most {most} in {declared}; scale it down, or send it as PNG or JPEG"
    pillows_limit = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata, and sizes above half the limit
        # Pillow refuses more than twice this, a WebP before it takes memory for them.
        Image.MAX_IMAGE_PIXELS = -(-max(most, 1) // 2)
        try:
            picture = _opened(body, declared)
            width, height = picture.size
            got = f"{width} x {height} pixels"
            if width * height > most:
                raise TooLarge(f"{field}: got {got}, expected {allowed}", field=field)
            passes = _passes(picture, body)
            if passes * width * height > _MAX_WORK_PIXELS:
                raise ValueError(
                    f"{passes} passes over it are too many; save it as PNG or baseline JPEG"
                )
            needed = _beside_bytes(picture, passes)
            picture.draft(*_DRAFT)
            needed += picture.width * picture.height * _MODE_BYTES.get(picture.mode, 4)
            if needed > _MAX_DECODED_BYTES:
                raise TooLarge(
                    f"{field}: got {got}, which take {needed} bytes to decode, expected at most "
                    f"{_MAX_DECODED_BYTES}; scale it down, or send it as baseline JPEG",
                    field=field,
                )
            between(passes * width * height)
            frame = picture.tile[0][1] if declared == "image/gif" else None
            picture, orientation = _loaded(picture, body, declared)
            grey = _averaged(picture, frame, invert)
        except Image.DecompressionBombError as exc:
            got = re.findall(r"\d+", str(exc))[0]
            raise TooLarge(f"{field}: got {got} pixels, expected {allowed}", field=field) from exc
        except _UNREADABLE as exc:
            raise InvalidInput(f"{field}: not a readable {declared}: {exc}", field=field) from exc
        finally:
            Image.MAX_IMAGE_PIXELS = pillows_limit
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
    """The drafted picture, decoded, and what its file says of the orientation. Raises: likewise."""
    try:
        picture.load()
    except OSError:
        if kind != "image/jpeg" or picture.info.get("progressive"):
            raise
        # It may lack nothing but its end marker: then no pixel depends on what follows.
        ends = [_opened(body.rstrip(b"\xff") + end, kind) for end in _JPEG_ENDS]
        for each in ends:
            each.draft(*_DRAFT)
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


def _beside_bytes(picture: Any, passes: int) -> int:
    """What the decoder of a TIFF or JPEG keeps at most, beside the pixels."""
    pixels = picture.width * picture.height
    if picture.format == "TIFF":  # a strip or tile, which may be the whole picture
        return int(pixels * _MODE_BYTES.get(picture.mode, 4))
    if picture.format != "JPEG" or passes == 1:
        return 0
    # Coefficients of all scans, 2 bytes each.
    across, down = zip(*(layer[1:3] for layer in picture.layer), strict=True)
    areas = sum(x * y for x, y in zip(across, down, strict=True))
    return int(2 * pixels * areas / (max(across) * max(down)))


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


def _averaged(picture: Image.Image, frame: Any, invert: Invert) -> Image.Image:
    """Luminance, its longer side averaged down to `_WORKING_SIDE`, transparent pixels on paper.

    `frame` is the part of a GIF that is not transparent. One strip after another: whole copies in
    other modes would take twice the picture's memory.
    """
    width, height = picture.size
    factor = -(-max(width, height) // _WORKING_SIDE)
    rows = factor * max(1, _STRIP_PIXELS // (factor * width))
    deep_range = _deep_range(picture, rows) if picture.mode.startswith("I;16") else (0, 0)
    greys, alphas, visible = [], [], [0] * 256
    if frame == (0, 0, width, height):
        frame = None
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        is_whole = bottom - top == height
        box = None if is_whole else (0, top, width, bottom)
        grey, alpha = _luminance(picture, box, deep_range)
        if frame is not None:
            # The rest of the canvas is transparent.
            place = Image.new("L", grey.size, 0)
            first, last = (min(max(edge - top, 0), grey.height) for edge in frame[1::2])
            within = (frame[0], first, frame[2], last)
            if first < last:
                place.paste(alpha.crop(within) if alpha else 255, within)
            alpha = place
        if alpha is not None:
            visible = [sum(both) for both in zip(visible, grey.histogram(alpha), strict=True)]
            grey = Image.composite(grey, Image.new("L", grey.size, 0), alpha)
            alphas.append(alpha.reduce(factor) if factor > 1 else alpha)
        greys.append(grey.reduce(factor) if factor > 1 else grey)
    grey = _joined(greys)
    if not alphas or _is_light_on_clear(visible, width * height, invert):
        return grey
    return ImageChops.add(grey, ImageChops.invert(_joined(alphas)))


def _joined(strips: list[Image.Image]) -> Image.Image:
    """One below another."""
    if len(strips) == 1:
        return strips[0]
    joined = Image.new("L", (strips[0].width, sum(strip.height for strip in strips)))
    top = 0
    for strip in strips:
        joined.paste(strip, (0, top))
        top += strip.height
    return joined


def _deep(part: Image.Image, whole: Image.Image) -> tuple[NDArray[np.uint16], int]:
    """The levels of a part of mode I;16, white the highest, and the bits that they may have."""
    levels = np.asarray(part)
    if not (tags := getattr(whole, "tag_v2", None)):  # of a TIFF
        return levels, 16
    return 65_535 - levels if tags.get(262, 0) == 0 else levels, tags[258][0]


def _deep_range(picture: Image.Image, rows: int) -> tuple[int, int]:
    """The lowest level that becomes 0, and the bits of which the highest 8 are taken.

    Microscopes and scanners use a small part of 16 bits, which in 8 would be a few levels.
    """
    low, high, bits = 65_535, 0, 16
    for top in range(0, picture.height, rows):
        bottom = min(top + rows, picture.height)
        levels, bits = _deep(picture.crop((0, top, picture.width, bottom)), picture)
        low, high = min(low, int(levels.min())), max(high, int(levels.max()))
    used_bits = (high - low).bit_length()
    return (low, used_bits) if 8 < used_bits <= bits - 3 else (0, bits)


def _luminance(
    whole: Image.Image, box: tuple[int, int, int, int] | None, deep_range: tuple[int, int]
) -> tuple[Image.Image, Image.Image | None]:
    """ITU-R 601 luma and opacity of a part, both of mode L; no opacity where all is opaque.

    `deep_range`: see `_deep_range`.
    """
    if whole.mode == "P" and whole.palette is None:
        raise ValueError("it has no palette")
    if whole.mode in ("I", "F"):
        raise ValueError("it has 32 bits a pixel and channel, expected at most 16")
    picture = whole if box is None else whole.crop(box)
    transparent = picture.info.get("transparency")
    if picture.mode.startswith("I;16"):
        # Pillow clips 16 bits to 255 where it converts them.
        (deep, _), (low, bits) = _deep(picture, whole), deep_range
        grey = Image.fromarray(((deep - low) >> (bits - 8)).astype(np.uint8))
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


def _is_light_on_clear(visible: list[int], pixels: int, invert: Invert) -> bool:
    """By the histogram of the pixels that are not quite transparent."""
    if invert != "auto":
        return invert == "false"
    count = sum(visible)
    if count >= 0.5 * pixels:
        return False  # a sheet with transparent corners, for example
    return sum(level * pixels for level, pixels in enumerate(visible)) > 160 * count
