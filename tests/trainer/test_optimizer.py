import math

import numpy as np
import pytest

from trainer.optimizer import WARM_UP, Sgd, one_cycle, step_decay


def test_one_cycle_rises_to_its_peak_and_falls_to_almost_nothing():
    rates = [one_cycle(step, 1000, 0.4) for step in range(1000)]
    top = round(WARM_UP * 1000)
    assert rates[0] == pytest.approx(0.4 / 25)
    assert rates[top] == pytest.approx(0.4)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[-1] < 0.4 / 1000


def test_one_cycle_stays_large_for_most_of_the_run():
    assert sum(one_cycle(step, 100, 1.0) > 0.1 for step in range(100)) > 70


def test_one_cycle_of_a_single_step_is_positive():
    assert one_cycle(0, 1, 1.0) > 0


def test_step_decay_drops_tenfold_at_half_and_at_three_quarters():
    rates = [step_decay(step, 100, 0.1) for step in (0, 49, 50, 74, 75, 99)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_follows_its_formula_over_several_steps(nesterov):
    weight, bias = np.array([1.0, -2.0]), np.array([3.0])
    sgd = Sgd({"a.weight": weight, "a.bias": bias}, 0.8, 0.1, nesterov)
    expected = {"a.weight": weight.copy(), "a.bias": bias.copy()}
    velocity = {"a.weight": np.zeros(2), "a.bias": np.zeros(1)}
    for step in range(3):
        gradients = {"a.weight": np.array([0.5, step]), "a.bias": np.array([-1.0])}
        sgd.step(gradients, 0.01)
        for name, value in expected.items():
            decay = 0.1 if name == "a.weight" else 0.0
            gradient = gradients[name] + decay * value
            velocity[name] = 0.8 * velocity[name] + gradient
            move = gradient + 0.8 * velocity[name] if nesterov else velocity[name]
            expected[name] = value - 0.01 * move
    np.testing.assert_allclose(weight, expected["a.weight"])
    np.testing.assert_allclose(bias, expected["a.bias"])


def test_sgd_finds_the_bottom_of_a_bowl():
    x = np.array([4.0, -3.0])
    sgd = Sgd({"x": x})
    for step in range(200):
        sgd.step({"x": 2 * x}, one_cycle(step, 200, 0.05))
    assert math.hypot(*x) < 1e-3


def test_sgd_keeps_the_dtype_of_its_parameters():
    weight = np.ones(2, np.float32)
    Sgd({"a.weight": weight}, 0.9, 1e-3).step({"a.weight": weight.copy()}, 0.1)
    assert weight.dtype == np.float32
