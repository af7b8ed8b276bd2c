import math

import numpy as np
import pytest

from trainer.augment import CONTROLS, WarpLimits, warp
from trainer.random import philox, symmetric


def some_images(count):
    return np.random.default_rng(0).integers(0, 256, (count, 28, 28)).astype(np.uint8)


@pytest.mark.parametrize("elastic", [0, 2])
def test_a_part_of_a_batch_is_warped_as_in_the_whole(elastic):
    images, limits = some_images(12), WarpLimits(12, 0.1, 8, 2, elastic)
    whole = warp(images, limits, 1, 5)
    np.testing.assert_array_equal(warp(images[7:], limits, 1, 5, first_row=7), whole[7:])


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
    """Weights of the seven control points: the cubic B-spline at each distance, in intervals."""
    distance = np.abs(pixel / 7 - np.arange(-1, CONTROLS - 1))
    near, far = 4 - 6 * distance**2 + 3 * distance**3, (2 - distance) ** 3
    return np.where(distance < 1, near, np.where(distance < 2, far, 0)) / 6


@pytest.mark.parametrize("limits", [WarpLimits(30, 0.3, 20, 5), WarpLimits(12, 0.1, 8, 2, 4)])
def test_a_warp_follows_its_definition(limits):
    images = some_images(3)
    found = warp(images, limits, 1 << 40, 7, first_row=2)
    for row, image in enumerate(images):
        expected = warped_one_pixel_at_a_time(image, limits, 1 << 40, 7, row + 2)
        # Rounded to a whole number, and computed in float32 at places of up to 29.
        assert np.abs(found[row] - expected).max() <= 0.51
