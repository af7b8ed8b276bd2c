"""A JSON body -> uint8 (n, 28, 28).

Images of whole numbers take a fast path; another one is inspected again, slowly, and converted, or
its wrong value is named. What numbers are taken says `service.forms.pixels`.
"""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import orjson

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, TooLarge, invalid, shown
from service.forms import advice
from service.forms.pixels import as_pixels, check_count
from service.forms.reader import NeedsProcess, Reader
from service.pictures.headers import describe, recognise

_UINT8 = np.dtype(np.uint8)
_SHAPES = "28 rows of 28, 784 integers 0 to 255, or a base64 string of 784 bytes or a picture"
_FORM = '{"images": [...]}'
_MOST_LENGTHS = 5
_UNCHECKED_BYTES = 64 * 1024
"""A smaller body is cheap to parse whatever it contains."""

_LIST_BYTES = 50
"""A row of 28 numbers has 57 bytes at least, and an image of 28 rows 29 lists."""

_CHANNEL_BYTES = 8 * 1024 * 1024
"""A body up to this size may have an axis of one channel, a list for each number."""
_NOW_LISTS = 10_000
"""Lists that are read on the event loop, in 1 ms."""

_SLICE_BYTES = 256 * 1024
_SPACE = rb"[ \t\r\n]*"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""PowerShell and editors of Windows write it before a document."""
_LIST_BEGIN = re.compile(rb'(?:\xef\xbb\xbf)?%b\{%b"images"%b:%b\[%b(?=[\["])' % ((_SPACE,) * 5))
_LIST_END = re.compile(rb"\]%b\}%b\Z" % ((_SPACE,) * 2))
_OTHER_KEYS = {
    "instances": "; TensorFlow Serving's requests go to /v1/models/MODEL:predict",
    "signature_name": "; TensorFlow Serving's requests go to /v1/models/MODEL:predict",
    "inputs": "; the Open Inference Protocol's requests go to /v2/models/MODEL/infer",
    "model": "; the model goes into the URL, /predict?model=NAME",
    "version": "; the version goes into the URL, /predict?version=N",
    "invert": "; it goes into the URL, /predict?invert=true",
}
_NOT_JSON = {
    b"{'": "; names need double quotes: in Python send json.dumps(...)",
    b"'": "; it begins with a quote of the shell's: send a file, with curl --data-binary @FILE",
    b"\xff\xfe": "; it is UTF-16: save it as UTF-8",
}
"""Advice by the beginning of a document that is nearly JSON."""
_NOT_UTF8 = "str is not valid UTF-8"
"""Prefix of orjson 3.11's error for invalid UTF-8; the rest is about surrogates."""
_NO_MEMORY = "Not enough memory"
"""Prefix of orjson 3.11's error when allocation fails: it needs 12 bytes of memory for each byte
of a document."""


def json_images(body: bytes, reader: Reader) -> Images:
    """One or many images under `images`, each in one of `_SHAPES`, at most `max_images`.

    Raises: InvalidInput, TooLarge, NeedsProcess.
    """
    _check_containers(body, reader)
    document = json_object(body, _FORM)
    if len(document) != 1 or "images" not in document:
        for key in document:
            if key != "images":
                expected = 'only "images"' + _OTHER_KEYS.get(key, "")
                raise invalid(key[:40], "an unknown key", expected)
        raise invalid("images", "nothing", f"one image or a list of them, each {_SHAPES}")
    images = document["images"]
    pixels = _Pixels(reader, _has_booleans(body))
    if type(images) is not list or _is_one_image(images):
        pixels.add(images, "images", "")
    else:
        check_count(len(images), "images", reader.limits.max_images)
        pixels.add_list(images, str(len(images)))
    return pixels.images()


def sliced_json_images(body: bytes, reader: Reader) -> Images:
    """`json_images` for large bodies: the list of images is parsed in slices.

    Parsed whole, 32 MB of JSON take 400 MB, in slices 50 MB. `reader.between` is called before each
    slice. A slice ends at a comma between two images, found by counting brackets. Where that goes
    wrong, as with brackets in strings, the slice is not valid JSON, and the rest is parsed as one.

    Raises: InvalidInput, TooLarge, MemoryError (the rest, or a document of another form, is large),
        NeedsProcess.
    """
    if len(body) <= _SLICE_BYTES:
        return json_images(body, reader)
    begin = _LIST_BEGIN.match(body)
    end = _LIST_END.search(body, max(0, body.rfind(b"]")))
    if begin is None or end is None:
        return json_images(body, reader)
    max_images = reader.limits.max_images
    _check_containers(body, reader)
    pixels = _Pixels(reader, _has_booleans(body))
    count, at = 0, begin.end()
    while at <= end.start():
        if reader.between is not None:
            reader.between(0)
        stop = _slice_end(body, at, end.start())
        images = _slice(body, at, stop, end.start())
        if images is None:
            stop = end.start()
            images = _slice(body, at, stop, stop)
            assert images is not None, "bug: the rest has no rest"
        if not count and _is_one_image(images):
            return json_images(body, reader)
        # Beyond the limit they are only counted, for the message.
        pixels.add_list(images[: max(0, max_images - count)], "n")
        count += len(images)
        at = stop + 1
    check_count(count, "images", max_images)
    return pixels.images()


class _Pixels:
    """The pixels of the images of one body, one after another."""

    def __init__(self, reader: Reader, booleans: bool) -> None:
        self._reader = reader
        self._fast = _pixels if reader.scale == "byte" and not booleans else _no_pixels
        self._contents: list[bytes] = []
        self._extra = 0
        """Images of pictures beyond the first of each, with digits=several."""

    def add_list(self, images: list[object], rows: str) -> None:
        """Add each of `images`, which are `rows` in all. Raises: as `add`."""
        for image, content in zip(images, map(self._fast, images), strict=True):
            if content is not None:
                self._contents.append(content)
            else:
                number = len(self._contents)
                self.add(image, f"images[{number}]", "" if number else rows)

    def add(self, image: object, field: str, rows: str) -> None:
        """Add an image, or the digits of a picture. `rows`: see `_checked_pixels`.

        Raises: InvalidInput, TooLarge, NeedsProcess.
        """
        content = self._fast(image)
        if content is None and type(image) is str:
            images = self._reader.base64(image, field, len(self._contents) + self._extra)
            self._extra += len(images) - 1
            content = self._reader.inverted(images).tobytes()  # `images` inverts all of them
        self._contents.append(content or _checked_pixels(image, field, self._reader, rows))

    def images(self) -> Images:
        """All of them. Raises: TooLarge."""
        count = len(self._contents) + self._extra
        check_count(count, "images", self._reader.limits.max_images)
        images = np.ndarray((count, HEIGHT, WIDTH), _UINT8, b"".join(self._contents))
        return self._reader.inverted(images)


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
    if body.startswith(_BYTE_ORDER_MARK):
        body = body[len(_BYTE_ORDER_MARK) :]
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


def _check_containers(body: bytes, reader: Reader) -> None:
    """Raises: likewise, NeedsProcess."""
    if len(body) <= _UNCHECKED_BYTES:
        return
    has_channel = len(body) <= _CHANNEL_BYTES
    of_an_image = 1 + HEIGHT + (PIXELS if has_channel else 0)
    check_containers(body, _FORM, 1, 1 + of_an_image * reader.limits.max_images)
    lists, most = body.count(b"["), len(body) // _LIST_BYTES
    if lists > most and not has_channel:
        raise invalid("body", f"{lists} lists in {len(body)} bytes", f"at most {most}, {_FORM}")
    if lists > _NOW_LISTS and reader.between is None:
        raise NeedsProcess


def _is_one_image(images: list[object]) -> bool:
    """Whether `images` is itself an image: 784 numbers, or rows of numbers, or of lists of one."""
    first = images[0] if images else None
    if type(first) is not list:
        return isinstance(first, (int, float))
    if first and type(first[0]) is list:
        return lengths(images) == [HEIGHT, WIDTH, 1]
    return len(first) == WIDTH or (len(images) == HEIGHT and len(first) != PIXELS)


def _pixels(image: object) -> bytes | None:
    """784 bytes if `image` is lists of integers 0 to 255, else None."""
    if type(image) is list:
        try:
            if len(image) == PIXELS:
                return bytes(image)
            # `bytes` of a number is that many zeros: `len` makes sure that no row is a number.
            if len(image) == HEIGHT and set(map(len, image)) == {WIDTH}:
                return b"".join(map(bytes, image))
        except (TypeError, ValueError):
            pass
    return None


def _no_pixels(_: object) -> None:
    """Each image is inspected."""


def _checked_pixels(image: object, field: str, reader: Reader, rows: str = "") -> bytes:
    """784 bytes, each element checked.

    `rows`: of the first of a list of images, how long that is; it may be a row of one image.

    Raises:
        InvalidInput: names the first that is wrong.
    """
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
    place, values = "[{0}]", image
    if sizes == [1, HEIGHT, WIDTH]:
        field, values, sizes = f"{field}[0]", image[0], [HEIGHT, WIDTH]
    if len(sizes) > 2 and sizes != [HEIGHT, WIDTH, 1]:
        raise invalid(field, f"shape {tuple(sizes)}", _SHAPES + advice.for_shape(sizes))
    if len(sizes) > 1:
        if sizes[0] != HEIGHT:
            raise invalid(field, f"{sizes[0]} rows", _SHAPES + advice.for_shape(sizes))
        for y, row in enumerate(values):
            if type(row) is not list or len(row) != WIDTH:
                raise invalid(f"{field}[{y}]", shown(row), "a list of 28 integers 0 to 255")
        place, values = "[{1}][{2}]", [value for row in values for value in row]
    if len(sizes) == 3:
        place = "[{1}][{2}][0]"
        for i, one in enumerate(values):
            if type(one) is not list or len(one) != 1:
                where = field + "[{}][{}]".format(*divmod(i, WIDTH))
                raise invalid(where, shown(one), "a list of one number, as the first")
        values = [one[0] for one in values]
    if len(values) != PIXELS:
        raise invalid(field, f"{len(values)} values", _SHAPES + advice.for_count(len(values)))
    return _numbers(values, field, place, reader)


def _numbers(values: list[Any], field: str, place: str, reader: Reader) -> bytes:
    """784 numbers as bytes; `place` names one by its index, row and column."""
    is_unit = reader.scale == "unit"
    expected = "a number 0 to 1, as scale=unit says" if is_unit else "an integer 0 to 255"
    most = 1 if is_unit else 255
    kinds = {type(value) for value in values}
    fractions = float in kinds and not is_unit and _largest(values) == 1
    for i, value in enumerate(values):
        kind = type(value)
        if (
            kind not in ((int,) if fractions else (int, float))
            or not 0 <= value <= most
            or (not is_unit and value % 1)
        ):
            hint = "" if is_unit or kind is not float else advice.for_numbers(values)
            where = field + place.format(i, *divmod(i, WIDTH))
            raise invalid(where, shown(value), f"{expected}{hint}")
    array = np.array(values, np.float64)
    return as_pixels(array, field, reader.scale).tobytes()


def _largest(values: list[Any]) -> float:
    return max((value for value in values if type(value) in (int, float)), default=0)


def lengths(values: list[Any]) -> list[int]:
    """The lengths of `values` and the lists in it, as the first ones are nested."""
    sizes, inner = [len(values)], values
    while inner and type(inner[0]) is list and len(sizes) < _MOST_LENGTHS:
        inner = inner[0]
        sizes.append(len(inner))
    return sizes
