"""A digit's ink -> uint8 (28, 28), normalised like MNIST's images.

Source: Y. LeCun, https://yann.lecun.com/exdb/mnist: "size normalized to fit in a 20x20 pixel box
while preserving their aspect ratio ... centered in a 28x28 image by computing the center of mass".
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lenet.pixels import HEIGHT, WIDTH

Ink: TypeAlias = NDArray[np.float32]
"""How much each pixel differs from the paper, (height, width) >= 0."""

BOX = 20
"""Longer side of a digit in the 28x28 image, in pixels."""

TRACE = 0.1
"""Share of the strongest ink from which a pixel counts."""

_CENTRE = 14.0
"""MNIST's centre of mass, as a pixel index: with it 59,998 of the 60,000 training images keep their
position, with 13.5 (the middle of the image) 25 % do."""

_DARK_ENOUGH = 230.0
"""Fainter ink is stretched to 255. In every MNIST image ink reaches at least 254."""


def normalised(ink: Ink) -> NDArray[np.uint8]:
    """The ink of one digit as an image of MNIST, uint8 (28, 28)."""
    return _centred(_scaled(ink))


def box_of(ink: Ink) -> tuple[int, int, int, int]:
    """The first row of the ink that counts, the row behind its last, and its columns likewise."""
    drawn = ink > ink.max() * TRACE
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _scaled(ink: Ink) -> Ink:
    """The ink's bounding box, its longer side scaled to `BOX`, and a margin of one pixel.

    A box of 19 to 21 pixels is not resampled, so MNIST's own images stay as they are. Scaling
    makes thin strokes faint, and pencil is faint already: ink below `_DARK_ENOUGH` is stretched.
    """
    top, bottom, left, right = box_of(ink)
    height, width = bottom - top, right - left
    longer = max(height, width)
    scale = 1.0 if abs(longer - BOX) <= 1 else BOX / longer
    size_y, size_x = max(1, round(height * scale)), max(1, round(width * scale))
    step_y, step_x = height / size_y, width / size_x
    margin = math.ceil(max(step_y, step_x))
    # The box and its margin, with nothing beyond the picture.
    top, left = top - margin, left - margin
    padded = np.zeros((height + 2 * margin, width + 2 * margin), np.float32)
    inside = ink[max(top, 0) : top + padded.shape[0], max(left, 0) : left + padded.shape[1]]
    first = max(-top, 0), max(-left, 0)
    padded[first[0] : first[0] + inside.shape[0], first[1] : first[1] + inside.shape[1]] = inside
    if scale == 1:
        patch: Ink = padded[margin - 1 : margin + height + 1, margin - 1 : margin + width + 1]
    else:
        near = (margin - step_x, margin - step_y)
        far = (margin + width + step_x, margin + height + step_y)
        patch = np.asarray(
            Image.fromarray(padded).resize(
                (size_x + 2, size_y + 2),
                Image.Resampling.BOX if scale <= 1 else Image.Resampling.BICUBIC,
                box=(*near, *far),
            )
        )
    strong = patch[patch > patch.max() / 2]
    place = 0.9 * (strong.size - 1)
    below = int(place)
    # The 90th percentile; NumPy's function takes ten times as long.
    strong.partition((below, min(below + 1, strong.size - 1)))
    strokes = float(strong[below])
    strokes += (float(strong[min(below + 1, strong.size - 1)]) - strokes) * (place - below)
    if strokes < _DARK_ENOUGH:
        patch = patch * (255 / strokes)
    clipped: Ink = np.clip(patch, 0, 255)
    return clipped


def _centred(patch: Ink) -> NDArray[np.uint8]:
    """uint8 (28, 28) with the patch's centre of mass at its centre, no ink beyond its edge."""
    height, width = patch.shape
    total = patch.sum(dtype=np.float64)
    top = int(np.floor(_CENTRE - patch.sum(1) @ np.arange(height) / total + 0.5))
    left = int(np.floor(_CENTRE - patch.sum(0) @ np.arange(width) / total + 0.5))
    # The patch's outermost pixels are its margin and may lie outside.
    top, left = min(max(top, -1), HEIGHT + 1 - height), min(max(left, -1), WIDTH + 1 - width)
    field = np.zeros((HEIGHT + 2, WIDTH + 2), np.float32)
    field[top + 1 : top + 1 + height, left + 1 : left + 1 + width] = patch
    return np.rint(field[1:-1, 1:-1]).astype(np.uint8)
