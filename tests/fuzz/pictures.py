"""Pictures: what is accepted are Pillow's pixels, whatever `invert` says, within the bounds.

Only a PNG, whose chunks have checksums, is changed by its structure. Changes of bytes reach as many
refusals of the other formats, or more.
"""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from collections.abc import Iterator

from PIL import Image, ImageOps

from service.errors import ServiceError
from tests.fuzz import samples
from tests.fuzz.bodies import LIMITS, decoded
from tests.fuzz.target import Finding, MutateBytes, Target, mutate_list


class _PictureTarget(Target):
    """A picture is read, or refused with an error that says so, whatever `invert` is.

    One that is opaque and has 8 bits is read as Pillow's pixels of the whole file, saved as PNG.
    """

    kind = ""
    traced_bytes = 6 << 20  # ten arrays of float32 of all allowed pixels

    def run(self, data: bytes) -> None:
        found = decoded(data, self.kind)
        unreadable = _is_unreadable(found)
        for invert in ("true", "false"):
            other = decoded(data, self.kind, invert=invert)
            if unreadable != _is_unreadable(other):
                raise Finding(f"whether it can be read depends on invert: {other}")
        if isinstance(found, ServiceError):
            return
        if len(found) != 1:
            raise Finding(f"one picture is {len(found)} images")
        plain = self._plain(data)
        if plain is None:
            return
        again = decoded(plain, "image/png")
        if isinstance(again, ServiceError):
            raise Finding(f"accepted, and as PNG refused: {again.message}")
        if not (found == again).all():
            raise Finding("other pixels than Pillow's of the whole file")

    def _plain(self, data: bytes) -> bytes | None:
        """A PNG of the upright picture; None where Pillow alone reads it in another way."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(data)) as picture:
                    size = picture.size
                    if self.is_read_otherwise(picture, data) or max(size) > 1024:
                        return None
                    picture.draft("L", size)  # not by way of RGB, which clips colours
                    picture.load()
                    if picture.has_transparency_data:  # of a chunk behind the pixels
                        return None
                    upright = ImageOps.exif_transpose(picture).convert("L")
        except Exception:  # noqa: BLE001 - a JPEG without its end, BMP's few colours
            return None
        if size[0] * size[1] > LIMITS.max_picture_pixels:
            raise Finding(f"accepted {size}")
        file = io.BytesIO()
        upright.save(file, "PNG")
        return file.getvalue()

    def is_read_otherwise(self, picture: Image.Image, data: bytes) -> bool:
        """Whether Pillow's own conversion to grey differs: transparency, 16 bits."""
        return picture.has_transparency_data or picture.mode.startswith("I")


def _is_unreadable(found: object) -> bool:
    """Whether the file was refused, and not what it shows."""
    return isinstance(found, ServiceError) and "no digit found" not in found.message


class PngTarget(_PictureTarget):
    """`image/png`."""

    kind = "image/png"

    def is_read_otherwise(self, picture: Image.Image, data: bytes) -> bool:
        # Pillow does not know the name that older ImageMagick gives to EXIF.
        return b"type APP1" in data or super().is_read_otherwise(picture, data)

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


def _chunks(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at + 8 <= len(body):
        length, kind = struct.unpack_from(">I4s", body, at)
        yield kind, body[at + 8 : at + 8 + length]
        at += 12 + length


class JpegTarget(_PictureTarget):
    """`image/jpeg`."""

    kind = "image/jpeg"

    def is_read_otherwise(self, picture: Image.Image, data: bytes) -> bool:
        # Pillow's reader of several pictures takes the orientation of other metadata.
        return picture.format != "JPEG"


class WebpTarget(_PictureTarget):
    """`image/webp`."""

    kind = "image/webp"


class GifTarget(_PictureTarget):
    """`image/gif`."""

    kind = "image/gif"

    def is_read_otherwise(self, picture: Image.Image, data: bytes) -> bool:
        # Pillow fills the rest of the canvas with a colour.
        tiles = getattr(picture, "tile", ())
        whole = bool(tiles) and tuple(tiles[0][1]) == (0, 0, *picture.size)
        return not whole or super().is_read_otherwise(picture, data)


class BmpTarget(_PictureTarget):
    """`image/bmp`."""

    kind = "image/bmp"

    def is_read_otherwise(self, picture: Image.Image, data: bytes) -> bool:
        # Pillow takes two colours of 8 bits for pixels of 1 bit.
        return (data[28] in (4, 8) and data[46] <= 2) or super().is_read_otherwise(picture, data)


class AvifTarget(_PictureTarget):
    """`image/avif`."""

    kind = "image/avif"
    traced_bytes = 8 << 20


class TiffTarget(_PictureTarget):
    """`image/tiff`."""

    kind = "image/tiff"
