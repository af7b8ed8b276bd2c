"""Warnings of arrays, on MNIST's test images."""

from __future__ import annotations

import numpy as np
import pytest

from service.forms.array_doubts import array_doubts


def shares(images, count):
    """The share of batches of `count` images that have each doubt."""
    batches = images.reshape(-1)[: len(images) // count * count * 784].reshape(-1, count * 784)
    found = [doubt for batch in batches for _, doubt in array_doubts(batch.tobytes(), count)]
    return {doubt: found.count(doubt) / len(batches) for doubt in set(found)}


@pytest.mark.parametrize("count", [1, 4, 16, 32, 100])
def test_digits_are_never_doubtful(mnist, count):
    images, labels = mnist
    assert not shares(images, count)
    assert not shares(images[np.argsort(labels, kind="stable")], count)


@pytest.mark.parametrize("count", [1, 32])
def test_inverted_digits_are_doubtful(mnist, count):
    assert shares(255 - mnist[0], count) == {"looks_inverted": 1}


@pytest.mark.parametrize("blank", [0, 255])
def test_a_white_image_is_doubtful_and_a_black_one_is_not(blank):
    found = array_doubts(bytes([blank] * 784), 1)
    assert found == (((0, "looks_inverted"),) if blank else ())


FLOATS = {
    "0 to 1": lambda images: (images / 255).astype("<f4"),
    "0 to 255": lambda images: images.astype("<f4"),
    "normalised": lambda images: ((images / 255 - 0.1307) / 0.3081).astype("<f4"),
}


@pytest.mark.parametrize("name", FLOATS)
def test_images_of_float32_are_doubtful(mnist, name):
    wide = FLOATS[name](mnist[0]).view(np.uint8).reshape(-1, 28, 28)
    for count in (4, 32):
        assert shares(wide, count).get("looks_wider", 0) >= 0.99


def test_most_batches_of_transposed_digits_are_doubtful(mnist):
    transposed = np.ascontiguousarray(mnist[0].transpose(0, 2, 1))
    assert shares(transposed, 32).get("looks_transposed", 0) >= 0.6
    assert shares(transposed, 1) == {}
