"""A picture of any size -> uint8 (n, 28, 28), each digit normalised like MNIST's images.

Source: Y. LeCun, https://yann.lecun.com/exdb/mnist: "size normalized to fit in a 20x20 pixel box
while preserving their aspect ratio ... centered in a 28x28 image by computing the center of mass".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lenet.pixels import HEIGHT, WIDTH, Images
from service.errors import InvalidInput, TooLarge
from service.pictures.candidates import candidates
from service.pictures.doubt import count_shapes, is_no_digit, silhouette
from service.pictures.headers import Between, Digits, Doubt, Invert
from service.pictures.ink import FAINTEST, SMALLEST_SEARCHED, Drawing, Ink, find_ink
from service.pictures.judge import IS_DIGIT, ranked, verdicts
from service.pictures.picture_files import read_grey
from service.pictures.separate import MAX_DIGITS, find_digits, in_reading_order
from service.pictures.shapes import Grey

BOX = 20
"""Longer side of a digit in the 28x28 image, in pixels."""

_FLAT = 14
"""Rows of a prepared image. Nearly all digits have 20."""

_DOUBTFUL, _UNLIKELY = 0.2, 0.03
"""Probabilities of a digit below which a photograph is searched for another, and an image is warned
of: 11 of MNIST's 10,000 test images are."""

_CENTRE = 14.0
"""MNIST's centre of mass, as a pixel index: with it 59,998 of the 60,000 training images keep their
position, with 13.5 (the middle of the image) 25 % do."""

_DARK_ENOUGH = 230.0
"""Fainter ink is stretched to 255. In every MNIST image ink reaches at least 254."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The images of a picture, uint8 (n, 28, 28), doubts by image, and its number of pixels."""

    images: Images
    doubts: Sequence[tuple[int, Doubt]]
    pixels: int


def prepare(
    body: bytes,
    declared: str,
    *,
    field: str,
    invert: Invert,
    digits: Digits,
    max_pixels: int,
    used_pixels: int,
    between: Between,
) -> Prepared:
    """The digits in a picture, each cropped, scaled and centred like MNIST's.

    `invert`: "true" is dark ink on light paper, "false" light ink on dark paper, "auto" detects
    which of the two it is. `digits`: "one" takes everything that is drawn for one digit, "several"
    takes it apart, in reading order. `max_pixels` is the limit of the whole request, of which
    `used_pixels` are taken; `between` is called before they are decoded.

    Raises: InvalidInput (another type, damaged, no digit), TooLarge (too many pixels or digits).
    """
    grey, pixels = read_grey(
        body,
        declared,
        field=field,
        invert=invert,
        max_pixels=max_pixels,
        used_pixels=used_pixels,
        between=between,
    )
    drawing = find_ink(grey, invert)
    if not drawing.ink.any():
        if digits == "one" and (other := search(grey, invert, 0.0)):
            return Prepared(*other, pixels)
        hint = "" if invert == "auto" else f"; invert is {invert}, try auto"
        message = f"{field}: no digit found: the picture is blank, or no ink in it stands out{hint}"
        raise InvalidInput(message, field=field)
    found = find_digits(drawing) if digits == "several" else []
    if len(found) > MAX_DIGITS:
        raise TooLarge(
            f"{field}: got {len(found)} shapes, expected at most {MAX_DIGITS} digits in a picture; "
            "cut it into several",
            field=field,
        )
    alone = (one.alone(drawing) for one in in_reading_order(found))
    drawings = alone if len(found) > 1 else [drawing]
    images = np.stack([_centred(_scaled(one)) for one in drawings])
    judged = verdicts(images)
    doubts: list[tuple[int, Doubt]] = []
    for index, image in enumerate(images):
        shape = silhouette(image)
        # A long number is so small that its digits may have become one shape.
        several = count_shapes(shape) > 1 or np.count_nonzero(image.any(1)) < _FLAT
        if digits == "one" and several and len(find_digits(drawing)) > 1:
            doubts.append((index, "several_shapes"))
        elif is_no_digit(shape) or judged[index, 0] < _UNLIKELY:
            doubts.append((index, "not_a_digit"))
    # A letter is searched no further: a part of it may look like a digit.
    is_doubtful = not drawing.is_plain and judged[0].sum() < _DOUBTFUL
    if digits == "one" and is_doubtful and (other := search(grey, invert, judged[0, 0])):
        found_image, more = other
        # What the rules say of shapes holds for the picture, whichever part of it is taken.
        tangled = is_no_digit(silhouette(images[0]))
        kept = [one for one in doubts if tangled or one[1] == "several_shapes"]
        return Prepared(found_image, more or kept, pixels)
    return Prepared(images, doubts, pixels)


def search(
    grey: Grey, invert: Invert, least: float
) -> tuple[Images, Sequence[tuple[int, Doubt]]] | None:
    """The best candidate, where the judge believes in it, and more than `least`."""
    if min(grey.shape) < SMALLEST_SEARCHED or int(grey.max()) - int(grey.min()) < FAINTEST:
        return None
    found = candidates(grey, invert)
    if not found:
        return None
    images = np.stack([normalised(one.ink) for one in found])
    (best, *others), judged = ranked(found, images)
    if judged[best, 0] < max(IS_DIGIT, least):
        return None
    height = [bottom - top for top, bottom, *_ in (one.box for one in found)]
    is_alone = all(judged[one, 0] < IS_DIGIT or 2 * height[one] < height[best] for one in others)
    return images[[best]], [] if is_alone else [(0, "several_shapes")]


def normalised(ink: Ink) -> NDArray[np.uint8]:
    """Ink without noise, (height, width), as an image of MNIST, uint8 (28, 28)."""
    return _centred(_scaled(Drawing(ink, 0.0)))


def _scaled(drawing: Drawing) -> Ink:
    """The ink's bounding box, its longer side scaled to `BOX`, and a margin of one pixel.

    A box of 19 to 21 pixels is not resampled, so MNIST's own images stay as they are. Scaling
    makes thin strokes faint, and pencil is faint already: ink below `_DARK_ENOUGH` is stretched.
    """
    ink, drawn = drawing.ink, drawing.drawn
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
    longer = max(height, width)
    scale = 1.0 if abs(longer - BOX) <= 1 else BOX / longer
    size_y, size_x = max(1, round(height * scale)), max(1, round(width * scale))
    step_y, step_x = height / size_y, width / size_x
    margin = math.ceil(max(step_y, step_x))
    # The box and its margin, with nothing beyond the picture.
    top, left = int(rows[0]) - margin, int(columns[0]) - margin
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
