"""JSON, bytes, npy, pictures (PNG, JPEG, WebP, GIF, BMP) and multipart bodies -> uint8 (n, 28, 28).

The one place where untrusted image data is parsed. A malformed body raises InvalidInput with the
field, what it got and what was expected. Nothing is evaluated (no pickle, no Python literals) or
converted (1.0 is not a pixel), and no memory is allocated by a number in the body.

Time and memory are linear in the body, except for pictures, which decompress to much more than
their size: `Limits.max_picture_pixels` bounds all pictures of one request together.

The serving process decodes small bodies here on its event loop, everything else in the processes of
`service.decode.pool`. What those alone need is imported where it is used: Pillow and
python-multipart take 5 MiB and 35 ms.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from lenet.nvtx import span
from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, UnsupportedMediaType, invalid, shown
from service.forms import advice
from service.forms.pixel_json import check_count, json_images, sliced_json_images
from service.pictures.headers import Digits, Doubt, Invert, describe, recognise, sniff

__all__ = ["ACCEPTED", "Digits", "Doubt", "Doubts", "Invert", "Limits", "decode", "decoder"]

_UINT8 = np.dtype(np.uint8)
_PICTURES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
_BINARY = ("application/octet-stream", "application/x-npy", *_PICTURES)
ACCEPTED = ("application/json", *_BINARY, "multipart/form-data")
"""Content types of a request's body."""

_ALIASES = {"image/jpg": "image/jpeg", "image/x-ms-bmp": "image/bmp"}
"""Types that are not registered, and often sent."""

_NPY_MAGIC = b"\x93NUMPY"
_NPY_MAX_HEADER = 1024
_NPY_ITEM = re.compile(
    r"'descr':'(?P<descr>[^']*)'"
    r"|'fortran_order':(?P<order>True|False)"
    r"|'shape':\((?P<shape>\d{1,20},(?:\d{1,20},){0,8}(?:\d{1,20})?)\)",
    re.ASCII,
)
_NPY_DTYPES = {np.dtype(code).str[1:]: np.dtype(code) for code in "?bhilBHILefdFD"}
_MULTIPART_SLICE_BYTES = 64 * 1024
"""Parsed in one piece: 3 ms of small parts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request.

    `max_picture_pixels` applies to all pictures of a request together: 16,777,216 are one
    telephone photograph, or 256 drawings of 256 x 256.
    """

    max_images: int
    max_picture_pixels: int = 16_777_216


Doubts: TypeAlias = list[tuple[int, Doubt]]
"""Images of a request whose answer may mean nothing, and why; `MAX_DOUBTS` of them."""

MAX_DOUBTS = 256


def decode(
    body: bytes,
    content_type: str,
    *,
    invert: Invert = "auto",
    digits: Digits = "one",
    limits: Limits,
    doubts: Doubts | None = None,
) -> Images:
    """The images in a request's body, in their order; see `decoder`."""
    decode = decoder(content_type, invert=invert, digits=digits, limits=limits, doubts=doubts)
    return decode(body)


def media_type(content_type: str) -> str:
    """A Content-Type in lower case, without its parameters."""
    kind = content_type.partition(";")[0].strip().lower()
    return _ALIASES.get(kind, kind)


def decoder(
    content_type: str,
    *,
    invert: Invert,
    digits: Digits = "one",
    limits: Limits,
    doubts: Doubts | None = None,
    between: Callable[[], None] | None = None,
) -> Callable[[bytes], Images]:
    """What decodes the bodies of requests with these headers.

    Args:
        content_type: one of `ACCEPTED`; case and parameters such as charset are ignored.
        invert: "true" maps x to 255 - x, "false" leaves x; "auto" detects dark ink in pictures
            and leaves JSON, bytes and npy as they are.
        digits: "several" makes an image of each separate digit of a picture, in reading order. It
            makes no difference to anything but pictures.
        limits: how many images, how many pixels.
        doubts: gets what is doubtful about pictures, image by image.
        between: called again and again while a body is decoded, between its pictures or slices; it
            raises to end that. Large JSON is then parsed in slices, which takes a tenth of the
            memory.

    Returns: a function from a whole body to uint8 (n, 28, 28), C-contiguous, 1 <= n <= max_images,
        perhaps read-only. It raises InvalidInput, TooLarge and, for a part, UnsupportedMediaType.
    Raises: UnsupportedMediaType.
    """
    kind = media_type(content_type)
    if kind not in ACCEPTED:
        raise _unsupported("content-type", kind, ACCEPTED)
    inverted = invert == "true"

    if kind == "application/octet-stream" and not inverted:
        return span("decode")(partial(_octets, field="body", limits=limits))

    binary = partial(_Binary, invert, digits, limits, [] if doubts is None else doubts)

    def decode(body: bytes) -> Images:
        if not body:
            raise invalid("body", "nothing", "at least one image")
        if kind == "application/octet-stream":
            return ~_octets(body, "body", limits)
        if kind == "application/json":
            if between is None:
                images = json_images(body, limits.max_images)
            else:
                images = sliced_json_images(body, limits.max_images, between)
            return ~images if inverted else images
        if kind == "multipart/form-data":
            return _multipart(body, content_type, binary(), limits, between or _nothing)
        return binary().images(body, kind, "body")

    return span("decode")(decode)


class _Binary:
    """Reads the parts of one body that are not JSON, and counts their pixels and images."""

    def __init__(self, invert: Invert, digits: Digits, limits: Limits, doubts: Doubts) -> None:
        self._invert, self._digits, self._limits = invert, digits, limits
        self._doubts = doubts
        self._used_pixels = self._count = 0

    def images(self, body: bytes, kind: str, field: str) -> Images:
        """The images of a body or part. Raises: InvalidInput, TooLarge."""
        if kind not in _PICTURES:
            images = (_npy if kind == "application/x-npy" else _octets)(body, field, self._limits)
            self._count += len(images)
            return ~images if self._invert == "true" else images
        from service.pictures.picture import prepare

        prepared = prepare(
            body,
            kind,
            field=field,
            invert=self._invert,
            digits=self._digits,
            max_pixels=self._limits.max_picture_pixels,
            used_pixels=self._used_pixels,
        )
        check_count(len(prepared.images), field, self._limits.max_images)
        self._doubts.extend((self._count + index, doubt) for index, doubt in prepared.doubts)
        del self._doubts[MAX_DOUBTS:]
        self._used_pixels += prepared.pixels
        self._count += len(prepared.images)
        return prepared.images


def _octets(body: bytes, field: str, limits: Limits) -> Images:
    count, rest = divmod(len(body), PIXELS)
    if rest or not count:
        raise _no_pixels(bytes(body), field)
    if count > limits.max_images:
        check_count(count, field, limits.max_images)
    return np.ndarray((count, HEIGHT, WIDTH), _UINT8, body)


def _no_pixels(body: bytes, field: str) -> InvalidInput:
    found, hint = recognise(body)
    got = f"{len(body)} bytes{', ' * bool(found)}{found}" if body else "nothing"
    return invalid(field, got, f"n x 784 bytes, one a pixel, n at least 1{hint}")


def _npy(body: bytes, field: str, limits: Limits) -> Images:
    """Format versions 1 to 3, their headers by a strict pattern.

    `numpy.lib.format` evaluates the header as a Python literal, emits Python warnings about some,
    and has no public function for version 3.
    """
    cut = body.startswith(_NPY_MAGIC)
    if not cut or len(body) < 12:
        found, hint = ("", "") if cut else recognise(body)
        got = found or (f"{len(body)} bytes" if len(body) < 12 else describe(body))
        raise invalid(field, got, f"an npy file, as np.save writes it{hint}")
    start = 10 if body[6] == 1 else 12
    length = int.from_bytes(body[8:start], "little")
    if body[6] not in (1, 2, 3) or body[7] or length > min(_NPY_MAX_HEADER, len(body) - start):
        got = f"npy version {body[6]}.{body[7]} with a header of {length} bytes"
        raise invalid(field, got, f"version 1 to 3, and at most {_NPY_MAX_HEADER} bytes, all sent")
    header = "".join(body[start : start + length].decode("latin-1").replace('"', "'").split())
    items = {item.lastgroup: item[item.lastindex or 0] for item in _NPY_ITEM.finditer(header)}
    if len(items) != 3 or _NPY_ITEM.sub("x", header) not in ("{x,x,x}", "{x,x,x,}"):
        got = f"npy header {shown(header)}"
        raise invalid(field, got, "descr, fortran_order and shape of an array")
    code = items["descr"].lstrip("|<>=")
    if code != "u1":
        hint = _conversion(items["descr"], body[start + length :])
        if code == "O":
            hint = "; it holds Python objects: save np.array(x, dtype='uint8')"
        got = f"dtype {_NPY_DTYPES.get(code) or shown(code)}"
        raise invalid(field, got, f"uint8, 0 to 255{hint}")
    shape = tuple(int(side) for side in items["shape"].split(",") if side)
    one = shape in ((HEIGHT, WIDTH), (PIXELS,))
    if not one and shape[1:] not in ((HEIGHT, WIDTH), (PIXELS,)):
        expected = "(28, 28), (784,), (n, 28, 28) or (n, 784)"
        raise invalid(field, f"shape {shape}", expected + advice.for_shape(shape))
    count = 1 if one else shape[0]
    check_count(count, field, limits.max_images)
    data = memoryview(body)[start + length :]
    if len(data) != count * PIXELS:
        raise invalid(field, f"{len(data)} bytes of data", f"{count * PIXELS} for shape {shape}")
    order: Literal["F", "C"] = "F" if items["order"] == "True" else "C"
    array = np.frombuffer(data, np.uint8).reshape(shape, order=order)
    return np.ascontiguousarray(array).reshape(count, HEIGHT, WIDTH)


def _conversion(descr: str, data: bytes) -> str:
    """How the numbers of an npy file, which are not uint8, become pixels."""
    dtype = _NPY_DTYPES.get(descr.lstrip("|<>="))
    if dtype is None or dtype.kind == "c" or len(data) < dtype.itemsize:
        return ""
    if dtype.kind == "b":
        return "; save 255 * x.astype('uint8')"
    ordered = dtype.newbyteorder(">" if descr.startswith(">") else "<")
    numbers = np.frombuffer(data, ordered, len(data) // dtype.itemsize)
    low, high = float(numbers.min()), float(numbers.max())
    if dtype.kind in "iu" and low >= 0 and high <= 255:
        return "; save x.astype('uint8')"
    return advice.for_range(low, high)


def _nothing() -> None:
    pass


def _multipart(
    body: bytes, content_type: str, binary: _Binary, limits: Limits, between: Callable[[], None]
) -> Images:
    """The images of all parts, in the order of the parts."""
    images: list[Images] = []
    count = 0
    for i, part in enumerate(_parts(body, content_type, limits, between)):
        between()
        kind, content = part.kind, part.content
        field = f"parts[{i}]"
        if kind in ("", "application/octet-stream"):
            npy = "application/x-npy" if content.startswith(_NPY_MAGIC) else None
            kind = sniff(content) or npy or "application/octet-stream"
            if kind == "application/octet-stream" and (not content or len(content) % PIXELS):
                raise _no_file(part, field)
        if kind not in _BINARY:
            raise _unsupported(field, kind, _BINARY)
        rows = binary.images(content, kind, field)
        images.append(rows)
        count += len(rows)
        check_count(count, "parts", limits.max_images)
    return images[0] if len(images) == 1 else np.concatenate(images)


@dataclass(slots=True)
class _Part:
    """A part of a form; `kind` is its content type, "" where it has none."""

    kind: str = ""
    disposition: bytes = b""
    content: bytes = b""


def _no_file(part: _Part, field: str) -> InvalidInput:
    """The error for a part without a type that is no picture, no npy file and no pixels."""
    from python_multipart.multipart import parse_options_header

    options = parse_options_header(part.disposition)[1]
    if options.get(b"filename") == b"":
        return invalid(field, "an empty file", "a file; none was chosen in the form")
    text = recognise(part.content)[0]
    if b"filename" not in options and text.startswith("the text "):
        name = shown(options.get(b"name", b"").decode("utf-8", "replace"))
        expected = "files alone; with curl: -F image=@FILE, and leave out other fields"
        return invalid(field, f"the field {name} with {text}", expected)
    return _no_pixels(part.content, field)


def _parts(
    body: bytes, content_type: str, limits: Limits, between: Callable[[], None]
) -> list[_Part]:
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    parts: list[_Part] = []
    contents: list[bytearray] = []
    name, value, ends = bytearray(), bytearray(), list[bool]()

    def part_begin() -> None:
        check_count(len(parts) + 1, "parts", limits.max_images)
        parts.append(_Part())
        contents.append(bytearray())

    def header_end() -> None:
        header = name.lower()
        if header == b"content-type":
            parts[-1].kind = media_type(value.decode("latin-1"))
        elif header == b"content-disposition":
            parts[-1].disposition = bytes(value)
        name.clear()
        value.clear()

    try:
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not boundary:
            raise invalid("content-type", "no boundary", "multipart/form-data; boundary=...")
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": part_begin,
                "on_part_data": lambda data, start, end: contents[-1].extend(data[start:end]),
                "on_header_field": lambda data, start, end: name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: value.extend(data[start:end]),
                "on_header_end": header_end,
                "on_end": lambda: ends.append(True),
            },
        )
        for start in range(0, len(body), _MULTIPART_SLICE_BYTES):
            between()
            parser.write(body[start : start + _MULTIPART_SLICE_BYTES])
    except (FormParserError, UnicodeEncodeError) as exc:
        raise InvalidInput(f"body: not multipart/form-data: {exc}", field="body") from exc
    if not ends or not parts:
        got = f"{len(parts)} parts" + ("" if ends else " and no closing boundary")
        expected = "at least one file and a boundary after the last; with curl: -F image=@FILE"
        raise invalid("body", got, expected)
    for part, content in zip(parts, contents, strict=True):
        part.content = bytes(content)
    return parts


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
"""What to do instead of sending these."""


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
