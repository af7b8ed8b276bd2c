import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from service.pictures.shapes import common_areas, dilated, opened, shapes

MASKS = arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=12))


def flooded(mask):
    """Numbers of the shapes from 1, by flooding them one after another."""
    found = np.zeros(mask.shape, int)
    for start in zip(*np.nonzero(mask), strict=True):
        if found[start]:
            continue
        number, rest = found.max() + 1, [start]
        while rest:
            y, x = rest.pop()
            if found[y, x]:
                continue
            found[y, x] = number
            near = [(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
            rest += [
                (i, j)
                for i, j in near
                if 0 <= i < mask.shape[0] and 0 <= j < mask.shape[1] and mask[i, j]
            ]
    return found


@given(MASKS)
def test_shapes_are_those_of_a_flood(mask):
    expected = flooded(mask)
    found = shapes(mask)
    assert len(found) == expected.max()
    for one in range(len(found)):
        alone = expected == one + 1
        rows, columns = np.nonzero(alone)
        assert (found.only(one) == alone).all()
        assert found.area[one] == alone.sum()
        assert (found.top[one], found.bottom[one]) == (rows.min(), rows.max() + 1)
        assert (found.left[one], found.right[one]) == (columns.min(), columns.max() + 1)
        begins, ends = found.outline(one)
        box = alone[found.top[one] : found.bottom[one]]
        assert begins.tolist() == box.argmax(1).tolist()
        assert ends.tolist() == (box.shape[1] - box[:, ::-1].argmax(1)).tolist()
        sides = [box[0].sum(), box[-1].sum()]
        assert found.on_own_box()[one] <= min(sides) / found.width[one]


@given(MASKS, st.integers(1, 5))
def test_an_opening_keeps_what_a_square_can_cover(mask, size):
    expected = np.zeros_like(mask)
    for y in range(mask.shape[0] - size + 1):
        for x in range(mask.shape[1] - size + 1):
            if mask[y : y + size, x : x + size].all():
                expected[y : y + size, x : x + size] = True
    assert (opened(mask, size) == expected).all()


@given(MASKS, st.integers(0, 3))
def test_a_dilation_reaches_so_many_pixels(mask, reach):
    expected = np.zeros_like(mask)
    for y, x in zip(*np.nonzero(mask), strict=True):
        expected[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1] = True
    assert (dilated(mask, reach) == expected).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (3, 4)])
def test_the_frame_is_counted_once_for_each_pixel(size):
    height, width = size
    (found,) = shapes(np.ones(size, bool)).on_frame()
    if min(size) > 1:
        assert found == 2 * (height + width) - 4
    else:
        assert found >= max(size)


@given(MASKS)
def test_shapes_are_cut_out_within_their_box(mask):
    found = shapes(mask)
    for one in range(len(found)):
        top, bottom, left, right = found.boxes[one]
        own = found.only(one)[top:bottom, left:right]
        assert (found.cut(np.array([one]), top, bottom, left, right) == own).all()
    if len(found) > 1:
        both = found.only(0) | found.only(1)
        assert (found.cut(np.array([0, 1]), 0, mask.shape[0], 0, mask.shape[1]) == both).all()


def test_common_areas_are_those_of_each_two_boxes():
    boxes = np.array([[0, 10, 0, 10], [0, 10, 5, 15], [20, 30, 0, 10]])
    np.testing.assert_array_equal(common_areas(boxes), [[100, 50, 0], [50, 100, 0], [0, 0, 100]])
