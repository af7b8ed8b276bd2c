"""The separate digits of a drawing, in the order in which they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from service.pictures.ink import MOST_RUNS, Drawing, pen_width
from service.pictures.shapes import Mask, Shapes, count_runs, dilated, shapes

MAX_DIGITS = 64
"""The most digits in one picture."""

_MOST_SHAPES = 256
"""Shapes without specks from which digits are joined. Each is compared with each digit: 20 ms."""

_TALL = 0.5
"""Height of a digit at least, of the largest one's. Less is a part of a digit, or dust."""

_DUST = 0.12
"""Both sides of a speck are smaller, of the largest digit's height."""

_NEAR = 0.25
"""Distance of a part from its digit at most, of the largest digit's height."""

_LEAST = 0.4
"""One side of a lying or broken digit is as long, of the largest digit's height."""


@dataclass(slots=True)
class Digit:
    """The shapes of one digit, and the box around them."""

    found: Shapes
    shapes: list[int]
    top: int
    bottom: int
    left: int
    right: int

    def distance(self, other: Digit) -> float:
        """Between the two boxes."""
        beside = max(self.left - other.right, other.left - self.right, 0)
        above = max(self.top - other.bottom, other.top - self.bottom, 0)
        return math.hypot(beside, above)

    def add(self, other: Digit) -> None:
        """Take another one's shapes."""
        self.shapes += other.shapes
        self.top, self.bottom = min(self.top, other.top), max(self.bottom, other.bottom)
        self.left, self.right = min(self.left, other.left), max(self.right, other.right)

    def alone(self, drawing: Drawing) -> Drawing:
        """The part of a drawing that shows this digit, without the ink of others."""
        own = np.zeros(len(self.found), bool)
        own[self.shapes] = True
        part = np.s_[max(self.top - 2, 0) : self.bottom + 2, max(self.left - 2, 0) : self.right + 2]
        near = dilated(self.found.mask(own)[part], 2)
        return Drawing(np.where(near, drawing.ink[part], np.float32(0)), drawing.noise)


def find_digits(drawing: Drawing) -> list[Digit]:
    """The digits of a drawing, in any order; none in noise.

    Strokes that nearly touch are one digit, and so are a digit and a short stroke beside it.
    Specks are left out. Of a drawing with too many shapes each is returned alone: there are more
    than `MAX_DIGITS`.
    """
    marks = drawing.ink > 0.3 * drawing.ink.max()
    if count_runs(marks) > MOST_RUNS:
        return []
    found = shapes(dilated(marks, round(pen_width(marks) / 4)))
    tallest = int(found.height.max())
    tall = found.height >= _TALL * tallest
    large = np.maximum(found.height, found.width) >= _DUST * tallest
    boxes = np.stack([found.top, found.bottom, found.left, found.right], 1)

    def digits_of(selected: Mask) -> list[Digit]:
        return [Digit(found, [int(i)], *boxes[i].tolist()) for i in np.flatnonzero(selected)]

    digits, parts = digits_of(tall), digits_of(large & ~tall)
    if len(digits) > MAX_DIGITS or len(digits) + len(parts) > _MOST_SHAPES:
        return digits + parts
    for part in sorted(parts, key=lambda part: -found.area[part.shapes[0]]):
        nearest = min(digits, key=part.distance)
        if part.distance(nearest) < _NEAR * tallest:
            nearest.add(part)
        else:
            digits.append(part)
    return [
        one for one in digits if max(one.bottom - one.top, one.right - one.left) >= _LEAST * tallest
    ]


def in_reading_order(digits: list[Digit]) -> list[Digit]:
    """Lines from top to bottom, each from left to right."""
    lines: list[list[Digit]] = []
    for digit in sorted(digits, key=lambda one: one.left + one.right):
        for line in lines:
            last = line[-1]  # the line may slope
            common = min(digit.bottom, last.bottom) - max(digit.top, last.top)
            if common >= 0.4 * min(digit.bottom - digit.top, last.bottom - last.top):
                line.append(digit)
                break
        else:
            lines.append([digit])
    lines.sort(key=lambda line: sum(one.top + one.bottom for one in line) / len(line))
    return [digit for line in lines for digit in line]
