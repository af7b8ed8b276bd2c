from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.pictures.candidates import Candidate
from service.pictures.judge import IS_DIGIT, MAY_BE_DIGIT, ranked, verdicts
from service.pictures.view import view_alone


def bar(width: int) -> np.ndarray:
    image = np.zeros((96, 96), np.float32)
    image[10:86, 48 - width // 2 : 48 + width - width // 2] = 255
    return image


def candidate(view: np.ndarray, left: float, height: float = 0.3, votes: int = 3) -> Candidate:
    box = (0.1, 0.1 + height, left, left + height / 2)
    return Candidate(np.ones((8, 8), np.float32), box, votes, view)


def of_digit(mnist, digit: int) -> np.ndarray:
    return view_alone(mnist[0][np.flatnonzero(mnist[1] == digit)[0]].astype(np.float32))


def star() -> np.ndarray:
    image = np.zeros((60, 60), np.float32)
    for step in range(-20, 21):
        for row, column in ((step, step), (-step, step), (0, step), (step, 0)):
            image[28 + row : 32 + row, 28 + column : 32 + column] = 255
    return view_alone(image)


def test_a_thousand_digits_are_digits_and_upright_bars_are_ones(mnist):
    judged = verdicts(np.stack([view_alone(one.astype(np.float32)) for one in mnist[0][:1000]]))
    assert (judged[:, 0] > MAY_BE_DIGIT).mean() >= 0.99
    assert (verdicts(np.stack([view_alone(bar(w)) for w in range(4, 30)]))[:, 0] > IS_DIGIT).all()


def test_halves_of_digits_and_lines_are_none_to_the_judge(mnist):
    halves = mnist[0][mnist[1] == 8][:200].astype(np.float32)
    halves[:, 13:] = 0
    judged = verdicts(np.stack([view_alone(one) for one in halves]))
    assert (judged[:, 0] < IS_DIGIT).mean() >= 0.3
    lying = view_alone(bar(6).T)
    square = view_alone(np.full((20, 20), 255, np.float32))
    assert (verdicts(np.stack([lying, square]))[:, 0] < MAY_BE_DIGIT).all()


def test_candidates_apart_are_in_the_order_in_which_the_judge_believes_in_them(mnist):
    square, seven = view_alone(np.full((20, 20), 255, np.float32)), of_digit(mnist, 7)
    found = [candidate(square, 0.1), candidate(seven, 0.6), candidate(square, 0.61)]
    order = ranked(found)
    assert [one.candidate for one in order] == [
        found[1],
        found[0],
    ]  # the third lies over the second
    of_view = [(one.digit, one.mark) for one in order]
    np.testing.assert_array_equal(
        np.float32(of_view), verdicts(np.stack([one.view for one in found]))[[1, 0]]
    )
    assert order[0].chance > 0.9 > 0.1 > order[1].chance
    # Of two that are as good the larger, the one that more readings agree on, and that lost less.
    large = candidate(seven, 0.6)
    assert ranked([candidate(seven, 0.1, 0.2), large])[0].candidate is large
    assert ranked([replace(candidate(seven, 0.1), votes=1), large])[0].candidate is large
    thin = replace(candidate(seven, 0.1), ink=np.eye(8, dtype=np.float32))
    assert ranked([thin, large])[0].candidate is large


def test_a_digit_within_a_sign_is_less_likely_one(mnist):
    seven = candidate(of_digit(mnist, 7), 0.4)
    alone = ranked([seven])[0]
    within = ranked([seven, candidate(star(), 0.35, 0.5, votes=1)])[0]
    assert verdicts(star()[np.newaxis])[0, 1] > 0.5
    assert within.candidate is seven
    assert within.chance < alone.chance
