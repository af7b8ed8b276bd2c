"""A JSON body -> uint8 (n, 28, 28).

Valid images take a fast path; an invalid one is inspected again, slowly, to name the wrong value.
Floats are taken if they are whole, as in an array's `tolist()`. An image of 0.0 and 1.0 alone is
rejected: its client means fractions.
"""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import orjson

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, TooLarge, invalid, shown
from service.forms import advice, base64_text
from service.pictures.headers import Between, describe, recognise, sniff

_UINT8 = np.dtype(np.uint8)
_SHAPES = "28 rows of 28, 784 integers 0 to 255, or a base64 string of 784 bytes"
_FORM = '{"images": [...]}'
_MOST_LENGTHS = 5
_UNCHECKED_BYTES = 64 * 1024
"""A smaller body is cheap to parse whatever it contains."""

_LIST_BYTES = 50
"""A row of 28 numbers has 57 bytes at least, and an image of 28 rows 29 lists."""

_SLICE_BYTES = 256 * 1024
_SPACE = rb"[ \t\r\n]*"
_LIST_BEGIN = re.compile(rb'%b\{%b"images"%b:%b\[%b(?=[\["])' % ((_SPACE,) * 5))
_LIST_END = re.compile(rb"\]%b\}%b\Z" % ((_SPACE,) * 2))
_OTHER_KEYS = {
    "instances": "; TensorFlow Serving's requests go to /v1/models/MODEL:predict",
    "signature_name": "; TensorFlow Serving's requests go to /v1/models/MODEL:predict",
    "inputs": "; the Open Inference Protocol's requests go to /v2/models/MODEL/infer",
    "model": "; the model goes into the URL, /predict?model=NAME",
    "version": "; the version goes into the URL, /predict?version=N",
    "invert": "; it goes into the URL, /predict?invert=true",
}
_NAME = re.compile(r"\w{2,9}://|[^\n]{1,200}\.\w{2,4}\Z")
"""A URL, or the name of a file."""
_READ_CHARACTERS = 300
_NUMBERS = re.compile(r"\s*[\[(]*\s*\d+(\.\d*)?[\s,]", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]+")
_NOT_JSON = {
    b"{'": "; names need double quotes: in Python send json.dumps(...)",
    b"'": "; it begins with a quote of the shell's: send a file, with curl --data-binary @FILE",
    b"\xef\xbb\xbf": "; it begins with a byte order mark: save it as UTF-8 without one",
    b"\xff\xfe": "; it is UTF-16: save it as UTF-8",
}
"""Advice by the beginning of a document that is nearly JSON."""
_NOT_UTF8 = "str is not valid UTF-8"
"""Prefix of orjson 3.11's error for invalid UTF-8; the rest is about surrogates."""
_NO_MEMORY = "Not enough memory"
"""Prefix of orjson 3.11's error when allocation fails: it needs 12 bytes of memory for each byte
of a document."""


def json_images(body: bytes, max_images: int) -> Images:
    """One or many images under `images`, each in one of `_SHAPES`, at most `max_images`.

    Raises: InvalidInput, TooLarge.
    """
    _check_containers(body, max_images)
    document = json_object(body, _FORM)
    if len(document) != 1 or "images" not in document:
        for key in document:
            if key != "images":
                expected = 'only "images"' + _OTHER_KEYS.get(key, "")
                raise invalid(key[:40], "an unknown key", expected)
        raise invalid("images", "nothing", f"one image or a list of them, each {_SHAPES}")
    images = document["images"]
    booleans = _has_booleans(body)
    if type(images) is not list or _is_one_image(images):
        content, count = _pixels(images, booleans) or _checked_pixels(images, "images"), 1
    else:
        check_count(count := len(images), "images", max_images)
        content = b"".join(
            [
                _pixels(image, booleans)
                or _checked_pixels(image, f"images[{i}]", "" if i else str(count))
                for i, image in enumerate(images)
            ]
        )
    return np.ndarray((count, HEIGHT, WIDTH), _UINT8, content)


def sliced_json_images(body: bytes, max_images: int, between: Between) -> Images:
    """`json_images` for large bodies: the list of images is parsed in slices.

    Parsed whole, 32 MB of JSON take 400 MB, in slices 50 MB. `between` is called before each slice.
    A slice ends at a comma between two images, found by counting brackets. Where that goes wrong,
    as with brackets in strings, the slice is not valid JSON, and the rest is parsed as one.

    Raises: InvalidInput, TooLarge, MemoryError (the rest, or a document of another form, is large).
    """
    begin = _LIST_BEGIN.match(body)
    end = _LIST_END.search(body, max(0, body.rfind(b"]")))
    if len(body) <= _SLICE_BYTES or begin is None or end is None:
        return json_images(body, max_images)
    _check_containers(body, max_images)
    booleans = _has_booleans(body)
    contents: list[bytes] = []
    count, at = 0, begin.end()
    while at <= end.start():
        between(0)
        stop = _slice_end(body, at, end.start())
        images = _slice(body, at, stop, end.start())
        if images is None:
            stop = end.start()
            images = _slice(body, at, stop, stop)
            assert images is not None, "bug: the rest has no rest"
        if not count and _is_one_image(images):
            return json_images(body, max_images)
        # Beyond the limit they are only counted, for the message.
        for i, image in enumerate(images[: max_images - count] if count < max_images else ()):
            content = _pixels(image, booleans)
            rows = "" if count + i else "n"
            contents.append(content or _checked_pixels(image, f"images[{count + i}]", rows))
        count += len(images)
        at = stop + 1
    check_count(count, "images", max_images)
    return np.ndarray((count, HEIGHT, WIDTH), _UINT8, b"".join(contents))


def _has_booleans(body: bytes) -> bool:
    """Whether these words occur at all: then each pixel's type is checked, as bytes([True]) is 1.

    One letter is found in a tenth of the time of a word: 2 us less for an image.
    """
    return (b"u" in body and b"true" in body) or (b"l" in body and b"false" in body)


def _slice_end(body: bytes, start: int, end: int) -> int:
    """The last comma between images within `_SLICE_BYTES`, or some more if need be; or `end`.

    `start` is outside all brackets of the images.
    """
    size = _SLICE_BYTES
    while start + size < end:
        characters = np.frombuffer(body, np.uint8, size, start)
        changes = (characters == ord("[")).view(np.int8) - (characters == ord("]")).view(np.int8)
        outside = np.cumsum(changes, dtype=np.int32) == 0
        commas = np.flatnonzero(outside & (characters == ord(",")))
        if commas.size:
            return start + int(commas[-1])
        size *= 2
    return end


def _slice(body: bytes, start: int, stop: int, end: int) -> list[object] | None:
    """The images from `start` to `stop`; None if they may not end there, but only at `end`."""
    try:
        images = _loads(b"[%b]" % body[start:stop])
    except orjson.JSONDecodeError as exc:
        if stop < end:
            return None
        # The position counts from the start of the slice, which begins with a bracket.
        at = start + exc.pos - 1
        line, column = body.count(b"\n", 0, at) + 1, at - body.rfind(b"\n", 0, at)
        where = f"line {line} column {column} (char {at})"
        raise InvalidInput(f"body: not JSON: {exc.msg}: {where}", field="body") from exc
    if not images:
        raise InvalidInput(f"body: not JSON: no value at char {start}", field="body")
    return cast("list[object]", images)


def json_object(body: bytes, form: str) -> dict[str, Any]:
    """The object in `body`; `form` shows one to a client who sent something else.

    Raises: InvalidInput, MemoryError.
    """
    try:
        document = _loads(body)
    except orjson.JSONDecodeError as exc:
        raise _not_json(body, exc, form) from exc
    if type(document) is not dict:
        raise invalid("body", shown(document), f"an object, {form}")
    return document


def _not_json(body: bytes, error: orjson.JSONDecodeError, form: str) -> InvalidInput:
    message = f"body: not JSON: {error}"
    found, hint = recognise(body)
    if form != _FORM and "Content-Type" in hint:
        hint = "; it goes to /predict"
    for beginning, remedy in _NOT_JSON.items():
        if body.startswith(beginning):
            message += remedy
            break
    else:
        if found and body[:1] not in b'{["':
            message = f"body: not JSON but {found}{hint}"
        elif error.msg.startswith(_NOT_UTF8):
            start = "" if body[:1] in b'{["' else f"{describe(body)}, and "
            message = f"body: not JSON: {start}not all of it is UTF-8"
        elif body[error.pos : error.pos + 3] in (b"NaN", b"Inf", b"-In"):
            message += "; JSON has no NaN and no infinity"
    return InvalidInput(message, field="body")


def _loads(text: bytes) -> Any:
    """The document in `text`.

    Raises: orjson.JSONDecodeError, MemoryError.
    """
    try:
        return orjson.loads(text)
    except SystemError as exc:  # where an allocation failed within it
        raise MemoryError from exc
    except orjson.JSONDecodeError as exc:
        if exc.msg.startswith(_NO_MEMORY):
            raise MemoryError from exc
        raise


def check_count(count: int, field: str, max_images: int) -> None:
    """Raise unless 1 <= count <= max_images."""
    if not count:
        raise invalid(field, "0 images", "at least 1")
    if count > max_images:
        message = (
            f"{field}: got {count} images, expected at most {max_images} in a request; send fewer"
        )
        raise TooLarge(message, field=field)


def check_containers(body: bytes, form: str, most_objects: int, most_lists: int) -> None:
    """Count objects and lists of a document like `form` before orjson builds them all.

    It holds the interpreter lock meanwhile; 32 MB of empty lists took 1 GB and 2 s.

    Raises: InvalidInput, TooLarge.
    """
    if len(body) <= _UNCHECKED_BYTES:
        return
    if (objects := body.count(b"{")) > most_objects:
        raise invalid("body", f"{objects} objects", f"at most {most_objects}, {form}")
    if (lists := body.count(b"[")) > most_lists:
        message = f"body: got {lists} lists, expected at most {most_lists}, enough for the images"
        raise TooLarge(message, field="body")


def _check_containers(body: bytes, max_images: int) -> None:
    """Raises: likewise."""
    check_containers(body, _FORM, 1, 1 + (1 + HEIGHT) * max_images)
    lists, most = body.count(b"["), len(body) // _LIST_BYTES
    if lists > most and len(body) > _UNCHECKED_BYTES:
        raise invalid("body", f"{lists} lists in {len(body)} bytes", f"at most {most}, {_FORM}")


def _is_one_image(images: list[object]) -> bool:
    """Whether `images` is itself an image: 784 numbers, or rows of numbers."""
    first = images[0] if images else None
    if type(first) is not list:
        return isinstance(first, (int, float))
    if first and type(first[0]) is list:
        return False
    return len(first) == WIDTH or (len(images) == HEIGHT and len(first) != PIXELS)


def _pixels(image: object, booleans: bool) -> bytes | None:
    """784 bytes if `image` is valid lists, else None: `_checked_pixels` says what is wrong."""
    if type(image) is list and not booleans:
        try:
            if len(image) == PIXELS:
                return bytes(image)
            # `bytes` of a number is that many zeros: `len` makes sure that no row is a number.
            if len(image) == HEIGHT and set(map(len, image)) == {WIDTH}:
                return b"".join(map(bytes, image))
        except (TypeError, ValueError):
            pass
    return None


def _checked_pixels(image: object, field: str, rows: str = "") -> bytes:
    """784 bytes, each element checked.

    `rows`: of the first of a list of images, how long that is; it may be a row of one image.

    Raises:
        InvalidInput: names the first that is wrong.
    """
    if type(image) is str:
        return _base64_pixels(image, field)
    if type(image) is not list:
        raise invalid(field, shown(image), _SHAPES)
    sizes = lengths(image)
    if rows not in ("", "1") and (
        (len(sizes) == 1 and sizes[0] != PIXELS)
        or (len(sizes) == 2 and sizes[1] in advice.CHANNELS)
    ):
        got = f"shape ({rows}, {', '.join(map(str, sizes))})"
        number = int(rows) if rows.isascii() and rows.isdigit() else 0
        raise invalid("images", got, _SHAPES + advice.for_shape([number, *sizes]))
    if len(sizes) > 2:
        raise invalid(field, f"shape {tuple(sizes)}", _SHAPES + advice.for_shape(sizes))
    place, values = "[{0}]", image
    if len(sizes) == 2:
        if sizes[0] != HEIGHT:
            raise invalid(field, f"{sizes[0]} rows", _SHAPES + advice.for_shape(sizes))
        for y, row in enumerate(image):
            if type(row) is not list or len(row) != WIDTH:
                raise invalid(f"{field}[{y}]", shown(row), "a list of 28 integers 0 to 255")
        place, values = "[{1}][{2}]", [value for row in image for value in row]
    if len(values) != PIXELS:
        raise invalid(field, f"{len(values)} values", _SHAPES + advice.for_count(len(values)))
    numbers = [value for value in values if type(value) in (int, float)]
    kinds = (int,) if max(numbers, default=0) == 1 else (int, float)
    for i, value in enumerate(values):
        if type(value) not in kinds or not 0 <= value <= 255 or value % 1:
            hint = advice.for_numbers(values) if type(value) is float else ""
            where = field + place.format(i, *divmod(i, WIDTH))
            raise invalid(where, shown(value), f"an integer 0 to 255{hint}")
    return bytes(map(int, values))


def lengths(values: list[Any]) -> list[int]:
    """The lengths of `values` and the lists in it, as the first ones are nested."""
    sizes, inner = [len(values)], values
    while inner and type(inner[0]) is list and len(sizes) < _MOST_LENGTHS:
        inner = inner[0]
        sizes.append(len(inner))
    return sizes


def _base64_pixels(text: str, field: str) -> bytes:
    try:
        content = base64_text.bytes_of(text)
    except ValueError as exc:
        expected = f"784 bytes in {base64_text.ALPHABET}{_no_base64(text)}"
        raise invalid(field, shown(text), expected) from exc
    if len(content) != PIXELS:
        if picture := sniff(content):
            expected = f"784 bytes of pixels; {_send_picture(picture)}"
            raise invalid(field, f"a picture ({picture}) in base64", expected)
        found, hint = recognise(content)[0], ""
        if len(text) == 2 * PIXELS and _HEX.fullmatch(text):
            found, hint = "", "; it looks like hex"
        elif len(content) in (4 * PIXELS, 8 * PIXELS):
            hint = "; floats have more than one: encode x.astype('uint8')"
        got = f"base64 of {len(content)} bytes{', ' * bool(found)}{found}"
        raise invalid(field, got, f"784, one a pixel{hint}")
    return content


def _no_base64(text: str) -> str:
    """Advice for a client that sent `text`."""
    if _NUMBERS.match(text):
        return "; send a list of numbers without quotes"
    if _NAME.match(text[:_READ_CHARACTERS]):
        return f"; files and URLs are not read: {_send_picture('image/png')}"
    return ""


def _send_picture(kind: str) -> str:
    return f"send the picture's file itself as the body, with Content-Type: {kind}"
