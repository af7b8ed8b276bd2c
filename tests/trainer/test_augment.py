import math

import numpy as np
import pytest

from trainer.augment import CONTROLS, Limits, spline_basis, warp
from trainer.random import philox, symmetric


def random():
    return np.random.default_rng(0)


def random_warp(images, limits):
    return warp(images, limits, 1, 0)


def blot(row, column, count=50):
    """One bright 3 by 3 blot."""
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, row - 1 : row + 2, column - 1 : column + 2] = 200
    return images


def centres(images):
    """Centre of mass of each image: rows and columns."""
    total = images.sum(axis=(1, 2), dtype=float)
    place = np.arange(images.shape[1])
    return np.stack(
        [(images.sum(axis=axis, dtype=float) * place).sum(axis=1) / total for axis in (2, 1)]
    )


def test_nothing_changes_when_every_limit_is_zero():
    images = random().integers(0, 256, (5, 28, 28)).astype(np.uint8)
    np.testing.assert_array_equal(random_warp(images, Limits()), images)


def test_the_same_seed_and_step_give_the_same_images_and_others_give_others():
    images, limits = blot(8, 8), Limits(12, 0.1, 8, 2, 1)
    first, second = (warp(images, limits, 1, 5) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (first[0] != first[1]).any()
    for seed, step in ((2, 5), (1, 6)):
        assert (warp(images, limits, seed, step)[0] != first[0]).any()


@pytest.mark.parametrize("elastic", [0, 2])
def test_a_part_of_a_batch_is_warped_as_in_the_whole(elastic):
    images, limits = blot(8, 8, 12), Limits(12, 0.1, 8, 2, elastic)
    whole = warp(images, limits, 1, 5)
    np.testing.assert_array_equal(warp(images[7:], limits, 1, 5, first_row=7), whole[7:])


def test_a_shift_moves_the_ink_within_its_limit_and_keeps_its_amount():
    moved = random_warp(blot(14, 14), Limits(shift=2))
    offsets = centres(moved) - 14
    assert np.abs(offsets).max() <= 2.01
    assert np.abs(offsets).max() > 1.5
    np.testing.assert_allclose(moved.sum(axis=(1, 2)), 9 * 200, rtol=0.01)


def test_a_rotation_keeps_the_distance_from_the_centre():
    turned = centres(random_warp(blot(4, 14), Limits(rotation=15))) - 13.5
    radius = np.hypot(*turned)
    np.testing.assert_allclose(radius, np.hypot(9.5, 0.5), atol=0.15)
    angles = np.degrees(np.arctan2(turned[1], -turned[0]))
    assert np.abs(angles - np.degrees(np.arctan2(0.5, 9.5))).max() <= 15.5
    assert np.ptp(angles) > 20


def test_scaling_moves_ink_along_its_axis_by_up_to_its_share():
    scaled = centres(random_warp(blot(4, 14), Limits(scale=0.1))) - 13.5
    shares = scaled[0] / -9.5
    assert 0.88 < shares.min() < 0.95
    assert 1.05 < shares.max() < 1.12


def test_a_shear_moves_rows_and_leaves_the_height():
    sheared = centres(random_warp(blot(4, 14), Limits(shear=10))) - 13.5
    np.testing.assert_allclose(sheared[0], -9.5, atol=0.05)
    assert np.ptp(sheared[1]) > 1


def test_the_centre_stays_where_it_is_when_nothing_is_shifted():
    images = np.zeros((20, 28, 28), np.uint8)
    images[:, 12:16, 12:16] = 200
    np.testing.assert_allclose(centres(random_warp(images, Limits(20, 0.2, 20))), 13.5, atol=0.05)


@pytest.mark.parametrize("value", [0, 255])
def test_ink_that_leaves_the_image_is_replaced_by_paper(value):
    images = np.full((20, 28, 28), value, np.uint8)
    moved = random_warp(images, Limits(45, 0.5, 45, 14))
    assert moved.max() == value
    assert moved.min() == 0
    assert moved.dtype == np.uint8
    assert moved.shape == images.shape


def warped_one_pixel_at_a_time(image, limits, seed, step, row):
    """The definition of a warp in float64."""
    count = 6 + (2 * CONTROLS**2 if limits.elastic else 0)
    u = [
        float(number)
        for q in range(-(-count // 4))
        for number in symmetric(philox(seed, row, step, 1, q))
    ]
    angle, shear = math.radians(limits.rotation) * u[0], math.radians(limits.shear) * u[1]
    wide, high = 1 / (1 + limits.scale * u[2]), 1 / (1 + limits.scale * u[3])
    turn = [
        [math.cos(angle) * high, -math.sin(angle) * wide],
        [math.sin(angle) * high, math.cos(angle) * wide],
    ]
    back = np.array([[a + math.tan(shear) * b, b] for a, b in turn])
    controls = np.array(u[6:count]).reshape(-1, CONTROLS, CONTROLS)
    result = np.zeros((28, 28))
    for i, j in np.ndindex(28, 28):
        place = 13.5 + back @ (np.array([i, j]) - 13.5) + limits.shift * np.array(u[4:6])
        if limits.elastic:
            place += limits.elastic * (weights(i) @ controls @ weights(j))
        (y, x), (fy, fx) = np.floor(place).astype(int), place % 1
        for dy, dx in np.ndindex(2, 2):
            if 0 <= y + dy < 28 and 0 <= x + dx < 28:
                share = (fy if dy else 1 - fy) * (fx if dx else 1 - fx)
                result[i, j] += share * image[y + dy, x + dx]
    return result


def weights(pixel):
    """Of the seven control points: the cubic B-spline at the distance of each, in intervals."""
    distance = np.abs(pixel / 7 - np.arange(-1, CONTROLS - 1))
    near, far = 4 - 6 * distance**2 + 3 * distance**3, (2 - distance) ** 3
    return np.where(distance < 1, near, np.where(distance < 2, far, 0)) / 6


@pytest.mark.parametrize("limits", [Limits(30, 0.3, 20, 5), Limits(12, 0.1, 8, 2, 4)])
def test_a_warp_follows_its_definition(limits):
    images = random().integers(0, 256, (3, 28, 28)).astype(np.uint8)
    found = warp(images, limits, 1 << 40, 7, first_row=2)
    for row, image in enumerate(images):
        expected = warped_one_pixel_at_a_time(image, limits, 1 << 40, 7, row + 2)
        # Rounded to a whole number, and computed in float32 at places of up to 29.
        assert np.abs(found[row] - expected).max() <= 0.51


def test_a_bend_moves_ink_by_no_more_than_its_limit_and_here_otherwise_than_there():
    images = np.zeros((40, 28, 28), np.uint8)
    images[:, 5:8, 5:8] = images[:, 20:23, 20:23] = 200
    moved = random_warp(images, Limits(elastic=3))
    first = centres(moved[:, :14, :14]) - 6
    second = centres(moved[:, 14:, 14:]) - 7
    for offsets in (first, second):
        assert np.abs(offsets).max() <= 3
        assert np.abs(offsets).max() > 0.7
    assert np.abs(first - second).max() > 1


def test_the_weights_of_a_spline_are_one_in_all_and_its_control_points_lie_evenly():
    basis = spline_basis(28)
    assert basis.shape == (28, CONTROLS)
    np.testing.assert_allclose(basis.sum(axis=1), 1, rtol=1e-6)
    # A spline whose control points lie on a line is that line: no bend anywhere.
    np.testing.assert_allclose(basis @ np.arange(CONTROLS), np.arange(28) / 7 + 1, rtol=1e-6)
