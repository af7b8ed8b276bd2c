"""Advice on a client's mistake, appended to an error message.

Computed only for rejected requests. Advice begins with "; "; it is "" if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lenet.pixels import HEIGHT, PIXELS, WIDTH

CHANNELS = (1, 3, 4)
"""Numbers of a pixel in a picture that is not only grey: grey, colours, with transparency."""
_COLOURS = CHANNELS[1:]
_SIZE = [HEIGHT, WIDTH]


def for_shape(sizes: Sequence[object]) -> str:
    """How an array of this shape becomes images of 28 x 28."""
    sides = list(sizes)
    if sides[-3:] == [*_SIZE, 1] or sides[-3:-1] == [1, 1] or sides[-3:] == [1, *_SIZE]:
        return "; in NumPy x.reshape(-1, 28, 28)"
    if len(sides) > 2 and (sides[-1] in _COLOURS or sides[-3] in _COLOURS):
        return f"; send grey, one number a pixel, or {_SEND_FILE}"
    if len(sides) > 1 and sides[-2:] != _SIZE and sides[-1] != PIXELS:
        return f"; scale it to {HEIGHT} x {WIDTH}, or {_SEND_FILE}"
    return ""


def for_count(count: int) -> str:
    """How a flat list of `count` numbers becomes images of 28 x 28."""
    if count in (3 * PIXELS, 4 * PIXELS):
        return for_shape([HEIGHT, WIDTH, count // PIXELS])
    side = math.isqrt(count)
    return for_shape([side, side]) if count and side * side == count else ""


_SEND_FILE = "send the picture's file to /predict, with Content-Type: image/png"


_NOT_FINITE = "; some numbers are NaN or infinite"


def for_numbers(numbers: Sequence[object]) -> str:
    """How the numbers of an image, one of which is no pixel, become pixels.

    What is not a number is left out.
    """
    found = [float(number) for number in numbers if isinstance(number, (int, float))]
    if not all(map(math.isfinite, found)):
        return _NOT_FINITE
    return for_range(min(found), max(found)) if found else ""


def for_range(low: float, high: float) -> str:
    """How numbers from `low` to `high` become pixels."""
    if not math.isfinite(high - low):
        return _NOT_FINITE
    if low < 0:
        return "; negative numbers look normalised: send the pixels before that, 0 to 255"
    if high <= 1:
        return "; fractions 0 to 1 need the parameter scale=unit, or send round(255 * x)"
    if high <= 255:
        return "; for floats 0 to 255 send round(x), in NumPy np.rint(x).astype('uint8')"
    return f"; they go up to {high:g}: scale them to 0 to 255"
