from __future__ import annotations

import numpy as np
import pytest

from lenet.cpu import CpuBackend
from lenet.model import ARCHITECTURES


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_answer_is_the_same_to_the_bit_when_its_batch_differs(random_weights, name):
    weights = random_weights(name)
    images = np.random.default_rng(7).integers(0, 256, (64, 28, 28), np.uint8)
    plan = CpuBackend().plan(weights, 64)
    together = plan.run(images).probabilities
    for rows in (1, 2, 3, 5, 8, 13, 31):
        for start in (0, 17, 64 - rows):
            part = slice(start, start + rows)
            np.testing.assert_array_equal(plan.run(images[part]).probabilities, together[part])
    mixed = np.random.default_rng(8).permutation(64)
    np.testing.assert_array_equal(plan.run(images[mixed]).probabilities, together[mixed])


def test_two_sessions_are_kept_and_no_third_when_weights_are_replaced(random_weights, tiny):
    first, second, third = (random_weights(tiny, seed) for seed in (1, 2, 3))
    backend = CpuBackend()
    backend.plan(first, 1)
    session = backend.session
    backend.plan(first, 2)
    assert backend.session is session
    backend.load(second)
    replaced = backend.session
    for _ in range(3):
        backend.load(first)
        assert backend.session is session
        backend.load(second)
        assert backend.session is replaced
    backend.load(third)
    backend.load(second)
    assert backend.session is replaced
    backend.load(first)
    assert backend.session is not session, "more than two sessions were kept"
