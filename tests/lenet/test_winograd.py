from __future__ import annotations

import numpy as np
import pytest

from lenet import winograd


@pytest.mark.parametrize("m", [1, 2, 4, 8])
@pytest.mark.parametrize("r", [1, 3, 4, 5])
def test_the_outputs_are_those_of_the_filter(m, r):
    random = np.random.default_rng(10 * m + r)
    inputs, taps = random.normal(size=m + r - 1), random.normal(size=r)
    a_t, g, b_t = winograd.matrices(m, r)
    found = a_t @ ((g @ taps) * (b_t @ inputs))
    np.testing.assert_allclose(found, np.correlate(inputs, taps, "valid"), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("m", "limit"), [(4, 1e-6), (8, 1e-5)])
def test_rounding_to_float32_costs_few_digits(m, limit):
    random = np.random.default_rng(0)
    inputs, taps = random.normal(size=(1000, m + 4)), random.normal(size=(1000, 5))
    a_t, g, b_t = (matrix.astype(np.float32) for matrix in winograd.matrices(m, 5))
    found = ((taps.astype(np.float32) @ g.T) * (inputs.astype(np.float32) @ b_t.T)) @ a_t.T
    windows = np.lib.stride_tricks.sliding_window_view(inputs, 5, axis=1)
    expected = np.einsum("nmr,nr->nm", windows, taps)
    assert np.linalg.norm(found - expected) < limit * np.linalg.norm(expected)
