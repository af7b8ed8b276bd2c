"""Whether a prepared image may show something else than a digit.

An image is one number of 960 bits, in which a row and a column of zeros separate the rows: a few
operations on it count pixels, edges and shapes in 20 us.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROW: Final = 32
_INK: Final = 100
"""The least pixel value that counts as ink."""

_SMALLEST: Final = 8
"""Pixels of a shape that counts."""

# Limits that nearly all of MNIST's digits keep.
_LONGEST_OUTLINE: Final = 98
"""Ends of runs of ink, one in two, in all rows and columns."""
_WIDEST_PEN: Final = 14.0
"""Pixels; see `service.pictures.ink.pen_width`."""
_MOST_HOLES: Final = 3
_MOST_SHAPES: Final = 4
"""How many more holes than shapes there are, and the other way round."""


def silhouette(image: NDArray[np.uint8]) -> int:
    """The ink mask of a uint8 (28, 28) image, packed into an integer."""
    field = np.zeros((30, _ROW), np.bool_)
    field[1:29, 1:29] = image > _INK
    return int.from_bytes(np.packbits(field).tobytes(), "big")


def count_shapes(bits: int) -> int:
    """How many separate shapes of some size a silhouette has; diagonal neighbours are connected."""
    found = 0
    while bits:
        shape = bits & -bits
        while True:
            grown = shape | shape << 1 | shape >> 1
            grown = (grown | grown << _ROW | grown >> _ROW) & bits
            if grown == shape:
                break
            shape = grown
        found += shape.bit_count() >= _SMALLEST
        bits ^= shape
    return found


def is_no_digit(bits: int) -> bool:
    """Whether a silhouette is more tangled, or more solid, than any digit."""
    ink = bits.bit_count()
    outline = 2 * ink - (bits & bits >> 1).bit_count() - (bits & bits >> _ROW).bit_count()
    if outline > _LONGEST_OUTLINE or 8 / np.pi * ink > _WIDEST_PEN * outline:
        return True
    holes_more = _euler(_FIELD ^ bits) - _EULER_OF_BLANK
    return not -_MOST_SHAPES <= holes_more <= _MOST_HOLES


def _euler(bits: int) -> int:
    """Shapes minus holes, of shapes whose diagonal neighbours are not connected."""
    beside = bits & bits >> 1
    squares = beside & beside >> _ROW
    below = bits & bits >> _ROW
    return bits.bit_count() - beside.bit_count() - below.bit_count() + squares.bit_count()


_FIELD: Final = (1 << 30 * _ROW) - 1
_EULER_OF_BLANK: Final = _euler(_FIELD)
