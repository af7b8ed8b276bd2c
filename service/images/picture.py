"""A PNG or JPEG of any size -> uint8 (28, 28), normalised like MNIST's images.

Pillow gets only those parts of a file that hold pixels, after the size in the header was checked.
Metadata (text, profiles, animation, EXIF) is dropped: a compressed text chunk may be a
decompression bomb, and Pillow's EXIF reader warns through Python's process-wide filters. A picture
is taken to show one digit.

Source: Y. LeCun, https://yann.lecun.com/exdb/mnist: "size normalized to fit in a 20x20 pixel box
while preserving their aspect ratio ... centered in a 28x28 image by computing the center of mass".
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from lenet.pixels import HEIGHT, WIDTH, Images
from service.errors import InvalidInput, invalid, shown
from service.images.headers import PNG_MAGIC, Invert, check_size, describe, sniff
from service.images.ink import Grey, Ink, find_ink

BOX = 20
"""Longer side of a digit in the 28x28 image, in pixels."""

_CENTRE = 14.0
"""MNIST's centre of mass, as a pixel index: with it 59,998 of the 60,000 training images keep their
position, with 13.5 (the middle of the image) 25 % do."""

_WORKING_SIDE = 512
"""Larger pictures are averaged down to about this side first. That removes a photograph's noise and
bounds the time of the later steps; a digit a tenth of the picture high still has 50 pixels."""

_DARK_ENOUGH = 230.0
"""Fainter ink is stretched to 255. In every MNIST image ink reaches at least 254."""

_MAX_SEGMENTS = 16_384
"""Chunks or markers in one file: 16 million RGBA pixels in libpng's 8 KiB chunks are half that."""

_MAX_SCANS = 32
"""Scans of a progressive JPEG. Encoders write about ten; each costs a pass over all pixels."""

_PNG_PIXEL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_JPEG_PIXEL_SEGMENTS = frozenset((*range(0xC0, 0xD0), *range(0xDA, 0xDE), 0xE0, 0xEE)) - {0xC8}
"""Frames, tables and scans; of the application segments JFIF's and Adobe's, which define the colour
space. Pillow reads on within a segment whose marker it does not know: metadata could hide there."""
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_HUFFMAN_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
"""Frames in which each block takes at least a bit. Arithmetic coding takes less, and is not
checked."""

_EXIF_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF orientation; 1 is upright."""


def digit(
    body: bytes, declared: str, *, field: str, invert: Invert, max_pixels: int, used_pixels: int
) -> tuple[Images, int]:
    """The digit in a picture, cropped, scaled and centred like MNIST's.

    Transparent pixels count as white, EXIF orientation is applied. `invert`: "true" is dark ink on
    light paper, "false" light ink on dark paper, "auto" detects which of the two it is.
    `max_pixels` is the limit of the whole request, of which `used_pixels` are taken.

    Returns: uint8 (1, 28, 28), and how many pixels the picture has.
    Raises: InvalidInput (another type, damaged, no digit), TooLarge (too many pixels).
    """
    found = sniff(body)
    if found != declared:
        advice = f"; send it with Content-Type: {found}" if found else ""
        raise invalid(field, describe(body), declared + advice)
    try:
        picture, orientation, damage = _open(body, found)
        check_size(picture.width, picture.height, field, max_pixels, used_pixels)
        if damage:
            raise ValueError(damage)
        grey = _grey(picture, orientation)
    except (OSError, SyntaxError, ValueError, IndexError, struct.error) as exc:
        raise InvalidInput(f"{field}: not a readable {declared}: {exc}", field=field) from exc
    drawing = find_ink(grey, invert)
    ink, noise = drawing.ink, drawing.noise
    if not ink.any():
        hint = "" if invert == "auto" else f"; invert is {invert}, try auto"
        if picture.has_transparency_data:
            hint += "; transparent pixels count as white, so light ink needs a dark background"
        message = f"{field}: no digit found: the picture is blank or its ink too faint{hint}"
        raise InvalidInput(message, field=field)
    return _centred(_scaled(ink, noise))[np.newaxis], picture.width * picture.height


def _open(body: bytes, found: str) -> tuple[Image.Image, int, str]:
    """The picture, not decoded yet, its EXIF orientation, and any damage found."""
    if found == "image/png":
        return PngImageFile(io.BytesIO(_png_pixels(body))), 1, ""
    pixel_segments, orientation, damage = _jpeg_pixels(body)
    return JpegImageFile(io.BytesIO(pixel_segments)), orientation, damage


def _grey(picture: Image.Image, orientation: int) -> Grey:
    """Luminance, uint8 (height, width), longer side about 512 at most."""
    # libjpeg can decode to a half, quarter or eighth of the size and to grey: 35 ms instead of 100
    # for a 12-megapixel photograph (EPYC, 2026-11-20). No effect on a PNG.
    picture.draft("L", (2 * _WORKING_SIDE, 2 * _WORKING_SIDE))
    picture.load()
    if picture.mode == "P" and picture.palette is None:
        raise ValueError("it has no palette")
    grey = _luminance(picture)
    factor = -(-max(grey.size) // _WORKING_SIDE)
    if factor > 1:
        grey = grey.reduce(factor)
    if orientation in _EXIF_TRANSPOSE:
        grey = grey.transpose(_EXIF_TRANSPOSE[orientation])
    return np.asarray(grey)


def _luminance(picture: Image.Image) -> Image.Image:
    """Mode L: ITU-R 601 luma over white paper."""
    transparent = picture.info.get("transparency")
    if picture.mode == "I;16":
        # Pillow clips 16 bits to 255 where it converts them.
        deep = np.asarray(picture)
        if isinstance(transparent, int):
            deep = np.where(deep == transparent, 65_535, deep)
        return Image.fromarray((deep >> 8).astype(np.uint8))
    if transparent is not None:
        picture = picture.convert("RGBA")
    if picture.mode not in ("LA", "RGBA"):
        return picture.convert("L")
    # Grey first: luminance is linear, so the order makes no difference and saves two RGBA copies.
    white = Image.new("L", picture.size, 255)
    return Image.composite(picture.convert("L"), white, picture.getchannel("A"))


def _png_pixels(body: bytes) -> bytes:
    """The PNG with only the chunks that hold pixels, their checksums verified."""
    view, at = memoryview(body), len(PNG_MAGIC)
    kept = [view[:at]]
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
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    raise ValueError(f"it has more than {_MAX_SEGMENTS} chunks")


def _jpeg_pixels(body: bytes) -> tuple[bytes, int, str]:
    """The JPEG without metadata or trailing bytes, its EXIF orientation, and any damage found."""
    kept, at, orientation, scans = [body[:2]], 2, 1, 0
    blocks = scan_bytes = 0
    for _ in range(_MAX_SEGMENTS):
        marker = _JPEG_MARKER.search(body, at)
        if marker is None:
            raise ValueError(f"it ends after {len(body)} bytes, before its end marker")
        start, content = marker.span()
        kind = body[start + 1]
        if scans:
            kept.append(body[at:start])
            scan_bytes += start - at
        if kind == 0xD9:  # end of image
            damage = ""
            if 8 * scan_bytes < blocks:
                damage = f"its {scan_bytes} bytes of scans cannot hold {blocks} blocks of 8 x 8"
            return b"".join([*kept, marker.group()]), orientation, damage
        at = content + int.from_bytes(body[content : content + 2], "big")
        if at < content + 2 or at > len(body):
            raise ValueError(f"its segment {kind:#x} at byte {start} has an invalid length")
        if kind == 0xE1 and body.startswith(b"Exif\0\0", content + 2):
            orientation = _orientation(body[content + 8 : at])
        if kind in _HUFFMAN_FRAMES:
            height, width = struct.unpack_from(">HH", body, content + 3)
            blocks = -(-width // 8) * -(-height // 8)
        scans += kind == 0xDA
        if scans > _MAX_SCANS:
            raise ValueError(f"it has more than {_MAX_SCANS} scans")
        if kind in _JPEG_PIXEL_SEGMENTS:
            kept.append(body[start:at])
    raise ValueError(f"it has more than {_MAX_SEGMENTS} segments")


def _orientation(exif: bytes) -> int:
    """Tag 274 of the first directory of a TIFF header; 1, upright, if it has none."""
    order = "<" if exif.startswith(b"II") else ">"
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for index in range(entries):
            entry = struct.unpack_from(order + "HHIH", exif, directory + 2 + 12 * index)
            if entry[0] == 274:
                return int(entry[3])
    except struct.error:
        return 1
    return 1


def _scaled(ink: Ink, noise: float) -> Ink:
    """The ink's bounding box, its longer side scaled to `BOX`, and a margin of one pixel.

    A box of 19 to 21 pixels is not resampled, so MNIST's own images stay as they are. Scaling
    makes thin strokes faint, and pencil is faint already: ink below `_DARK_ENOUGH` is stretched.
    """
    drawn = ink > ink.max() * (0.25 if noise else 0.1)
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    longer = max(height, width)
    scale = 1.0 if abs(longer - BOX) <= 1 else BOX / longer
    size_y, size_x = max(1, round(height * scale)), max(1, round(width * scale))
    step_y, step_x = height / size_y, width / size_x
    margin = math.ceil(max(step_y, step_x))
    top, left = int(rows[0]) + margin, int(columns[0]) + margin
    padded = np.zeros((ink.shape[0] + 2 * margin, ink.shape[1] + 2 * margin), np.float32)
    padded[margin:-margin, margin:-margin] = ink
    if scale == 1:
        patch: Ink = padded[top - 1 : top + height + 1, left - 1 : left + width + 1]
    else:
        patch = np.asarray(
            Image.fromarray(padded).resize(
                (size_x + 2, size_y + 2),
                Image.Resampling.BOX if scale <= 1 else Image.Resampling.BICUBIC,
                box=(left - step_x, top - step_y, left + width + step_x, top + height + step_y),
            )
        )
    strokes = float(np.percentile(patch[patch > patch.max() / 2], 90))
    if strokes < _DARK_ENOUGH:
        patch = patch * (255 / strokes)
    clipped: Ink = np.clip(patch, 0, 255)
    return clipped


def _centred(patch: Ink) -> NDArray[np.uint8]:
    """uint8 (28, 28) with the patch's centre of mass at its centre, no ink beyond its edge."""
    height, width = patch.shape
    total = patch.sum(dtype=np.float64)
    top = int(np.floor(_CENTRE - patch.sum(1) @ np.arange(height) / total + 0.5))
    left = int(np.floor(_CENTRE - patch.sum(0) @ np.arange(width) / total + 0.5))
    # The patch's outermost pixels are its margin and may lie outside.
    top, left = min(max(top, -1), HEIGHT + 1 - height), min(max(left, -1), WIDTH + 1 - width)
    field = np.zeros((HEIGHT + 2, WIDTH + 2), np.float32)
    field[top + 1 : top + 1 + height, left + 1 : left + 1 + width] = patch
    return np.rint(field[1:-1, 1:-1]).astype(np.uint8)
