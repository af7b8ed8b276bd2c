import numpy as np
import pytest

from trainer.ops_cpu.batch_norm import batch_norm, batch_norm_backward


@pytest.mark.parametrize("shape", [(3, 4, 2, 5), (6, 7)])
def test_batch_norm_agrees_with_differences_on_images_and_on_units(shape, assert_slope):
    random = np.random.default_rng(1)
    x = random.standard_normal(shape) * 2 + 1
    gamma, beta = random.standard_normal((2, shape[0]))
    result = batch_norm(x, gamma, beta)
    flat = x.reshape(shape[0], -1)
    np.testing.assert_allclose(result.mean, flat.mean(axis=1))
    np.testing.assert_allclose(result.variance, flat.var(axis=1, ddof=1))
    dy = random.standard_normal(shape)
    dx, dgamma, dbeta = batch_norm_backward(dy, result.saved)

    def value():
        return float((batch_norm(x, gamma, beta).y * dy).sum())

    assert_slope(dx, value, x)
    assert_slope(dgamma, value, gamma)
    assert_slope(dbeta, value, beta)
