"""A PNG, JPEG, WebP, GIF or BMP file -> grey levels, by Pillow.

Pillow gets only those parts of a file that hold pixels, after the size in the header was checked.
Metadata (text, profiles, further frames, EXIF) is dropped: a compressed text chunk may be a
decompression bomb, and Pillow's EXIF reader warns through Python's process-wide filters. Of it
the orientation alone is read, here.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from service.errors import InvalidInput, TooLarge, invalid, shown
from service.pictures.headers import (
    PNG_MAGIC,
    Invert,
    check_size,
    describe,
    recognise,
    sniff,
    stated_size,
)
from service.pictures.ink import Grey

_WORKING_SIDE = 512
"""Larger pictures are averaged down to about this side first. That removes a photograph's noise and
bounds the time of the later steps; a digit a tenth of the picture high still has 50 pixels."""

_MAX_SEGMENTS = 16_384
"""Chunks or markers in one file: 16 million RGBA pixels in libpng's 8 KiB chunks are half that."""

_MAX_SCANS = 32
"""Scans of a progressive JPEG. Encoders write about ten; each costs a pass over all pixels."""

_MAX_BLOCKS = 131_072
"""Blocks of up to 255 bytes in a GIF: 16 million pixels without any compression."""

_MAX_RLE_BYTES = 65_536
"""Limit of a BMP's run-length data, decoded here in 0.5 us a byte."""

_MAX_METADATA_BYTES = 65_536
"""Metadata in which an orientation is looked for, decompressed. EXIF begins with it."""

_PNG_PIXEL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_PNG_TEXT_CHUNKS = frozenset((b"tEXt", b"zTXt", b"iTXt"))
_PNG_XMP = b"XML:com.adobe.xmp"
_PNG_PROFILES = (b"Raw profile type exif", b"Raw profile type APP1")
"""Keywords of text chunks in which ImageMagick stores EXIF, in hexadecimal digits."""

_JPEG_PIXEL_SEGMENTS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xDE), 0xE0, 0xEE)) - {0xC8}
"""Frames, tables and scans; of the application segments JFIF's and Adobe's, which define the colour
space. Pillow reads on within a segment whose marker it does not know: metadata could hide there."""
_JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_JPEG_END = b"\xff\xd9"
_JPEG_OTHER_END = bytes.fromhex("a55a3cc396699fe9") * 8 + _JPEG_END
"""Bits that are read as pixels where pixels are missing; libjpeg assumes zeros before the end."""

_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_PROGRESSIVE_FRAMES = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_HUFFMAN_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
"""Frames in which each block takes at least a bit. Arithmetic coding takes less."""
_ARITHMETIC_FRAMES = frozenset((0xC9, 0xCA))

_MAX_ARITHMETIC_PIXELS = 1 << 20
"""Pixels of a JPEG in arithmetic coding, of which a few bytes may hold any number: 16 million in 32
scans, 566 bytes, took 2.7 s (one core, 2026-11-26). Neither cameras nor browsers know it."""

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

_EXIF = b"Exif\0\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

MAX_WEBP_PIXELS = 1 << 23
"""Pixels of a WebP: its decoder takes 18 bytes for each, twice as many as the others."""

Size: TypeAlias = tuple[int, int]
"""Width and height."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file whose pixels are not decoded yet."""

    picture: ImageFile
    orientation: int = 1
    """The EXIF orientation."""
    damage: str = ""
    other: ImageFile | None = None
    """The file with another end, if it has none of its own: no pixel may depend on it."""
    canvas: tuple[Size, Size] | None = None
    """Size of the canvas, and place of the picture on it, if that is smaller."""


def read_grey(
    body: bytes, declared: str, *, field: str, invert: Invert, max_pixels: int, used_pixels: int
) -> tuple[Grey, int]:
    """Luminance, uint8 (height, width), the longer side about 512 at most; and the file's pixels.

    EXIF orientation is applied. Transparent pixels are white, or black where the ink is light: by
    `invert`, and with "auto" where most of the picture is transparent and the rest light.
    `max_pixels` is the limit of the whole request, of which `used_pixels` are taken.

    Raises: InvalidInput (another type, damaged), TooLarge (too many pixels).
    """
    found = sniff(body)
    if found != declared:
        raise invalid(field, describe(body), declared + recognise(body)[1])
    assert found is not None, "bug: no type was declared"
    try:
        if found in _SIZED_FIRST:
            stated = stated_size(body)
            if stated is None:
                raise ValueError("it ends within its header")
            check_size(*stated, field, max_pixels, used_pixels)
            if found == "image/webp" and math.prod(stated) > MAX_WEBP_PIXELS:
                width, height = stated
                raise TooLarge(
                    f"{field}: got {width} x {height} pixels in WebP, expected at most "
                    f"{MAX_WEBP_PIXELS}; scale the picture down, or send it as PNG or JPEG",
                    field=field,
                )
        opened = _OPEN[found](body)
        width, height = opened.canvas[0] if opened.canvas else opened.picture.size
        check_size(width, height, field, max_pixels, used_pixels)
        if opened.damage:
            raise ValueError(opened.damage)
        return _grey(opened, invert), width * height
    except (OSError, SyntaxError, ValueError, IndexError, struct.error, EOFError) as exc:
        raise InvalidInput(f"{field}: not a readable {declared}: {exc}", field=field) from exc


def _grey(opened: _Opened, invert: Invert) -> Grey:
    picture = opened.picture
    # libjpeg can decode to a half, quarter or eighth of the size and to grey: 35 ms instead of 100
    # for a 12-megapixel photograph (EPYC, 2026-11-20). No effect on other formats.
    for each in filter(None, (picture, opened.other)):
        each.draft("L", (2 * _WORKING_SIDE, 2 * _WORKING_SIDE))
        each.load()
    if opened.other is not None and opened.other.tobytes() != picture.tobytes():
        raise ValueError("it ends before its last pixels")
    if picture.mode == "P" and picture.palette is None:
        raise ValueError("it has no palette")
    grey, alpha = _luminance(picture)
    if opened.canvas:
        size, place = opened.canvas
        grey = _placed(grey, size, place)
        alpha = _placed(alpha or Image.new("L", picture.size, 255), size, place)
    if alpha is not None:
        paper = Image.new("L", grey.size, 0 if _is_light_on_clear(grey, alpha, invert) else 255)
        grey = Image.composite(grey, paper, alpha)
    factor = -(-max(grey.size) // _WORKING_SIDE)
    if factor > 1:
        grey = grey.reduce(factor)
    if opened.orientation in _EXIF_TRANSPOSE:
        grey = grey.transpose(_EXIF_TRANSPOSE[opened.orientation])
    return np.asarray(grey)


def _luminance(picture: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """ITU-R 601 luma and opacity, both of mode L; no opacity where every pixel is opaque."""
    transparent = picture.info.get("transparency")
    if picture.mode == "I;16":
        # Pillow clips 16 bits to 255 where it converts them.
        deep = np.asarray(picture)
        grey = Image.fromarray((deep >> 8).astype(np.uint8))
        if not isinstance(transparent, int):
            return grey, None
        return grey, Image.fromarray(np.where(deep == transparent, 0, 255).astype(np.uint8))
    if transparent is not None:
        picture = picture.convert("RGBA")
    if picture.mode not in ("LA", "RGBA"):
        return picture.convert("L"), None
    # Grey first: luminance is linear, so the order makes no difference and saves two RGBA copies.
    return picture.convert("L"), picture.getchannel("A")


def _placed(picture: Image.Image, size: Size, place: Size) -> Image.Image:
    canvas = Image.new("L", size, 0)
    canvas.paste(picture, place)
    return canvas


def _is_light_on_clear(grey: Image.Image, alpha: Image.Image, invert: Invert) -> bool:
    if invert != "auto":
        return invert == "false"
    visible = grey.histogram(alpha)
    count = sum(visible)
    if count >= 0.5 * grey.width * grey.height:
        return False  # a sheet with transparent corners, for example
    return sum(level * pixels for level, pixels in enumerate(visible)) > 160 * count


def _orientation(exif: bytes, xmp: bytes = b"") -> int:
    """Tag 274 of the first directory of a TIFF header, else that of XMP; else 1, upright."""
    order = "<" if exif.startswith(b"II") else ">"
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for index in range(entries):
            entry = struct.unpack_from(order + "HHIH", exif, directory + 2 + 12 * index)
            if entry[0] == 274:
                return int(entry[3])
    except struct.error:
        pass
    found = _XMP_ORIENTATION.search(xmp, 0, _MAX_METADATA_BYTES)
    return int(found[1]) if found else 1


# PNG: https://www.w3.org/TR/png-3


def _open_png(body: bytes) -> _Opened:
    pixels, orientation = _png_pixels(body)
    return _Opened(PngImageFile(io.BytesIO(pixels)), orientation)


def _png_pixels(body: bytes) -> tuple[bytes, int]:
    """The PNG with only the chunks that hold pixels, their checksums verified; its orientation."""
    view, at = memoryview(body), len(PNG_MAGIC)
    kept = [view[:at]]
    exif, texts = b"", dict[bytes, tuple[bytes, memoryview]]()
    for _ in range(_MAX_SEGMENTS):
        if at + 12 > len(body):
            raise ValueError(f"it ends after {len(body)} bytes, before its IEND chunk")
        length, kind = struct.unpack_from(">I4s", body, at)
        end = at + 12 + length
        if end > len(body):
            name = shown(kind.decode("latin-1"))
            raise ValueError(f"its {name} chunk at byte {at} is longer than the rest of the file")
        if kind in _PNG_PIXEL_CHUNKS:
            if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
                name = shown(kind.decode("latin-1"))
                raise ValueError(f"the checksum of its {name} chunk at byte {at} is wrong")
            if (kind == b"IHDR") != (len(kept) == 1):  # Pillow would take the size from the last
                raise ValueError("it begins with another chunk than IHDR, or has two of them")
            kept.append(view[at:end])
        elif kind == b"eXIf":
            exif = bytes(view[at + 8 : end - 4][:_MAX_METADATA_BYTES])
        elif kind in _PNG_TEXT_CHUNKS:
            keyword = body[at + 8 : min(at + 8 + 80, end - 4)].partition(b"\0")[0]
            if keyword == _PNG_XMP or keyword in _PNG_PROFILES:
                texts[keyword] = kind, view[at + 9 + len(keyword) : end - 4]
        if kind == b"IEND":
            return b"".join(kept), _png_orientation(exif, texts)
        at = end
    raise ValueError(f"it has more than {_MAX_SEGMENTS} chunks")


def _png_orientation(exif: bytes, texts: dict[bytes, tuple[bytes, memoryview]]) -> int:
    """The orientation in an eXIf chunk, else in text chunks, by keyword."""
    for keyword in _PNG_PROFILES:
        if not exif and keyword in texts:
            # An empty line, the name, the number of bytes, and lines of digits.
            digits = b"".join(_png_text(*texts[keyword]).split(b"\n")[3:])
            with suppress(ValueError):
                exif = bytes.fromhex(digits[: len(digits) & ~1].decode("latin-1"))
    xmp = _png_text(*texts[_PNG_XMP]) if _PNG_XMP in texts else b""
    return _orientation(exif.removeprefix(_EXIF), xmp)


def _png_text(kind: bytes, content: memoryview) -> bytes:
    """Up to `_MAX_METADATA_BYTES` of the text of a chunk, which follows its keyword."""
    text = bytes(content)
    if kind == b"tEXt":
        return text[:_MAX_METADATA_BYTES]
    is_compressed = kind == b"zTXt" or text[:1] == b"\1"
    # A compressed text has its method, an international one a flag, the method and two names first.
    text = text[1:] if kind == b"zTXt" else text[2:].split(b"\0", 2)[-1]
    if not is_compressed:
        return text[:_MAX_METADATA_BYTES]
    try:
        return zlib.decompressobj().decompress(text, _MAX_METADATA_BYTES)
    except zlib.error:
        return b""


# JPEG: https://www.w3.org/Graphics/JPEG/itu-t81.pdf


def _open_jpeg(body: bytes) -> _Opened:
    segments, orientation, damage, ended = _jpeg_pixels(body)
    picture = JpegImageFile(io.BytesIO(segments + _JPEG_END))
    other = None if ended else JpegImageFile(io.BytesIO(segments + _JPEG_OTHER_END))
    return _Opened(picture, orientation, damage, other)


def _jpeg_pixels(body: bytes) -> tuple[bytes, int, str, bool]:
    """The JPEG without metadata, end marker or trailing bytes.

    Its EXIF orientation, any damage found, and whether it had an end marker.
    """
    kept, at, exif, xmp, scans = [body[:2]], 2, b"", b"", 0
    blocks = scan_bytes = 0
    is_progressive = False  # its first scan has all pixels, at a low precision
    for _ in range(_MAX_SEGMENTS):
        marker = _JPEG_MARKER.search(body, at)
        if marker is None and (is_progressive or not scans):
            raise ValueError(f"it ends after {len(body)} bytes, before its end marker")
        start, content = marker.span() if marker else (len(body), len(body))
        kind = body[start + 1] if marker else 0xD9
        if scans:
            kept.append(body[at:start])
            scan_bytes += start - at
        if kind == 0xD9:  # end of image
            damage = ""
            if 8 * scan_bytes < blocks:
                damage = f"its {scan_bytes} bytes of scans cannot hold {blocks} blocks of 8 x 8"
            if marker is None:
                kept[-1] = kept[-1].rstrip(b"\xff")  # half of an end marker
            return b"".join(kept), _orientation(exif, xmp), damage, marker is not None
        at = content + int.from_bytes(body[content : content + 2], "big")
        if at < content + 2 or at > len(body):
            raise ValueError(f"its segment {kind:#x} at byte {start} has an invalid length")
        if kind == 0xE1 and body.startswith(_EXIF, content + 2):
            exif = body[content + 8 : at]
        elif kind == 0xE1 and body.startswith(_JPEG_XMP, content + 2):
            xmp = body[content + 2 + len(_JPEG_XMP) : at]
        if kind in _HUFFMAN_FRAMES or kind in _ARITHMETIC_FRAMES:
            height, width = struct.unpack_from(">HH", body, content + 3)
            if kind in _HUFFMAN_FRAMES:
                blocks = -(-width // 8) * -(-height // 8)
            elif width * height > _MAX_ARITHMETIC_PIXELS:
                raise ValueError(
                    f"it has {width} x {height} pixels in arithmetic coding, expected at most "
                    f"{_MAX_ARITHMETIC_PIXELS}; save it as PNG"
                )
        is_progressive |= kind in _PROGRESSIVE_FRAMES
        scans += kind == 0xDA
        if scans > _MAX_SCANS:
            raise ValueError(f"it has more than {_MAX_SCANS} scans")
        if kind in _JPEG_PIXEL_SEGMENTS:
            kept.append(body[start:at])
    raise ValueError(f"it has more than {_MAX_SEGMENTS} segments")


# WebP: https://developers.google.com/speed/webp/docs/riff_container


def _open_webp(body: bytes) -> _Opened:
    pixels, orientation, canvas = _webp_pixels(body)
    return _Opened(WebPImageFile(io.BytesIO(pixels)), orientation, canvas=canvas)


def _webp_pixels(body: bytes) -> tuple[bytes, int, tuple[Size, Size] | None]:
    """A WebP of the first frame alone, its EXIF orientation, and its place on the canvas."""
    end = 8 + int.from_bytes(body[4:8], "little")
    if end > len(body):
        raise ValueError(f"it has {len(body)} bytes, and states {end}")
    alpha = frame = b""
    flags = 0x10
    canvas = place = None
    exif = xmp = b""
    for kind, start, stop in _webp_chunks(body, 12, end):
        if kind == b"VP8X" and stop - start >= 10:
            flags = body[start]
            canvas = _uint24(body, start + 4) + 1, _uint24(body, start + 7) + 1
        elif kind == b"ANMF" and not frame:
            if stop - start < 16:
                raise ValueError("its first frame has no header")
            place = 2 * _uint24(body, start), 2 * _uint24(body, start + 3)
            for part, begins, ends in _webp_chunks(body, start + 16, stop):
                if part == b"ALPH":
                    alpha = body[begins - 8 : ends]
                elif part in (b"VP8 ", b"VP8L"):
                    frame = body[begins - 8 : ends]
                    break
        elif kind == b"ALPH" and not frame:
            alpha = body[start - 8 : stop]
        elif kind in (b"VP8 ", b"VP8L") and not frame:
            frame = body[start - 8 : stop]
        elif kind == b"EXIF":
            exif = body[start : min(stop, start + _MAX_METADATA_BYTES)].removeprefix(_EXIF)
        elif kind == b"XMP ":
            xmp = body[start : min(stop, start + _MAX_METADATA_BYTES)]
    size = stated_size(b"RIFF    WEBP" + frame)
    if size is None or not all(size):
        raise ValueError("it has no frame")
    if place is None and canvas not in (None, size):
        raise ValueError(f"its frame is not of the size {canvas} that it states")
    if place is not None and canvas is None:
        raise ValueError("it is an animation without a canvas")
    parts = frame
    if alpha and flags & 0x10 and frame.startswith(b"VP8 "):
        sides = b"".join((side - 1).to_bytes(3, "little") for side in size)
        parts = b"VP8X\x0a\0\0\0\x10\0\0\0" + sides + _even(alpha) + frame
    pixels = b"RIFF" + (4 + len(_even(parts))).to_bytes(4, "little") + b"WEBP" + _even(parts)
    return pixels, _orientation(exif, xmp), _on_canvas(canvas, place, size)


def _webp_chunks(body: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Type, start and end of each chunk's content."""
    for _ in range(_MAX_SEGMENTS):
        if at >= end:
            return
        start = at + 8
        stop = start + int.from_bytes(body[at + 4 : start], "little")
        if start > end or stop > end:
            raise ValueError(f"its chunk at byte {at} is longer than the rest of the file")
        yield body[at : at + 4], start, stop
        at = stop + (stop & 1)
    raise ValueError(f"it has more than {_MAX_SEGMENTS} chunks")


def _uint24(body: bytes, at: int) -> int:
    return int.from_bytes(body[at : at + 3], "little")


def _even(chunk: bytes) -> bytes:
    return chunk + b"\0" * (len(chunk) & 1)


def _on_canvas(canvas: Size | None, place: Size | None, size: Size) -> tuple[Size, Size] | None:
    """Canvas and place of a frame, None if it fills the canvas. Raises: ValueError."""
    if canvas is None or place is None or (canvas == size and place == (0, 0)):
        return None
    if place[0] + size[0] > canvas[0] or place[1] + size[1] > canvas[1]:
        raise ValueError("its first frame reaches beyond its canvas")
    return canvas, place


# GIF: https://www.w3.org/Graphics/GIF/spec-gif89a.txt


def _open_gif(body: bytes) -> _Opened:
    pixels, canvas = _gif_pixels(body)
    return _Opened(GifImageFile(io.BytesIO(pixels)), canvas=canvas)


def _gif_pixels(body: bytes) -> tuple[bytes, tuple[Size, Size] | None]:
    """A GIF of the first frame alone, without extensions, and its place on the canvas."""
    width, height, flags = struct.unpack_from("<HHB", body, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    palette = body[13:at]
    control = b""
    for _ in range(_MAX_BLOCKS):
        kind = body[at : at + 1]
        if kind == b"!":
            if body[at + 1 : at + 3] == b"\xf9\x04" and body[at + 3] & 1:
                control = b"!\xf9\x04\1\0\0" + body[at + 6 : at + 7] + b"\0"
            elif body[at + 1 : at + 3] == b"\xf9\x04":
                control = b""
            at = _gif_blocks_end(body, at + 2)
        elif kind == b",":
            break
        else:
            raise ValueError("it has no frame")
    else:
        raise ValueError(f"it has more than {_MAX_BLOCKS} extensions")
    left, top, own_width, own_height, own_flags = struct.unpack_from("<HHHHB", body, at + 1)
    if not (own_width and own_height and width and height):
        raise ValueError("it has no pixels")
    data = at + 10 + (3 << (own_flags & 7) + 1 if own_flags & 0x80 else 0)
    end = _gif_blocks_end(body, data + 1)
    size = struct.pack("<HH", own_width, own_height)
    screen = b"GIF89a" + size + bytes((flags, 0, 0)) + palette
    frame = b"," + bytes(4) + size + bytes((own_flags,)) + body[at + 10 : end]
    canvas = _on_canvas((width, height), (left, top), (own_width, own_height))
    return screen + control + frame + b";", canvas


def _gif_blocks_end(body: bytes, at: int) -> int:
    """Position after the blocks that begin at `at`. Raises: ValueError."""
    for _ in range(_MAX_BLOCKS):
        if at >= len(body):
            raise ValueError(f"it ends after {len(body)} bytes, before the end of its first frame")
        if not body[at]:
            return at + 1
        at += 1 + body[at]
    raise ValueError(f"it has more than {_MAX_BLOCKS} blocks")


# BMP: https://learn.microsoft.com/windows/win32/gdi/bitmap-storage


def _open_bmp(body: bytes) -> _Opened:
    if body[14] >= 40:
        body = _plain_bmp(body)
    return _Opened(BmpImageFile(io.BytesIO(body)))


def _plain_bmp(body: bytes) -> bytes:
    """The BMP as Pillow reads it right.

    Pillow decodes run lengths pixel by pixel, in Python: here they become 8 bits a pixel. And it
    takes black and white of 4 or 8 bits for pixels of 1 bit, which a longer palette prevents.
    """
    (start,) = struct.unpack_from("<I", body, 10)
    header_bytes, width, height = struct.unpack_from("<Iii", body, 14)
    bits, compression = struct.unpack_from("<HI", body, 28)
    (colours,) = struct.unpack_from("<I", body, 46)
    if bits not in (4, 8) or not (compression in (1, 2) or (compression == 0 and 0 < colours <= 2)):
        return body
    palette_at = 14 + header_bytes
    palette = body[palette_at : min(palette_at + 4 * min(colours or 256, 256), start)]
    if compression == 0:
        rows: bytes | bytearray = body[start:]
    elif bits != (4 if compression == 2 else 8) or height < 0:
        raise ValueError(f"its run lengths are not of {bits} bits a pixel, from below")
    elif len(body) - start > _MAX_RLE_BYTES:
        raise ValueError(
            f"its run lengths have {len(body) - start} bytes, expected at most {_MAX_RLE_BYTES}; "
            "save it as PNG"
        )
    else:
        rows = _run_lengths(memoryview(body)[start:], width, height, bits == 4)
        bits = 8
    palette = palette.ljust(4 << bits, b"\0")
    offset = 54 + len(palette)
    head = struct.pack("<2sIII", b"BM", offset + len(rows), 0, offset)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, 0, 0, 0, 0, 1 << bits, 0)
    return b"".join((head, info, palette, rows))


def _run_lengths(data: memoryview, width: int, height: int, four: bool) -> bytearray:
    """The rows, a byte for each pixel. Raises: ValueError, IndexError."""
    stride = (width + 3) & ~3
    rows = bytearray(stride * height)
    x = y = at = 0
    while y < height:
        count, value = data[at], data[at + 1]
        at += 2
        if count:
            pixels = bytes((value >> 4, value & 15)) * 128 if four else bytes((value,)) * count
        elif value == 0:
            x, y = 0, y + 1
            continue
        elif value == 1:
            break
        elif value == 2:
            x, y = x + data[at], y + data[at + 1]
            at += 2
            continue
        else:
            count = value
            size = (count + 1) // 2 if four else count
            packed = bytes(data[at : at + size])
            if len(packed) < size:
                raise ValueError("it ends within its run lengths")
            pixels = (
                bytes(half for one in packed for half in (one >> 4, one & 15)) if four else packed
            )
            at += size + (size & 1)
        taken = max(min(count, width - x), 0)
        rows[y * stride + x : y * stride + x + taken] = pixels[:taken]
        x += count
        if y == height - 1 and x >= width:
            break  # its end mark may be missing
    return rows


_OPEN: MappingProxyType[str, Callable[[bytes], _Opened]] = MappingProxyType(
    {
        "image/png": _open_png,
        "image/jpeg": _open_jpeg,
        "image/webp": _open_webp,
        "image/gif": _open_gif,
        "image/bmp": _open_bmp,
    }
)

_SIZED_FIRST = frozenset(("image/webp", "image/gif", "image/bmp"))
"""Types whose first bytes state the size, at a place of its own. Pillow's file of another type is
opened without taking any memory for pixels."""
