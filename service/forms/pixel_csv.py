"""A CSV body -> uint8 (n, 28, 28): an image a line, 784 numbers, read by NumPy.

The first line may be a header. Kaggle's labelled files have `label` as its first column; MNIST's
and EMNIST's labelled files often have no header, and 785 numbers begin with the label; SageMaker
sends 784 numbers without a header. Labels are ignored.
"""

from __future__ import annotations

import io
import re
from itertools import chain, islice

import numpy as np

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import invalid, shown
from service.forms.pixels import Scale, as_pixels, check_count
from service.pictures.headers import describe

_LABELLED = PIXELS + 1
_IGNORED = (b"label", b"")
"""Names of a first column without pixels. pandas gives its index none."""

_LAST_NAMES = (b"783", b"784")
"""Last names of columns that are called by their number, which no pixel has."""

_SLICE_LINES = 256
"""Lines that are parsed in one piece: 1.6 MB of float64."""

_WHOLE = b'0123456789, \t\r\n"'
"""Characters of whole numbers."""

_PLACE = re.compile(r"at row (\d+), column (\d+)")
"""Where NumPy found no number, in its message: the row from 0, the column from 1."""

CSV_BEGIN = re.compile(rb'(\xef\xbb\xbf)?[\w."+-]{0,40},[\w."+-]{1,40},')
"""The first two columns of a CSV file."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def csv_images(body: bytes, field: str, max_images: int, scale: Scale = "byte") -> Images:
    """The images in the lines of `body`. Raises: InvalidInput, TooLarge."""
    lines = io.BytesIO(body.removeprefix(_BYTE_ORDER_MARK).rstrip())
    first = lines.readline()
    columns = first.count(b",") + 1
    if columns not in (PIXELS, _LABELLED):
        got = f"{columns} values in line 1" if columns > 1 else describe(body)
        expected = f"{PIXELS} numbers in a line, between commas, or {_LABELLED} with a label first"
        raise invalid(field, got, expected)
    names = [name.strip(b' "\r\n') for name in first.split(b",")]
    has_header = names[-1] in _LAST_NAMES or not (_is_value(names[1]) or _is_value(names[-1]))
    if has_header and columns == _LABELLED and names[0].lower() not in _IGNORED:
        got = f"{_LABELLED} columns, of which the first is {_text(names[0])}"
        raise invalid(field, got, f"{PIXELS} columns, or {_LABELLED} of which the first is label")
    images: list[Images] = []
    count = 0
    rest = lines if has_header else chain([first], lines)
    while some := list(islice(rest, _SLICE_LINES)):
        check_count(count + len(some), field, max_images)
        images.append(_images(some, 1 + has_header + count, columns, field, scale))
        count += len(some)
    check_count(count, field, max_images)
    return images[0] if len(images) == 1 else np.concatenate(images)


def _images(lines: list[bytes], number: int, columns: int, field: str, scale: Scale) -> Images:
    """The images of `lines`, the first of which is line `number` of the body."""

    def place(index: int) -> str:
        line, pixel = divmod(index, PIXELS)
        return f"line {number + line}, column {pixel + 1 + columns - PIXELS}"

    for i, line in enumerate(lines, number):
        if (size := line.count(b",") + 1) != columns:
            raise invalid(field, f"{size} values in line {i}", f"{columns}, as in line 1")
    # NumPy 2.0 reads fractions as integers, with a warning.
    is_whole = not b"".join(lines).translate(None, _WHOLE)
    kind = np.int64 if is_whole else np.float64
    try:
        values = np.loadtxt(lines, kind, comments=None, delimiter=",", quotechar='"', ndmin=2)
        if values.shape != (len(lines), columns):
            raise ValueError
    except ValueError as exc:
        got = f"an open quote in lines {number} to {number + len(lines) - 1}"
        found = _PLACE.search(str(exc))
        row, column = map(int, found.groups()) if found else (0, 0)
        if 0 < column <= columns:  # a quoted line feed makes one row of two lines
            cell = lines[row].split(b",")[column - 1].strip()
            got = f"{_text(cell)} at line {number + row}, column {column}"
        raise invalid(field, got, "a number in each column") from exc
    pixels = as_pixels(np.ascontiguousarray(values[:, -PIXELS:]), field, scale, place=place)
    return pixels.reshape(len(lines), HEIGHT, WIDTH)


def _is_value(cell: bytes) -> bool:
    """Whether a cell of the first line is a number or empty: then that line is no header."""
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True


def _text(cell: bytes) -> str:
    return shown(cell.decode("utf-8", "replace"))
