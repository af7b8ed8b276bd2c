"""Every slope against float64 finite differences, and against itself where float32 ends."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenet import reference
from lenet.model import RELU, Activation, ActivationKind
from trainer.ops_cpu.activations import activate, activate_backward

ALL = [Activation(kind) for kind in get_args(ActivationKind)]
H = 1e-5


def slope(x, activation):
    return activate_backward(np.ones_like(x), activate(x, activation)[1])


@given(
    st.sampled_from([activation.kind for activation in ALL]),
    st.sampled_from([0.3, 1.0, 6.0]),
    st.integers(0, 99),
)
def test_every_activation_agrees_with_the_reference_and_with_differences(kind, parameter, seed):
    activation = Activation(kind, parameter)
    random = np.random.default_rng(seed)
    # From -9.95 to 9.95 in steps of 0.1: no kink, at 0 or at the parameter, is within reach of H.
    x = (random.permutation(200) - 99.5).reshape(5, 4, 5, 2) * 0.1
    y, saved = activate(x, activation)
    np.testing.assert_array_equal(y, reference.activate(x, activation))
    dy = random.standard_normal(x.shape)
    expected = (reference.activate(x + H, activation) - reference.activate(x - H, activation)) * (
        dy / (2 * H)
    )
    difference = np.abs(activate_backward(dy, saved) - expected).max()
    assert difference <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("activation", ALL, ids=lambda activation: activation.kind)
def test_float32_is_right_to_its_last_digits_however_large_the_input(activation):
    largest = np.finfo(np.float32).max
    x = np.array([0.001, 0.1, 1, 8, 20, 44, 80, 200, 1e4, 1e30, largest], np.float32)
    x = np.concatenate([-x, x])
    # Warnings are errors: nothing overflows. Below 1e-37 float32 itself has no digits left.
    for found, exact in (
        (activate(x, activation)[0], activate(x.astype(np.float64), activation)[0]),
        (slope(x, activation), slope(x.astype(np.float64), activation)),
    ):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(
    ("activation", "x", "expected"),
    [
        (RELU, 0.0, 0),
        (Activation("clipped_relu", 0.1), 0.0, 0),
        # 0.1 as float32 is not 0.1: the ceiling is compared in the array's precision.
        (Activation("clipped_relu", 0.1), 0.1, 0),
        (Activation("elu", 0.25), 0.0, 0.25),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_at_a_kink_the_slope_is_that_of_the_promised_side(activation, x, expected, dtype):
    assert slope(np.array([x], dtype), activation) == expected
