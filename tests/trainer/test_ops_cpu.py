"""Every backward against float64 finite differences of its forward."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenet import reference
from lenet.blocks import ConvBlock, Pool
from trainer.ops_cpu import CpuOps

OPS = CpuOps()
# The error of a central difference in float64 is about h^2 + 1e-16 / h, so 1e-9 at this h.
H = 1e-5
TOLERANCE = 1e-6


def numeric(function, x):
    """The gradient of a scalar function at x by central differences."""
    gradient = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        kept = x[place]
        x[place] = kept + H
        above = function()
        x[place] = kept - H
        below = function()
        x[place] = kept
        gradient[place] = (above - below) / (2 * H)
    return gradient


def assert_agree(computed, function, x):
    expected = numeric(function, x)
    scale = np.abs(expected).max()
    assert np.abs(computed - expected).max() <= TOLERANCE * max(scale, 1e-3)


def spread(random, shape):
    """Distinct values, far from each other and from zero against H: no kink within reach."""
    count = int(np.prod(shape))
    values = random.permutation(count) - count // 2 + 0.5
    return values.reshape(shape) * 0.1


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def convolutions(draw):
    kernel, dilation, padding = draw(pairs(1, 4)), draw(pairs(1, 3)), draw(pairs(0, 3))
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    size = tuple(low + draw(st.integers(0, 3)) for low in least)
    block = ConvBlock(
        draw(st.integers(1, 5)),
        kernel,
        stride=draw(pairs(1, 3)),
        padding=padding,
        dilation=dilation,
    )
    return block, draw(st.integers(1, 3)), size, draw(st.integers(1, 3)), draw(st.integers(0, 99))


@settings(max_examples=60)
@given(convolutions(), st.booleans())
def test_convolution_agrees_with_its_definition_and_with_differences(case, with_bias):
    block, c, size, n, seed = case
    random = np.random.default_rng(seed)
    x = random.standard_normal((c, *size, n))
    weight = random.standard_normal((block.channels, c, *block.kernel))
    bias = random.standard_normal(block.channels) if with_bias else None
    y, saved = OPS.convolution(x, weight, bias, block)
    direct = reference.convolve_directly(x.transpose(3, 0, 1, 2), weight, block)
    if with_bias:
        direct += bias[:, None, None]
    np.testing.assert_allclose(y.transpose(3, 0, 1, 2), direct, rtol=1e-12, atol=1e-12)

    dy = random.standard_normal(y.shape)
    dx, dweight, dbias = OPS.convolution_backward(dy, saved, True)

    def value():
        return float((OPS.convolution(x, weight, bias, block)[0] * dy).sum())

    assert_agree(dx, value, x)
    assert_agree(dweight, value, weight)
    if with_bias:
        assert_agree(dbias, value, bias)


def test_no_gradient_is_made_for_the_input_when_none_is_asked_for():
    random = np.random.default_rng(0)
    y, saved = OPS.convolution(
        random.standard_normal((1, 5, 5, 2)),
        random.standard_normal((2, 1, 3, 3)),
        None,
        ConvBlock(2, (3, 3)),
    )
    assert OPS.convolution_backward(y, saved, False)[0] is None
    y, saved = OPS.dense(random.standard_normal((4, 2)), random.standard_normal((3, 4)), None)
    assert OPS.dense_backward(y, saved, False)[0] is None


@pytest.mark.parametrize("shape", [(3, 4, 2, 5), (6, 7)])
def test_batch_norm_agrees_with_differences_on_images_and_on_units(shape):
    random = np.random.default_rng(1)
    x = random.standard_normal(shape) * 2 + 1
    gamma, beta = random.standard_normal((2, shape[0]))
    result = OPS.batch_norm(x, gamma, beta, 1e-5)
    flat = x.reshape(shape[0], -1)
    np.testing.assert_allclose(result.mean, flat.mean(axis=1))
    np.testing.assert_allclose(result.variance, flat.var(axis=1, ddof=1))
    dy = random.standard_normal(shape)
    dx, dgamma, dbeta = OPS.batch_norm_backward(dy, result.saved)

    def value():
        return float((OPS.batch_norm(x, gamma, beta, 1e-5).y * dy).sum())

    assert_agree(dx, value, x)
    assert_agree(dgamma, value, gamma)
    assert_agree(dbeta, value, beta)


def test_affine_scales_and_shifts_each_channel():
    x = np.ones((2, 3, 1, 2))
    y = OPS.affine(x, np.array([2.0, 3.0]), np.array([0.0, 1.0]))
    assert (y[0] == 2).all()
    assert (y[1] == 4).all()


@st.composite
def pools(draw):
    size = draw(pairs(1, 4))
    padding = tuple(draw(st.integers(0, side // 2)) for side in size)
    kind = draw(st.sampled_from(["max", "average", "global_average"]))
    least = (max(1, side - 2 * p) for side, p in zip(size, padding, strict=True))
    image = tuple(low + draw(st.integers(0, 4)) for low in least)
    return Pool(kind, size, draw(pairs(1, 4)), padding), image


@settings(max_examples=100)
@given(pools(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_pooling_agrees_with_the_reference_and_with_differences(case, c, n, seed):
    window, image = case
    random = np.random.default_rng(seed)
    x = spread(random, (c, *image, n))
    y, saved = OPS.pool(x, window)
    expected = reference.pool(x.transpose(3, 0, 1, 2), window)
    np.testing.assert_allclose(y.transpose(3, 0, 1, 2), expected, rtol=1e-12, atol=1e-12)
    dy = random.standard_normal(y.shape)
    dx = OPS.pool_backward(dy, saved)
    assert_agree(dx, lambda: float((OPS.pool(x, window)[0] * dy).sum()), x)


def test_the_first_of_equal_maxima_gets_the_whole_gradient():
    x = np.zeros((1, 2, 2, 1))
    y, saved = OPS.pool(x, Pool("max"))
    dx = OPS.pool_backward(np.ones_like(y), saved)
    assert dx.ravel().tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("shape", [(2, 3, 2, 4), (12, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_dense_agrees_with_differences_on_images_and_on_units(shape, with_bias):
    random = np.random.default_rng(3)
    x, weight = random.standard_normal(shape), random.standard_normal((5, 12))
    bias = random.standard_normal(5) if with_bias else None
    y, saved = OPS.dense(x, weight, bias)
    dy = random.standard_normal(y.shape)
    dx, dweight, dbias = OPS.dense_backward(dy, saved, True)

    def value():
        return float((OPS.dense(x, weight, bias)[0] * dy).sum())

    assert_agree(dx, value, x)
    assert_agree(dweight, value, weight)
    if with_bias:
        assert_agree(dbias, value, bias)


def test_dropout_agrees_with_differences_and_keeps_the_expected_sum():
    x = np.random.default_rng(4).standard_normal((6, 5))
    dy = np.random.default_rng(5).standard_normal((6, 5))
    _, saved = OPS.dropout(x, 0.3, np.random.default_rng(6))
    dx = OPS.dropout_backward(dy, saved)
    assert_agree(
        dx, lambda: float((OPS.dropout(x, 0.3, np.random.default_rng(6))[0] * dy).sum()), x
    )
    y, factors = OPS.dropout(np.ones((400, 400)), 0.3, np.random.default_rng(7))
    assert np.unique(factors).tolist() == [0, 1 / 0.7]
    assert y.mean() == pytest.approx(1, abs=0.01)


def test_softmax_cross_entropy_agrees_with_differences():
    random = np.random.default_rng(8)
    logits, labels = random.standard_normal((7, 5)), np.array([0, 6, 3, 3, 1], np.uint8)
    loss, saved = OPS.softmax_cross_entropy(logits, labels)
    probabilities = reference.softmax(logits.T)
    assert loss == pytest.approx(-np.log(probabilities[np.arange(5), labels]).mean())
    dlogits = OPS.softmax_cross_entropy_backward(saved)
    assert_agree(dlogits, lambda: OPS.softmax_cross_entropy(logits, labels)[0], logits)


def test_softmax_cross_entropy_is_finite_for_huge_logits():
    logits = np.array([[1e30], [-1e30]], np.float32)
    loss, saved = OPS.softmax_cross_entropy(logits, np.array([0], np.uint8))
    assert loss == 0
    assert np.isfinite(OPS.softmax_cross_entropy_backward(saved)).all()


@pytest.mark.parametrize("kind", ["max", "average", "global_average"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_result_has_the_dtype_of_its_input(dtype, kind):
    images = np.full((2, 4, 4), 255, np.uint8)
    x = OPS.enter(images, dtype)
    assert x.shape == (1, 4, 4, 2)
    assert x.max() == pytest.approx(1)
    block = ConvBlock(3, (3, 3), padding=(1, 1))
    weight, ones = np.ones((3, 1, 3, 3), dtype), np.ones(3, dtype)
    y, convolved = OPS.convolution(x, weight, ones, block)
    normal = OPS.batch_norm(y, ones, ones, 1e-5)
    dropped, kept = OPS.dropout(normal.y, 0.5, np.random.default_rng(0))
    pooled, pool = OPS.pool(dropped, Pool(kind))
    logits, dense = OPS.dense(pooled, np.ones((10, pooled[..., 0].size), dtype), np.ones(10, dtype))
    _, loss = OPS.softmax_cross_entropy(logits, np.array([1, 2], np.uint8))
    dlogits = OPS.softmax_cross_entropy_backward(loss)
    dpooled, *gradients = OPS.dense_backward(dlogits, dense, True)
    ddropped = OPS.dropout_backward(OPS.pool_backward(dpooled, pool), kept)
    dy, *more = OPS.batch_norm_backward(ddropped, normal.saved)
    found = [x, y, *normal[:3], dropped, pooled, logits, dlogits, dpooled, *gradients, *more]
    found += OPS.convolution_backward(dy, convolved, True)
    assert {array.dtype for array in found} == {np.dtype(dtype)}
    assert OPS.leave(logits).shape == (2, 10)
