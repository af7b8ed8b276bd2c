"""When memory for pixels is free, and what lies in it."""

from __future__ import annotations

import numpy as np

from lenet.staging import Staging


def test_a_buffer_is_taken_again_when_nothing_refers_to_it():
    staging = Staging(np.zeros(100, np.uint8) for _ in range(2))
    first, second = staging.take(100), staging.take(50)
    assert (len(first), len(second)) == (100, 50)
    assert staging.take(1) is None
    first[:] = bytes(range(100))
    images = np.ndarray((2, 5, 2), np.uint8, second[10:30])
    del second
    part = images[1:]
    del images
    assert staging.take(1) is None
    part[...] = 7
    assert bytes(first) == bytes(range(100))
    del part
    assert staging.take(101) is None
    third = staging.take(100)
    assert bytes(third[20:30]) == bytes([7] * 10)
    assert staging.take(1) is None


def test_only_images_in_its_buffers_are_held():
    staging = Staging([np.zeros(100, np.uint8)])
    view = staging.take(100)
    images = np.ndarray((1, 7, 7), np.uint8, view[2:])
    assert staging.holds(images)
    assert not staging.holds(~images)
    assert not staging.holds(np.frombuffer(bytes(50), np.uint8))
