from __future__ import annotations

import numpy as np

from trainer.marks import NONE
from trainer.scenes import drawn


def test_a_scene_is_a_picture_with_marks_of_its_size(rings_and_bars):
    for number in range(30):
        scene = drawn(rings_and_bars, np.random.default_rng(number))
        assert 24 <= min(scene.picture.size) <= max(scene.picture.size) <= 256
        for share, label in scene.marks:
            assert share.shape == scene.picture.size[::-1]
            assert 0 <= share.min() <= 0.5 < share.max() <= 1
            assert 0 <= label <= NONE
