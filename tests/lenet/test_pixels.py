from __future__ import annotations

from lenet import pixels


def test_an_image_is_what_mnist_says_when_its_pixels_are_counted():
    assert (pixels.HEIGHT, pixels.WIDTH, pixels.PIXELS) == (28, 28, 784)
    assert 255 * pixels.SCALE == 1.0
