"""Bytes and npy files -> uint8 (n, 28, 28). Neither copied, nor converted: 1.0 is no pixel."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np

from lenet.pixels import HEIGHT, PIXELS, WIDTH, Images
from service.errors import InvalidInput, invalid, shown
from service.forms import advice
from service.forms.form import Body
from service.forms.pixel_json import check_count
from service.pictures.headers import describe, recognise

_UINT8 = np.dtype(np.uint8)
NPY_MAGIC = b"\x93NUMPY"
_NPY_MAX_HEADER = 1024
_NPY_ITEM = re.compile(
    r"'descr':'(?P<descr>[^']*)'"
    r"|'fortran_order':(?P<order>True|False)"
    r"|'shape':\((?P<shape>\d{1,20},(?:\d{1,20},){0,8}(?:\d{1,20})?)\)",
    re.ASCII,
)
_NPY_DTYPES = {np.dtype(code).str[1:]: np.dtype(code) for code in "?bhilBHILefdFD"}


def octets(body: Body, field: str, max_images: int) -> Images:
    """The images of which `body` is the pixels, not copied. Raises: InvalidInput, TooLarge."""
    count, rest = divmod(len(body), PIXELS)
    if rest or not count:
        raise no_pixels(bytes(body), field)
    if count > max_images:
        check_count(count, field, max_images)
    return np.ndarray((count, HEIGHT, WIDTH), _UINT8, body)


def no_pixels(body: bytes, field: str) -> InvalidInput:
    """The error for bytes that are not pixels."""
    found, hint = recognise(body)
    got = f"{len(body)} bytes{', ' * bool(found)}{found}" if body else "nothing"
    return invalid(field, got, f"n x 784 bytes, one a pixel, n at least 1{hint}")


def npy(body: bytes, field: str, max_images: int) -> Images:
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
    check_count(count, field, max_images)
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
