"""A PNG or JPEG of any size -> the uint8 (28, 28) that MNIST would have made of it.

It refuses to trust a container: Pillow sees only the parts of a file that hold pixels, after the
sizes in the header were checked. Metadata (text, profiles, animation, EXIF) is left out, because a
compressed text chunk is a bomb and Pillow's EXIF reader warns through Python's process-wide
filters. It refuses to find several digits in one picture.

Source: Y. LeCun, https://yann.lecun.com/exdb/mnist: "size normalized to fit in a 20x20 pixel box
while preserving their aspect ratio ... centered in a 28x28 image by computing the center of mass".
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from lenet.pixels import HEIGHT, WIDTH, Images
from service.errors import InvalidInput, TooLarge

Invert: TypeAlias = Literal["auto", "true", "false"]

Grey: TypeAlias = NDArray[np.uint8]
Ink: TypeAlias = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)

BOX = 20
"""The longer side of a digit inside its 28x28 field, in pixels."""

_CENTRE = 14.0
"""Where MNIST puts the centre of mass, in pixel indices: with it 59,998 of the 60,000 training
images stay where they are, with 13.5 (the middle of the field) 25 % do."""

_WORKING_SIDE = 512
"""Larger pictures are averaged down to about this first: it takes the noise out of a photograph,
bounds the time of what follows, and a digit a tenth of the picture high still has 50 pixels."""

_SURFACE_SIDE = 48
"""The paper's light is fitted on a copy of this size; it changes slowly."""

_FAINTEST = 24.0
"""Contrast, of 255, below which there is nothing but paper."""

_DARK_ENOUGH = 230.0
"""Ink that reaches this is left as it is; every MNIST image does (the palest reaches 254)."""

_MAX_SEGMENTS = 16_384
"""Chunks or markers in one file: 16 million RGBA pixels in libpng's 8 KiB chunks are half that."""

_MAX_SCANS = 32
"""Scans of a progressive JPEG; encoders write about ten. The shortest costs a pass over it all."""

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_PIXEL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_TURNS = dict(enumerate(map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), start=2))
"""What an EXIF orientation of 2 to 8 asks for; 1 is upright."""


def sniff(body: bytes) -> str | None:
    """The type that the first bytes claim, whatever the sender called it."""
    if body.startswith(_PNG_MAGIC):
        return "image/png"
    return "image/jpeg" if body.startswith(b"\xff\xd8\xff") else None


def digit(
    body: bytes, declared: str, *, field: str, invert: Invert, max_pixels: int
) -> tuple[Images, int]:
    """The digit in a picture, cropped, scaled and centred as MNIST's were.

    Transparency lies over white paper, EXIF orientation is applied. `invert`: "true" dark ink on
    light paper, "false" light ink on dark paper, "auto" looks which of the two it is.

    Returns: uint8 (1, 28, 28), and how many pixels the picture had.
    Raises: InvalidInput (another type, damaged, no digit), TooLarge (more than `max_pixels`).
    """
    found = sniff(body)
    if found != declared:
        what = found or f"bytes that begin with {bytes(body[:8])!r}"
        raise InvalidInput(f"{field}: expected {declared}, got {what}", field=field)
    try:
        grey, pixels = _read(body, found, field, max_pixels)
    except (OSError, SyntaxError, ValueError, IndexError, struct.error) as exc:
        raise InvalidInput(f"{field}: not a readable {declared}: {exc}", field=field) from exc
    ink, paper_noise = _ink(grey, field, invert)
    return _centred(_scaled(ink, paper_noise))[np.newaxis], pixels


def _read(body: bytes, found: str, field: str, max_pixels: int) -> tuple[Grey, int]:
    """Luminance, uint8 (height, width), longer side about 1,000 at most; and the pixel count."""
    picture: Image.Image
    orientation = 1
    if found == "image/png":
        picture = PngImageFile(io.BytesIO(_png_pixels(body)))
    else:
        pixel_segments, orientation = _jpeg_pixels(body)
        picture = JpegImageFile(io.BytesIO(pixel_segments))
    pixels = picture.width * picture.height
    if pixels > max_pixels:
        size = f"{picture.width} x {picture.height}"
        most = f"{max_pixels}, which is left of a request's: scale it down"
        raise TooLarge(f"{field}: got {size} pixels, expected at most {most}", field=field)
    # libjpeg can decode at a half, quarter or eighth of the size and in grey, which for a
    # 12-megapixel photograph takes 35 ms, not 100 (EPYC, 2026-11-20). A PNG ignores it.
    picture.draft("L", (2 * _WORKING_SIDE, 2 * _WORKING_SIDE))
    picture.load()
    grey = _luminance(picture)
    factor = -(-max(grey.size) // _WORKING_SIDE)
    if factor > 1:
        grey = grey.reduce(factor)
    if orientation in _TURNS:
        grey = grey.transpose(_TURNS[orientation])
    return np.asarray(grey), pixels


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
    """The PNG again with only the chunks that hold pixels, each with a checked checksum."""
    view, at = memoryview(body), len(_PNG_MAGIC)
    kept = [view[:at]]
    for _ in range(_MAX_SEGMENTS):
        if at + 12 > len(body):
            raise ValueError(f"it ends after {len(body)} bytes, before its IEND chunk")
        length, kind = struct.unpack_from(">I4s", body, at)
        end = at + 12 + length
        if end > len(body):
            raise ValueError(f"its {kind!r} chunk at byte {at} is longer than the rest")
        if kind in _PNG_PIXEL_CHUNKS:
            if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
                raise ValueError(f"the checksum of its {kind!r} chunk at byte {at} is wrong")
            kept.append(view[at:end])
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    raise ValueError(f"it has more than {_MAX_SEGMENTS} chunks")


def _jpeg_pixels(body: bytes) -> tuple[bytes, int]:
    """The JPEG again without metadata or what follows its end, and its EXIF orientation."""
    kept, at, orientation, scans = [body[:2]], 2, 1, 0
    for _ in range(_MAX_SEGMENTS):
        marker = _JPEG_MARKER.search(body, at)
        if marker is None:
            raise ValueError(f"it ends after {len(body)} bytes, before its end marker")
        if scans:
            kept.append(body[at : marker.start()])
        start, content = marker.span()
        kind = body[start + 1]
        if kind == 0xD9:  # end of image
            return b"".join([*kept, marker.group()]), orientation
        at = content + int.from_bytes(body[content : content + 2], "big")
        if at < content + 2 or at > len(body):
            raise ValueError(f"its segment {kind:#x} at byte {start} has no sound length")
        if kind == 0xE1 and body.startswith(b"Exif\0\0", content + 2):
            orientation = _orientation(body[content + 8 : at])
        scans += kind == 0xDA
        if scans > _MAX_SCANS:
            raise ValueError(f"it has more than {_MAX_SCANS} scans")
        # Of the application segments JFIF's (E0) and Adobe's (EE) tell how colours are coded.
        if kind in (0xE0, 0xEE) or not (0xE0 <= kind <= 0xEF or kind == 0xFE):
            kept.append(body[start:at])
    raise ValueError(f"it has more than {_MAX_SEGMENTS} segments")


def _orientation(exif: bytes) -> int:
    """Tag 274 of the first directory of a TIFF header; 1, upright, where there is none."""
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


def _ink(grey: Grey, field: str, invert: Invert) -> tuple[Ink, float]:
    """How far from the paper each pixel is, float32, 0 = paper; and the noise, already taken off.

    The sign of the cubed differences says whether ink is dark: it follows the few pixels that are
    far from the paper, where a mean would follow the many that are near.
    """
    paper, noise = _paper(grey)
    ink = grey.astype(np.float32) - paper
    if invert == "true" or (invert == "auto" and (ink * ink * ink).sum() < 0):
        ink = -ink
    strongest = float(ink.max())
    if strongest < max(_FAINTEST, 6 * noise):
        hint = "" if invert == "auto" else f"; invert is {invert}, try auto"
        message = f"{field}: no digit found: nothing here stands out from its paper{hint}"
        raise InvalidInput(message, field=field)
    return np.maximum(ink - min(3 * noise, strongest / 4), 0), noise


def _paper(grey: Grey) -> tuple[Ink, float]:
    """The level of the paper under each pixel, broadcastable to `grey`, and its noise, one sigma.

    A drawn picture has one level along its edge, and so has any that is too small to show a
    shadow. A photograph has shadows and noise: there a quadratic surface is fitted by iteratively
    reweighted least squares, beginning at the edge's median, with Cauchy's weights, to which
    pixels far from the paper mean nothing: that is the ink, or the table beside the sheet.
    """
    edge = _edge(grey)
    level = float(np.median(edge))
    flat = np.full((1, 1), level, np.float32)
    if np.mean(edge == level) >= 0.75:
        return flat, 0.0
    # 1.4826 medians of absolute deviation are one sigma of a normal distribution.
    if min(grey.shape) <= _SURFACE_SIDE:
        return flat, 1.4826 * float(np.median(np.abs(edge - level)))
    side = (_SURFACE_SIDE, _SURFACE_SIDE)
    small = np.asarray(Image.fromarray(grey).resize(side, Image.Resampling.BOX), np.float64)
    y, x = np.indices(side).reshape(2, -1) * (2 / _SURFACE_SIDE) - 1
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y])
    fitted = np.full(small.size, level)
    for _ in range(10):
        weighted = terms / (1 + ((small.ravel() - fitted) / _FAINTEST) ** 2)
        fitted = np.linalg.solve(weighted @ terms.T, weighted @ small.ravel()) @ terms
    surface = Image.fromarray(fitted.reshape(side).astype(np.float32))
    paper = np.asarray(surface.resize(grey.shape[::-1], Image.Resampling.BILINEAR))
    return paper, 1.4826 * float(np.median(np.abs(_edge(grey - paper))))


def _edge(picture: NDArray[Number]) -> NDArray[Number]:
    return np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])


def _scaled(ink: Ink, noise: float) -> Ink:
    """The ink's bounding box and one pixel around it, its longer side scaled to `BOX`.

    A box of 20 pixels, give or take one, is not resampled: a picture that is MNIST's already
    stays what it is. Scaling makes thin strokes faint and pencil is faint anyway, so ink that
    stays under `_DARK_ENOUGH` is stretched: MNIST's strokes all reach 254.
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
    patch = np.asarray(
        Image.fromarray(np.pad(ink, margin)).resize(
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
    """uint8 (28, 28), the patch's centre of mass at its centre, no ink over its edge."""
    height, width = patch.shape
    total = patch.sum(dtype=np.float64)
    top = int(np.floor(_CENTRE - patch.sum(1) @ np.arange(height) / total + 0.5))
    left = int(np.floor(_CENTRE - patch.sum(0) @ np.arange(width) / total + 0.5))
    # The patch's outermost pixels are its margin and may fall off.
    top, left = min(max(top, -1), HEIGHT + 1 - height), min(max(left, -1), WIDTH + 1 - width)
    field = np.zeros((HEIGHT + 2, WIDTH + 2), np.float32)
    field[top + 1 : top + 1 + height, left + 1 : left + 1 + width] = patch
    return np.rint(field[1:-1, 1:-1]).astype(np.uint8)
