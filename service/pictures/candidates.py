"""The marks of a picture that may be a digit: many readings of it, made by plain methods.

A layer is the relief of a picture, by how much each pixel differs from the paper around it, and the
mask of the pixels where it exceeds a threshold. There are layers of dark and of light ink, of small
and large surroundings, of several thresholds, and without lines that are thinner than strokes. Each
connected shape of a layer is a candidate, alone and with the parts near it. Which of them shows a
digit is for `service.pictures.judge` to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.pictures.headers import Digits, Invert
from service.pictures.normalise import box_of
from service.pictures.shapes import (
    Grey,
    Mask,
    Numbers,
    Shapes,
    closed,
    count,
    count_runs,
    grown,
    longer_sides,
    opened,
    otsu,
    overlaps,
    shapes,
)
from service.pictures.view import DIM, Paper, most_beyond, view, view_alone

_EVEN = 0.75
"""Share of a picture's edge with one level, which is then the paper's."""

_SIDES = (128, 256)
"""Bounds of the longer side of the copy that is searched."""

_MOST_RUNS = 8000
"""Maximum horizontal runs of all layers, and a third of it of one, which is noise if it has more;
and again as many without thin lines."""

_ONE, _SEVERAL = (12, 240, 36), (66, 640, 192)
"""Maximum shapes of a layer that are candidates, candidates of a picture before those that are
alike are left out, and after; where one digit is looked for, and where several are."""

_AT_ONCE = 6
"""Layers that are searched in one call, which takes memory for each."""

_FAINTEST = 12
"""Difference from the paper, of 255, below which nothing counts as ink."""

_SURROUNDINGS = (5, 16)
"""The picture's longer side divided by the side of the square that the paper is taken from."""

_THRESHOLDS = (0.45, 0.25, 0.65)
"""Shares of the strongest relief. Of candidates that are alike the first is taken."""

_OPENINGS = (2, 4)
"""Sides of squares, in pixels, that ruling is thinner than."""

_MOST_INK = 0.7
"""Maximum share of a layer that is ink."""

_LEAST = 1 / 24
"""Minimum longer side of a candidate, of the picture's."""

_NEAR = 0.3
"""Maximum distance of a part from its shape, of the shape's longer side."""

_LEAST_PART, _MOST_PART = 0.12, 1.3
"""Bounds of the longer side of a part, of the shape's."""

_MOST_PARTS = 6

SAME_MARK = 0.8
"""Common share of the boxes of two candidates that are readings of the same mark."""

Box: TypeAlias = tuple[float, float, float, float]
"""First row, the row behind the last, and the columns likewise."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A mark: its relief, float32 (height, width), without anything beside it.

    `box` is in shares of the picture's longer side, `votes` the number of candidates that fill
    about the same box, `view` what the judge sees: the mark and what is beside it, uint8 (28, 28).
    """

    ink: NDArray[np.float32]
    box: Box
    votes: int
    view: Grey


@dataclass(frozen=True, slots=True)
class _Layer:
    relief: Grey
    threshold: int
    mask: Mask
    paper: Paper
    opening: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Shapes of one layer that may be a digit together; `box` is in pixels of the layer.

    In `found` the layer begins at `first_row`.
    """

    layer: _Layer
    found: Shapes
    members: Numbers
    first_row: int
    box: tuple[int, int, int, int]


def drawing(grey: Grey, invert: Invert) -> Candidate | None:
    """All ink of a picture on paper of one level; None if the paper has more, or there is no ink.

    The sign of the sum of cubed differences says whether ink is dark: it follows the few pixels far
    from the paper, where a mean would follow the many near it.
    """
    edge = np.sort(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]))
    level = int(edge[edge.size // 2])
    if np.count_nonzero(edge == level) < _EVEN * edge.size:
        return None
    inked = grey != level
    rows, columns = np.flatnonzero(inked.any(1)), np.flatnonzero(inked.any(0))
    if not rows.size:
        return None
    first_row, first_column = int(rows[0]), int(columns[0])
    ink = grey[first_row : rows[-1] + 1, first_column : columns[-1] + 1].astype(np.float32)
    ink -= level
    if invert == "true" or (invert == "auto" and np.vdot(ink * ink, ink) < 0):
        np.negative(ink, out=ink)
    np.maximum(ink, 0, out=ink)
    if ink.max() < 2 * _FAINTEST:
        return None
    top, bottom, left, right = box_of(ink)
    side = max(grey.shape)
    box = (
        (first_row + top) / side,
        (first_row + bottom) / side,
        (first_column + left) / side,
        (first_column + right) / side,
    )
    return Candidate(ink, box, 1, view_alone(ink))


def candidates(grey: Grey, invert: Invert, digits: Digits = "one") -> list[Candidate]:
    """The candidates of a picture, uint8 (height, width); of those alike the first.

    Those first that are large and that many layers show.

    `invert`: "true" is dark ink on light paper, "false" light ink on dark paper, "auto" either.
    """
    most_shapes, most_groups, most_candidates = _ONE if digits == "one" else _SEVERAL
    least, most = _SIDES
    picture, side = Image.fromarray(grey), max(grey.shape)
    # A line of many digits may be long, and no larger than a picture of one.
    larger = side / most if digits == "one" else (grey.size / most**2) ** 0.5
    if larger > 1:
        grey = np.asarray(picture.reduce(math.ceil(larger)))
    elif side < least:
        scale = -(-least // side)
        enlarged = scale * picture.width, scale * picture.height
        grey = np.asarray(picture.resize(enlarged, Image.Resampling.BICUBIC))
    layers, side = list(_layers(grey, invert)), max(grey.shape)
    smallest = max(6, _LEAST * (side if digits == "one" else math.isqrt(grey.size)))
    groups: list[_Group] = []
    for first in range(0, len(layers), _AT_ONCE):
        found = _groups_of(layers[first : first + _AT_ONCE], smallest, most_shapes)
        groups += islice(found, most_groups - len(groups))
        del found  # and the mask of all its layers
    if not groups:
        return []
    boxes = np.array([group.box for group in groups])
    areas = [group.found.area[group.members].sum() for group in groups]
    logs = np.log(np.array(areas, np.float32))
    common = overlaps(boxes)
    votes = np.count_nonzero(common > SAME_MARK, axis=1)
    alike = (common > 0.9) & (np.abs(np.subtract.outer(logs, logs)) < 0.12)
    first_alike = np.flatnonzero(np.argmax(alike, 1) == np.arange(len(groups)))
    shares: list[Box] = list(map(tuple, (boxes / side).tolist()))
    stand_out = votes * longer_sides(boxes)
    chosen = first_alike[np.argsort(-stand_out[first_alike], kind="stable")]
    return [
        _candidate(groups[one], shares[one], int(votes[one]))
        for one in chosen[:most_candidates].tolist()
    ]


def _groups_of(layers: Sequence[_Layer], least: float, most_shapes: int) -> Iterator[_Group]:
    """The candidates of layers, whose masks are searched together, an empty row behind each."""
    height, width = layers[0].mask.shape
    stack = np.zeros((len(layers), height + 1, width), np.bool_)
    for number, layer in enumerate(layers):
        stack[number, :-1] = layer.mask
    found = shapes(stack.reshape(-1, width))
    layer_of = found.boxes[:, 0] // (height + 1)
    for number, layer in enumerate(layers):
        first_row = number * (height + 1)
        own = np.flatnonzero(layer_of == number)
        for members in _groups(found, own, least, most_shapes):
            top, bottom, left, right = _around(found.boxes[members])
            box = top - first_row, bottom - first_row, left, right
            yield _Group(layer, found, members, first_row, box)


def _layers(grey: Grey, invert: Invert) -> Iterator[_Layer]:
    """Whole layers first, and then those without thin lines, as long as there are few runs."""
    reliefs: list[tuple[Grey, list[int], Paper]] = []
    margin = most_beyond(max(grey.shape))
    for is_dark in {"auto": (True, False), "true": (True,), "false": (False,)}[invert]:
        levels = grey if is_dark else 255 - grey
        picture = Image.fromarray(np.pad(levels, margin))
        dark = 255 - levels
        threshold = otsu(dark)
        if np.any(of_paper := dark <= threshold):
            level = int(np.median(dark[of_paper]))
            paper = Paper(
                np.broadcast_to(np.uint8(255 - level), grey.shape), picture, margin, is_dark
            )
            reliefs.append((dark - np.minimum(dark, level), [threshold - level], paper))
        for part in _SURROUNDINGS:
            # A closing follows the edges of sheets and shadows, where a mean would blur them.
            around = closed(levels, max(3, max(grey.shape) // part))
            relief = around - levels
            if is_dark:  # it takes the same share of the light in a shadow
                relief = (relief * (255 / np.maximum(around, np.float32(DIM)))).astype(np.uint8)
            strongest = max(float(np.percentile(relief, 99.5)), 2 * _FAINTEST)
            paper = Paper(around, picture, margin, is_dark)
            reliefs.append((relief, [int(share * strongest) for share in _THRESHOLDS], paper))
    quiet, noisy, left = [], [], _MOST_RUNS
    for relief, thresholds, paper in reliefs:
        for level in (max(_FAINTEST, threshold) for threshold in thresholds):
            layer = _Layer(relief, level, relief > level, paper)
            if 0 < count(layer.mask) <= _MOST_INK * layer.mask.size:
                runs = count_runs(layer.mask)
                if runs <= min(_MOST_RUNS // 3, left):
                    quiet.append(layer)
                    left -= runs
                else:
                    noisy.append(layer)
    yield from quiet
    left += _MOST_RUNS
    for layer in quiet + noisy:
        ink = count(layer.mask)
        for size in _OPENINGS if ink > 0.02 * layer.mask.size else ():
            without = opened(layer.mask, size)
            runs = count_runs(without)
            if 0 < count(without) < 0.97 * ink and runs <= min(_MOST_RUNS // 3, left):
                left -= runs
                yield _Layer(layer.relief, layer.threshold, without, layer.paper, size)


def _groups(found: Shapes, members: Numbers, least: float, most_shapes: int) -> Iterator[Numbers]:
    """The candidates of one layer: shapes, each alone, with its parts, and with the largest."""
    longest = longer_sides(found.boxes[members])
    kept = np.flatnonzero((longest >= 3) & (found.area[members] >= 4))
    kept = kept[np.argsort(-longest[kept], kind="stable")][: 5 * most_shapes]
    members, longest = members[kept], longest[kept]
    boxes, areas = found.boxes[members], found.area[members]
    main = min(most_shapes, int(np.count_nonzero(longest >= least)))
    own, length = boxes[:main, np.newaxis], longest[:main, np.newaxis]
    beside = np.maximum(boxes[:, 2] - own[..., 3], own[..., 2] - boxes[:, 3]).clip(0)
    above = np.maximum(boxes[:, 0] - own[..., 1], own[..., 0] - boxes[:, 1]).clip(0)
    far = np.hypot(beside, above)
    is_part = (far < _NEAR * length) & (longest >= _LEAST_PART * length)
    is_part &= longest < _MOST_PART * length
    is_part[np.arange(main), np.arange(main)] = False
    # What stands beside a digit and is as tall is another one.
    rows = np.minimum(boxes[:, 1], own[..., 1]) - np.maximum(boxes[:, 0], own[..., 0])
    heights = boxes[:, 1] - boxes[:, 0]
    is_part &= rows < 0.7 * np.maximum(heights, heights[:main, np.newaxis])
    height, width = (boxes[:main, 1::2] - boxes[:main, ::2]).T
    is_blot = (areas[:main] > 0.8 * height * width) & (
        3 * np.minimum(height, width) > longest[:main]
    )
    for one, count_parts in enumerate(np.count_nonzero(is_part, axis=1).tolist()):
        groups = [] if is_blot[one] else [[one]]
        if 0 < count_parts <= _MOST_PARTS:
            parts = np.flatnonzero(is_part[one])
            groups.append([one, *parts])
            if count_parts > 1:
                groups.append([one, parts[np.argmax(areas[parts])]])
        for group in groups:
            yield members[group]


def _around(boxes: Numbers) -> tuple[int, int, int, int]:
    """The box around boxes."""
    top, _, left, _ = boxes.min(0)
    _, bottom, _, right = boxes.max(0)
    return int(top), int(bottom), int(left), int(right)


def _candidate(group: _Group, box: Box, votes: int) -> Candidate:
    """A group of shapes: its relief with its faint edges, and how it is seen."""
    layer, (top, bottom, left, right) = group.layer, group.box
    rows = group.first_row + top, group.first_row + bottom
    reach = 1 + layer.opening
    own = grown(group.found.mask(group.members, *rows, left, right), reach)
    above, before = min(reach, top), min(reach, left)
    relief = layer.relief[top - above : bottom + reach, left - before : right + reach]
    mask = own[reach - above :, reach - before :][: relief.shape[0], : relief.shape[1]]
    faint = np.uint8(layer.threshold // 3)
    ink = np.where(mask, relief - np.minimum(relief, faint), np.uint8(0))
    seen = view(ink, (top - above, left - before), group.box, layer.paper)
    return Candidate(ink.astype(np.float32), box, votes, seen)
