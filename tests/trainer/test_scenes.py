from __future__ import annotations

import numpy as np
import pytest

from trainer.judge import samples
from trainer.mnist import Digits
from trainer.scenes import MARK, NONE, drawn


@pytest.fixture(scope="module")
def digits() -> Digits:
    """Twenty rings and bars instead of digits, so that no files are needed."""
    y, x = np.indices((28, 28)) - 13.5
    ring = (np.abs(np.hypot(x, y * 0.8) - 7) < 1.6) * 255
    bar = ((np.abs(x) < 1.6) & (np.abs(y) < 10)) * 255
    return Digits(np.array([ring, bar] * 10, np.uint8), np.array([0, 1] * 10, np.uint8))


def test_the_same_seed_draws_the_same_scenes(digits):
    one, two = (samples(digits, 12, 5) for _ in range(2))
    for left, right in zip(one, two, strict=True):
        np.testing.assert_array_equal(left, right)
    assert len(samples(digits, 12, 6)[0]) != len(one[0])


def test_candidates_have_the_class_of_what_is_there(digits):
    images, labels = samples(digits, 60, 1)
    assert images.shape[1:] == (28, 28)
    assert set(labels.tolist()) == {0, 1, MARK, NONE}
    ring = images[labels == 0].astype(int)
    assert np.median(ring[:, 12:16, 12:16]) < 20  # it is hollow, a bar is not
    assert np.median(images[labels == 1].astype(int)[:, 9:19, 13:15]) > 200


def test_a_scene_is_a_picture_with_marks_of_its_size(digits):
    for number in range(30):
        scene = drawn(digits, np.random.default_rng(number))
        assert 24 <= min(scene.picture.size) <= max(scene.picture.size) <= 256
        for share, label in scene.marks:
            assert share.shape == scene.picture.size[::-1]
            assert 0 <= share.min() <= 0.5 < share.max() <= 1
            assert 0 <= label <= NONE
