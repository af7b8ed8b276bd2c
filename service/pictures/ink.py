"""Finds the ink of a grey picture: paper, noise, ruling and surroundings are removed.

Most pictures show ink on paper and nothing else, and are done after one fit of the paper. Where
something reaches the picture's edge, or the fit is poor, the ink is searched for:

    sheet   the light or the dark part of the picture, and its brightness at every pixel
    marks   what differs from it, opened by larger and larger squares until no ruling is left
    outer   marks that run along the edge: the table, a border, the line at which a box was cut
    digit   marks inside, which neither touch the edge nor are a sheet themselves
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.pictures.headers import Invert
from service.pictures.shapes import (
    Grey,
    Mask,
    Numbers,
    Shapes,
    closed,
    count,
    count_runs,
    dilated,
    opened,
    otsu,
    shapes,
)

Ink: TypeAlias = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)

_SURFACE_SIDE = 48
"""Side of the copy on which the paper's brightness is fitted, which varies slowly."""

FAINTEST = 24.0
"""Contrast, of 255, below which a picture counts as blank."""

_SEARCH_SIDE = 256
"""Side of the copy on which the ink is searched for."""

_SAMPLES = 10_000
"""Pixels of which a median is taken."""

MOST_RUNS = 6000
"""Horizontal runs of a mask whose shapes are looked at. A mask with more is noise."""

_OPENINGS = (1, 2, 3, 4, 5, 7, 10)
"""Sides of the squares that remove ruling, in pixels of that copy. 1 removes nothing."""

SMALLEST_SEARCHED = 8
_TWO_LEVELS = 0.85
"""Share of the variance that is between light and dark. Normal noise has 0.64, uniform 0.75."""
_SMALLEST_CLOSED = 64
"""Ruling stays in smaller pictures until the fit: strokes are as thin as ruling there."""


@dataclass(frozen=True)
class Drawing:
    """Ink, float32 (height, width) >= 0, without the noise; and the noise, one sigma.

    `searched`: more than ink on paper was seen.
    """

    ink: Ink
    noise: float
    searched: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but ink on even paper."""
        return not self.noise and not self.searched

    @cached_property
    def drawn(self) -> Mask:
        """Mask of the pixels with more than a trace of ink."""
        mask: Mask = self.ink > self.ink.max() * (0.25 if self.noise else 0.1)
        return mask


def find_ink(grey: Grey, invert: Invert) -> Drawing:
    """How much each pixel differs from the paper, minus the noise. All zeros if nothing stands out.

    The sign of the sum of cubed differences says whether ink is dark: it follows the few pixels far
    from the paper, where a mean would follow the many near it.
    """
    paper, noise = _paper(grey)
    ink = grey.astype(np.float32) - paper
    if invert == "true" or (invert == "auto" and np.vdot(ink * ink, ink) < 0):
        np.negative(ink, out=ink)
    strongest = float(ink.max())
    if strongest < max(FAINTEST, 6 * noise):
        drawing = Drawing(np.zeros_like(ink), noise)
        poor = int(grey.max()) - int(grey.min()) >= FAINTEST
    else:
        # On both sides of the paper, or paper that is a hill: it was fitted to two surfaces.
        poor = count(ink < -max(12, 4 * noise)) > 0.01 * ink.size or _is_bent(paper)
        drawing = Drawing(_clean(ink, noise, strongest), noise)
        if not poor and (_is_alone(drawing) or _is_cut(drawing)):
            return drawing
    if (poor or drawing.ink.any()) and min(grey.shape) >= SMALLEST_SEARCHED:
        found = _searched(grey, invert)
        if found is None and not drawing.ink.any():
            # Where the edge is half ink, it says nothing of the paper.
            found = _of_two_levels(grey, invert)
        return found or Drawing(drawing.ink, noise, searched=True)
    return drawing


def _of_two_levels(grey: Grey, invert: Invert) -> Drawing | None:
    """The ink where paper and ink have a level each, and there is more paper."""
    light = grey > otsu(grey)
    share = float(light.mean())
    if share in (0.0, 1.0) or invert == ("false" if share > 0.5 else "true"):
        return None
    apart = float(grey[light].mean()) - float(grey[~light].mean())
    if share * (1 - share) * apart * apart < _TWO_LEVELS * float(grey.var()):
        return None
    paper = light if share > 0.5 else ~light
    level = float(np.median(_sample(grey[paper])))
    ink = (grey.astype(np.float32) - level) * (-1 if share > 0.5 else 1)
    noise, strongest = _noise(ink[paper]), float(ink.max())
    if strongest < max(FAINTEST, 6 * noise):
        return None
    return Drawing(_clean(ink, noise, strongest), noise)


def _clean(ink: Ink, noise: float, strongest: float) -> Ink:
    """The ink without the noise, in place."""
    if noise:
        ink -= np.float32(min(3 * noise, strongest / 4))
    return np.maximum(ink, 0, out=ink)


def _paper(grey: Grey) -> tuple[Ink, float]:
    """The paper's brightness under each pixel, broadcastable to `grey`, and its noise (one sigma).

    A drawn picture has one level along its edge, and so has a picture too small to show a shadow.
    A photograph has shadows and noise: a quadratic surface is fitted by iteratively reweighted
    least squares, starting from the edge's median. Cauchy weights ignore pixels far from the
    paper, which are ink.
    """
    edge = np.sort(_edge(grey))
    # The median; NumPy's function takes three times as long.
    level = (float(edge[(edge.size - 1) // 2]) + float(edge[edge.size // 2])) / 2
    flat = np.full((1, 1), level, np.float32)
    if count(edge == level) >= 0.75 * edge.size:
        return flat, 0.0
    # 1.4826 x the median absolute deviation is one sigma of a normal distribution.
    if min(grey.shape) <= _SURFACE_SIDE:
        return flat, 1.4826 * float(np.median(np.abs(edge - level)))
    small, terms = _surface_points(grey)
    fitted = np.full(small.size, level)
    for _ in range(10):
        weighted = terms / (1 + ((small - fitted) / FAINTEST) ** 2)
        fitted = np.linalg.solve(weighted @ terms.T, weighted @ small) @ terms
    paper = _surface(fitted, grey.shape)
    return paper, 1.4826 * float(np.median(np.abs(_edge(grey - paper))))


def _edge(picture: NDArray[Number]) -> NDArray[Number]:
    return np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])


def _surface_points(grey: Grey) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Levels of a small copy, flat, and the six terms of a quadratic surface there, (6, n)."""
    side = (_SURFACE_SIDE, _SURFACE_SIDE)
    small = np.asarray(Image.fromarray(grey).resize(side, Image.Resampling.BOX), np.float64)
    y, x = np.indices(side).reshape(2, -1) * (2 / _SURFACE_SIDE) - 1
    return small.ravel(), np.stack([np.ones_like(x), x, y, x * x, x * y, y * y])


def _surface(fitted: NDArray[np.float64], shape: tuple[int, int]) -> Ink:
    small = Image.fromarray(fitted.reshape(_SURFACE_SIDE, _SURFACE_SIDE).astype(np.float32))
    return np.asarray(small.resize(shape[::-1], Image.Resampling.BILINEAR))


def _is_bent(paper: Ink) -> bool:
    """Whether the middle is brighter or darker than the corners, as no lamp would make it."""
    if paper.size == 1:
        return False
    corners = float(paper[[0, 0, -1, -1], [0, -1, 0, -1]].mean())
    return abs(corners - float(paper[paper.shape[0] // 2, paper.shape[1] // 2])) > FAINTEST


# Is the ink all that was found?


def _is_alone(drawing: Drawing) -> bool:
    """Whether nothing touches the edge, and what was found is neither box nor sheet."""
    drawn = drawing.drawn
    if drawn[0].any() or drawn[-1].any() or drawn[:, 0].any() or drawn[:, -1].any():
        return False
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    box = drawn[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    area = count(box)
    wide = min(drawn.shape) > _SURFACE_SIDE or box.size > 0.6 * drawn.size
    if wide and area > 0.55 * box.size and area > 0.25 * drawn.size:
        # The ink on a sheet may differ from what surrounds the sheet, too.
        sheet = (drawing.ink > 0.5 * drawing.ink.max())[rows[0] : rows[-1] + 1]
        begins, ends = sheet.argmax(1), sheet.shape[1] - sheet[:, ::-1].argmax(1)
        if _shows_ink(begins, ends, count(sheet)) and _is_rectangle(begins, ends, 0, drawn.shape):
            return False
    if drawing.noise:
        # Faint ruling makes the box larger than the digit's own.
        strong = drawing.ink > 0.45 * drawing.ink.max()
        if max(box.shape) > 1.15 * max(map(count, (strong.any(1), strong.any(0)))):
            return False
    height, width = box.shape
    along, across = min(count(box[0]), count(box[-1])), min(count(box[:, 0]), count(box[:, -1]))
    if along < 0.6 * width or across < 0.6 * height or area > 0.4 * box.size:
        return True
    found = shapes(box)
    return not _boxes(found, np.maximum(found.height, found.width) >= 4).any()


def _is_cut(drawing: Drawing) -> bool:
    """Whether what touches the edge is a digit which the edge cuts, not ruling that runs to it."""
    ink = drawing.ink
    factor = -(-max(ink.shape) // _SEARCH_SIDE)
    if factor > 1:
        ink = np.asarray(Image.fromarray(ink).reduce(factor))
    marks = ink > 0.35 * ink.max() if min(ink.shape) > _SURFACE_SIDE else drawing.drawn
    if count_runs(marks) > MOST_RUNS:
        return False
    found = shapes(marks)
    main = int(found.area.argmax())
    contacts = found.on_frame()
    contact = int(contacts[main])
    if not contact and min(ink.shape) <= _SURFACE_SIDE:
        # Specks, in a picture so small that they are a few pixels.
        return bool((found.area[contacts > 0] <= 8).all())
    if found.area[main] < 0.7 * found.area.sum() or _runs_along(contact, found, main):
        return False
    if not contact or _is_sheet(found, main):
        return False
    alone = found.only(main)
    sides = (alone[0], alone[-1], alone[:, 0], alone[:, -1])
    places = sum(int(side[0]) + count(side[1:] > side[:-1]) for side in sides)
    thickest = 2
    while opened(alone, thickest).any():
        thickest = thickest * 3 // 2
    touch = contact / places
    return places <= 8 and touch >= 0.13 * thickest and (touch > 3 or max(marks.shape) <= 64)


def _runs_along(contact: int, found: Shapes, one: int) -> bool:
    return contact >= 0.6 * max(int(found.height[one]), int(found.width[one]))


# The search. It takes 3 to 10 ms, and 35 ms for a picture of noise (Xeon, 2026-11-24).


def _searched(grey: Grey, invert: Invert) -> Drawing | None:
    """The ink without ruling and surroundings; None if no digit is found apart from them."""
    factor = -(-max(grey.shape) // _SEARCH_SIDE)
    small = np.asarray(Image.fromarray(grey).reduce(factor)) if factor > 1 else grey
    signs = {"true": (-1,), "false": (1,), "auto": (-1, 1)}[invert]
    for closing in (1, 3, 5) if min(small.shape) > _SMALLEST_CLOSED else (1,):
        for sign in signs:
            found = _search(_closed(small, closing, sign), sign)
            if found is None:
                continue
            keep, sheet, paper = found
            noise = factor * _noise((small - paper)[sheet])
            if paper.size > 1:
                whole = Image.fromarray(paper)
                paper = np.asarray(whole.resize(grey.shape[::-1], Image.Resampling.BILINEAR))
            ink = sign * (grey.astype(np.float32) - paper)
            ink[~_enlarged(keep, factor, grey.shape)] = 0
            strongest = float(ink.max())
            if strongest >= FAINTEST:
                return Drawing(_clean(ink, noise, strongest), noise, searched=True)
    return None


def _enlarged(mask: Mask, factor: int, shape: tuple[int, ...]) -> Mask:
    """The mask of a picture from that of a copy reduced by `factor`."""
    return np.repeat(np.repeat(mask, factor, 0), factor, 1)[: shape[0], : shape[1]]


def _closed(grey: Grey, size: int, sign: int) -> Grey:
    """The picture without ink thinner than `size`; `sign` is that of the ink's difference."""
    if size == 1:
        return grey
    return closed(grey, size) if sign < 0 else 255 - closed(255 - grey, size)


def _search(grey: Grey, sign: int) -> tuple[Mask, Mask, Ink] | None:
    """Masks of the ink to keep and of the sheet, and the ink's brightness."""
    threshold = otsu(grey)
    sheet = grey > threshold if sign < 0 else grey <= threshold
    tried = None
    for known in (sheet, np.ones_like(sheet)):
        if not known.any():
            continue
        level = float(np.median(_sample(grey[known])))
        paper = _paper_of(grey, known, level)
        if tried is not None and tried.size == paper.size == 1 and tried == paper:
            continue
        tried = paper
        ink = sign * (grey - paper)
        noise = _noise(ink[known])
        if noise > (20 if known is sheet else 5 + 2 * _grain(grey)):
            continue  # not one surface
        found = _free(ink, noise)
        if found is not None:
            return *found, paper
    return None


def _paper_of(grey: Grey, sheet: Mask, level: float) -> Ink:
    """The brightness of the paper, fitted to the pixels of `sheet`, and then to all like them."""
    flat = np.full((1, 1), level, np.float32)
    alike = count(np.abs(grey[sheet] - np.float32(level)) <= 1)
    if alike >= 0.4 * count(sheet) or min(grey.shape) <= _SURFACE_SIDE:
        return flat
    small, terms = _surface_points(grey)
    known = np.asarray(Image.fromarray(sheet).resize((_SURFACE_SIDE, _SURFACE_SIDE)), bool).ravel()
    if not known.any():
        return flat
    weights = known + 1e-6
    for turn in range(14):
        weighted = terms * weights
        fitted = np.linalg.solve(weighted @ terms.T, weighted @ small) @ terms
        # Tukey's biweight: what is far from the paper has no say at all, however much it is.
        far = ((small - fitted) / max(2 * FAINTEST, 160 * 0.7**turn)) ** 2
        weights = np.maximum(1 - far, 0) ** 2 * (known if turn < 6 else 1) + 1e-6
    # Beyond the sheet the surface says nothing.
    return _surface(fitted.clip(*np.percentile(small[known], (5, 95))), grey.shape)


def _noise(ink: Ink) -> float:
    """One sigma of the paper's noise, where less than half is ink."""
    near = np.abs(_sample(ink))
    near = near[near < 2 * FAINTEST]
    return 1.4826 * float(np.median(near)) if near.size else 0.0


def _grain(grey: Grey) -> float:
    """One sigma of the difference between neighbouring pixels, over the square root of 2."""
    return 1.05 * float(np.median(np.abs(_sample(np.diff(grey.astype(np.int16), axis=1)))))


def _sample(pixels: NDArray[Number]) -> NDArray[Number]:
    return pixels.ravel()[:: 1 + pixels.size // _SAMPLES]


def _free(ink: Ink, noise: float) -> tuple[Mask, Mask] | None:
    """Masks of the ink to keep and of the sheet."""
    strongest = float(ink.max())
    outside = np.zeros(ink.shape, bool)
    for _ in range(2):
        if strongest < max(FAINTEST, 6 * noise):
            return None
        found = _opened_until_free((ink > max(0.35 * strongest, 4 * noise)) & ~outside, outside)
        if found is None:
            return None
        digit, outer, size = found
        kept = dilated(digit, size + 2)
        beyond = outside | dilated(outer, 2)
        if outer.any():
            strength = float(ink[kept & ~dilated(outer, 3)].max(initial=0))
            if strength < 0.5 * strongest:
                # The table is much darker than the ink, of which too little was marked.
                strongest, outside = strength, beyond
                continue
        return kept & ~beyond, ~beyond
    return None


def _opened_until_free(marks: Mask, outside: Mask) -> tuple[Mask, Mask, int] | None:
    """The digit, what surrounds it, and the square by which both were opened."""
    found, before = None, 0
    total = count(marks)
    for size in _OPENINGS:
        kept = opened(marks, size)
        left = count(kept)
        if not left or (size > 2 and left > 0.98 * total):
            break  # nothing is left, or there is no ruling
        if size > 1 and left >= 0.99 * before:
            continue
        before = left
        better = _inner(kept, size, outside)
        if found is not None:
            # Lines may have tied most of the digit to what surrounds it.
            if better is not None and better[0].sum() > 1.5 * found[0].sum():
                found = better
            break
        found = better
        if found is not None and not _edge(found[1]).any():
            break
    return found


def _inner(marks: Mask, size: int, outside: Mask) -> tuple[Mask, Mask, int] | None:
    """`_opened_until_free` for marks opened by `size`; None if no digit is apart."""
    if count_runs(marks) > MOST_RUNS:
        return None
    found = shapes(marks)
    longest = np.maximum(found.height, found.width)
    contact = found.on_frame()
    outer = contact >= 0.6 * longest
    inside = contact == 0
    large = longest >= max(0.08 * max(marks.shape), 4)
    boxes = _boxes(found, inside & large)
    outside = outside | found.mask(outer)
    rest = inside & ~outer & ~boxes
    if not (large & rest).any():
        return None
    main = int(np.where(large & rest, found.area, 0).argmax())
    area = int(found.area[main])
    room = marks.size - count(outside)
    if room < 0.2 * marks.size or found.area[~outer & ~boxes].sum() > 0.45 * room:
        return None  # more ink than paper
    if found.area[~inside & ~outer].max(initial=0) > 0.3 * area:
        return None  # a part of the digit, or ruling that is still there
    if outside.any() and not _is_seen_as_rectangle(~outside):
        return None
    if _is_sheet(found, main):
        return None
    pen = pen_width(found.only(main))
    if size > 1 and pen < 1.5 * size:
        return None
    digit = found.mask(rest & (longest >= 0.2 * longest[main]) & (found.area >= 0.03 * area))
    wider = round(0.35 * pen)
    if wider > size:
        digit, size = opened(digit, wider), wider
        again = shapes(digit)
        digit = again.mask(again.area >= 0.03 * again.area.max(initial=0))
    return digit, found.mask(outer | boxes), size


def _boxes(found: Shapes, selected: Mask) -> Mask:
    """Mask of the selected shapes that are a drawn rectangle around another one."""
    boxes = np.zeros(len(found), bool)
    hollow = (found.on_own_box() >= 0.6) & (found.area < 0.4 * found.height * found.width)
    for box in np.flatnonzero(hollow & selected):
        within = (found.top > found.top[box]) & (found.bottom < found.bottom[box])
        within &= (found.left > found.left[box]) & (found.right < found.right[box])
        boxes[box] = (within & selected).any()
    return boxes


def pen_width(mask: Mask) -> float:
    """Width of the strokes in a mask, from their area and the length of their outline."""
    across = count(mask[1:] != mask[:-1])
    along = count(mask[:, 1:] != mask[:, :-1])
    # The outline of pixels is longer than what it approximates, by 4 / pi on average.
    return 8 / np.pi * count(mask) / max(across + along, 1)


# Is a shape paper?


def _is_sheet(found: Shapes, one: int) -> bool:
    """Whether a shape is paper that shows ink: a large rectangle with holes."""
    area = int(found.area[one])
    if area < 0.1 * found.size[0] * found.size[1]:
        return False
    begins, ends = found.outline(one)
    if not _shows_ink(begins, ends, area):
        return False
    return _is_rectangle(begins, ends, int(found.top[one]), found.size)


def _shows_ink(begins: Numbers, ends: Numbers, area: int) -> bool:
    """Whether the holes of a shape with this outline are as much as ink on paper is."""
    filled = int((ends - begins).sum())
    return 0.002 * filled < filled - area < 0.5 * filled


def _is_seen_as_rectangle(mask: Mask) -> bool:
    mask = opened(mask, 5)  # without gaps in a table of wood
    rows = np.flatnonzero(mask.any(1))
    if not len(rows):
        return False
    seen = mask[rows[0] : rows[-1] + 1]
    ends = seen.shape[1] - seen[:, ::-1].argmax(1)
    return _is_rectangle(seen.argmax(1), ends, int(rows[0]), mask.shape)


def _is_rectangle(begins: Numbers, ends: Numbers, top: int, size: tuple[int, ...]) -> bool:
    """Whether rows with these columns, the first of them `top`, fill a rectangle as far as is seen.

    The rectangle may be turned, and may reach beyond the picture, which has this size.
    """
    rows = np.arange(len(begins)) + top
    x, y = np.concatenate([begins, ends]), np.concatenate([rows, rows])
    angles = np.deg2rad(np.arange(0, 90, 2))
    cos, sin = np.cos(angles), np.sin(angles)
    along = np.outer(cos, x) + np.outer(sin, y)
    across = np.outer(cos, y) - np.outer(sin, x)
    # How much of the picture each of these rectangles takes, by 32 x 32 points.
    v, u = (np.indices((32, 32)).reshape(2, -1) + 0.5) * np.array(size).reshape(2, 1) / 32
    one, other = np.outer(cos, u) + np.outer(sin, v), np.outer(cos, v) - np.outer(sin, u)
    within = (one >= along.min(1, keepdims=True)) & (one <= along.max(1, keepdims=True))
    within &= (other >= across.min(1, keepdims=True)) & (other <= across.max(1, keepdims=True))
    least = float(within.mean(1).min()) * size[0] * size[1]
    return int((ends - begins).sum()) > 0.92 * least
