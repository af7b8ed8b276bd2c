"""Pictures of several digits, read with `digits=several`."""

import sys
import tracemalloc

import numpy as np
import pytest

from service.errors import TooLarge
from service.forms.body import decode
from service.forms.reader import Limits
from service.pictures.picture import MAX_DIGITS, reading_order
from tests.pictures import PNG, encoded

PAPER, INK = 240, 40
LIMITS = Limits(MAX_DIGITS)


def bars(*boxes, size=(512, 512)):
    grey = np.full(size, PAPER, np.uint8)
    for top, bottom, left, right in boxes:
        grey[top:bottom, left:right] = INK
    return grey


def test_digits_are_read_line_by_line():
    boxes = {
        "c": (160, 220, 60, 70),
        "b": (30, 90, 200, 208),
        "d": (172, 233, 200, 211),  # the line slopes
        "a": (30, 91, 60, 69),
    }
    assert reading_order(boxes) == ["a", "b", "c", "d"]


def test_specks_are_no_digits():
    one, other = (60, 160, 60, 75), (60, 150, 200, 215)
    grey = bars(one, other, (100, 106, 130, 136), (250, 254, 300, 304), size=(300, 400))
    assert len(decode(encoded(grey), PNG, digits="several", limits=LIMITS)) == 2


MANY = {
    "64 bars": [(y, y + 30, x, x + 6) for y in range(20, 500, 60) for x in range(20, 500, 60)],
    "1,600 bars": [(y, y + 3, x, x + 5) for y in range(20, 500, 12) for x in range(20, 500, 12)],
    "a stroke and 5,000 bars": [
        (20, 50, 8, 9),
        *((y, y + 1, x, x + 6) for y in range(8, 500, 2) for x in range(20, 500, 24)),
    ],
    "70 bars": [(y, y + 30, x, x + 6) for y in range(20, 500, 50) for x in range(20, 500, 70)],
}


def work(content, digits):
    """Calls of Python functions, bytes that are allocated at most, and the images or the error."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    tracemalloc.start()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = decode(content, PNG, digits=digits, limits=LIMITS)
    except TooLarge as exc:
        found = exc
    finally:
        sys.setprofile(before)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return calls, peak, found


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("digits", ["one", "several"])
def test_work_and_memory_are_bounded_however_many_shapes_there_are(name, digits):
    content = encoded(bars(*MANY[name]))
    calls, peak, found = work(content, digits)
    # Ten arrays of float32 of a picture's size are 10 MiB.
    assert calls < 40_000
    assert peak < 10 << 20
    if digits == "one":
        assert len(found) == 1
    elif name == "70 bars":
        assert f"shapes, expected at most {MAX_DIGITS} digits" in found.message
    elif name == "64 bars":
        assert len(found) == MAX_DIGITS
