"""A picture of any size -> uint8 (n, 28, 28), each digit normalised like MNIST's images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import Images
from service.errors import InvalidInput, TooLarge
from service.pictures.candidates import candidates
from service.pictures.headers import Between, Digits, Doubt, Invert
from service.pictures.judge import IS_DIGIT, MAY_BE_DIGIT, ranked, verdicts
from service.pictures.normalise import Ink, normalised
from service.pictures.picture_files import read_grey
from service.pictures.shapes import Grey

_FAINTEST = 24.0
"""Contrast, of 255, below which a picture counts as blank."""

_EVEN = 0.75
"""Share of a picture's edge with one level, which is then the paper's."""

_NO_DIGIT = 0.1
"""Probability of a digit below which an image is warned of."""

_IS_NONE = 0.02
"""Probability of a digit below which a photograph shows none."""


MAX_DIGITS = 64
"""The most digits in one picture."""

_IN_LINE = 0.03
"""Probability from which a shape beside a digit is one."""

_TALL = 0.45
"""Minimum height of a digit of several, of the tallest one's."""

Found: TypeAlias = tuple[Images, Sequence[tuple[int, Doubt]]]
Box: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The images of a picture, uint8 (n, 28, 28), its number of pixels, and doubts by image."""

    images: Images
    pixels: int
    doubts: Sequence[tuple[int, Doubt]]


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

    Ink on even paper is taken as it is, if the judge says that it is a digit. Any other picture is
    searched for the marks that are.

    `invert`: "true" is dark ink on light paper, "false" light ink on dark paper, "auto" detects
    which of the two it is. `digits`: "one" takes a picture for one digit, "several" takes it apart,
    in reading order. `max_pixels` is the limit of the whole request, of which `used_pixels` are
    taken; `between` is called before they are decoded.

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
    ink = _on_even_paper(grey, invert)
    drawn: Found | None = None
    if ink is not None and ink.any():
        image = normalised(ink)
        chance, _ = verdicts(image[np.newaxis])[0].tolist()
        drawn = _of(image, chance)
        if chance >= (MAY_BE_DIGIT if digits == "one" else IS_DIGIT):
            return Prepared(drawn[0], pixels, drawn[1])
    if ink is None or drawn is not None:
        found = _searched(grey, invert, digits, IS_DIGIT if drawn else _IS_NONE) or drawn
        if found is not None:
            if len(found[0]) > MAX_DIGITS:
                raise TooLarge(
                    f"{field}: got {len(found[0])} shapes, expected at most {MAX_DIGITS} digits in "
                    "a picture; cut it into several",
                    field=field,
                )
            return Prepared(found[0], pixels, found[1])
    hint = "" if invert == "auto" else f"; invert is {invert}, try auto"
    message = f"{field}: no digit found: the picture is blank, or no ink in it stands out{hint}"
    raise InvalidInput(message, field=field)


def _on_even_paper(grey: Grey, invert: Invert) -> Ink | None:
    """The ink on paper of one level; None where the paper has more than one.

    The sign of the sum of cubed differences says whether ink is dark: it follows the few pixels far
    from the paper, where a mean would follow the many near it.
    """
    edge = np.sort(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]))
    level = int(edge[edge.size // 2])
    if np.count_nonzero(edge == level) < _EVEN * edge.size:
        return None
    ink = grey.astype(np.float32) - level
    if invert == "true" or (invert == "auto" and np.vdot(ink * ink, ink) < 0):
        np.negative(ink, out=ink)
    np.maximum(ink, 0, out=ink)
    return ink if ink.max() >= _FAINTEST else np.zeros_like(ink)


def _of(image: NDArray[np.uint8], chance: float, is_alone: bool = True) -> Found:
    """One digit."""
    doubt: Doubt | None = None if is_alone else "several_shapes"
    if chance < _NO_DIGIT:
        doubt = "not_a_digit"
    return image[np.newaxis], [(0, doubt)] if doubt else []


def _searched(grey: Grey, invert: Invert, digits: Digits, least: float) -> Found | None:
    """The digits of a picture, and doubts; None where none has the `least` probability."""
    found = candidates(grey, invert, digits)
    if not found:
        return None
    images = np.stack([normalised(one.ink) for one in found])
    apart, judged = ranked(found, images)
    chances, marks = judged.T
    best = apart[0]
    if chances[best] < least:
        return None
    boxes = {one: found[one].box for one in apart}
    height = {one: bottom - top for one, (top, bottom, _, _) in boxes.items()}
    if digits == "one":
        sure = [one for one in apart[1:] if chances[one] > IS_DIGIT]
        is_alone = all(2 * height[one] < height[best] for one in sure)
        return _of(images[best], float(chances[best]), is_alone)
    sure = [one for one in apart if chances[one] >= MAY_BE_DIGIT] or [best]
    least_height = _TALL * max(height[one] for one in sure)
    # Beside a digit and as tall as it, a shape is one that is hard to read, or a sign.
    likely = (chances >= _IN_LINE) | (marks >= MAY_BE_DIGIT)
    for one in apart:
        if one not in sure and likely[one] and any(_in_line(boxes[one], boxes[it]) for it in sure):
            sure.append(one)
    order = reading_order({one: boxes[one] for one in sure if height[one] >= least_height})
    doubtful = (at for at, one in enumerate(order) if chances[one] < _IN_LINE)
    return images[order], [(at, "not_a_digit") for at in doubtful]


def _in_line(one: Box, other: Box) -> bool:
    """Whether at least half of the taller one's rows are rows of both."""
    common = min(one[1], other[1]) - max(one[0], other[0])
    return 2 * common >= max(one[1] - one[0], other[1] - other[0])


def reading_order(boxes: Mapping[int, Box]) -> list[int]:
    """The keys of boxes in lines from top to bottom, each from left to right."""
    lines: list[list[int]] = []
    for one in sorted(boxes, key=lambda one: boxes[one][2] + boxes[one][3]):
        top, bottom = boxes[one][:2]
        for line in lines:
            above, below = boxes[line[-1]][:2]  # the line may slope
            if min(bottom, below) - max(top, above) >= 0.4 * min(bottom - top, below - above):
                line.append(one)
                break
        else:
            lines.append([one])
    lines.sort(key=lambda line: sum(sum(boxes[one][:2]) for one in line) / len(line))
    return [one for line in lines for one in line]
