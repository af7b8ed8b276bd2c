from __future__ import annotations

import numpy as np
import pytest

from trainer.judge import Seen, rates, samples, weigh
from trainer.marks import MARK, NONE


def test_the_same_seed_draws_the_same_scenes(rings_and_bars):
    one, two = (samples(rings_and_bars, 12, 5) for _ in range(2))
    for left, right in zip(one, two, strict=True):
        np.testing.assert_array_equal(left, right)
    assert len(samples(rings_and_bars, 12, 6)[0]) != len(one[0])


def test_candidates_have_the_class_of_what_is_there(rings_and_bars):
    images, labels = samples(rings_and_bars, 60, 1)
    assert images.shape[1:] == (28, 28)
    assert set(labels.tolist()) == {0, 1, MARK, NONE}
    ring = images[labels == 0].astype(int)
    assert np.median(ring[:, 12:16, 12:16]) < 20  # it is hollow, a bar is not
    assert np.median(images[labels == 1].astype(int)[:, 9:19, 13:15]) > 200


def seen(random: np.random.Generator, weights: np.ndarray, level: float | None) -> Seen:
    """Four candidates; one of them is chosen as `weigh` assumes, and is a digit if there is one.

    Circumstances: a normal number around `level`, or around -1 if there is no digit, and 1.
    """
    merits = random.normal(size=(4, len(weights)))
    chances = np.exp(merits @ weights)
    is_digit = np.zeros(4, np.bool_)
    if level is not None:
        is_digit[random.choice(4, p=chances / chances.sum())] = True
    about = random.normal(-1 if level is None else level, 1, (4, 1))
    return Seen(merits, np.hstack([about, np.ones((4, 1))]), is_digit, level is not None)


def test_weights_are_those_that_the_scenes_were_drawn_with():
    random, weights = np.random.default_rng(1), np.array([2.0, 0.5])
    scenes = [seen(random, weights, 2 if i % 2 else None) for i in range(6000)]
    ranking, chance = weigh(scenes)
    np.testing.assert_allclose(ranking, weights, atol=0.15)
    # Two normal distributions of variance 1: log odds (2 - -1) x - (2**2 - 1) / 2.
    np.testing.assert_allclose(chance, [3, -1.5], atol=0.3)
    # 99 % of digits are above 2 - 2.33, below which Phi(0.67) of what is no digit are.
    chosen, warned, least = rates(scenes, ranking, chance)
    assert warned == pytest.approx(0.75, abs=0.06)
    assert 0 < least < 0.5
    assert chosen > rates(scenes, np.array([-2.0, -0.5]), chance)[0]
