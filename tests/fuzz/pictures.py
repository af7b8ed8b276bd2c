"""Pictures: PNG beside a plain decoder of its own, the others beside Pillow on the whole file."""

from __future__ import annotations

import io
import random
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from lenet.pixels import Images
from service.errors import ServiceError
from tests.fuzz import samples
from tests.fuzz.bodies import LIMITS, decoded
from tests.fuzz.target import Finding, MutateBytes, Target, mutate_list

Grey = np.ndarray[Any, np.dtype[np.uint8]]


class _PictureTarget(Target):
    kind = ""
    traced_bytes = 6 << 20  # ten arrays of float32 of all allowed pixels, and the plain decoder's

    def decode(self, data: bytes) -> Images | ServiceError:
        """Decode with `invert` auto; the other two settings accept the same pictures."""
        found = decoded(data, self.kind)
        unreadable = isinstance(found, ServiceError) and _no_picture(found)
        for invert in ("true", "false"):
            other = decoded(data, self.kind, invert=invert)
            if unreadable != (isinstance(other, ServiceError) and _no_picture(other)):
                raise Finding(f"whether it can be read depends on invert: {other}")
        if not isinstance(found, ServiceError) and len(found) != 1:
            raise Finding(f"one picture is {len(found)} images")
        return found


def _no_picture(error: ServiceError) -> bool:
    """Whether the file was refused, and not what it shows."""
    return "no digit found" not in error.message


class PngTarget(_PictureTarget):
    """`image/png`: accepted if and only if a plain decoder reads the same picture."""

    kind = "image/png"

    def run(self, data: bytes) -> None:
        found = self.decode(data)
        try:
            grey = plain_png(data)
        except NotPlain:
            grey = None
        if isinstance(found, ServiceError) and _no_picture(found):
            if grey is not None:
                raise Finding(f"refused what a plain decoder reads: {found.message}")
            return
        if grey is None:
            self._check_lenient(data)
            return
        if re.search(rb"eXIf|Raw profile type|XML:com.adobe", data):
            return  # it may be turned
        # The pixels as a minimal PNG.
        again = decoded(samples.png(grey), "image/png")
        if isinstance(found, ServiceError) != isinstance(again, ServiceError):
            raise Finding(f"a digit or none, and a plain decoder's levels differ: {again!r:.80}")
        if not isinstance(found, ServiceError) and not isinstance(again, ServiceError):
            difference = np.abs(found.astype(int) - again.astype(int))
            # A level more or less may move a threshold, so that a few pixels differ by much.
            if difference.mean() > 8:
                raise Finding(f"pixels differ by {difference.mean():.1f} on average")

    def _check_lenient(self, data: bytes) -> None:
        """Read by us and not by the plain decoder: only for what Pillow is known to tolerate."""
        try:
            plain_png(data, lenient=True)
        except NotPlain as exc:
            raise Finding(f"accepted what is no picture: {exc}") from exc

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.1:
            return mutate(data)
        chunks = [kind + content for kind, content in _chunks(data)]

        def change(item: bytes) -> bytes:
            kind, content = item[:4].ljust(4, b"x"), item[4:]
            if kind == b"IHDR" and len(content) == 13:
                fields = list(struct.unpack(">IIBBBBB", content))
                fields[rng.randrange(7)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16, 30, 100, 255))
                return kind + struct.pack(">IIBBBBB", *fields)
            if kind == b"IDAT" and rng.random() < 0.8:
                try:
                    rows = zlib.decompressobj().decompress(content, 1 << 20)
                except zlib.error:
                    return kind + mutate(content)
                return kind + zlib.compress(mutate(rows))
            if rng.random() < 0.2:
                kind = rng.choice((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"zTXt", b"eXIf"))
            return kind + mutate(content)

        chunks = mutate_list(chunks, rng, change)
        return samples.PNG_MAGIC + b"".join(samples.chunk(item[:4], item[4:]) for item in chunks)


class NotPlain(Exception):
    """Not a PNG as the specification has it."""


def _chunks(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at + 8 <= len(body):
        length, kind = struct.unpack_from(">I4s", body, at)
        yield kind, body[at + 8 : at + 8 + length]
        at += 12 + length


_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)


def plain_png(body: bytes, *, lenient: bool = False) -> Grey:
    """Luminance over white, by the specification alone.

    With `lenient`, what Pillow tolerates: compressed rows that end early (the rest is black) or are
    followed by more or by no checksum, a palette that is too short, transparency of a wrong size,
    and chunks behind the header in another order.

    Raises:
        NotPlain: it cannot be decoded, or is larger than the limit.
    """
    header, palette, transparent, data = b"", b"", None, b""
    seen: list[bytes] = []
    at = 8
    if not body.startswith(samples.PNG_MAGIC):
        raise NotPlain("magic")
    while not seen or seen[-1] != b"IEND":
        if at + 12 > len(body):
            raise NotPlain("it ends before its end")
        length, kind = struct.unpack_from(">I4s", body, at)
        content = body[at + 8 : at + 8 + length]
        at += 12 + length
        if at > len(body):
            raise NotPlain("a chunk is longer than the file")
        if kind not in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            continue
        if zlib.crc32(kind + content) != int.from_bytes(body[at - 4 : at], "big"):
            raise NotPlain("checksum")
        if not lenient and kind in seen and (kind != b"IDAT" or seen[-1] != b"IDAT"):
            raise NotPlain("a chunk a second time")
        if not lenient and kind in (b"PLTE", b"tRNS") and b"IDAT" in seen:
            raise NotPlain("late")
        if not lenient and kind == b"PLTE" and b"tRNS" in seen:
            raise NotPlain("late")
        if (kind == b"IHDR") != (not seen):
            raise NotPlain("the header is not first")
        seen.append(kind)
        if kind == b"IHDR":
            header = content
        elif kind == b"PLTE":
            palette = content
        elif kind == b"tRNS":
            transparent = content
        elif kind == b"IDAT":
            data += content
        elif content and not lenient:
            raise NotPlain("content of the end")
    if len(header) < 13 or (len(header) > 13 and not lenient):
        raise NotPlain("header")
    width, height, depth, colour, compression, filtering, interlaced = struct.unpack(
        ">IIBBBBB", header[:13]
    )
    if colour not in _CHANNELS or depth not in _DEPTHS[colour] or filtering:
        raise NotPlain("form")
    if (compression or interlaced > 1) and not lenient:
        raise NotPlain("form")
    if not 0 < width * height <= LIMITS.max_picture_pixels:
        raise NotPlain("size")
    if not lenient and (len(palette) % 3 or len(palette) > 768 or (colour == 3) > bool(palette)):
        raise NotPlain("palette")
    if not lenient and (colour in (0, 4) and palette):
        raise NotPlain("palette")
    if not lenient and transparent is not None:
        sizes = {0: (2,), 2: (6,), 3: range(1, len(palette) // 3 + 1)}.get(colour, ())
        if len(transparent) not in sizes:
            raise NotPlain("transparency")
        if colour != 3 and max(struct.unpack(f">{len(transparent) // 2}H", transparent)) >> depth:
            raise NotPlain("transparency")
    samples_ = _samples(data, width, height, depth, colour, interlaced, lenient)
    if lenient:
        return np.zeros((height, width), np.uint8)  # that it can be read is all that counts
    return _luminance(samples_, depth, colour, palette, transparent)


def _samples(
    data: bytes, width: int, height: int, depth: int, colour: int, interlaced: int, lenient: bool
) -> np.ndarray[Any, Any]:
    """The numbers in the pixels, (height, width, channels), unfiltered."""
    channels = _CHANNELS[colour]
    bits, step = channels * depth, max(1, channels * depth // 8)
    passes = _PASSES if interlaced else ((0, 0, 1, 1),)
    sizes = [(-(-(height - y) // dy), -(-(width - x) // dx)) for x, y, dx, dy in passes]
    needed = sum(rows * (1 + (columns * bits + 7) // 8) for rows, columns in sizes if columns > 0)
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(data, needed + 1)
    except zlib.error as exc:
        if not lenient:
            raise NotPlain(f"zlib: {exc}") from exc
        raw = _until_error(data, needed)
    if len(raw) < needed:
        if lenient and unpacker.eof:
            return np.zeros((0, 0, 0), np.int64)
        raise NotPlain("too few rows")
    if not lenient and (len(raw) > needed or not unpacker.eof or unpacker.unused_data):
        raise NotPlain("too many rows")
    found = np.zeros((height, width, channels), np.int64)
    at = 0
    for (x, y, dx, dy), (rows, columns) in zip(passes, sizes, strict=True):
        if rows <= 0 or columns <= 0:
            continue
        line_bytes = (columns * bits + 7) // 8
        before = bytearray(line_bytes)
        for row in range(rows):
            kind, line = raw[at], bytearray(raw[at + 1 : at + 1 + line_bytes])
            at += 1 + line_bytes
            _unfilter(kind, line, before, step)
            before = line
            if lenient:
                continue
            if depth == 16:
                numbers = np.frombuffer(bytes(line), ">u2").astype(np.int64)
            elif depth == 8:
                numbers = np.frombuffer(bytes(line), np.uint8).astype(np.int64)
            else:
                spread = np.unpackbits(np.frombuffer(bytes(line), np.uint8)).reshape(-1, depth)
                numbers = spread @ (1 << np.arange(depth)[::-1])
            numbers = numbers[: columns * channels].reshape(columns, channels)
            found[y + row * dy, x::dx] = numbers
    return found


def _until_error(data: bytes, needed: int) -> bytes:
    """The output of zlib before its error."""
    unpacker, raw = zlib.decompressobj(), b""
    try:
        for at in range(len(data)):
            raw += unpacker.decompress(data[at : at + 1])
            if len(raw) >= needed:
                break
    except zlib.error:
        pass
    return raw


def _unfilter(kind: int, line: bytearray, before: bytearray, step: int) -> None:
    """Undo the filter of a row, by section 9 of the specification."""
    if kind > 4:
        raise NotPlain("filter")
    for i in range(len(line) if kind else 0):
        a, b = line[i - step] if i >= step else 0, before[i]
        c = before[i - step] if i >= step else 0
        if kind == 1:
            guess = a
        elif kind == 2:
            guess = b
        elif kind == 3:
            guess = (a + b) // 2
        else:
            p = a + b - c
            guess = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        line[i] = (line[i] + guess) & 255


def _luminance(
    numbers: np.ndarray[Any, Any],
    depth: int,
    colour: int,
    palette: bytes,
    transparent: bytes | None,
) -> Grey:
    alpha = np.full(numbers.shape[:2], 255, np.int64)
    if colour == 3:
        colours = np.zeros((256, 4), np.int64)
        colours[:, 3] = 255
        entries = np.frombuffer(palette, np.uint8).reshape(-1, 3)
        colours[: len(entries), :3] = entries
        if transparent is not None:
            colours[: len(transparent), 3] = list(transparent)
        found = colours[numbers[..., 0]]
        rgb, alpha = found[..., :3], found[..., 3]
    else:
        if transparent is not None:
            key = np.frombuffer(transparent, ">u2").astype(np.int64)
            alpha = np.where((numbers == key).all(axis=2), 0, 255)
        levels = numbers >> 8 if depth == 16 else numbers * 255 // ((1 << depth) - 1)
        if colour in (4, 6):
            alpha = levels[..., -1]
            levels = levels[..., :-1]
        rgb = np.broadcast_to(levels, (*levels.shape[:2], 3))
    luma = (rgb @ np.array([19_595, 38_470, 7_471]) + 0x8000) >> 16
    visible = luma[alpha > 0]
    # Light ink on transparent pixels is taken for ink on black.
    light = visible.size < 0.5 * alpha.size and visible.sum() > 160 * visible.size
    paper = 0 if light else 255
    return np.rint((luma * alpha + paper * (255 - alpha)) / 255).astype(np.uint8)


_PLAIN_EXIF = tuple(samples.exif(orientation, order) for orientation in range(10) for order in "<>")
"""Metadata that hold an orientation and nothing else."""


class JpegTarget(_PictureTarget):
    """`image/jpeg`: what is accepted is what Pillow makes of the whole file."""

    kind = "image/jpeg"

    def run(self, data: bytes) -> None:
        found = self.decode(data)
        if isinstance(found, ServiceError):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(data), formats=("JPEG", "MPO")) as picture:
                    picture.draft("L", picture.size)  # not by way of RGB, which clips colours
                    upright = ImageOps.exif_transpose(picture)
                    size, grey = picture.size, np.asarray(upright.convert("L"))
        except Exception:  # noqa: BLE001 - broken metadata, which we leave away
            return
        if size[0] * size[1] > LIMITS.max_picture_pixels:
            raise Finding(f"accepted {size}")
        if max(size) > 1024:  # decoded smaller
            return
        again = decoded(samples.png(grey), "image/png")
        if isinstance(again, ServiceError):
            raise Finding(f"accepted, and as PNG refused: {again.message}")
        # Pillow reads the orientation in another way from repeated or broken metadata.
        metadata = len(re.findall(rb"(?i)exif|tiff|photoshop|MPF\0", data))
        plain = metadata == data[2:].startswith(_PLAIN_EXIF)
        # Bytes that we drop from a scan are damage, which libjpeg conceals by its surroundings.
        plain &= not re.search(rb"\xff[\x01-\xbf\xe1-\xfe]", data[data.find(b"\xff\xda") :])
        # After a second end marker a damaged scan is concealed in another way.
        plain &= data.count(b"\xff\xd9") < 2
        if plain and not np.array_equal(found, again):
            raise Finding("other pixels than Pillow's of the whole file")

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.2:
            return mutate(data)
        segments: list[bytes] = []
        at = 2
        while (marker := re.compile(rb"\xff[^\x00\xff\xd0-\xd7]").search(data, at)) is not None:
            if marker.start() > at:
                segments.append(data[at : marker.start()])
            at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
            if marker.group() == b"\xff\xd9":
                segments.append(marker.group())
                break
            segments.append(data[marker.start() : at])
        else:
            segments.append(data[at:])

        def change(segment: bytes) -> bytes:
            if not segment.startswith(b"\xff") or len(segment) < 4:
                return mutate(segment)
            content = mutate(segment[4:])
            length = min(len(content) + 2, 65_535)
            marker = segment[1]
            if rng.random() < 0.1:
                marker = rng.choice((0xC0, 0xC1, 0xC2, 0xC4, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1, 0xEE))
            return bytes((0xFF, marker)) + length.to_bytes(2, "big") + content

        return b"\xff\xd8" + b"".join(mutate_list(segments, rng, change))


class _WholeFileTarget(_PictureTarget):
    """Accepted files must equal Pillow's first frame of the whole file."""

    format = ""

    def run(self, data: bytes) -> None:
        found = self.decode(data)
        if isinstance(found, ServiceError):
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(data), formats=(self.format,)) as picture:
                    size = picture.size
                    again = self.decode_plain(picture)
        except Exception:  # noqa: BLE001 - broken metadata or frames, which we leave away
            return
        if size[0] * size[1] > LIMITS.max_picture_pixels:
            raise Finding(f"accepted {size}")
        if again is None:
            return
        if isinstance(again, ServiceError):
            raise Finding(f"accepted, and as PNG refused: {again.message}")
        if not np.array_equal(found, again):
            raise Finding("other pixels than Pillow's of the whole file")

    def decode_plain(self, picture: Image.Image) -> Images | ServiceError | None:
        """The images from Pillow's pixels; None if it reads them in another way than we do."""
        plain = io.BytesIO()
        transparent = picture.mode in ("RGBA", "LA") or "transparency" in picture.info
        picture.convert("RGBA" if transparent else "RGB").save(plain, "PNG")
        return decoded(plain.getvalue(), "image/png")


class WebpTarget(_WholeFileTarget):
    """`image/webp`."""

    kind, format = "image/webp", "WEBP"

    def run(self, data: bytes) -> None:
        # Pillow blends a first frame with the background, and leaves orientation to its caller.
        if re.search(b"ANMF|EXIF|XMP ", data):
            self.decode(data)
        else:
            super().run(data)

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.2 or len(data) < 20:
            return mutate(data)
        chunks, at = [], 12
        while at + 8 <= len(data):
            length = int.from_bytes(data[at + 4 : at + 8], "little")
            chunks.append(data[at : at + 4] + data[at + 8 : at + 8 + length])
            at += 8 + length + (length & 1)

        def change(chunk: bytes) -> bytes:
            kind = chunk[:4].ljust(4)
            if rng.random() < 0.2:
                kind = rng.choice((b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANMF", b"ANIM", b"EXIF"))
            return kind + mutate(chunk[4:])

        return samples.webp_of(*mutate_list(chunks, rng, change))


class GifTarget(_WholeFileTarget):
    """`image/gif`."""

    kind, format = "image/gif", "GIF"

    def run(self, data: bytes) -> None:
        # Pillow skips what follows an empty extension, and keeps transparency that one takes back.
        head = data[: data.find(b",")]
        if re.search(rb"!.\0", head, re.DOTALL) or head.count(b"!\xf9") > 1:
            self.decode(data)
        else:
            super().run(data)

    def decode_plain(self, picture: Image.Image) -> Images | ServiceError | None:
        # Pillow fills the rest of the canvas with a colour, or makes the canvas larger.
        tiles = getattr(picture, "tile", ())
        if not tiles or tuple(tiles[0][1]) != (0, 0, *picture.size):
            return None
        return super().decode_plain(picture)

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.5:
            return mutate(data)
        at = data.find(b",")
        if at < 0 or rng.random() < 0.5:
            return data[:6] + mutate(data[6:])
        return data[:at] + mutate(data[at : at + 12]) + data[at + 12 :]


class BmpTarget(_WholeFileTarget):
    """`image/bmp`."""

    kind, format = "image/bmp", "BMP"

    def decode_plain(self, picture: Image.Image) -> Images | ServiceError | None:
        # Pillow reads run lengths that leave their row in another way, and 2 colours of 8 bits.
        if picture.info.get("compression") in (1, 2) or picture.mode == "1":
            return None
        return super().decode_plain(picture)

    def mutate(self, data: bytes, rng: random.Random, mutate: MutateBytes) -> bytes:
        if rng.random() < 0.3 or len(data) < 54:
            return mutate(data)
        if rng.random() < 0.5:
            return data[:54] + mutate(data[54:])
        head = bytearray(data[:54])
        at, form = rng.choice(
            ((10, "<I"), (14, "<I"), (18, "<i"), (22, "<i"), (28, "<H"), (30, "<I"))
        )
        number = rng.choice((0, 1, 2, 3, 4, 8, 12, 16, 24, 32, 40, 108, 124, 255, 20_000))
        struct.pack_into(form, head, at, -number if form == "<i" and rng.random() < 0.3 else number)
        return bytes(head) + data[54:]
