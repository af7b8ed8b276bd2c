from __future__ import annotations

import numpy as np
import pytest

from service.pictures.candidates import Candidate
from service.pictures.judge import DOUBTFUL, IS_DIGIT, best, chances


def candidate(left: float, height: float = 0.3, votes: int = 3) -> Candidate:
    box = (0.1, 0.1 + height, left, left + height / 2)
    return Candidate(np.zeros((1, 1), np.uint8), box, votes)


def test_few_of_mnist_are_no_digits_to_the_judge(mnist):
    found = chances(mnist[0])
    # 2.4 % and 88.5 %: the judge is unsure of odd digits, which the rules then answer for.
    assert (found < DOUBTFUL).mean() <= 0.03
    assert (found >= IS_DIGIT).mean() >= 0.85


def test_halves_of_digits_are_none_to_the_judge(mnist):
    upper = mnist[0][mnist[1] == 8].copy()
    upper[:, 13:] = 0
    lines = np.zeros((2, 28, 28), np.uint8)
    lines[0, 13:15], lines[1, 4:24, 4:24] = 255, 255
    assert (chances(lines) < DOUBTFUL).all()
    assert (chances(upper) < IS_DIGIT).mean() >= 0.3


def test_the_best_candidate_is_a_digit_and_says_whether_there_is_another(mnist):
    nothing = np.zeros((28, 28), np.uint8)
    nothing[4:24, 4:24] = 255
    seven = mnist[0][np.flatnonzero(mnist[1] == 7)[0]]
    images = np.stack([nothing, seven])
    found = best([candidate(0.1), candidate(0.6)], images)
    np.testing.assert_array_equal(found.image, seven)
    assert found.is_alone
    assert found.chance == pytest.approx(float(chances(images)[1]))
    assert not best([candidate(0.1), candidate(0.6)], np.stack([seven, seven])).is_alone
    # One that lies over it is a reading of the same mark, and one of a third of its height a speck.
    assert best([candidate(0.1), candidate(0.11)], np.stack([seven, seven])).is_alone
    assert best([candidate(0.1), candidate(0.6, 0.1)], np.stack([seven, seven])).is_alone
