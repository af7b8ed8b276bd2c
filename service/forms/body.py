"""The bodies of `POST /predict`: JSON, bytes, npy, pictures and multipart -> uint8 (n, 28, 28).

With `service.pictures` the one place where untrusted image data is parsed. A malformed body raises
InvalidInput with the field, what it got and what was expected. Nothing is evaluated (no pickle, no
Python literals) or converted (1.0 is not a pixel), and no memory is allocated by a number in it.

Time and memory are linear in the body, except for pictures, which decompress to much more than
their size: `Limits.max_picture_pixels` bounds all pictures of one request together.

What only decoding processes need is imported where it is used: Pillow and python-multipart take
5 MiB and 35 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

import numpy as np

from lenet.nvtx import span
from lenet.pixels import PIXELS, Images
from service.errors import UnsupportedMediaType, invalid, shown
from service.forms.form import BINARY, MAX_DOUBTS
from service.forms.multipart import media_type, no_file, parts_of
from service.forms.pixel_json import check_count, json_images, sliced_json_images
from service.forms.pixels import NPY_MAGIC, npy, octets
from service.pictures.headers import Between, Digits, Doubt, Invert, sniff

OCTETS = BINARY.decode()
NPY = "application/x-npy"
_FORMATS = ("png", "jpeg", "webp", "gif", "bmp", "avif", "tiff")
_PICTURES = tuple(f"image/{name}" for name in _FORMATS)
_BINARY = (OCTETS, NPY, *_PICTURES)
ACCEPTED = ("application/json", *_BINARY, "multipart/form-data")
"""Content types of a request's body."""

NOW_BYTES = {"application/json": 192 * 1024, NPY: 1024 * 1024}
"""The largest bodies that are decoded on the event loop. Larger ones block it for more than the 2
to 3 ms that JSON of 192 KiB, 64 images and more, takes, and the transposition of an npy array in
Fortran's order (one Xeon core, 2026-11-22)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request.

    `max_picture_pixels` applies to all pictures of a request together: 67,108,864 are one
    photograph of 64 megapixels, or 1,024 drawings of 256 x 256.
    """

    max_images: int
    max_picture_pixels: int = 1 << 26


Doubts: TypeAlias = list[tuple[int, Doubt]]
"""Images of a request whose answer may mean nothing, and why; `MAX_DOUBTS` of them."""


def accepted_type(content_type: str) -> str:
    """The media type of a body, one of `ACCEPTED`. Raises: UnsupportedMediaType."""
    kind = media_type(content_type)
    if kind not in ACCEPTED:
        raise _unsupported("content-type", kind, ACCEPTED)
    return kind


@span("decode")
def decode(
    body: bytes,
    content_type: str,
    *,
    invert: Invert = "auto",
    digits: Digits = "one",
    limits: Limits,
    doubts: Doubts | None = None,
    between: Between | None = None,
) -> Images:
    """The images of a body, uint8 (n, 28, 28), C-contiguous, 1 <= n <= max_images.

    See `prediction.ImageForm`. `doubts` gets what is doubtful about pictures. `between` is called
    between pictures, and slices of JSON. The result may be read-only.

    Raises: InvalidInput, TooLarge, UnsupportedMediaType.
    """
    kind = accepted_type(content_type)
    if not body:
        raise invalid("body", "nothing", "at least one image")
    if kind == "application/json":
        if between is None:
            images = json_images(body, limits.max_images)
        else:
            images = sliced_json_images(body, limits.max_images, between)
        return ~images if invert == "true" else images
    between = between or _nothing
    binary = _Binary(invert, digits, limits, [] if doubts is None else doubts, between)
    if kind == "multipart/form-data":
        return _multipart(body, content_type, binary, limits, between)
    return binary.images(body, kind, "body")


class _Binary:
    """Reads the parts of one body that are not JSON, and counts their pixels and images."""

    def __init__(
        self, invert: Invert, digits: Digits, limits: Limits, doubts: Doubts, between: Between
    ) -> None:
        self._invert, self._digits, self._limits = invert, digits, limits
        self._doubts, self._between = doubts, between
        self._used_pixels = self._count = 0

    def images(self, body: bytes, kind: str, field: str) -> Images:
        """The images of a body or part. Raises: InvalidInput, TooLarge."""
        limits = self._limits
        if kind not in _PICTURES:
            images = (npy if kind == NPY else octets)(body, field, limits.max_images)
            self._count += len(images)
            return ~images if self._invert == "true" else images
        from service.pictures.picture import prepare

        prepared = prepare(
            body,
            kind,
            field=field,
            invert=self._invert,
            digits=self._digits,
            max_pixels=limits.max_picture_pixels,
            used_pixels=self._used_pixels,
            between=self._between,
        )
        check_count(len(prepared.images), field, limits.max_images)
        self._doubts.extend((self._count + index, doubt) for index, doubt in prepared.doubts)
        del self._doubts[MAX_DOUBTS:]
        self._used_pixels += prepared.pixels
        self._count += len(prepared.images)
        return prepared.images


def _multipart(
    body: bytes, content_type: str, binary: _Binary, limits: Limits, between: Between
) -> Images:
    """The images of all parts, in the order of the parts."""
    images: list[Images] = []
    count = 0
    for i, part in enumerate(parts_of(body, content_type, limits.max_images, between)):
        between(0)
        kind, content = part.kind, part.content
        field = f"parts[{i}]"
        if kind in ("", OCTETS):
            kind = sniff(content) or (NPY if content.startswith(NPY_MAGIC) else OCTETS)
            if kind == OCTETS and (not content or len(content) % PIXELS):
                raise no_file(part, field)
        if kind not in _BINARY:
            raise _unsupported(field, kind, _BINARY)
        rows = binary.images(content, kind, field)
        images.append(rows)
        count += len(rows)
        check_count(count, "parts", limits.max_images)
    return images[0] if len(images) == 1 else np.concatenate(images)


def _nothing(_: int) -> None:
    pass


_CONVERT = "; convert it to PNG or JPEG"
_WITH_CURL = "; with curl: -H 'Content-Type: image/png'"
_TYPES = {
    "": _WITH_CURL,
    "application/x-www-form-urlencoded": f"{_WITH_CURL}, or application/json for numbers",
    "application/pdf": _CONVERT,
    "application/zip": "; save one array with np.save",
    "application/gzip": "; send it uncompressed",
    "text/csv": '; send numbers as JSON, {"images": [...]}',
    "text/plain": "; say what it is, as in Content-Type: image/png",
}
"""Advice by content type that is not supported."""


def _unsupported(field: str, kind: str, accepted: tuple[str, ...]) -> UnsupportedMediaType:
    got = shown(kind) if kind else "nothing"
    hint = _TYPES.get(kind, "")
    if kind == "text/plain" and field != "content-type":
        hint = "; leave out fields of text"
    elif kind.startswith("image/"):
        hint = _CONVERT
    elif not hint:
        names = {one.rpartition("/")[2].removeprefix("x-"): one for one in accepted}
        names.update(zip(accepted, accepted, strict=True))
        if close := get_close_matches(kind[:40], names, n=1, cutoff=0.8):
            hint = f"; did you mean {names[close[0]]}?"
    message = f"{field}: got {got}, expected one of {', '.join(accepted)}{hint}"
    return UnsupportedMediaType(message, field=field)
