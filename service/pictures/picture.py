"""A picture of any size -> uint8 (n, 28, 28), each digit normalised like MNIST's images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lenet.pixels import Images
from service.errors import InvalidInput, TooLarge
from service.pictures.candidates import SAME_MARK, Box, candidates, drawing
from service.pictures.headers import Between, Digits, Doubts, Invert
from service.pictures.judge import IS_DIGIT, MAY_BE_DIGIT, Verdict, ranked, verdicts
from service.pictures.normalise import normalised
from service.pictures.picture_files import read_grey
from service.pictures.shapes import overlaps

_NO_DIGIT = 0.25
"""Probability below which what was found, as all ink on even paper, is warned of as no digit."""

_SEARCHED = 1 << 19
"""Pixels that a search counts as. It takes about 20 ms for one digit, 50 for several."""

MAX_DIGITS = 64
"""The most digits in one picture."""

_IN_LINE = 0.03
"""Probability from which a mark beside a digit is one."""

_TALL = 0.45
"""Minimum height of a digit of several, of the tallest one's."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The images of a picture, uint8 (n, 28, 28), its number of pixels, and doubts by image.

    `judged` are the candidates of a search: those of the images, then the others, the best first.
    """

    images: Images
    pixels: int
    doubts: Doubts
    judged: Sequence[Verdict] = ()


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
    taken; `between` is called before they are decoded, and before a search.

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
    whole, alone = drawing(grey, invert), None
    if whole is not None:
        digit, mark = verdicts(whole.view[np.newaxis])[0].tolist()
        alone = Verdict(whole, digit, mark, digit)
        if digit >= (MAY_BE_DIGIT if digits == "one" else IS_DIGIT):
            return Prepared(normalised(whole.ink)[np.newaxis], pixels, [])
    between(_SEARCHED)
    found = candidates(grey, invert, digits)
    if whole is not None:
        found.append(whole)
    if not found:
        hint = "" if invert == "auto" else f"; invert is {invert}, try auto"
        message = f"{field}: no digit found: the picture is blank, or no ink in it stands out{hint}"
        raise InvalidInput(message, field=field)
    judged = ranked(found)
    if digits == "one":
        one, doubts = _one(judged, alone)
        chosen = [one]
    else:
        chosen, doubts = _several(judged)
    if len(chosen) > MAX_DIGITS:
        raise TooLarge(
            f"{field}: got {len(chosen)} shapes, expected at most {MAX_DIGITS} digits in a "
            "picture; cut it into several",
            field=field,
        )
    images = np.stack([normalised(one.candidate.ink) for one in chosen])
    boxes = np.array([one.candidate.box for one in (*chosen, *judged)])
    is_taken = (overlaps(boxes)[len(chosen) :, : len(chosen)] > SAME_MARK).any(1)
    others = [judged[at] for at in np.flatnonzero(~is_taken)]
    return Prepared(images, pixels, doubts, chosen + others)


def _one(judged: Sequence[Verdict], alone: Verdict | None) -> tuple[Verdict, Doubts]:
    """The digit of a picture; `alone` is all ink on even paper."""
    best = judged[0]
    others = [one for one in judged[1:] if one.digit > IS_DIGIT]
    doubts: Doubts = []
    if max(best.chance, alone.chance if alone else 0) < _NO_DIGIT:
        doubts = [(0, "not_a_digit")]
    elif any(2 * _height(one) >= _height(best) for one in others):
        doubts = [(0, "several_shapes")]
    # All ink, not scaled, where no reading is a digit, or it is of the same mark.
    if alone is not None:
        boxes = np.array([best.candidate.box, alone.candidate.box])
        if overlaps(boxes)[0, 1] > SAME_MARK or best.digit < MAY_BE_DIGIT:
            return alone, doubts
    return best, doubts


def _several(judged: Sequence[Verdict]) -> tuple[list[Verdict], Doubts]:
    """The digits of a picture, in reading order."""
    sure = [one for one in judged if one.digit >= MAY_BE_DIGIT] or [judged[0]]
    least_height = _TALL * max(map(_height, sure))
    # Beside a digit and as tall as it, a shape is one that is hard to read, or a sign.
    for one in judged:
        is_likely = one.digit >= _IN_LINE or one.mark >= MAY_BE_DIGIT
        is_beside = any(_in_line(one.candidate.box, it.candidate.box) for it in sure)
        if is_likely and is_beside and one not in sure:
            sure.append(one)
    tall = [one for one in sure if _height(one) >= least_height]
    order = reading_order({at: one.candidate.box for at, one in enumerate(tall)})
    chosen = [tall[at] for at in order]
    return chosen, [(at, "not_a_digit") for at, one in enumerate(chosen) if one.digit < _IN_LINE]


def _height(one: Verdict) -> float:
    top, bottom, _, _ = one.candidate.box
    return bottom - top


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
