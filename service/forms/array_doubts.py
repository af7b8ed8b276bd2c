"""Signs that raw pixels are not light ink on a dark ground, one byte a pixel, row by row.

Only the first images of a request are read. One test of a few bytes for each sign, which digits
hardly ever pass, decides whether more is read.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import HEIGHT, PIXELS, WIDTH
from service.forms.form import Body
from service.pictures.headers import Doubt

Doubts: TypeAlias = tuple[tuple[int, Doubt], ...]

_BRIGHT = 127
_CORNERS = (0, WIDTH - 1, PIXELS - WIDTH, PIXELS - 1)

_WIDE = 4
"""Bytes of a float32."""

_TOP_ROWS = Struct(f"{3 * WIDTH}s")
_TOP = 2 * PIXELS
"""Where the third image begins. Its three upper rows are blank in 95 % of MNIST; of an image of
float32 these bytes are 21 pixels in the middle, which are blank in 0.03 %."""

_BLANK = bytes(3 * WIDTH)
_LAST_BYTES = bytes(one for one in range(256) if not one or 0x35 <= one & 0x7F <= 0x43)
"""Last bytes of a float32 that is a pixel."""

_LEAST_FLOAT, _LARGEST_FLOAT = 0x35800000, 0x437F0000
"""The bits of 2^-20 and 255 as float32: a pixel has such a magnitude, scaled or not, or is 0."""

_LEAST_MEASURED, _MOST_MEASURED = 32, 128
"""Images of which width and height are measured."""

_PIXEL = Struct("B" + f"{PIXELS - 1}xB" * 7)
"""A pixel of each of eight images."""

_RIGHT, _BOTTOM = 13 * WIDTH + 23, 23 * WIDTH + 13
"""Pixels that transposition exchanges: 9 % and 53 % of MNIST have ink there."""

_MOST_BLANK = 5
"""Of eight transposed images those that may be blank at `_RIGHT`: more are in 97 % of MNIST."""

_WIDER_BY = 3.25
"""Pixels by which transposed images are wider than high in the mean. MNIST is higher by 4.1; of 32
neighbours in MNIST none are wider by more than 0.5, and of 32 of one class by 3.2, fives."""


def array_doubts(pixels: Body, count: int) -> Doubts:
    """What is doubtful about the first of `count` images, whose bytes are `pixels`."""
    if not count % _WIDE and _TOP_ROWS.unpack_from(pixels, _TOP)[0] != _BLANK and _is_wider(pixels):
        return ((0, "looks_wider"),)
    if (
        count >= _LEAST_MEASURED
        and _PIXEL.unpack_from(pixels, _RIGHT).count(0) <= _MOST_BLANK
        and _is_transposed(pixels, min(count, _MOST_MEASURED))
    ):
        return ((0, "looks_transposed"),)
    return ((0, "looks_inverted"),) if pixels[0] > _BRIGHT and _is_inverted(pixels) else ()


def _is_wider(pixels: Body) -> bool:
    """Whether the first four images are one of float32, scaled or not."""
    if _TOP_ROWS.unpack_from(pixels, _TOP)[0][_WIDE - 1 :: _WIDE].translate(None, _LAST_BYTES):
        return False
    bits = np.frombuffer(pixels, "<u4", PIXELS) & 0x7FFFFFFF
    is_pixel = (bits >= _LEAST_FLOAT) & (bits <= _LARGEST_FLOAT) | (bits == 0)
    return bool(is_pixel.all())


def _is_transposed(pixels: Body, count: int) -> bool:
    """Whether the first `count` images together are wider than high, which digits are not."""
    right, bottom = (_PIXEL.unpack_from(pixels, at).count(0) for at in (_RIGHT, _BOTTOM))
    if right >= bottom:
        return False
    ink = np.frombuffer(pixels, np.uint8, count * PIXELS).reshape(count, HEIGHT, WIDTH) > 0
    return _margins(ink, 2) - _margins(ink, 1) >= _WIDER_BY * count


def _margins(ink: NDArray[np.bool_], axis: int) -> int:
    """How many rows (axis 2) or columns (1) are blank before the first and behind the last ink."""
    has_ink = ink.max(axis=axis)
    return int(has_ink.argmax(axis=1).sum() + has_ink[:, ::-1].argmax(axis=1).sum())


def _is_inverted(pixels: Body) -> bool:
    """Whether the corners of the first image are bright, and most of it."""
    image = np.frombuffer(pixels, np.uint8, PIXELS)
    return all(pixels[corner] > _BRIGHT for corner in _CORNERS) and bool(image.mean() > _BRIGHT)
