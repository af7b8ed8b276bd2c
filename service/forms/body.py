"""The bodies of `POST /predict`, of every content type, -> uint8 (n, 28, 28).

With `service.pictures` the one place where untrusted image data is parsed. A malformed body raises
InvalidInput with the field, what it got and what was expected. Nothing is evaluated (no pickle, no
Python literals), and no memory is allocated by a number in it.

Time and memory are linear in the body, except for pictures, which decompress to much more than
their size: `Limits.max_picture_pixels` bounds all pictures of one request together.

What only decoding processes need is imported where it is used: Pillow and python-multipart take
5 MiB and 35 ms.
"""

from __future__ import annotations

from difflib import get_close_matches

import numpy as np

from lenet.nvtx import span
from lenet.pixels import PIXELS, Images
from service.errors import UnsupportedMediaType, invalid, shown
from service.forms.multipart import media_type, no_file, parts_of
from service.forms.pixel_csv import CSV_BEGIN
from service.forms.pixel_json import sliced_json_images
from service.forms.pixels import NPY_MAGIC, Scale, check_count
from service.forms.reader import ARRAYS, CSV, NPY, OCTETS, PICTURES, Limits, Reader
from service.pictures.headers import Digits, Doubts, Invert, sniff

_BINARY = (*ARRAYS, *PICTURES)
ACCEPTED = ("application/json", *_BINARY, "multipart/form-data")
"""Content types of a request's body."""

NOW_BYTES = {"application/json": 192 * 1024, NPY: 1024 * 1024, CSV: 96 * 1024}
"""The largest bodies that are decoded on the event loop. Larger ones block it for more than the 2
to 3 ms that JSON of 192 KiB, 64 images and more, takes, CSV of 96 KiB with exponents, and the
transposition of an npy array in Fortran's order (one Xeon core, 2026-11-27)."""


def accepted_type(content_type: str) -> str:
    """The media type of a body, one of `ACCEPTED`. Raises: UnsupportedMediaType."""
    kind = media_type(content_type)
    if kind not in ACCEPTED:
        raise _unsupported("content-type", kind, ACCEPTED)
    return kind


def decode(
    body: bytes,
    content_type: str,
    *,
    invert: Invert = "auto",
    digits: Digits = "one",
    scale: Scale = "byte",
    limits: Limits,
    doubts: Doubts | None = None,
) -> Images:
    """`read` any body; see `prediction.ImageForm`. `doubts` gets what is doubtful about images.

    Raises: InvalidInput, TooLarge, UnsupportedMediaType.
    """
    reader = Reader(limits, _nothing, scale=scale, invert=invert, digits=digits)
    images = read(body, content_type, reader)
    if doubts is not None:
        doubts += reader.doubts
    return images


@span("decode")
def read(body: bytes, content_type: str, reader: Reader) -> Images:
    """The images of a body, uint8 (n, 28, 28), C-contiguous, 1 <= n <= max_images.

    The result may be read-only.

    Raises: InvalidInput, TooLarge, UnsupportedMediaType, NeedsProcess.
    """
    kind = accepted_type(content_type)
    if not body:
        raise invalid("body", "nothing", "at least one image")
    if kind == "application/json":
        return sliced_json_images(body, reader)
    if kind == "multipart/form-data":
        return _multipart(body, content_type, reader)
    return reader.part(body, kind, "body", 0)


def _multipart(body: bytes, content_type: str, reader: Reader) -> Images:
    """The images of all parts, in the order of the parts."""
    between, max_images = reader.between or _nothing, reader.limits.max_images
    images: list[Images] = []
    count = 0
    for i, part in enumerate(parts_of(body, content_type, max_images, between)):
        between(0)
        kind, content = part.kind, part.content
        field = f"parts[{i}]"
        if kind in ("", OCTETS):
            kind = sniff(content) or _kind_of(content)
            if kind == OCTETS and (not content or len(content) % PIXELS):
                raise no_file(part, field)
        if kind not in _BINARY:
            raise _unsupported(field, kind, _BINARY)
        rows = reader.part(content, kind, field, count)
        images.append(rows)
        count += len(rows)
        check_count(count, "parts", max_images)
    return images[0] if len(images) == 1 else np.concatenate(images)


def _kind_of(content: bytes) -> str:
    """The kind of a part that is no picture and states none."""
    if content.startswith(NPY_MAGIC):
        return NPY
    return CSV if CSV_BEGIN.match(content) else OCTETS


def _nothing(_: int) -> None:
    pass


_CONVERT = "; convert it to PNG or JPEG"
_WITH_CURL = "; with curl: -H 'Content-Type: image/png'"
_TYPES = {
    "": _WITH_CURL,
    "application/x-www-form-urlencoded": f"{_WITH_CURL}, or application/json for numbers",
    "application/pdf": _CONVERT,
    "application/zip": "; save one array with np.save",
    "application/gzip": "; say it in Content-Encoding: gzip",
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
