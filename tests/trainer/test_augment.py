import numpy as np
import pytest

from trainer.augment import Limits, random_affine


def random():
    return np.random.default_rng(0)


def blot(row, column, count=50):
    """One bright 3 by 3 blot."""
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, row - 1 : row + 2, column - 1 : column + 2] = 200
    return images


def centres(images):
    """Centre of mass of each image: rows and columns."""
    total = images.sum(axis=(1, 2), dtype=float)
    place = np.arange(28)
    return np.stack(
        [(images.sum(axis=axis, dtype=float) * place).sum(axis=1) / total for axis in (2, 1)]
    )


def test_nothing_changes_when_every_limit_is_zero():
    images = random().integers(0, 256, (5, 28, 28)).astype(np.uint8)
    np.testing.assert_array_equal(random_affine(images, Limits(), random()), images)


def test_the_same_generator_state_gives_the_same_images():
    images, limits = blot(8, 8), Limits(12, 0.1, 8, 2)
    first, second = (random_affine(images, limits, random()) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (first[0] != first[1]).any()


def test_a_shift_moves_the_ink_within_its_limit_and_keeps_its_amount():
    moved = random_affine(blot(14, 14), Limits(shift=2), random())
    offsets = centres(moved) - 14
    assert np.abs(offsets).max() <= 2.01
    assert np.abs(offsets).max() > 1.5
    np.testing.assert_allclose(moved.sum(axis=(1, 2)), 9 * 200, rtol=0.01)


def test_a_rotation_keeps_the_distance_from_the_centre():
    turned = centres(random_affine(blot(4, 14), Limits(rotation=15), random())) - 13.5
    radius = np.hypot(*turned)
    np.testing.assert_allclose(radius, np.hypot(9.5, 0.5), atol=0.15)
    angles = np.degrees(np.arctan2(turned[1], -turned[0]))
    assert np.abs(angles - np.degrees(np.arctan2(0.5, 9.5))).max() <= 15.5
    assert np.ptp(angles) > 20


def test_scaling_moves_ink_along_its_axis_by_up_to_its_share():
    scaled = centres(random_affine(blot(4, 14), Limits(scale=0.1), random())) - 13.5
    shares = scaled[0] / -9.5
    assert 0.88 < shares.min() < 0.95
    assert 1.05 < shares.max() < 1.12


def test_a_shear_moves_rows_and_leaves_the_height():
    sheared = centres(random_affine(blot(4, 14), Limits(shear=10), random())) - 13.5
    np.testing.assert_allclose(sheared[0], -9.5, atol=0.05)
    assert np.ptp(sheared[1]) > 1


def test_the_centre_stays_where_it_is_when_nothing_is_shifted():
    images = np.zeros((20, 28, 28), np.uint8)
    images[:, 12:16, 12:16] = 200
    np.testing.assert_allclose(
        centres(random_affine(images, Limits(20, 0.2, 20), random())), 13.5, atol=0.05
    )


@pytest.mark.parametrize("value", [0, 255])
def test_ink_that_leaves_the_image_is_replaced_by_paper(value):
    images = np.full((20, 28, 28), value, np.uint8)
    moved = random_affine(images, Limits(45, 0.5, 45, 14), random())
    assert moved.max() == value
    assert moved.min() == 0
    assert moved.dtype == np.uint8
    assert moved.shape == images.shape
