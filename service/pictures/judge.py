"""The judge: a small network that says of a mark in a picture whether it is a digit.

`make judge` trains it on the candidates of drawn scenes, `trainer.judge`. Its classes are the ten
digits, `mark` for another character or sign that is whole, and `none` for anything else: parts of
strokes, two digits in one, edges, ruling, textures.

It sees one candidate and what is beside it. What it does not see, how large the candidate is in
the picture, how many others agree with it and what else was found there, is weighed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet.cpu import CpuBackend, CpuPlan
from lenet.pixels import Images
from lenet.weightfile import WeightFile
from service.pictures.candidates import Candidate
from service.pictures.shapes import common_areas, longer_sides

FILE = Path(__file__).with_name("judge.safetensors")
"""The judge's weights."""

RANKING, CHANCE = (1.2, 1.0, 0.65, 1.0), (0.91, -3.12, 0.23)
"""Weights of `merits`, which of the candidates is the digit, and of `circumstances`, whether it is
one. Of `python -m trainer.judge weigh --scenes 2000 --seed 77`, but for size and ink: its 0.35 and
0.25 take more digits of numbers whose thin strokes are lost."""

IS_DIGIT, MAY_BE_DIGIT = 0.9, 0.5
"""Probabilities from which a view surely shows a digit, and rather does than not."""

_OF_MARK = 0.3
"""Weight of the probability of a mark: a letter is taken where there is no digit."""

_MARK = 10
_MOST_ODDS = 5.0
"""Logarithm of the odds beyond which a candidate is no better: the judge's are smoothed."""

_APART = 0.2
"""Maximum common share of the smaller of two boxes that belong to different marks."""

_NEAR = 0.5
"""Maximum distance of a mark that a candidate may be a part of, of the candidate's longer side, and
minimum longer side of that mark."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Probabilities of a candidate.

    By what the judge sees, that it is a `digit`, and another `mark`; and the `chance` that it is a
    digit, given what else was found.
    """

    candidate: Candidate
    digit: float
    mark: float
    chance: float


def verdicts(views: Images) -> NDArray[np.float32]:
    """Probabilities that each view, uint8 (n, 28, 28), is of a digit, and of a mark, (n, 2)."""
    found = _plan().run(views).probabilities
    return np.stack([found[:, :_MARK].sum(1), found[:, _MARK]], 1)


@cache
def _plan() -> CpuPlan:
    return CpuBackend().plan(WeightFile.read(FILE), 1)


def ranked(found: Sequence[Candidate]) -> list[Verdict]:
    """Verdicts on the candidates that are apart from each other, the best first."""
    judged = verdicts(np.stack([one.view for one in found]))
    boxes = np.array([one.box for one in found])
    common = common_areas(boxes)
    areas = np.diagonal(common)
    is_apart = common < _APART * np.minimum(areas, areas[:, np.newaxis])
    scores = merits(found, judged) @ np.array(RANKING)
    order: list[int] = []
    for one in np.argsort(-scores, kind="stable").tolist():
        if is_apart[one, order].all():
            order.append(one)
    chances = 1 / (1 + np.exp(-circumstances(found, judged) @ np.array(CHANCE)))
    return [
        Verdict(found[one], float(judged[one, 0]), float(judged[one, 1]), float(chances[one]))
        for one in order
    ]


def merits(found: Sequence[Candidate], judged: NDArray[np.float32]) -> NDArray[np.float64]:
    """What makes a candidate the digit of its picture, (n, 4).

    Logarithms of its odds, of the number of candidates that fill the same box, of its size, of
    which a part has less, and of its inked pixels, which are fewer where strokes are lost.
    """
    odds = _log_odds(judged @ np.array([1, _OF_MARK]))
    votes = np.array([one.votes for one in found])
    sizes = longer_sides(np.array([one.box for one in found]))
    inked = np.array([np.count_nonzero(one.ink) for one in found])
    return np.stack([odds, np.log(votes), np.log(sizes), np.log(inked)], 1)


def circumstances(found: Sequence[Candidate], judged: NDArray[np.float32]) -> NDArray[np.float64]:
    """What makes a candidate a digit at all, (n, 3).

    Logarithms of its odds, the probability of a mark that it may be a part of, and 1.
    """
    boxes = np.array([one.box for one in found])
    longest = longer_sides(boxes)
    top, bottom, left, right = boxes.T
    above = np.maximum(top[:, np.newaxis] - bottom, top - bottom[:, np.newaxis]).clip(0)
    beside = np.maximum(left[:, np.newaxis] - right, left - right[:, np.newaxis]).clip(0)
    size = _NEAR * longest[:, np.newaxis]
    is_near = (np.hypot(above, beside) < size) & (longest >= size)
    marks = np.where(is_near, judged[:, 1], 0).max(1)
    return np.stack([_log_odds(judged[:, 0]), marks, np.ones(len(found))], 1)


def _log_odds(probabilities: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    odds: NDArray[np.float64] = np.log((probabilities + 1e-3) / (1.001 - probabilities))
    return odds.clip(max=_MOST_ODDS)
