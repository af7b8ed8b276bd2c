"""The gradient against float64 finite differences of the forward."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lenet import reference
from lenet.model import Pool
from trainer.ops_cpu.pooling import pool, pool_backward


def spread(random, shape):
    """Distinct values, far from each other and from zero against H: no kink within reach."""
    count = int(np.prod(shape))
    values = random.permutation(count) - count // 2 + 0.5
    return values.reshape(shape) * 0.1


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def pools(draw):
    size = draw(pairs(1, 4))
    padding = tuple(draw(st.integers(0, side // 2)) for side in size)
    kind = draw(st.sampled_from(["max", "average", "global_average"]))
    least = (max(1, side - 2 * p) for side, p in zip(size, padding, strict=True))
    image = tuple(low + draw(st.integers(0, 4)) for low in least)
    return Pool(kind, size, draw(pairs(1, 4)), padding), image


@settings(max_examples=100)
@given(case=pools(), c=st.integers(1, 3), n=st.integers(1, 3), seed=st.integers(0, 99))
def test_pooling_agrees_with_the_reference_and_with_differences(assert_slope, case, c, n, seed):
    window, image = case
    random = np.random.default_rng(seed)
    x = spread(random, (c, *image, n))
    y, saved = pool(x, window)
    expected = reference.pool(x.transpose(3, 0, 1, 2), window)
    np.testing.assert_allclose(y.transpose(3, 0, 1, 2), expected, rtol=1e-12, atol=1e-12)
    dy = random.standard_normal(y.shape)
    dx = pool_backward(dy, saved)
    assert_slope(dx, lambda: float((pool(x, window)[0] * dy).sum()), x)


def test_the_first_of_equal_maxima_gets_the_whole_gradient():
    x = np.zeros((1, 2, 2, 1))
    y, saved = pool(x, Pool("max"))
    dx = pool_backward(np.ones_like(y), saved)
    assert dx.ravel().tolist() == [1, 0, 0, 0]
