"""Connected shapes in a mask, openings that remove what is thin, a threshold; NumPy alone."""

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

    Diagonal neighbours are connected. Boxes are half-open. All arrays but those of the runs have
    one item a shape.
    """

    size: tuple[int, int]
    area: Numbers
    top: Numbers
    bottom: Numbers
    left: Numbers
    right: Numbers
    shape_of_run: Numbers
    run_row: Numbers
    run_left: Numbers
    run_right: Numbers

    def __len__(self) -> int:
        return len(self.area)

    @property
    def height(self) -> Numbers:
        """Heights of their boxes."""
        return self.bottom - self.top

    @property
    def width(self) -> Numbers:
        """Widths of their boxes."""
        return self.right - self.left

    def mask(self, selected: Mask) -> Mask:
        """The pixels of the selected shapes."""
        runs = selected[self.shape_of_run]
        height, width = self.size
        steps = np.zeros(height * (width + 1), np.int8)
        row = self.run_row[runs] * (width + 1)
        steps[row + self.run_left[runs]] = 1
        steps[row + self.run_right[runs]] -= 1
        filled: Mask = np.cumsum(steps, dtype=np.int8).reshape(height, width + 1)[:, :-1] != 0
        return filled

    def only(self, one: int) -> Mask:
        """The pixels of one shape."""
        return self.mask(np.arange(len(self)) == one)

    @property
    def boxes(self) -> Numbers:
        """First row, row behind the last, first column, column behind the last, (n, 4)."""
        return np.stack([self.top, self.bottom, self.left, self.right], 1)

    @property
    def longest(self) -> Numbers:
        """Longer sides of their boxes."""
        longest: Numbers = np.maximum(self.height, self.width)
        return longest

    @cached_property
    def _runs(self) -> tuple[Numbers, Numbers]:
        """Runs in the order of their shapes, and where each shape's begin."""
        order = np.argsort(self.shape_of_run, kind="stable")
        return order, np.searchsorted(self.shape_of_run[order], np.arange(len(self) + 1))

    def cut(self, members: Numbers, top: int, bottom: int, left: int, right: int) -> Mask:
        """The pixels of some shapes within a box that holds them all."""
        order, begins = self._runs
        runs = np.concatenate([order[begins[one] : begins[one + 1]] for one in members])
        steps = np.zeros((bottom - top, right - left + 1), np.int8)
        row = self.run_row[runs] - top
        steps[row, self.run_left[runs] - left] = 1
        steps[row, self.run_right[runs] - left] -= 1
        filled: Mask = np.cumsum(steps, axis=1, dtype=np.int8)[:, :-1] != 0
        return filled

    def sum_of_runs(self, weights: NDArray[Any]) -> Numbers:
        """Sum of `weights`, one for each run, over the runs of each shape."""
        return np.bincount(self.shape_of_run, weights, len(self)).astype(np.intp)

    def on_frame(self) -> Numbers:
        """Number of pixels of each shape on the outermost ring of the mask."""
        height, width = self.size
        ends = (self.run_left == 0).astype(np.intp) + (self.run_right == width)
        whole = (self.run_row == 0) | (self.run_row == height - 1)
        return self.sum_of_runs(np.where(whole, self.run_right - self.run_left, ends))

    def on_own_box(self) -> NDArray[np.float64]:
        """Least share of a side of its box that each shape fills."""
        shape, length = self.shape_of_run, self.run_right - self.run_left
        first = self.sum_of_runs(np.where(self.run_row == self.top[shape], length, 0))
        last = self.sum_of_runs(np.where(self.run_row == self.bottom[shape] - 1, length, 0))
        left = self.sum_of_runs((self.run_left == self.left[shape]).astype(np.intp))
        right = self.sum_of_runs((self.run_right == self.right[shape]).astype(np.intp))
        least: NDArray[np.float64] = np.minimum(
            np.minimum(first, last) / self.width, np.minimum(left, right) / self.height
        )
        return least

    def outline(self, shape: int) -> tuple[Numbers, Numbers]:
        """Columns at which each row of a shape begins and ends, from its top to its bottom."""
        runs = self.shape_of_run == shape
        row = self.run_row[runs] - self.top[shape]
        begins = np.full(int(self.height[shape]), self.size[1], np.intp)
        ends = np.zeros_like(begins)
        np.minimum.at(begins, row, self.run_left[runs])
        np.maximum.at(ends, row, self.run_right[runs])
        return begins, ends


def count(mask: Mask) -> int:
    """Pixels of a mask."""
    return int(np.count_nonzero(mask))


def count_runs(mask: Mask) -> int:
    """About how many horizontal runs a mask has: what `shapes` takes time for."""
    return count(mask[:, 1:] & ~mask[:, :-1])


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
    found = len(heads)
    left, right = begin - row * (width + 1), end - row * (width + 1)
    leftmost, rightmost = np.full(found, width, np.intp), np.zeros(found, np.intp)
    np.minimum.at(leftmost, number, left)
    np.maximum.at(rightmost, number, right)
    bottom = np.zeros(found, np.intp)
    np.maximum.at(bottom, number, row + 1)
    area = np.bincount(number, end - begin, found).astype(np.intp)
    return Shapes(
        (height, width),
        area,
        row[heads],
        bottom,
        leftmost,
        rightmost,
        number,
        row,
        left,
        right,
    )


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


def closed(pixels: NDArray[Item], size: int) -> NDArray[Item]:
    """Morphological closing by a square of `size` x `size`: what is thinner and darker goes.

    Beyond the picture its outermost pixels go on.
    """
    before, behind = size // 2, size - 1 - size // 2
    for best, margin in ((np.maximum, (before, behind)), (np.minimum, (behind, before))):
        pixels = np.pad(pixels, margin, "edge")
        pixels = extreme(extreme(pixels, size, best, 0), size, best, 1)
    return pixels


def opened(mask: Mask, size: int) -> Mask:
    """Morphological opening of `mask` by a square of `size` x `size` pixels."""
    if size <= 1:
        return mask
    covered = extreme(extreme(mask, size, np.logical_and, 0), size, np.logical_and, 1)
    found = np.zeros_like(mask)
    found[: covered.shape[0], : covered.shape[1]] = covered
    return _spread(_spread(found, size, 0), size, 1)


def dilated(mask: Mask, reach: int) -> Mask:
    """All pixels at most `reach` rows and columns away from the mask."""
    if reach <= 0:
        return mask
    wide = np.pad(mask, ((0, reach), (0, reach)))
    spread = _spread(_spread(wide, 2 * reach + 1, 0), 2 * reach + 1, 1)
    return spread[reach:, reach:]


def extreme(pixels: NDArray[Item], size: int, best: np.ufunc, axis: int) -> NDArray[Item]:
    """`best` of each `size` neighbours along an axis, which becomes shorter by `size - 1`."""
    got, reach = (pixels if axis == 0 else pixels.T), 1
    while reach < size and len(got):
        step = min(reach, size - reach)
        got = best(got[:-step], got[step:])
        reach += step
    return got if axis == 0 else got.T


def _spread(mask: Mask, size: int, axis: int) -> Mask:
    """Each pixel together with the `size - 1` before it along an axis."""
    got, reach = (mask if axis == 0 else mask.T), 1
    while reach < size:
        step = min(reach, size - reach)
        wider = got.copy()
        wider[step:] |= got[:-step]
        got, reach = wider, reach + step
    return got if axis == 0 else got.T


def otsu(levels: NDArray[np.uint8]) -> int:
    """The level that separates light from dark best. Source: Otsu 1979."""
    pixels = np.bincount(levels.ravel(), minlength=256).astype(np.float64)
    below = np.cumsum(pixels)[:-1]
    sums = np.cumsum(pixels * np.arange(256))
    apart = (sums[-1] * below / levels.size - sums[:-1]) ** 2
    return int(np.argmax(apart / np.maximum(below * (levels.size - below), 1)))
