"""Bytes, npy files and arrays of numbers -> uint8 (n, 28, 28). Bytes are not copied.

Numbers of any type are pixels if each is whole, 0 to 255. Fractions 0 to 1 have to be declared by
the scale "unit"; without that a float of an image that has no other than 0 and 1 is refused, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, TooLarge, invalid, shown
from service.forms import advice
from service.forms.form import Body
from service.pictures.headers import describe, recognise

Scale: TypeAlias = Literal["byte", "unit"]
"""What a number of an array is: 0 to 255, or with "unit" 0 to 1, of which 255 times is taken."""

SCALES: tuple[Scale, ...] = get_args(Scale)
_UINT8 = np.dtype(np.uint8)
_ONE_IMAGE = ((HEIGHT, WIDTH), (PIXELS,), (HEIGHT, WIDTH, 1))
_MANY_IMAGES = ((HEIGHT, WIDTH), (PIXELS,), (1, HEIGHT, WIDTH), (HEIGHT, WIDTH, 1))
NPY_MAGIC = b"\x93NUMPY"
_NPY_MAX_HEADER = 1024
_NPY_ITEM = re.compile(
    r"'descr':'(?P<descr>[^']*)'"
    r"|'fortran_order':(?P<order>True|False)"
    r"|'shape':\((?P<shape>\d{1,20},(?:\d{1,20},){0,8}(?:\d{1,20})?)\)",
    re.ASCII,
)
_NPY_DTYPES = {np.dtype(code).str[1:]: np.dtype(code) for code in "?bhilBHILefd"}
_SHAPES = "(28, 28), (784,), (n, 28, 28) or (n, 784), or with an axis of one channel"


def scale_of(value: object, field: str) -> Scale:
    """The scale that a request states. Raises: InvalidInput."""
    for scale in SCALES:
        if value == scale:
            return scale
    raise invalid(field, shown(value), f"one of {', '.join(SCALES)}")


def rows_of(shape: Sequence[int]) -> int | None:
    """How many images an array of `shape` has; None if it is none of images."""
    sides = tuple(shape)
    if sides in _ONE_IMAGE:
        return 1
    return sides[0] if sides[1:] in _MANY_IMAGES else None


def check_count(count: int, field: str, max_images: int) -> None:
    """Raise unless 1 <= count <= max_images."""
    if not count:
        raise invalid(field, "0 images", "at least 1")
    if count > max_images:
        message = (
            f"{field}: got {count} images, expected at most {max_images} in a request; send fewer"
        )
        raise TooLarge(message, field=field)


def where(index: int) -> str:
    """Names the image and pixel of number `index` of an array."""
    image, pixel = divmod(index, PIXELS)
    return f"index {index} (image {image}, row {pixel // WIDTH}, column {pixel % WIDTH})"


def as_pixels(
    values: NDArray[Any],
    field: str,
    scale: Scale = "byte",
    first: int = 0,
    place: Callable[[int], str] = where,
) -> NDArray[np.uint8]:
    """Numbers of any real dtype as pixels; uint8 is not copied, true is ink.

    `place` names a number in messages by its index, that of the first number being `first`. Whole
    images have to be in one call.

    Raises: InvalidInput (the first number that is no pixel).
    """
    if values.dtype == np.bool_:
        return np.where(values.view(np.uint8), np.uint8(255), np.uint8(0))
    if scale == "unit":
        wrong = ~((values >= 0) & (values <= 1))  # also NaN
        if wrong.any():
            got = f"{values.flat[index := int(wrong.argmax())]} at {place(first + index)}"
            raise invalid(field, got, "numbers 0 to 1, as scale=unit says")
        return np.rint(values * np.float32(255)).astype(np.uint8)
    if values.dtype == np.uint8:
        return values
    # NaN, infinity or 300.0 become some byte, which differs from them.
    with np.errstate(invalid="ignore"):
        pixels = values.astype(np.uint8)
    wrong = pixels != values
    if values.dtype.kind == "f" and not wrong.any():
        largest = pixels.reshape(-1, PIXELS).max(axis=1, keepdims=True)
        wrong = (largest == 1) & (pixels.reshape(-1, PIXELS) == 1)
    if wrong.any():
        index = int(wrong.argmax())
        image = index - index % PIXELS
        hint = advice.for_numbers(values.ravel()[image : image + PIXELS].tolist())
        got = f"{values.flat[index]} at {place(first + index)}"
        raise invalid(field, got, f"whole numbers 0 to 255{hint}")
    return pixels


def octets(body: Body, field: str, max_images: int, scale: Scale = "byte") -> Images:
    """The images of which `body` is the pixels, not copied. Raises: InvalidInput, TooLarge."""
    count, rest = divmod(len(body), PIXELS)
    if rest or not count:
        raise no_pixels(bytes(body), field)
    if count > max_images:
        check_count(count, field, max_images)
    images = np.ndarray((count, HEIGHT, WIDTH), _UINT8, body)
    return as_pixels(images, field, scale)


def no_pixels(body: bytes, field: str) -> InvalidInput:
    """The error for bytes that are not pixels."""
    found, hint = recognise(body)
    got = f"{len(body)} bytes{', ' * bool(found)}{found}" if body else "nothing"
    return invalid(field, got, f"n x 784 bytes, one a pixel, n at least 1{hint}")


def npy(body: bytes, field: str, max_images: int, scale: Scale = "byte") -> Images:
    """Format versions 1 to 3, their headers by a strict pattern.

    `numpy.lib.format` evaluates the header as a Python literal, emits Python warnings about some,
    and has no public function for version 3.
    """
    cut = body.startswith(NPY_MAGIC)
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
    dtype = _NPY_DTYPES.get(items["descr"].lstrip("|<>="))
    if dtype is None:
        python = items["descr"].lstrip("|<>=") == "O"
        hint = "; it holds Python objects: save np.array(x, dtype='uint8')" if python else ""
        raise invalid(field, f"dtype {shown(items['descr'])}", f"real numbers, as of uint8{hint}")
    dtype = dtype.newbyteorder(">" if items["descr"].startswith(">") else "<")
    shape = tuple(int(side) for side in items["shape"].split(",") if side)
    if (count := rows_of(shape)) is None:
        raise invalid(field, f"shape {shape}", _SHAPES + advice.for_shape(shape))
    check_count(count, field, max_images)
    data = memoryview(body)[start + length :]
    size = count * PIXELS * dtype.itemsize
    if len(data) != size:
        raise invalid(field, f"{len(data)} bytes of data", f"{size} for shape {shape} of {dtype}")
    order: Literal["F", "C"] = "F" if items["order"] == "True" else "C"
    array = np.frombuffer(data, dtype).reshape(shape, order=order)
    pixels = as_pixels(np.ascontiguousarray(array), field, scale)
    return pixels.reshape(count, HEIGHT, WIDTH)
