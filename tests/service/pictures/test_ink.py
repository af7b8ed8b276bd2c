"""Ink of drawings whose digit is known to the pixel; `test_picture.py` has photographs."""

import numpy as np
import pytest
from PIL import Image

from service.pictures.ink import find_ink

PAPER, INK = 230, 40


def seven(height=300, width=260, paper=PAPER, ink=INK):
    """A 7 of straight strokes, 20 pixels wide."""
    grey = np.full((height, width), paper, np.uint8)
    grey[70:90, 70:190] = ink
    grey[90:230, 170:190] = ink
    return grey


WHERE = seven() == INK


def drawn(grey, invert="auto"):
    return find_ink(np.ascontiguousarray(grey), invert).drawn


def stays(grey, where=WHERE, reach=0, invert="auto"):
    """All of the digit is ink, and nothing but what is `reach` pixels from it."""
    found = drawn(grey, invert)
    near = np.asarray(where)
    for axis in (0, 1):
        near = np.logical_or.reduce([np.roll(near, i, axis) for i in range(-reach, reach + 1)])
    return bool(found[where].all() and not found[~near].any())


@pytest.mark.parametrize("level", [0, 90, 150])
@pytest.mark.parametrize("width", [1, 2, 5, 12, 40])
def test_a_border_is_not_ink(width, level):
    grey = seven()
    framed = np.full_like(grey, level)
    framed[width:-width, width:-width] = grey[width:-width, width:-width]
    assert stays(framed)
    assert stays(255 - framed)


@pytest.mark.parametrize("sides", range(1, 16))
@pytest.mark.parametrize("width", [1, 25])
def test_dark_sides_are_not_ink(sides, width):
    grey = seven()
    for side in range(4):
        if sides >> side & 1:
            np.rot90(grey, side)[:width] = 20
    assert stays(grey)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("step", [12, 30, 64])
@pytest.mark.parametrize("level", [INK, 150, 200])
@pytest.mark.parametrize("crossing", [False, True])
def test_ruling_is_not_ink_and_strokes_that_it_crosses_stay_whole(width, step, level, crossing):
    grey = np.full((300, 260), PAPER, np.uint8)
    for at in range(0, 300, step):
        grey[at : at + width] = level
        if crossing:
            grey[:, at : at + width] = level
    grey[WHERE] = INK
    # Ends of lines stay, less than a stroke long.
    assert stays(grey, reach=16)


@pytest.mark.parametrize("degrees", [-9, 4, 30])
def test_ruling_may_run_in_any_direction(degrees):
    lines = Image.new("L", (600, 600), PAPER)
    pixels = np.asarray(lines).copy()
    pixels[::37] = pixels[1::37] = 120
    turned = np.asarray(Image.fromarray(pixels).rotate(degrees, fillcolor=PAPER))[150:450, 170:430]
    grey = turned.copy()
    grey[WHERE] = INK
    assert stays(grey, reach=16)


@pytest.mark.parametrize(
    "strokes",
    [
        (slice(60, 240), slice(120, 140)),  # a 1
        (slice(0, 300), slice(120, 140)),  # from edge to edge
        (slice(140, 155), slice(0, 260)),  # a bar from edge to edge
        (slice(0, 20), slice(60, 200)),  # along the edge
        (slice(145, 147), slice(40, 220)),  # thin
    ],
)
def test_a_straight_stroke_is_ink_where_it_is_all_that_is_there(strokes):
    where = np.zeros((300, 260), bool)
    where[strokes] = True
    assert stays(np.where(where, INK, PAPER).astype(np.uint8), where)
    assert stays(np.where(where, PAPER, INK).astype(np.uint8), where)


@pytest.mark.parametrize("cut", [(80, 0, 0, 0), (0, 80, 0, 0), (0, 0, 80, 0), (0, 0, 0, 80)])
@pytest.mark.parametrize("to_the_box", [False, True])
def test_a_digit_that_the_edge_cuts_or_touches_stays(cut, to_the_box):
    top, bottom, left, right = (70, 70, 70, 70) if to_the_box else cut
    part = np.s_[top : 300 - bottom, left : 260 - right]
    assert stays(seven()[part], WHERE[part])


def test_a_box_around_the_digit_is_not_ink():
    grey = seven()
    box = np.zeros_like(WHERE)
    box[15:285, 15:245] = True
    box[21:279, 21:239] = False
    grey[box] = INK
    assert stays(grey)
