import sys
import tracemalloc

import numpy as np
import pytest

from service.errors import TooLarge
from service.forms.body import decode
from service.forms.reader import Limits
from service.pictures.ink import find_ink
from service.pictures.separate import MAX_DIGITS, find_digits, in_reading_order
from tests.pictures import PNG, encoded

PAPER, INK = 240, 40
LIMITS = Limits(MAX_DIGITS)


def bars(*boxes, size=(300, 400)):
    grey = np.full(size, PAPER, np.uint8)
    for top, bottom, left, right in boxes:
        grey[top:bottom, left:right] = INK
    return grey


def sizes(grey):
    """Height and width of each digit, in reading order."""
    drawing = find_ink(grey, "auto")
    drawn = [one.alone(drawing).drawn for one in in_reading_order(find_digits(drawing))]
    return [(int(one.any(1).sum()), int(one.any(0).sum())) for one in drawn]


def test_digits_are_read_line_by_line():
    boxes = [(30, 90, 200, 208), (30, 91, 60, 69), (160, 220, 60, 70), (162, 223, 200, 211)]
    assert sizes(bars(*boxes)) == [(61, 9), (60, 8), (60, 10), (61, 11)]


def test_specks_are_no_digits():
    one, other = (60, 160, 60, 75), (60, 150, 200, 215)
    assert sizes(bars(one, other, (100, 106, 130, 136), (250, 254, 300, 304))) == [
        (100, 15),
        (90, 15),
    ]


def test_a_lying_digit_is_a_digit():
    assert sizes(bars((60, 160, 60, 75), (110, 125, 150, 220))) == [(100, 15), (15, 70)]


def test_a_short_stroke_belongs_to_the_digit_beside_it():
    assert sizes(bars((60, 160, 60, 75), (100, 108, 85, 115), (60, 150, 300, 315))) == [
        (100, 45),
        (90, 15),
    ]


MANY = {
    "64 bars": [(y, y + 20, x, x + 6) for y in range(20, 500, 60) for x in range(20, 500, 60)],
    "1,600 bars": [(y, y + 3, x, x + 5) for y in range(20, 500, 12) for x in range(20, 500, 12)],
    "a stroke and 5,000 bars": [
        (20, 50, 8, 9),
        *((y, y + 1, x, x + 6) for y in range(8, 500, 2) for x in range(20, 500, 24)),
    ],
    "64 digits and 1,300 parts": [
        *((y, y + 20, 8 + 30 * x, 10 + 30 * x) for y in (8, 40, 72, 104) for x in range(16)),
        *((y, y + 3, x, x + 8) for y in range(150, 500, 8) for x in range(8, 500, 16)),
    ],
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
def test_shapes_are_counted_before_any_of_them_is_looked_at(name, digits):
    content = encoded(bars(*MANY[name], size=(512, 512)))
    calls, peak, found = work(content, digits)
    # 64 digits take 2,500 calls. Ten arrays of float32 of a picture's size are 10 MiB.
    assert calls < 20_000
    assert peak < 10 << 20
    if digits == "one":
        assert len(found) == 1
    elif len(MANY[name]) > MAX_DIGITS:
        assert f"shapes, expected at most {MAX_DIGITS} digits" in found.message
    else:
        assert len(found) == MAX_DIGITS
