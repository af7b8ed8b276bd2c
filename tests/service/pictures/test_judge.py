from __future__ import annotations

import numpy as np

from service.pictures.candidates import Candidate
from service.pictures.judge import IS_DIGIT, ranked, verdicts


def candidate(left: float, height: float = 0.3, votes: int = 3) -> Candidate:
    box = (0.1, 0.1 + height, left, left + height / 2)
    return Candidate(np.zeros((1, 1), np.float32), box, votes)


def test_halves_of_digits_are_none_to_the_judge(mnist):
    upper = mnist[0][mnist[1] == 8].copy()
    upper[:, 13:] = 0
    lines = np.zeros((2, 28, 28), np.uint8)
    lines[0, 13:15], lines[1, 4:24, 4:24] = 255, 255
    assert (verdicts(lines)[:, 0] < 0.5).all()
    assert (verdicts(upper)[:, 0] < IS_DIGIT).mean() >= 0.3


def test_candidates_apart_are_in_the_order_in_which_the_judge_believes_in_them(mnist):
    nothing = np.zeros((28, 28), np.uint8)
    nothing[4:24, 4:24] = 255
    seven = mnist[0][np.flatnonzero(mnist[1] == 7)[0]]
    found = [candidate(0.1), candidate(0.6), candidate(0.61)]
    order, judged = ranked(found, np.stack([nothing, seven, nothing]))
    assert order == [1, 0]  # the third lies over the second
    np.testing.assert_array_equal(judged, verdicts(np.stack([nothing, seven, nothing])))
    # Of two that are as good the larger, and the one that more readings agree on.
    assert ranked([candidate(0.1, 0.2), candidate(0.6)], np.stack([seven] * 2))[0][0] == 1
    assert ranked([candidate(0.1, votes=1), candidate(0.6)], np.stack([seven] * 2))[0][0] == 1
