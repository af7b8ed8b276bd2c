from __future__ import annotations

import numpy as np
import pytest

from service.pictures.candidates import candidates
from service.pictures.view import view_alone

BEYOND = 80
"""A level that what is beside a mark has where it differs as much from the paper as its ink."""


def the(found, *box):
    """The first candidate with this box, in pixels of a picture of 200."""
    return next(one for one in found if tuple(round(edge * 200) for edge in one.box) == box)


@pytest.mark.parametrize(("paper", "ink"), [(200, 40), (40, 200)])
def test_a_mark_is_bright_and_what_is_beside_it_is_faint(paper, ink):
    image = np.full((200, 200), paper, np.uint8)
    image[80:120, 90:98] = ink
    image[80:120, 108:112] = ink
    seen = the(candidates(image, "auto"), 80, 120, 90, 98).view.astype(int)
    # 40 rows take 16 of the 28 pixels: the mark takes columns 12.4 to 15.6, the other 19.6 to 21.2.
    assert seen[8:20, 13].min() > 200
    assert BEYOND - 25 < seen[8:20, 20].min() <= seen[8:20, 20].max() <= BEYOND + 20
    assert seen[:, :10].max() < 20
    assert seen[:, 17].max() < 20


def test_what_is_beyond_the_picture_is_beside_the_mark():
    image = np.full((200, 200), 200, np.uint8)
    image[2:42, 90:98] = 40
    seen = the(candidates(image, "auto"), 2, 42, 90, 98).view.astype(int)
    assert seen[0:4, 2:10].min() > BEYOND - 25
    assert seen[8:, 2:10].max() < 20


@pytest.mark.parametrize("scale", [1, 3, 10])
def test_a_drawing_is_seen_alike_at_any_size(scale):
    image = np.zeros((40, 40), np.float32)
    image[5:25, 10:14] = 1
    seen = view_alone(np.kron(image, np.ones((scale, scale), np.float32)) * 200).astype(int)
    assert np.count_nonzero(seen.max(1) > 120) == 16
    assert np.count_nonzero(seen.max(0) > 60) in (3, 4)
    assert seen.max() >= 200
