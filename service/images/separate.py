"""The separate digits of a drawing, in the order in which they are read."""

from __future__ import annotations

import numpy as np
from PIL import Image

from service.images.ink import Drawing, pen_width
from service.images.shapes import Mask, Numbers, Shapes, dilated, shapes

_SIDE = 256
"""Side of the copy on which shapes are told apart."""

_TALL = 0.5
"""Height of a digit at least, of the largest one's. Less is a part of a digit, or dust."""

_DUST = 0.15
"""Both sides of a speck are smaller, of the largest digit's height."""


def separate(drawing: Drawing) -> list[Drawing]:
    """Each digit alone on a drawing of the same size: lines from top to bottom, left to right.

    Strokes that nearly touch are one digit, and so is a short stroke with the digit beside it.
    Specks are left out.
    """
    ink = drawing.ink
    factor = -(-max(ink.shape) // _SIDE)
    small = np.asarray(Image.fromarray(ink).reduce(factor)) if factor > 1 else ink
    marks = small > 0.3 * small.max()
    found = shapes(dilated(marks, round(pen_width(marks) / 4)))
    digits = _digits(found)
    if len(digits) <= 1:
        return [drawing]
    separated = []
    masks = [dilated(found.mask(digit), 1) for digit in digits]
    for own in masks:
        whole = np.repeat(np.repeat(own, factor, 0), factor, 1)[: ink.shape[0], : ink.shape[1]]
        separated.append(Drawing(np.where(whole, ink, np.float32(0)), drawing.noise))
    return separated


def _digits(found: Shapes) -> list[Mask]:
    """Which shapes belong to each digit, in reading order."""
    tallest = int(found.height.max())
    across = np.maximum(found.height, found.width)
    tall = np.flatnonzero(found.height >= _TALL * tallest)
    member = np.zeros((len(tall), len(found)), bool)
    member[np.arange(len(tall)), tall] = True
    parts = np.flatnonzero((found.height < _TALL * tallest) & (across >= _DUST * tallest))
    for part in parts:
        beside = np.maximum(
            found.left[tall] - found.right[part], found.left[part] - found.right[tall]
        )
        above = np.maximum(
            found.top[tall] - found.bottom[part], found.top[part] - found.bottom[tall]
        )
        distance = np.hypot(np.maximum(beside, 0), np.maximum(above, 0))
        nearest = int(distance.argmin())
        if distance[nearest] < 0.35 * tallest:
            member[nearest, part] = True
    return [member[i] for i in _reading_order(found, tall)]


def _reading_order(found: Shapes, tall: Numbers) -> list[int]:
    """Indices into `tall`. Shapes are on one line if they overlap by half of the lower one."""
    top, bottom = found.top[tall], found.bottom[tall]
    middle = found.left[tall] + found.right[tall]
    lines: list[list[int]] = []
    for i in np.argsort(middle, kind="stable").tolist():
        # Beside the last digit of a line, which may slope.
        overlaps = [min(bottom[i], bottom[line[-1]]) - max(top[i], top[line[-1]]) for line in lines]
        best = int(np.argmax(overlaps)) if lines else -1
        if lines and overlaps[best] >= 0.5 * min(
            bottom[i] - top[i], bottom[lines[best][-1]] - top[lines[best][-1]]
        ):
            lines[best].append(i)
        else:
            lines.append([i])
    lines.sort(key=lambda line: float(np.mean(top[line] + bottom[line])))
    return [i for line in lines for i in line]
