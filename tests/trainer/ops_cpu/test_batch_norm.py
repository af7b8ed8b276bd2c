import numpy as np
import pytest

from trainer.ops_cpu.batch_norm import affine, batch_norm, batch_norm_backward


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


def test_affine_scales_and_shifts_each_channel():
    x = np.ones((2, 3, 1, 2))
    y = affine(x, np.array([2.0, 3.0]), np.array([0.0, 1.0]))
    assert (y[0] == 2).all()
    assert (y[1] == 4).all()


def test_batch_norm_of_a_single_value_has_a_finite_variance():
    assert np.isfinite(batch_norm(np.ones((2, 1)), np.ones(2), np.zeros(2)).variance).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_result_has_the_dtype_of_its_input(dtype):
    x, ones = np.random.default_rng(0).standard_normal((3, 8)).astype(dtype), np.ones(3, dtype)
    y, mean, variance, saved = batch_norm(x, ones, ones)
    found = [y, mean, variance, affine(x, ones, ones), *batch_norm_backward(y, saved)]
    assert {array.dtype for array in found} == {np.dtype(dtype)}
