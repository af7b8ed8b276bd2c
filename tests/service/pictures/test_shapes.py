import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from service.pictures.shapes import common_areas, grown, opened, shapes

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
        top, bottom, left, right = found.boxes[one]
        assert (top, bottom) == (rows.min(), rows.max() + 1)
        assert (left, right) == (columns.min(), columns.max() + 1)
        assert found.area[one] == alone.sum()
        own = found.mask(np.array([one]), top, bottom, left, right)
        assert (own == alone[top:bottom, left:right]).all()
    if len(found) > 1:
        both = (expected == 1) | (expected == 2)
        assert (found.mask(np.array([0, 1]), 0, mask.shape[0], 0, mask.shape[1]) == both).all()


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
    expected = np.pad(np.zeros_like(mask), reach)
    for y, x in zip(*np.nonzero(mask), strict=True):
        expected[y : y + 2 * reach + 1, x : x + 2 * reach + 1] = True
    np.testing.assert_array_equal(grown(mask, reach), expected)


def test_common_areas_are_those_of_each_two_boxes():
    boxes = np.array([[0, 10, 0, 10], [0, 10, 5, 15], [20, 30, 0, 10]])
    np.testing.assert_array_equal(common_areas(boxes), [[100, 50, 0], [50, 100, 0], [0, 0, 100]])
