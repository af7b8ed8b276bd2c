from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lenet import reference
from lenet.model import IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool, window_count


def column(*values):
    """One channel, one column."""
    return np.array(values, np.float64).reshape(1, 1, -1, 1)


def pair(least, most):
    return st.tuples(st.integers(least, most), st.integers(least, most))


def test_a_convolution_is_a_cross_correlation_when_computed_by_hand():
    x = np.arange(9, dtype=np.float64).reshape(1, 1, 3, 3)
    weight = np.array([[[[1.0, 10.0], [100.0, 1000.0]]]])
    block = ConvBlock(1, (2, 2))
    expected = [[[[0 + 10 + 300 + 4000, 1 + 20 + 400 + 5000], [7643, 8754]]]]
    for convolve in (reference.convolve_directly, reference.convolve):
        np.testing.assert_array_equal(convolve(x, weight, block), expected)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(*[st.integers(1, 3)] * 3),
    pair(1, 9),
    pair(1, 4),
    pair(1, 3),
    pair(0, 3),
    pair(1, 3),
)
def test_the_fast_convolution_equals_the_definition_when_the_geometry_is_drawn(
    seed, nck, size, kernel, stride, padding, dilation
):
    axes = zip(size, kernel, stride, padding, dilation, strict=True)
    expected_size = tuple(window_count(*axis) for axis in axes)
    assume(min(expected_size) >= 1)
    n, c, k = nck
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, c, *size))
    weight = generator.standard_normal((k, c, *kernel))
    block = ConvBlock(k, kernel, stride, padding, dilation)
    direct = reference.convolve_directly(x, weight, block)
    assert direct.shape == (n, k, *expected_size)
    np.testing.assert_allclose(reference.convolve(x, weight, block), direct, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (Activation("identity"), lambda x: x),
        (Activation("relu"), lambda x: max(x, 0.0)),
        (Activation("clipped_relu", 1.5), lambda x: min(max(x, 0.0), 1.5)),
        (Activation("elu", 0.5), lambda x: x if x > 0 else 0.5 * (math.exp(x) - 1)),
        (Activation("sigmoid"), lambda x: 1 / (1 + math.exp(-x))),
        (Activation("tanh"), math.tanh),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_an_activation_is_its_formula_when_applied(activation, function):
    x = np.array([-30.0, -2.0, -0.5, 0.0, 0.25, 1.0, 1.75, 30.0])
    expected = [function(float(value)) for value in x]
    np.testing.assert_allclose(reference.activate(x, activation), expected, rtol=1e-14, atol=1e-16)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["max", "average"]),
    pair(1, 3),
    pair(1, 3),
    st.data(),
)
def test_pooling_is_its_definition_when_the_geometry_is_drawn(seed, kind, size, stride, data):
    padding = tuple(data.draw(st.integers(0, side // 2)) for side in size)
    x = np.random.default_rng(seed).standard_normal((1, 2, 5, 6))
    pooled = reference.pool(x, Pool(kind, size, stride, padding))
    for place in np.ndindex(pooled.shape):
        n, k, row, column = place
        top, left = row * stride[0] - padding[0], column * stride[1] - padding[1]
        inside = [
            x[n, k, i, j]
            for i in range(top, top + size[0])
            for j in range(left, left + size[1])
            if 0 <= i < 5 and 0 <= j < 6
        ]
        expected = max(inside) if kind == "max" else math.fsum(inside) / (size[0] * size[1])
        assert pooled[place] == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_logits_are_what_one_computes_by_hand_when_the_network_is_small():
    model = Model(
        "m",
        (
            ConvBlock(1, (28, 1), pool=Pool("max", (1, 28), (1, 28))),
            DenseBlock(2, activation=IDENTITY),
        ),
    )
    tensors = {
        "conv1.weight": np.full((1, 1, 28, 1), 2.0),
        "conv1.bias": np.array([-1.0]),
        "dense1.weight": np.array([[3.0], [-1.0]]),
        "dense1.bias": np.array([0.5, 0.0]),
    }
    images = np.zeros((2, 28, 28), np.uint8)
    images[0, :, 4] = 51  # a column of fifths: 2 * 28 / 5 - 1 = 10.2
    np.testing.assert_allclose(
        reference.logits(model, tensors, images), [[31.1, -10.2], [0.5, 0.0]], rtol=1e-13
    )
