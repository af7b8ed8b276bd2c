from __future__ import annotations

import numpy as np
import pytest

from service.pictures.candidates import candidates, drawing


def picture(paper: int = 200, ink: int = 40) -> np.ndarray:
    """A stroke with a part beside it, and a small speck far away; 100 x 200."""
    image = np.full((100, 200), paper, np.uint8)
    image[20:70, 60:68] = ink
    image[20:28, 74:100] = ink
    image[90:92, 190:192] = ink
    return image


def boxes(found):
    """Rows and columns of the candidates' boxes, in pixels."""
    return {tuple(round(edge * 200) for edge in one.box) for one in found}


@pytest.mark.parametrize(("paper", "ink"), [(200, 40), (40, 200), (120, 150)])
def test_each_shape_is_a_candidate_alone_and_with_the_part_near_it(paper, ink):
    found = boxes(candidates(picture(paper, ink), "auto"))
    assert {(20, 70, 60, 68), (20, 28, 74, 100), (20, 70, 60, 100)} <= found
    assert not any(right > 150 for *_, right in found)  # the speck


def test_a_candidate_is_its_own_ink_alone():
    image = picture()
    image[40:60, 72:75] = 40  # within the box of the stroke and its part
    for one in candidates(image, "true"):
        if one.box == (20 / 200, 70 / 200, 60 / 200, 68 / 200):
            assert np.count_nonzero(one.ink > one.ink.max() / 2) == 50 * 8


def test_a_small_picture_is_enlarged_to_be_searched():
    small = picture()[::4, ::4]
    assert {(20, 72, 60, 68)} <= boxes(candidates(small, "auto"))


def test_only_ink_of_the_sign_that_was_asked_for_is_looked_at():
    assert (20, 70, 60, 68) in boxes(candidates(picture(), "true"))
    assert (20, 70, 60, 68) not in boxes(candidates(picture(), "false"))


@pytest.mark.parametrize("shadow", [0.4, 0.7])
def test_ink_is_whole_across_the_edge_of_a_shadow(shadow):
    image = picture()
    image[45:] = image[45:] * shadow
    found = candidates(image, "auto")
    assert (20, 70, 60, 68) in boxes(found)
    strokes = [one.ink for one in found if boxes([one]) == {(20, 70, 60, 68)}]
    # In a layer of the paper around it as strong in the shadow as in the light.
    assert min(abs(one[10:20].max() / one[30:40].max() - 1) for one in strokes) < 0.05


def test_what_is_large_and_seen_by_many_layers_comes_first():
    image = np.full((256, 256), 200, np.uint8)
    image[40:100, 40:46] = 40
    image[150:230, 40:46] = 150  # longer, but faint
    found = candidates(image, "auto")
    assert tuple(round(edge * 256) for edge in found[0].box) == (40, 100, 40, 46)
    assert found[0].votes > max(one.votes for one in found if one.box[0] > 0.5)


def test_what_stands_beside_a_mark_and_is_as_tall_is_another_one():
    image = np.full((100, 200), 200, np.uint8)
    image[20:70, 60:68] = 40
    image[20:70, 76:84] = 40
    found = boxes(candidates(image, "true"))
    assert {(20, 70, 60, 68), (20, 70, 76, 84)} <= found
    assert (20, 70, 60, 84) not in found


@pytest.mark.parametrize(("paper", "ink"), [(200, 40), (40, 200), (120, 150)])
def test_a_drawing_is_all_ink_on_even_paper(paper, ink):
    image = picture(paper, ink)
    one = drawing(image, "auto")
    np.testing.assert_array_equal(one.ink > 0, image[20:92, 60:192] == ink)
    np.testing.assert_allclose(one.box, np.array([20, 92, 60, 192]) / 200)
    image[:, :60] = 255 - paper
    assert drawing(image, "auto") is None  # a sheet on a table
    assert drawing(np.full((64, 64), paper, np.uint8), "auto") is None


@pytest.mark.parametrize("level", [0, 7, 255])
@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (64, 64)])
def test_an_empty_picture_has_no_candidates(level, shape):
    assert candidates(np.full(shape, level, np.uint8), "auto") == []


def test_the_number_of_candidates_is_bounded():
    random = np.random.default_rng(1)
    for cell in (1, 2, 4, 8):
        noise = np.kron(random.integers(0, 256, (256 // cell, 256 // cell)), np.ones((cell, cell)))
        assert len(candidates(noise.astype(np.uint8), "auto")) <= 36
