"""The separate digits of a drawing, in the order in which they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from service.pictures.ink import MOST_RUNS, Drawing, Ink, pen_width
from service.pictures.shapes import Shapes, count_runs, dilated, shapes

_TALL = 0.5
"""Height of a digit at least, of the largest one's. Less is a part of a digit, or dust."""

_DUST = 0.12
"""Both sides of a speck are smaller, of the largest digit's height."""

_NEAR = 0.25
"""Distance of a part from its digit at most, of the largest digit's height."""

_LEAST = 0.4
"""One side of a lying or broken digit is as long, of the largest digit's height."""


def separate(drawing: Drawing) -> list[Drawing]:
    """Each digit alone on a drawing of the same size: lines from top to bottom, left to right.

    Strokes that nearly touch are one digit, and so are a digit and a short stroke beside it.
    Specks are left out.
    """
    ink = drawing.ink
    marks = ink > 0.3 * ink.max()
    if count_runs(marks) > MOST_RUNS:
        return [drawing]
    found = shapes(dilated(marks, round(pen_width(marks) / 4)))
    digits = _reading_order(_digits(found))
    if len(digits) <= 1:
        return [drawing]
    return [Drawing(_only(ink, found, digit), drawing.noise) for digit in digits]


def _only(ink: Ink, found: Shapes, digit: _Digit) -> Ink:
    """The ink of one digit."""
    own = np.zeros(len(found), bool)
    own[digit.shapes] = True
    alone: Ink = np.where(dilated(found.mask(own), 2), ink, np.float32(0))
    return alone


@dataclass(slots=True)
class _Digit:
    """The shapes of one digit, and the box around them."""

    shapes: list[int]
    top: int
    bottom: int
    left: int
    right: int

    def distance(self, other: _Digit) -> float:
        """Between the two boxes."""
        beside = max(self.left - other.right, other.left - self.right, 0)
        above = max(self.top - other.bottom, other.top - self.bottom, 0)
        return math.hypot(beside, above)

    def add(self, other: _Digit) -> None:
        """Take another one's shapes."""
        self.shapes += other.shapes
        self.top, self.bottom = min(self.top, other.top), max(self.bottom, other.bottom)
        self.left, self.right = min(self.left, other.left), max(self.right, other.right)


def _digits(found: Shapes) -> list[_Digit]:
    """The digits, in any order. A small shape belongs to what is near, or is one with others."""
    boxes = zip(found.top, found.bottom, found.left, found.right, strict=True)
    alone = [_Digit([i], *map(int, box)) for i, box in enumerate(boxes)]
    tallest = max(one.bottom - one.top for one in alone)
    digits = [one for one in alone if one.bottom - one.top >= _TALL * tallest]
    parts = [one for one in alone if one.bottom - one.top < _TALL * tallest]
    for part in sorted(parts, key=lambda part: -found.area[part.shapes[0]]):
        if max(part.bottom - part.top, part.right - part.left) < _DUST * tallest:
            continue
        nearest = min(digits, key=part.distance)
        if part.distance(nearest) < _NEAR * tallest:
            nearest.add(part)
        else:
            digits.append(part)
    return [
        one for one in digits if max(one.bottom - one.top, one.right - one.left) >= _LEAST * tallest
    ]


def _reading_order(digits: list[_Digit]) -> list[_Digit]:
    """Lines from top to bottom, each from left to right."""
    lines: list[list[_Digit]] = []
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
