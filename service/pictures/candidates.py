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
from typing import TypeAlias

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
"""Maximum horizontal runs of all layers, and a third of it of one, which is noise if it has more;
and again as many without thin lines."""

_MOST_SHAPES, _MOST_GROUPS, _MOST = 12, 240, 36
"""Maximum shapes of a layer that are candidates, candidates of a picture before those that are
alike are left out, and after."""

_AT_ONCE = 8
"""Layers that are searched in one call, which takes memory for each."""

_FAINTEST = 12
"""Difference from the paper, of 255, below which nothing counts as ink."""

_DIM = np.float32(80)
"""Level of paper below which the share of the light that ink takes is noise."""

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

_BESIDE, _MOST_BESIDE = 0.7, 1.5
"""Maximum distance of what stands beside a shape, and its longer side, of the shape's."""

SAME_MARK = 0.8
"""Common share of the boxes of two candidates that are readings of the same mark."""

Box: TypeAlias = tuple[float, float, float, float]
"""First row, the row behind the last, and the columns likewise."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mark: its relief, float32 (height, width), without anything beside it.

    `box` is in shares of the picture's longer side, `votes` the number of candidates that fill
    about the same box, `alone` the share of the ink in and beside the box that is the mark's.
    """

    ink: NDArray[np.float32]
    box: Box
    votes: int
    alone: float = 1.0


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
    alone: float


def candidates(grey: Grey, invert: Invert) -> list[Candidate]:
    """The candidates of a picture, uint8 (height, width); of those alike the first.

    Those first that are large, that many layers show, and that stand alone.

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
    shares: list[Box] = list(map(tuple, (boxes / side).tolist()))
    stand_out = votes * longest * np.array([group.alone for group in groups])
    chosen = first_alike[np.argsort(-stand_out[first_alike], kind="stable")]
    return [
        Candidate(_ink(it := groups[one]), shares[one], int(votes[one]), it.alone)
        for one in chosen[:_MOST].tolist()
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
        own = np.flatnonzero(layer_of == number)
        for members, alone in _groups(found, own, least):
            top, bottom, left, right = _around(found.boxes[members])
            box = top - first_row, bottom - first_row, left, right
            yield _Group(layer, found, members, first_row, box, alone)


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
            around = closed(levels, max(3, max(grey.shape) // part))
            relief = around - levels
            if is_dark:  # it takes the same share of the light in a shadow
                relief = (relief * (255 / np.maximum(around, _DIM))).astype(np.uint8)
            strongest = max(float(np.percentile(relief, 99.5)), 2 * _FAINTEST)
            reliefs.append((relief, [int(share * strongest) for share in _THRESHOLDS]))
    quiet, noisy, left = [], [], _MOST_RUNS
    for relief, thresholds in reliefs:
        for level in (max(_FAINTEST, threshold) for threshold in thresholds):
            layer = _Layer(relief, level, relief > level)
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
                yield _Layer(layer.relief, layer.threshold, without, size)


def _groups(found: Shapes, members: Numbers, least: float) -> Iterator[tuple[Numbers, float]]:
    """The candidates of one layer: shapes, each alone, with its parts, and with the largest.

    Beside each the share of the ink there that is its own.
    """
    longest = found.longest[members]
    kept = np.flatnonzero((longest >= 3) & (found.area[members] >= 4))
    kept = kept[np.argsort(-longest[kept], kind="stable")][: 5 * _MOST_SHAPES]
    members, longest = members[kept], longest[kept]
    boxes, areas = found.boxes[members], found.area[members]
    main = min(_MOST_SHAPES, int(np.count_nonzero(longest >= least)))
    own, length = boxes[:main, np.newaxis], longest[:main, np.newaxis]
    beside = np.maximum(boxes[:, 2] - own[..., 3], own[..., 2] - boxes[:, 3]).clip(0)
    above = np.maximum(boxes[:, 0] - own[..., 1], own[..., 0] - boxes[:, 1]).clip(0)
    far = np.hypot(beside, above)
    is_part = (far < _NEAR * length) & (longest >= _LEAST_PART * length)
    is_part &= longest < _MOST_PART * length
    is_part[np.arange(main), np.arange(main)] = False
    is_beside = (far < _BESIDE * length) & (longest >= _LEAST_PART * length)
    around = (is_beside & (longest < _MOST_BESIDE * length)) @ areas
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
            yield members[group], min(1.0, float(areas[group].sum() / around[one]))


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
    own = dilated(np.pad(group.found.cut(group.members, *rows, left, right), reach), reach)
    above, before = min(reach, top), min(reach, left)
    relief = layer.relief[top - above : bottom + reach, left - before : right + reach]
    mask = own[reach - above :, reach - before :][: relief.shape[0], : relief.shape[1]]
    faint = np.uint8(layer.threshold // 3)
    return np.where(mask, relief - np.minimum(relief, faint), np.uint8(0)).astype(np.float32)
