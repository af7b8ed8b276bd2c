"""What the judge sees of a mark in a picture: the mark, and fainter what is beside it.

A stroke alone is a 1, and the same stroke in a letter is none: what is beside a mark decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.pictures.normalise import box_of
from service.pictures.shapes import Grey

SIDE = 28
"""Sides of a view, in pixels."""

_OF_MARK = 16
"""Longer side of the mark in it."""

_STRONG, _BESIDE = 240, 0.35
"""Level of the mark's ink in it, and the share of this level that other ink has at most."""

DIM = 80
"""Level of paper below which the share of the light that ink takes is noise."""


@dataclass(frozen=True, slots=True)
class Paper:
    """Levels of a picture, and of the paper around each of its pixels; the ink is darker.

    `picture` has a margin of `margin` pixels. `is_dark`: ink is dark in the picture itself; if
    not, both are turned round.
    """

    around: Grey
    picture: Image.Image
    margin: int
    is_dark: bool


def view(
    ink: Grey, place: tuple[int, int], box: tuple[int, int, int, int], paper: Paper | None = None
) -> Grey:
    """The view of a mark, uint8 (28, 28).

    `ink` is by how much it differs from the paper, and begins at the row and column `place`; `box`
    is its first row, the row behind its last, and its columns likewise. All else that differs from
    the paper is beside it, also what is beyond the picture. Without `paper` there is nothing.
    """
    top, bottom, left, right = box
    side = max(bottom - top, right - left) * SIDE / _OF_MARK
    row, column = (top + bottom - side) / 2, (left + right - side) / 2
    first_row, first_column = math.floor(row), math.floor(column)
    field = np.zeros((math.ceil(side) + 1,) * 2, np.uint8)
    down, along = place[0] - first_row, place[1] - first_column
    part = ink[max(-down, 0) : len(field) - down, max(-along, 0) : len(field) - along]
    down, along = max(down, 0), max(along, 0)
    field[down : down + part.shape[0], along : along + part.shape[1]] = part
    scale = _STRONG / float(ink[ink > ink.max() // 2].mean())
    own = _resized(Image.fromarray(field), column - first_column, row - first_row, side)
    own = np.minimum(scale * own, 255)
    if paper is not None:
        level = float(paper.around[(top + bottom) // 2, (left + right) // 2])
        levels = _resized(paper.picture, column + paper.margin, row + paper.margin, side)
        if paper.is_dark:
            scale *= 255 / max(level, DIM)
        beside = np.minimum(scale * np.abs(levels - level), 255)
        own += beside * (_BESIDE - (_BESIDE / 255) * own)
    seen: Grey = own.astype(np.uint8)
    return seen


def most_beyond(side: int) -> int:
    """The most pixels that a view reaches beyond a picture with this longer side."""
    return side * SIDE // (2 * _OF_MARK) + 2


def view_alone(ink: NDArray[np.floating[Any]]) -> Grey:
    """The view of all ink of a picture, (height, width), uint8 (28, 28)."""
    box = box_of(ink)
    part = ink[box[0] : box[1], box[2] : box[3]] * (255 / ink.max())
    return view(part.astype(np.uint8), (box[0], box[2]), box)


def _resized(picture: Image.Image, left: float, top: float, side: float) -> NDArray[np.float32]:
    """A square of a picture with `SIDE` pixels a side."""
    how = Image.Resampling.BOX if side >= SIDE else Image.Resampling.BICUBIC
    window = left, top, left + side, top + side
    return np.asarray(picture.resize((SIDE, SIDE), how, window), np.float32)
