"""The marks of a picture that may be a digit: many readings of it, made by plain methods.

A layer is the relief of a picture, by how much each pixel differs from the paper around it, and the
mask of the pixels where it exceeds a threshold. There are layers of dark and of light ink, of small
and large surroundings, of several thresholds, and without lines that are thinner than strokes. Each
connected shape of a layer is a candidate, alone and with the parts near it. Which of them shows a
digit is for `service.pictures.judge` to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service.pictures.headers import Invert
from service.pictures.shapes import (
    Mask,
    Numbers,
    Shapes,
    closed,
    count_runs,
    dilated,
    opened,
    otsu,
    shapes,
)

Grey: TypeAlias = NDArray[np.uint8]

_SEARCH_SIDE = 256
"""Maximum longer side of the copy that is searched."""

_MOST_SHAPES, _MOST = 12, 128
"""Maximum number of shapes of a layer that are candidates, and of candidates of a picture."""

_FAINTEST = 12
"""Difference from the paper, of 255, below which nothing counts as ink."""

_SURROUNDINGS = (5, 16)
"""The picture's longer side divided by the side of the square that the paper is taken from."""

_THRESHOLDS = (0.45, 0.25, 0.65)
"""Shares of the strongest relief. Of marks that are alike the first is taken."""

_OPENINGS = (2, 4)
"""Sides of squares, in pixels, that ruling is thinner than."""

_MOST_RUNS = 4000
"""Maximum horizontal runs of a layer. One with more is noise."""

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
"""Overlap of the boxes of two candidates that are readings of the same mark."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mark: its relief, uint8 (height, width), without anything beside it.

    `box` is its first row, the row behind its last, and the columns likewise, as shares of the
    picture's longer side; `votes` the number of candidates that fill about the same box.
    """

    ink: Grey
    box: tuple[float, float, float, float]
    votes: int


@dataclass(frozen=True, slots=True)
class _Layer:
    relief: Grey
    threshold: int
    mask: Mask
    opening: int = 0


def candidates(grey: Grey, invert: Invert) -> list[Candidate]:
    """The candidates of a picture, uint8 (height, width); of those that are alike the first.

    `invert`: "true" is dark ink on light paper, "false" light ink on dark paper, "auto" either.
    """
    if (factor := -(-max(grey.shape) // _SEARCH_SIDE)) > 1:
        grey = np.asarray(Image.fromarray(grey).reduce(factor))
    layers = list(_layers(grey, invert))
    if not layers:
        return []
    # One call for all layers, with an empty row behind each.
    height, width = grey.shape
    stack = np.zeros((len(layers), height + 1, width), np.bool_)
    for number, layer in enumerate(layers):
        stack[number, :-1] = layer.mask
    found = shapes(stack.reshape(-1, width))
    layer_of = found.top // (height + 1)
    groups: list[Numbers] = []
    for number in range(len(layers)):
        groups += _groups(found, np.flatnonzero(layer_of == number), max(grey.shape))
    if not groups:
        return []
    boxes = np.array([_around(found.boxes[group]) for group in groups])
    boxes[:, :2] -= (layer_of[[group[0] for group in groups]] * (height + 1))[:, np.newaxis]
    areas = np.array([found.area[group].sum() for group in groups])
    common = overlap(boxes)
    votes = np.count_nonzero(common > SAME_MARK, axis=1)
    alike = (common > 0.9) & (np.abs(np.log(areas[:, np.newaxis] / areas)) < 0.12)
    longest = np.maximum(boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2])
    chosen = [one for one in range(len(groups)) if not alike[one, :one].any()]
    chosen.sort(key=lambda one: -int(longest[one]))
    labels = found.labels().reshape(stack.shape)
    result = []
    for one in chosen[:_MOST]:
        number = int(layer_of[groups[one][0]])
        ink = _ink(layers[number], labels[number, :-1], groups[one], boxes[one])
        top, bottom, left, right = (boxes[one] / max(grey.shape)).tolist()
        result.append(Candidate(ink, (top, bottom, left, right), int(votes[one])))
    return result


def _layers(grey: Grey, invert: Invert) -> Iterator[_Layer]:
    for is_dark in {"auto": (True, False), "true": (True,), "false": (False,)}[invert]:
        levels = grey if is_dark else 255 - grey
        dark = 255 - levels
        threshold = otsu(dark)
        if np.any(of_paper := dark <= threshold):
            paper = int(np.median(dark[of_paper]))
            yield from _opened(dark - np.minimum(dark, paper), max(_FAINTEST, threshold - paper))
        for part in _SURROUNDINGS:
            # A closing follows the edges of sheets and shadows, where a mean would blur them.
            relief = closed(levels, max(3, max(grey.shape) // part)) - levels
            strongest = max(float(np.percentile(relief, 99.5)), 2 * _FAINTEST)
            for share in _THRESHOLDS:
                yield from _opened(relief, max(_FAINTEST, int(share * strongest)))


def _opened(relief: Grey, threshold: int) -> Iterator[_Layer]:
    """The layer of a threshold, and without thin lines."""
    mask = relief > threshold
    ink = np.count_nonzero(mask)
    if not 0 < ink <= _MOST_INK * mask.size or count_runs(mask) > _MOST_RUNS:
        return
    yield _Layer(relief, threshold, mask)
    if ink > 0.02 * mask.size:
        for size in _OPENINGS:
            without = opened(mask, size)
            if 0 < np.count_nonzero(without) < 0.97 * ink:
                yield _Layer(relief, threshold, without, size)


def _groups(found: Shapes, members: Numbers, side: int) -> Iterator[Numbers]:
    """The candidates of one layer: shapes, each alone, with its parts, and with the largest."""
    boxes = found.boxes[members]
    longest = np.maximum(boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2])
    kept = np.flatnonzero((longest >= 3) & (found.area[members] >= 4))
    kept = kept[np.argsort(-longest[kept], kind="stable")][: 5 * _MOST_SHAPES]
    members, boxes, longest = members[kept], boxes[kept], longest[kept]
    count = min(_MOST_SHAPES, int(np.count_nonzero(longest >= max(6, side * _LEAST))))
    own = boxes[:count, np.newaxis]
    beside = np.maximum(boxes[:, 2] - own[..., 3], own[..., 2] - boxes[:, 3]).clip(0)
    above = np.maximum(boxes[:, 0] - own[..., 1], own[..., 0] - boxes[:, 1]).clip(0)
    main = longest[:count, np.newaxis]
    near = (np.hypot(beside, above) < _NEAR * main) & (longest >= _LEAST_PART * main)
    near &= longest < _MOST_PART * main
    near[np.arange(count), np.arange(count)] = False
    for one in range(count):
        box = boxes[one]
        height, width = box[1] - box[0], box[3] - box[2]
        solid = found.area[members[one]] > 0.8 * height * width
        if not (solid and 3 * min(height, width) > max(height, width)):
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


def overlap(boxes: NDArray[Any]) -> NDArray[np.float64]:
    """The common area of each two boxes (n, 4), over that of both, (n, n)."""
    low = np.maximum(boxes[:, np.newaxis, ::2], boxes[:, ::2])
    high = np.minimum(boxes[:, np.newaxis, 1::2], boxes[:, 1::2])
    common: NDArray[np.float64] = (high - low).clip(0).prod(2)
    areas = np.diagonal(common)
    return common / (areas[:, np.newaxis] + areas - common)


def _ink(layer: _Layer, labels: NDArray[np.int32], group: Numbers, box: Numbers) -> Grey:
    """The relief of a group of shapes, and of its faint edges, within its box and two pixels."""
    part = np.s_[max(box[0] - 2, 0) : box[1] + 2, max(box[2] - 2, 0) : box[3] + 2]
    own = labels[part]
    mask = own == group[0]
    for shape in group[1:]:
        mask |= own == shape
    faint = np.uint8(layer.threshold // 3)
    relief = layer.relief[part]
    return np.where(
        dilated(mask, 1 + layer.opening), relief - np.minimum(relief, faint), np.uint8(0)
    )
