"""Connected shapes in a mask, closings and openings, a threshold; NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Grey = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Numbers = NDArray[np.intp]
Item = TypeVar("Item", bound=np.generic)


@dataclass(frozen=True)
class Shapes:
    """The connected shapes of a mask, numbered from 0 by their first pixel, row by row.

    Diagonal neighbours are connected. `area` has one item a shape, and `boxes` its first row, the
    row behind its last, and its columns likewise, (n, 4). The others have one item for each
    horizontal run of pixels.
    """

    area: Numbers
    boxes: Numbers
    shape_of_run: Numbers
    run_row: Numbers
    run_left: Numbers
    run_right: Numbers

    def __len__(self) -> int:
        return len(self.area)

    @cached_property
    def _runs(self) -> tuple[Numbers, Numbers]:
        """Runs in the order of their shapes, and where each shape's begin."""
        order = np.argsort(self.shape_of_run, kind="stable")
        return order, np.searchsorted(self.shape_of_run[order], np.arange(len(self) + 1))

    def mask(self, members: Numbers, top: int, bottom: int, left: int, right: int) -> Mask:
        """The pixels of some shapes within a box that holds them all."""
        order, begins = self._runs
        runs = np.concatenate([order[begins[one] : begins[one + 1]] for one in members])
        steps = np.zeros((bottom - top, right - left + 1), np.int8)
        row = self.run_row[runs] - top
        steps[row, self.run_left[runs] - left] = 1
        steps[row, self.run_right[runs] - left] -= 1
        filled: Mask = np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1] != 0
        return filled


def count(mask: Mask) -> int:
    """Pixels of a mask."""
    return int(np.count_nonzero(mask))


def count_runs(mask: Mask) -> int:
    """About how many horizontal runs a mask has: what `shapes` takes time for."""
    return count(mask[:, 1:] > mask[:, :-1])


def shapes(mask: Mask) -> Shapes:
    """The connected shapes of a mask, (height, width)."""
    height, width = mask.shape
    # A column of False behind each row ends every run within its row.
    padded = np.zeros((height, width + 1), np.int8)
    padded[:, :-1] = mask
    flat = padded.ravel()
    change = np.flatnonzero(np.diff(flat, prepend=np.int8(0)))
    begin, end = change[0::2], change[1::2]
    row = begin // (width + 1)
    # Runs of the row before that a run touches, also at its corners, are neighbours in the list.
    first = np.searchsorted(end, begin - (width + 1), "left")
    last = np.searchsorted(begin, end - (width + 1), "right")
    # The padding is one column: a run may reach the first or last of another row by its corner.
    first = np.maximum(first, np.searchsorted(row, row - 1, "left"))
    last = np.minimum(last, np.searchsorted(row, row - 1, "right"))
    count = np.maximum(last - first, 0)
    below = np.repeat(np.arange(len(begin)), count)
    above = np.arange(len(below)) - np.repeat(np.cumsum(count) - count, count) + first[below]
    root = _roots(len(begin), below, above)
    heads, number = np.unique(root, return_inverse=True)
    left, right = begin - row * (width + 1), end - row * (width + 1)
    boxes = np.zeros((len(heads), 4), np.intp)
    boxes[:, 0] = row[heads]
    boxes[:, 2] = width
    np.maximum.at(boxes[:, 1], number, row + 1)
    np.minimum.at(boxes[:, 2], number, left)
    np.maximum.at(boxes[:, 3], number, right)
    area = np.bincount(number, end - begin, len(heads)).astype(np.intp)
    return Shapes(area, boxes, number, row, left, right)


def _roots(count: int, one: Numbers, other: Numbers) -> Numbers:
    """The least member of each item's set, where `one` and `other` are pairs of the same set."""
    root = np.arange(count)
    while True:
        low = np.minimum(root[one], root[other])
        before = root.copy()
        np.minimum.at(root, root[one], low)
        np.minimum.at(root, root[other], low)
        while True:
            shorter = root[root]
            if np.array_equal(shorter, root):
                break
            root = shorter
        if np.array_equal(root, before):
            return root


def common_areas(boxes: NDArray[Any]) -> NDArray[np.float32]:
    """The common area of each two boxes (n, 4), (n, n); a box's own area on the diagonal."""
    top, bottom, left, right = boxes.T.astype(np.float32)
    rows = np.minimum.outer(bottom, bottom) - np.maximum.outer(top, top)
    columns = np.minimum.outer(right, right) - np.maximum.outer(left, left)
    found: NDArray[np.float32] = rows.clip(0) * columns.clip(0)
    return found


def overlaps(boxes: NDArray[Any]) -> NDArray[np.float32]:
    """The share of what each two boxes (n, 4) cover that is common to both, (n, n), 0 to 1."""
    common = common_areas(boxes)
    areas = np.diagonal(common)
    shares: NDArray[np.float32] = common / (areas + areas[:, np.newaxis] - common)
    return shares


def longer_sides(boxes: NDArray[Any]) -> NDArray[Any]:
    """The longer side of each of the boxes (n, 4): (n,), in their unit."""
    sides: NDArray[Any] = np.maximum(boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2])
    return sides


def closed(pixels: NDArray[Item], size: int) -> NDArray[Item]:
    """Morphological closing by a square of `size` x `size`: what is thinner and darker goes.

    Beyond the picture its outermost pixels go on.
    """
    before, behind = size // 2, size - 1 - size // 2
    for best, margin in ((np.maximum, (before, behind)), (np.minimum, (behind, before))):
        pixels = np.pad(pixels, margin, "edge")
        pixels = _extreme(_extreme(pixels, size, best, 0), size, best, 1)
    return pixels


def opened(mask: Mask, size: int) -> Mask:
    """Morphological opening of `mask` by a square of `size` x `size` pixels."""
    if size > min(mask.shape):
        return np.zeros_like(mask)
    covered = _extreme(_extreme(mask, size, np.logical_and, 0), size, np.logical_and, 1)
    return _spread(covered, size)


def grown(mask: Mask, reach: int) -> Mask:
    """All pixels at most `reach` rows and columns away from the mask, with a margin of as many."""
    return _spread(mask, 2 * reach + 1)


def _spread(mask: Mask, size: int) -> Mask:
    """Every pixel as a square of `size` x `size` that begins at it: (height, width) + size - 1."""
    margin = size - 1
    height, width = mask.shape
    wide = np.zeros((height + 2 * margin, width + 2 * margin), np.bool_)
    wide[margin : margin + height, margin : margin + width] = mask
    return _extreme(_extreme(wide, size, np.logical_or, 0), size, np.logical_or, 1)


def _extreme(pixels: NDArray[Item], size: int, best: np.ufunc, axis: int) -> NDArray[Item]:
    """`best` of each `size` neighbours along an axis, which becomes shorter by `size - 1`."""
    got, reach = (pixels if axis == 0 else pixels.T), 1
    while reach < size and len(got):
        step = min(reach, size - reach)
        got = best(got[:-step], got[step:])
        reach += step
    return got if axis == 0 else got.T


def otsu(levels: Grey) -> int:
    """The level that separates light from dark best. Source: Otsu 1979."""
    pixels = np.bincount(levels.ravel(), minlength=256).astype(np.float64)
    below = np.cumsum(pixels)[:-1]
    sums = np.cumsum(pixels * np.arange(256))
    apart = (sums[-1] * below / levels.size - sums[:-1]) ** 2
    return int(np.argmax(apart / np.maximum(below * (levels.size - below), 1)))
