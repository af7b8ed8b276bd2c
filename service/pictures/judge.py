"""The judge: a small network that says of a prepared image whether it shows a digit.

`make judge` trains it on the candidates of drawn scenes, `trainer.scenes`. Its classes are the ten
digits, `mark` for another character or sign that is whole, and `none` for anything else: parts of
strokes, two digits in one, edges, ruling, textures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lenet.cpu import CpuBackend, CpuPlan
from lenet.pixels import Images
from lenet.weightfile import WeightFile
from service.pictures.candidates import SAME_MARK, Candidate, overlap

FILE = Path(__file__).with_name("judge.safetensors")

IS_DIGIT, DOUBTFUL = 0.9, 0.2
"""Probabilities of a digit from which an image is believed to show one, and below which not."""

_MOST_ODDS = 9.0
"""Logarithm of the odds beyond which a candidate is no better."""

_WEIGHTS = (0.5, 1.0, 0.5)
"""Weights of the readings of the same mark, by the judge and by number, and of its size, fitted to
drawn scenes: of 734 with a candidate that fits, 93.6 % are found, 91.4 % by the judge alone."""


def chances(images: Images) -> NDArray[np.float32]:
    """Probability that each image, uint8 (n, 28, 28), shows a digit, float32 (n,)."""
    found: NDArray[np.float32] = _plan().run(images).probabilities[:, :10].sum(1)
    return found


@cache
def _plan() -> CpuPlan:
    return CpuBackend().plan(WeightFile.read(FILE), 1)


@dataclass(frozen=True, slots=True)
class Judged:
    """The candidate that was chosen, its image, uint8 (28, 28), and what the judge says of it.

    `is_alone`: no other candidate is surely a digit, at least half as high.
    """

    image: NDArray[np.uint8]
    chance: float
    is_alone: bool


def best(found: Sequence[Candidate], images: Images) -> Judged:
    """The candidate that shows a digit best; `images`, uint8 (n, 28, 28), are the candidates'.

    A reading of a mark counts for more if others agree with it, and a large mark for more than a
    small one, which may be a part of it.
    """
    each = chances(images)
    boxes = np.array([one.box for one in found])
    height, width = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    common = overlap(boxes)
    agreed = ((common > SAME_MARK) * each).sum(1)
    votes = np.array([one.votes for one in found])
    terms = np.log([agreed + 0.3, votes + 0.3, np.maximum(height, width)])
    odds = [min(math.log((chance + 1e-4) / (1.0001 - chance)), _MOST_ODDS) for chance in each]
    one = int(np.argmax(odds + np.array(_WEIGHTS) @ terms))
    others = (each > IS_DIGIT) & (2 * height > height[one]) & (common[one] == 0)
    return Judged(images[one], float(each[one]), not others.any())
