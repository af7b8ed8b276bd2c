"""What of a grey picture is ink: paper, noise, lines and surroundings are removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.images.headers import Invert
from service.images.shapes import Mask, Numbers, Shapes, along, dilated, opened, shapes

Grey: TypeAlias = NDArray[np.uint8]
Ink: TypeAlias = NDArray[np.float32]
Number = TypeVar("Number", bound=np.generic)

_SURFACE_SIDE = 48
"""Side of the copy on which the paper's brightness is fitted, which varies slowly."""

_FAINTEST = 24.0
"""Contrast, of 255, below which a picture counts as blank."""

_SEARCH_SIDE = 256
"""Side of the copy on which lines and surroundings are looked for."""

_SAMPLES = 10_000
"""Pixels of which a median is taken."""

_MOST_RUNS = 6000
"""Rows of connected pixels in a mask. One with more is noise."""

_LINE_WIDTHS = (1, 2, 3, 4, 5, 7, 10)
"""Squares by which lines are told from strokes, in pixels of that copy. 1 keeps everything."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Ink, float32 (height, width) >= 0, without the noise; and the noise, one sigma."""

    ink: Ink
    noise: float
    opposite: int = 0
    bent: bool = False

    @property
    def drawn(self) -> Mask:
        """Where there is more than a trace of ink."""
        mask: Mask = self.ink > self.ink.max() * (0.25 if self.noise else 0.1)
        return mask


def find_ink(grey: Grey, invert: Invert) -> Drawing:
    """How much each pixel differs from the paper, minus the noise. All zeros if nothing stands out.

    The sign of the sum of cubed differences says whether ink is dark: it follows the few pixels far
    from the paper, where a mean would follow the many near it.
    """
    edge = _edge(grey)
    drawing = _drawing(grey, *_paper(grey, edge, float(np.median(edge))), invert)
    if _is_clear(drawing, grey):
        return drawing
    if _is_cut(drawing):
        return drawing
    return _without_surroundings(grey, invert) or drawing


def _drawing(grey: Grey, paper: Ink, noise: float, invert: Invert) -> Drawing:
    ink = grey.astype(np.float32) - paper
    if invert == "true" or (invert == "auto" and (ink * ink * ink).sum() < 0):
        ink = -ink
    strongest = float(ink.max())
    if strongest < max(_FAINTEST, 6 * noise):
        return Drawing(np.zeros_like(ink), noise)
    opposite = int(np.count_nonzero(ink < -max(12, 4 * noise)))
    corners = paper[[0, 0, -1, -1], [0, -1, 0, -1]]
    middle = paper[paper.shape[0] // 2, paper.shape[1] // 2]
    bent = bool(abs(float(corners.mean() - middle)) > _FAINTEST)
    return Drawing(np.maximum(ink - min(3 * noise, strongest / 4), 0), noise, opposite, bent)


def _is_clear(drawing: Drawing, grey: Grey) -> bool:
    """Whether ink is all that was found: it stays away from the edge, and is neither box nor sheet.
    """
    if drawing.opposite > 0.01 * drawing.ink.size:
        return False
    if drawing.bent:
        return False
    drawn = drawing.drawn
    if drawn[0].any() or drawn[-1].any() or drawn[:, 0].any() or drawn[:, -1].any():
        return False
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    if not len(rows):
        return int(grey.max()) - int(grey.min()) < _FAINTEST
    box = drawn[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    area = np.count_nonzero(box)
    if area > 0.55 * box.size and area > 0.25 * drawn.size and _shows_a_sheet(box, drawn.shape):
        return False
    if drawing.noise:
        core = drawing.ink > 0.45 * drawing.ink.max()
        longer = np.count_nonzero(core.any(1)), np.count_nonzero(core.any(0))
        if max(box.shape) > 1.15 * max(longer):
            return False
    return min(box[0].mean(), box[-1].mean(), box[:, 0].mean(), box[:, -1].mean()) < 0.6


def _edge(picture: NDArray[Number]) -> NDArray[Number]:
    return np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])


def _paper(grey: Grey, edge: Grey, level: float) -> tuple[Ink, float]:
    """The paper's brightness under each pixel, broadcastable to `grey`, and its noise (one sigma).

    A drawn picture has one level along its edge, and so has a picture too small to show a shadow.
    A photograph has shadows and noise: a quadratic surface is fitted by iteratively reweighted
    least squares, starting from the edge's median. Cauchy weights ignore pixels far from the
    paper: the ink, or the table beside the sheet.
    """
    flat = np.full((1, 1), level, np.float32)
    if np.mean(edge == level) >= 0.75:
        return flat, 0.0
    # 1.4826 x the median absolute deviation is one sigma of a normal distribution.
    if min(grey.shape) <= _SURFACE_SIDE:
        return flat, 1.4826 * float(np.median(np.abs(edge - level)))
    paper = _surface(grey, level)
    return paper, 1.4826 * float(np.median(np.abs(_edge(grey - paper))))


def _surface(grey: Grey, level: float) -> Ink:
    side = (_SURFACE_SIDE, _SURFACE_SIDE)
    small = np.asarray(Image.fromarray(grey).resize(side, Image.Resampling.BOX), np.float64)
    y, x = np.indices(side).reshape(2, -1) * (2 / _SURFACE_SIDE) - 1
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y])
    fitted = np.full(small.size, level)
    for _ in range(10):
        weighted = terms / (1 + ((small.ravel() - fitted) / _FAINTEST) ** 2)
        fitted = np.linalg.solve(weighted @ terms.T, weighted @ small.ravel()) @ terms
    surface = Image.fromarray(fitted.reshape(side).astype(np.float32))
    return np.asarray(surface.resize(grey.shape[::-1], Image.Resampling.BILINEAR))


# What is slower, and only done where something else than ink may have been found.


def _is_cut(drawing: Drawing) -> bool:
    """Whether what touches the edge is a digit that the picture's edge cuts or touches."""
    ink = drawing.ink
    if drawing.bent or drawing.opposite > 0.01 * ink.size:
        return False
    factor = -(-max(ink.shape) // _SEARCH_SIDE)
    if factor > 1:
        ink = np.asarray(Image.fromarray(ink).reduce(factor))
    marks = ink > 0.35 * ink.max()
    if not 0 < np.count_nonzero(marks[:, 1:] & ~marks[:, :-1]) < _MOST_RUNS:
        return False
    found = shapes(marks)
    main = int(found.area.argmax())
    area = int(found.area[main])
    frame = found.on_frame()
    longest = max(found.height[main], found.width[main])
    if area < 0.7 * found.area.sum() or not 0 < frame[main] < 0.6 * longest:
        return False
    if area > 0.1 * marks.size and _is_sheet(found, main):
        return False
    alone = found.mask(np.arange(len(found)) == main)
    ring = [alone[0], alone[-1], alone[:, 0], alone[:, -1]]
    contacts = sum(int(side[0]) + int(np.count_nonzero(side[1:] > side[:-1])) for side in ring)
    thickest = 2
    while opened(alone, thickest).any():
        thickest = thickest * 3 // 2
    touch = frame[main] / contacts
    return contacts <= 8 and touch >= 0.13 * thickest and (touch > 3 or max(marks.shape) <= 64)


def _without_surroundings(grey: Grey, invert: Invert) -> Drawing | None:
    """The ink without lines on the paper, and without what is around the paper.

    None if there is no such thing, or nothing would be left.
    """
    factor = -(-max(grey.shape) // _SEARCH_SIDE)
    small = np.asarray(Image.fromarray(grey).reduce(factor)) if factor > 1 else grey
    for closing in (1, 3, 5) if min(small.shape) > 64 else (1,):
        for sign in (-1, 1):
            if (invert == "true" and sign > 0) or (invert == "false" and sign < 0):
                continue
            found = _search(small if closing == 1 else _closed(small, closing, sign), sign)
            if found is None:
                continue
            keep, region, paper = found
            noise = _noise((small - paper)[region]) * factor
            whole = np.repeat(np.repeat(keep, factor, 0), factor, 1)
            if paper.size > 1:
                surface = Image.fromarray(paper).resize(grey.shape[::-1], Image.Resampling.BILINEAR)
                paper = np.asarray(surface)
            ink = sign * (grey.astype(np.float32) - paper)
            ink[~whole[: grey.shape[0], : grey.shape[1]]] = 0
            strongest = float(ink.max())
            if strongest >= _FAINTEST:
                return Drawing(np.maximum(ink - min(3 * noise, strongest / 4), 0), noise)
    return None


def _closed(grey: Grey, size: int, sign: int) -> Grey:
    """The picture without ink that is thinner than `size` pixels."""
    first, second = (np.maximum, np.minimum) if sign < 0 else (np.minimum, np.maximum)
    wide = np.pad(grey, size - 1, "edge")
    for best in (first, second):
        for axis in (0, 1):
            wide = along(wide, size, best, axis)
    return wide


def _search(grey: Grey, sign: int) -> tuple[Mask, Mask, Ink] | None:
    threshold = _otsu(grey)
    sheet = grey > threshold if sign < 0 else grey <= threshold
    tried = None
    for known in (sheet, np.ones(grey.shape, bool)):
        if not known.any():
            continue
        sample = grey[known]
        paper = _paper_of(grey, known, float(np.median(sample[:: 1 + sample.size // _SAMPLES])))
        if tried is not None and paper.size == tried.size == 1 and paper == tried:
            continue
        tried = paper
        ink = sign * (grey - paper)
        noise = _noise(ink[known])
        if noise > (20 if known is sheet else 5 + 2 * _grain(grey)):
            _why('noise')
            continue
        found = _free(ink, noise)
        if found is not None:
            return *found, paper
    return None


def _paper_of(grey: Grey, sheet: Mask, level: float) -> Ink:
    """The paper's brightness, fitted to the pixels of `sheet` first and then to all like them."""
    if np.mean(np.abs(grey[sheet] - np.float32(level)) <= 1) >= 0.4:
        return np.full((1, 1), level, np.float32)
    if min(grey.shape) <= _SURFACE_SIDE:
        return np.full((1, 1), level, np.float32)
    side = (_SURFACE_SIDE, _SURFACE_SIDE)
    small = np.asarray(Image.fromarray(grey).resize(side, Image.Resampling.BOX), np.float64).ravel()
    known = np.asarray(Image.fromarray(sheet).resize(side), bool).ravel()
    y, x = np.indices(side).reshape(2, -1) * (2 / _SURFACE_SIDE) - 1
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y])
    weights = known + 1e-6
    for turn in range(14):
        weighted = terms * weights
        fitted = np.linalg.solve(weighted @ terms.T, weighted @ small) @ terms
        # Tukey's biweight: what is far from the paper has no say at all, however much it is.
        far = ((small - fitted) / max(2 * _FAINTEST, 160 * 0.7**turn)) ** 2
        weights = np.maximum(1 - far, 0) ** 2 * (known if turn < 6 else 1) + 1e-6
    if not known.any():
        return np.full((1, 1), level, np.float32)
    low, high = np.percentile(small[known], (5, 95))
    surface = Image.fromarray(fitted.clip(low, high).reshape(side).astype(np.float32))
    return np.asarray(surface.resize(grey.shape[::-1], Image.Resampling.BILINEAR))


def _noise(ink: Ink) -> float:
    """One sigma of the paper's noise where less than half is ink."""
    near = np.abs(ink.ravel()[:: 1 + ink.size // _SAMPLES])
    near = near[near < 2 * _FAINTEST]
    return 1.4826 * float(np.median(near)) if len(near) else 0.0


def _grain(grey: Grey) -> float:
    """One sigma of what differs from one pixel to the next."""
    step = np.diff(grey.astype(np.int16), axis=1).ravel()
    return 1.4826 / 2**0.5 * float(np.median(np.abs(step[:: 1 + step.size // _SAMPLES])))


def _otsu(grey: Grey) -> int:
    """The level that separates light from dark best. Source: N. Otsu 1979."""
    count = np.bincount(grey.ravel(), minlength=256).astype(np.float64)
    below = np.cumsum(count)[:-1]
    sums = np.cumsum(count * np.arange(256))
    apart = (sums[-1] * below / grey.size - sums[:-1]) ** 2
    return int(np.argmax(apart / np.maximum(below * (grey.size - below), 1)))


def _free(ink: Ink, noise: float) -> tuple[Mask, Mask] | None:
    """Where to keep the ink, and the sheet, once lines and surroundings are taken away.

    None if that fails.
    """
    strongest = float(ink.max())
    around = np.zeros(ink.shape, bool)
    for _ in range(2):
        if strongest < max(_FAINTEST, 6 * noise):
            return _why(f'faint {strongest:.0f} {noise:.0f}')
        marks = (ink > max(0.35 * strongest, 4 * noise)) & ~around
        found, before = None, 0
        for size in _LINE_WIDTHS:
            kept = opened(marks, size)
            count = int(np.count_nonzero(kept))
            if not count or (size > 2 and count > 0.98 * first):
                break  # nothing is left, or there are no thin lines
            if size == 1:
                first = count
            if count < 0.99 * before or size == 1:
                before = count
                better = _inner(kept, size, around)
                if found is not None:  # where lines tie a digit to what surrounds it
                    if better is not None and better[0].sum() > 1.5 * found[0].sum():
                        found = better
                    break
                found = better
                if found is not None and not _edge(found[1]).any():
                    break
        if found is None:
            return None
        inner, outer, size = found
        if outer.any():
            beyond = float(ink[dilated(inner, size + 2) & ~dilated(outer, 3)].max(initial=0))
            if beyond < 0.5 * strongest:
                strongest, around = beyond, around | dilated(outer, 2)
                continue
        region = ~dilated(outer | around, 2)
        return dilated(inner, size + 2) & region, region
    return None


def _inner(marks: Mask, size: int, around: Mask) -> tuple[Mask, Mask, int] | None:
    """The digit, what surrounds it, and by what square the digit is opened.

    `marks` are without lines thinner than `size`.
    """
    if np.count_nonzero(marks[:, 1:] & ~marks[:, :-1]) > _MOST_RUNS:
        return None
    found = shapes(marks)
    longest = np.maximum(found.height, found.width)
    frame = found.on_frame()
    outer = frame >= 0.6 * longest
    inside = frame == 0
    large = longest >= max(0.08 * max(marks.shape), 4)
    # A box around another shape.
    boxes = np.zeros(len(found), bool)
    hollow = (found.on_own_box() >= 0.6) & (found.area < 0.4 * found.height * found.width)
    for box in np.flatnonzero(hollow & inside & large):
        within = (found.top > found.top[box]) & (found.bottom < found.bottom[box])
        within &= (found.left > found.left[box]) & (found.right < found.right[box])
        if (within & large).any():
            boxes[box] = True
    around = around | found.mask(outer)
    outer |= boxes
    candidates = large & inside & ~outer
    if not candidates.any():
        return _why('no inner')
    main = int(np.where(candidates, found.area, 0).argmax())
    area = int(found.area[main])
    room = marks.size - int(np.count_nonzero(around))
    if room < 0.2 * marks.size or found.area[~outer].sum() > 0.45 * room:
        return _why('room')
    if found.area[~inside & ~outer].max(initial=0) > 0.3 * area:
        return _why('cut')
    if around.any() and not _fills_rectangle(~around):
        return _why('outer no rectangle')
    if area > 0.1 * marks.size and _is_sheet(found, main):
        return _why('sheet')
    chosen = inside & ~outer & (longest >= 0.2 * longest[main]) & (found.area >= 0.03 * area)
    digit = found.mask(chosen)
    pen = _pen(found.mask(np.arange(len(found)) == main))
    if size > 1 and pen < 1.5 * size:
        return _why('thin')
    wider = round(0.35 * pen)
    if wider > size:
        digit, size = opened(digit, wider), wider
        again = shapes(digit)
        digit = again.mask(again.area >= 0.03 * again.area.max())
    return digit, found.mask(outer), size


def _pen(mask: Mask) -> float:
    """Width of the strokes, from their area and their outline."""
    area = np.count_nonzero(mask)
    across = np.count_nonzero(mask[1:] != mask[:-1])
    along = np.count_nonzero(mask[:, 1:] != mask[:, :-1])
    # An outline of pixels is longer than what it approximates, by 4 / pi on average.
    return 2 * area * 4 / np.pi / max(across + along, 1)


def _is_sheet(found: Shapes, one: int) -> bool:
    """Whether a shape is a rectangle with holes in it, in any position: paper that shows ink."""
    begins, ends = found.outline(one)
    filled = int((ends - begins).sum())
    if not 0.01 * filled < filled - found.area[one] < 0.5 * filled:
        return False
    return _is_rectangle(begins, ends, int(found.top[one]), found.size)


def _shows_a_sheet(box: Mask, size: tuple[int, int]) -> bool:
    """Whether the marks in their box are paper."""
    begins, ends = box.argmax(1), box.shape[1] - box[:, ::-1].argmax(1)
    filled, area = int((ends - begins).sum()), int(np.count_nonzero(box))
    return 0.01 * filled < filled - area < 0.5 * filled and _is_rectangle(begins, ends, 0, size)


def _fills_rectangle(mask: Mask) -> bool:
    """Whether a mask with its holes is a rectangle, in any position."""
    size: tuple[int, int] = mask.shape
    mask = opened(mask, 5)  # not the gaps in a table of wood
    rows = np.flatnonzero(mask.any(1))
    if not len(rows):
        return False
    mask = mask[rows[0] : rows[-1] + 1]
    ends = mask.shape[1] - mask[:, ::-1].argmax(1)
    return _is_rectangle(mask.argmax(1), ends, int(rows[0]), size)


def _is_rectangle(begins: Numbers, ends: Numbers, top: int, size: tuple[int, int]) -> bool:
    """Whether rows from and to these columns nearly fill a rectangle, as far as it is seen.

    The rectangle may be turned, and reach beyond the picture of this size.
    """
    rows = np.arange(len(begins)) + top
    x, y = np.concatenate([begins, ends]), np.concatenate([rows, rows])
    angles = np.deg2rad(np.arange(0, 90, 2))
    cos, sin = np.cos(angles), np.sin(angles)
    along = np.outer(cos, x) + np.outer(sin, y)
    across = np.outer(cos, y) - np.outer(sin, x)
    # Shares of the whole picture, from 32 x 32 points of it.
    row, column = (np.indices((32, 32)).reshape(2, -1) + 0.5) * np.array(size).reshape(2, 1) / 32
    one, other = (np.outer(cos, a) + np.outer(sin, b) for a, b in ((column, row), (row, -column)))
    within = (one >= along.min(1, keepdims=True)) & (one <= along.max(1, keepdims=True))
    within &= (other >= across.min(1, keepdims=True)) & (other <= across.max(1, keepdims=True))
    least = float(within.mean(1).min()) * size[0] * size[1]
    return int((ends - begins).sum()) > 0.92 * least


def _why(x):
    WHY.append(x)
WHY=[]
