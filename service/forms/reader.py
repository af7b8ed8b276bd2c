"""Reads the images in the parts of one request, whatever form surrounds them.

A part is raw pixels, an npy or CSV file, or a picture. Pictures are decoded in a decoding process:
on the event loop the reader raises `NeedsProcess` at the first one.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lenet.pixels import PIXELS, Images
from service.errors import InvalidInput, invalid, shown
from service.forms import base64_text
from service.forms.form import BINARY, MAX_CANDIDATES, MAX_DOUBTS, JudgedCandidate
from service.forms.pixel_csv import csv_images
from service.forms.pixels import Scale, check_count, npy, octets
from service.pictures.headers import (
    MAX_PIXELS,
    Between,
    Digits,
    Doubts,
    Invert,
    recognise,
    sniff,
)

if TYPE_CHECKING:  # only decoding processes load it
    from service.pictures.judge import Verdict

OCTETS = BINARY.decode()
NPY = "application/x-npy"
CSV = "text/csv"
ARRAYS = {OCTETS: octets, NPY: npy, CSV: csv_images}
"""The parsers of arrays of pixels, by media type."""
PICTURES = tuple(f"image/{kind}" for kind in ("png", "jpeg", "webp", "gif", "bmp", "avif", "tiff"))

_ELEMENT = "the file of a picture, or 784 bytes"
_SNIFFED_BYTES = 32
_READ_CHARACTERS = 300
_NAME = re.compile(r"\w{2,9}://|[^\n]{1,200}\.\w{2,4}\Z")
"""A URL, or the name of a file."""
_NUMBERS = re.compile(r"\s*[\[(]*\s*\d+(\.\d*)?[\s,]", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]+")


class NeedsProcess(Exception):
    """The body has a picture, which is not decoded on the event loop."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request.

    `max_picture_pixels` applies to all pictures of a request together: 67,108,864 are one
    photograph of 64 megapixels, or 1,024 drawings of 256 x 256.
    """

    max_images: int
    max_picture_pixels: int = MAX_PIXELS


class Reader:
    """Reads the parts of one request, and counts the pixels of its pictures.

    Attributes:
        between: see `service.pictures.headers`; None on the event loop.
        scale: of numbers, see `service.forms.pixels.Scale`.
        doubts: what is doubtful about the images read so far, by their index in the request.
        candidates: what was considered in the last picture, if it `is_explained`.
    """

    def __init__(
        self,
        limits: Limits,
        between: Between | None = None,
        *,
        scale: Scale = "byte",
        invert: Invert = "auto",
        digits: Digits = "one",
        is_explained: bool = False,
    ) -> None:
        self.limits, self.scale = limits, scale
        self.doubts: Doubts = []
        self.candidates: tuple[JudgedCandidate, ...] = ()
        self._is_explained = is_explained
        self.between, self._invert, self._digits = between, invert, digits
        self._used_pixels = 0

    def part(self, content: bytes, kind: str, field: str, index: int) -> Images:
        """The images of a body or part, of which the first is image `index` of the request.

        `kind` is its media type, one of `ARRAYS` or `PICTURES`.

        Raises: InvalidInput, TooLarge, NeedsProcess.
        """
        if kind not in PICTURES:
            images = ARRAYS[kind](content, field, self.limits.max_images, self.scale)
            return self.inverted(images)
        if self.between is None:
            raise NeedsProcess
        from service.pictures.picture import prepare

        prepared = prepare(
            content,
            kind,
            field=field,
            invert=self._invert,
            digits=self._digits,
            max_pixels=self.limits.max_picture_pixels,
            used_pixels=self._used_pixels,
            between=self.between,
        )
        check_count(len(prepared.images), field, self.limits.max_images)
        self.doubts.extend((index + number, doubt) for number, doubt in prepared.doubts)
        del self.doubts[MAX_DOUBTS:]
        self._used_pixels += prepared.pixels
        if self._is_explained:
            chosen = len(prepared.images)
            self.candidates = tuple(
                _explained(one, at < chosen)
                for at, one in enumerate(prepared.judged[: max(MAX_CANDIDATES, chosen)])
            )
        return prepared.images

    def element(self, content: bytes | memoryview, field: str, index: int) -> Images:
        """The images of one element of a list: a picture, or the 784 bytes of an image.

        Raises: likewise.
        """
        if kind := sniff(bytes(content[:_SNIFFED_BYTES])):
            return self.part(bytes(content), kind, field, index)
        if len(content) != PIXELS:
            raise _no_element(bytes(content), field, "")
        return self.part(bytes(content), OCTETS, field, index)

    def base64(self, text: object, field: str, index: int) -> Images:
        """The images of one element in base64. Raises: likewise."""
        try:
            content = base64_text.bytes_of(text)
        except ValueError as exc:
            expected = f"{_ELEMENT} in {base64_text.ALPHABET}{_no_base64(text)}"
            raise invalid(field, shown(text), expected) from exc
        if len(content) != PIXELS and not sniff(content):
            is_hex = len(content) == 2 * PIXELS * 3 // 4 and _HEX.fullmatch(str(text))
            raise _no_element(content, field, "base64 of ", "; it looks like hex" if is_hex else "")
        return self.element(content, field, index)

    def inverted(self, images: Images) -> Images:
        """Arrays of pixels as `invert` says: "auto" leaves them."""
        return ~images if self._invert == "true" else images


def _explained(one: Verdict, is_chosen: bool) -> JudgedCandidate:
    top, bottom, left, right = (round(share, 4) for share in one.candidate.box)
    image = b64encode(one.candidate.view.tobytes()).decode()
    digit, mark = round(one.digit, 4), round(one.mark, 4)
    return JudgedCandidate((top, bottom, left, right), image, digit, mark, is_chosen)


def _no_element(content: bytes, field: str, encoding: str, hint: str = "") -> InvalidInput:
    found = "" if hint else recognise(content)[0]
    if len(content) in (4 * PIXELS, 8 * PIXELS):
        hint = "; floats have more than one: encode x.astype('uint8')"
    got = f"{encoding}{len(content)} bytes{', ' * bool(found)}{found}"
    return invalid(field, got, f"{_ELEMENT}, one a pixel{hint}")


def _no_base64(text: object) -> str:
    """Advice for a client that sent `text`."""
    if not isinstance(text, str):
        return ""
    if _NUMBERS.match(text):
        return "; send a list of numbers without quotes"
    if _NAME.match(text[:_READ_CHARACTERS]):
        return "; files and URLs are not read: send the picture's file itself, or it in base64"
    return ""
