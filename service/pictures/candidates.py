"""The marks of a picture that may be a digit: many readings of it, made by plain methods.

A layer is the relief of a picture, by how much each pixel differs from the paper around it, and the
mask of the pixels where it exceeds a threshold. There are layers of dark and of light ink, of small
and large surroundings, of several thresholds, and without lines that are thinner than strokes. Each
connected shape of a layer is a candidate, alone and with the parts near it. Which of them shows a
digit is for `service.pictures.judge` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

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
    common_areas,
    count,
    count_runs,
    dilated,
    opened,
    otsu,
    shapes,
)

_SIDES = (128, 256)
"""Bounds of the longer side of the copy that is searched."""

_MOST_RUNS = 8000
"""Maximum horizontal runs of all layers, and a third of it of one. One with more is noise."""

_MOST_SHAPES, _MOST_GROUPS, _MOST = 12, 200, 64
"""Maximum shapes of a layer that are candidates, candidates of a picture before those that are
alike are left out, and after."""

_AT_ONCE = 8
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mark: its relief, float32 (height, width), without anything beside it.

    `box` is its first row, the row behind its last, and the columns likewise, as shares of the
    picture's longer side; `votes` the number of candidates that fill about the same box.
    """

    ink: NDArray[np.float32]
    box: tuple[float, float, float, float]
    votes: int


@dataclass(frozen=True, slots=True)
class _Layer:
    relief: Grey
    threshold: int
    mask: Mask
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


def candidates(grey: Grey, invert: Invert) -> list[Candidate]:
    """The candidates of a picture, uint8 (height, width), largest first; of those alike the first.

    `invert`: "true" is dark ink on light paper, "false" light ink on dark paper, "auto" either.
    """
    least, most = _SIDES
    picture, side = Image.fromarray(grey), max(grey.shape)
    if side > most:
        grey = np.asarray(picture.reduce(-(-side // most)))
    elif side < least:
        scale = -(-least // side)
        larger = scale * picture.width, scale * picture.height
        grey = np.asarray(picture.resize(larger, Image.Resampling.BICUBIC))
    layers, side = list(_layers(grey, invert)), max(grey.shape)
    groups: list[_Group] = []
    for first in range(0, len(layers), _AT_ONCE):
        found = _groups_of(layers[first : first + _AT_ONCE], max(6, side * _LEAST))
        groups += islice(found, _MOST_GROUPS - len(groups))
        del found  # and the mask of all its layers
    if not groups:
        return []
    boxes = np.array([group.box for group in groups])
    areas = [group.found.area[group.members].sum() for group in groups]
    logs = np.log(np.array(areas, np.float32))
    common = common_areas(boxes)
    sizes = np.diagonal(common)
    common /= sizes + sizes[:, np.newaxis] - common
    votes = np.count_nonzero(common > SAME_MARK, axis=1)
    alike = (common > 0.9) & (np.abs(np.subtract.outer(logs, logs)) < 0.12)
    longest = np.maximum(boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2])
    first_alike = np.flatnonzero(np.argmax(alike, 1) == np.arange(len(groups)))
    chosen = first_alike[np.argsort(-longest[first_alike], kind="stable")]
    return [
        Candidate(_ink(groups[one]), tuple((boxes[one] / side).tolist()), int(votes[one]))
        for one in chosen[:_MOST]
    ]


def _groups_of(layers: Sequence[_Layer], least: float) -> Iterator[_Group]:
    """The candidates of layers, whose masks are searched together, an empty row behind each."""
    height, width = layers[0].mask.shape
    stack = np.zeros((len(layers), height + 1, width), np.bool_)
    for number, layer in enumerate(layers):
        stack[number, :-1] = layer.mask
    found = shapes(stack.reshape(-1, width))
    layer_of = found.top // (height + 1)
    for number, layer in enumerate(layers):
        first_row = number * (height + 1)
        for members in _groups(found, np.flatnonzero(layer_of == number), least):
            top, bottom, left, right = _around(found.boxes[members])
            box = top - first_row, bottom - first_row, left, right
            yield _Group(layer, found, members, first_row, box)


def _layers(grey: Grey, invert: Invert) -> Iterator[_Layer]:
    """Whole layers first, and then those without thin lines, as long as there are few runs."""
    reliefs: list[tuple[Grey, list[int]]] = []
    for is_dark in {"auto": (True, False), "true": (True,), "false": (False,)}[invert]:
        levels = grey if is_dark else 255 - grey
        dark = 255 - levels
        threshold = otsu(dark)
        if np.any(of_paper := dark <= threshold):
            paper = int(np.median(dark[of_paper]))
            reliefs.append((dark - np.minimum(dark, paper), [threshold - paper]))
        for part in _SURROUNDINGS:
            # A closing follows the edges of sheets and shadows, where a mean would blur them.
            relief = closed(levels, max(3, max(grey.shape) // part)) - levels
            strongest = max(float(np.percentile(relief, 99.5)), 2 * _FAINTEST)
            reliefs.append((relief, [int(share * strongest) for share in _THRESHOLDS]))
    whole = []
    runs = 0
    for relief, thresholds in reliefs:
        for threshold in thresholds:
            mask = relief > (threshold := max(_FAINTEST, threshold))
            more = count_runs(mask)
            if 0 < count(mask) <= _MOST_INK * mask.size and more <= min(
                _MOST_RUNS // 3, _MOST_RUNS - runs
            ):
                runs += more
                whole.append(_Layer(relief, threshold, mask))
    yield from whole
    for layer in whole:
        ink = count(layer.mask)
        for size in _OPENINGS if ink > 0.02 * layer.mask.size else ():
            without = opened(layer.mask, size)
            if 0 < count(without) < 0.97 * ink:
                runs += count_runs(without)
                if runs > 2 * _MOST_RUNS:
                    return
                yield _Layer(layer.relief, layer.threshold, without, size)


def _groups(found: Shapes, members: Numbers, least: float) -> Iterator[Numbers]:
    """The candidates of one layer: shapes, each alone, with its parts, and with the largest."""
    longest = found.longest[members]
    kept = np.flatnonzero((longest >= 3) & (found.area[members] >= 4))
    kept = kept[np.argsort(-longest[kept], kind="stable")][: 5 * _MOST_SHAPES]
    members, longest = members[kept], longest[kept]
    boxes = found.boxes[members]
    main = min(_MOST_SHAPES, int(np.count_nonzero(longest >= least)))
    own = boxes[:main, np.newaxis]
    beside = np.maximum(boxes[:, 2] - own[..., 3], own[..., 2] - boxes[:, 3]).clip(0)
    above = np.maximum(boxes[:, 0] - own[..., 1], own[..., 0] - boxes[:, 1]).clip(0)
    length = longest[:main, np.newaxis]
    near = (np.hypot(beside, above) < _NEAR * length) & (longest >= _LEAST_PART * length)
    near &= longest < _MOST_PART * length
    near[np.arange(main), np.arange(main)] = False
    for one in range(main):
        top, bottom, left, right = boxes[one]
        height, width = bottom - top, right - left
        is_solid = found.area[members[one]] > 0.8 * height * width
        if not (is_solid and 3 * min(height, width) > max(height, width)):
            yield members[[one]]
        parts = np.flatnonzero(near[one])
        if 0 < len(parts) <= _MOST_PARTS:
            yield members[[one, *parts]]
            if len(parts) > 1:
                largest = parts[np.argmax(found.area[members[parts]])]
                yield members[[one, largest]]


def _around(boxes: Numbers) -> tuple[int, int, int, int]:
    """The box around boxes."""
    top, _, left, _ = boxes.min(0)
    _, bottom, _, right = boxes.max(0)
    return int(top), int(bottom), int(left), int(right)


def _ink(group: _Group) -> NDArray[np.float32]:
    """The relief of a group of shapes, and of its faint edges, within its box and a margin."""
    layer, (top, bottom, left, right) = group.layer, group.box
    rows = group.first_row + top, group.first_row + bottom
    reach = 1 + layer.opening
    own = np.pad(group.found.cut(group.members, *rows, left, right), reach)
    above, before = min(reach, top), min(reach, left)
    relief = layer.relief[top - above : bottom + reach, left - before : right + reach]
    wide = dilated(own, reach)[reach - above :, reach - before :]
    mask = wide[: relief.shape[0], : relief.shape[1]]
    faint = np.uint8(layer.threshold // 3)
    return np.where(mask, relief - np.minimum(relief, faint), np.uint8(0)).astype(np.float32)
