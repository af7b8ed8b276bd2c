"""The judge: a small network that says of a prepared image whether it shows a digit.

`make judge` trains it on the candidates of drawn scenes, `trainer.judge`. Its classes are the ten
digits, `mark` for another character or sign that is whole, and `none` for anything else: parts of
strokes, two digits in one, edges, ruling, textures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lenet.cpu import CpuBackend, CpuPlan
from lenet.pixels import Images
from lenet.weightfile import WeightFile
from service.pictures.candidates import SAME_MARK, Candidate
from service.pictures.shapes import common_areas

FILE = Path(__file__).with_name("judge.safetensors")

IS_DIGIT = 0.97
"""Probability from which an image surely shows a digit."""

_OF_MARK = 0.3
"""Weight of the probability of a mark: a letter is taken where there is no digit."""

_MARK = 10
_MOST_ODDS = 5.0
"""Logarithm of the odds beyond which a candidate is no better: the judge's are smoothed."""

RANKING = (1.0, 1.2, 0.5, 0.75)
"""Weights of `merits`, of `python -m trainer.judge weigh`."""

_APART = 0.2
"""Maximum common share of the smaller of two boxes that belong to different marks."""


def verdicts(images: Images) -> NDArray[np.float32]:
    """Probabilities that each image, uint8 (n, 28, 28), shows a digit, and a mark, (n, 2)."""
    found = _plan().run(images).probabilities
    return np.stack([found[:, :_MARK].sum(1), found[:, _MARK]], 1)


@cache
def _plan() -> CpuPlan:
    return CpuBackend().plan(WeightFile.read(FILE), 1)


def ranked(found: Sequence[Candidate], images: Images) -> tuple[list[int], NDArray[np.float32]]:
    """The candidates that are apart from each other, best first, and the verdicts of all.

    `images`, uint8 (n, 28, 28), are the candidates'.
    """
    judged = verdicts(images)
    boxes = np.array([one.box for one in found])
    common = common_areas(boxes)
    areas = np.diagonal(common)
    is_apart = common < _APART * np.minimum(areas, areas[:, np.newaxis])
    order: list[int] = []
    for one in np.argsort(-merits(found, judged) @ np.array(RANKING), kind="stable").tolist():
        if is_apart[one, order].all():
            order.append(one)
    return order, judged


def merits(found: Sequence[Candidate], judged: NDArray[np.float32]) -> NDArray[np.float64]:
    """What makes a candidate the digit of its picture, (n, 4), as logarithms.

    Its odds, the number of readings of the same mark, the candidate's size, of which a part has
    less, and its share of the ink there, of readings of the same mark the largest.
    """
    likely = judged @ np.array([1, _OF_MARK])
    odds = np.log((likely + 1e-3) / (1.001 - likely)).clip(max=_MOST_ODDS)
    votes, alone = np.array([(one.votes, one.alone) for one in found]).T
    boxes = np.array([one.box for one in found])
    common = common_areas(boxes)
    areas = np.diagonal(common)
    alike = common > SAME_MARK * (areas + areas[:, np.newaxis] - common)
    sizes = np.maximum(boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2])
    shares = (alike * alone).max(1)
    return np.stack([odds, np.log(votes + 0.3), np.log(sizes), np.log(shares + 0.05)], 1)
