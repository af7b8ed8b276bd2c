import numpy as np
import pytest

from lenet.model import named
from trainer.ops_cpu import CpuOps
from trainer.optimizer import WARM_UP, Sgd, one_cycle, rates, step_decay


def test_one_cycle_rises_to_its_peak_and_falls_to_almost_nothing():
    found = one_cycle(1000, 0.4).tolist()
    top = round(WARM_UP * 1000)
    assert found[0] == pytest.approx(0.4 / 25)
    assert found[top] == pytest.approx(0.4)
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert 0 < found[-1] < 0.4 / 1000


def test_one_cycle_is_half_a_cosine_up_and_half_a_cosine_down():
    found = one_cycle(100, 1.0)
    assert found[15] == pytest.approx((1 + 1 / 25) / 2)
    assert found[65] == pytest.approx((1 + 1e-4) / 2)


def test_one_cycle_stays_large_for_most_of_the_run():
    assert np.count_nonzero(one_cycle(100, 1.0) > 0.1) > 70


def test_one_cycle_of_a_single_step_is_positive():
    assert one_cycle(1, 1.0) > 0


def test_step_decay_drops_tenfold_at_half_and_at_three_quarters():
    found = step_decay(100, 0.1)[[0, 49, 50, 74, 75, 99]]
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_the_rates_of_a_run_are_those_of_its_schedule():
    for schedule, function in (("one-cycle", one_cycle), ("step", step_decay)):
        found = rates(schedule, 40, 0.3)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, function(40, 0.3).astype(np.float32))


class Noting(CpuOps):
    """Notes what descent is asked for."""

    def sgd_step(self, updates, state, momentum, weight_decay, nesterov):
        self.noted = updates, momentum, weight_decay, nesterov
        super().sgd_step(updates, state, momentum, weight_decay, nesterov)


def test_sgd_hands_each_parameter_its_own_gradient_and_velocity(digits, run_of):
    ops, model = Noting(), named("mlp")
    random = np.random.default_rng(0)
    tensors = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in model.parameters().items()
    }
    parameters = ops.upload(model, tensors)
    gradients = {name: np.ones_like(value) for name, value in reversed(tensors.items())}
    sgd = Sgd(model, parameters, ops, 0.8, 0.1, False)
    assert not any(velocity.any() for velocity in sgd.velocities.values())
    sgd.step(gradients, ops.start(run_of(digits(4, 0), 4, [0.5])))
    updates, *rest = ops.noted
    assert rest == [0.8, 0.1, False]
    assert [update.name for update in updates] == list(tensors)
    for name, parameter, gradient, velocity in updates:
        assert parameter is parameters[name]
        assert gradient is gradients[name]
        assert velocity is sgd.velocities[name]
        decay = 0.1 if name.endswith(".weight") else 0.0
        np.testing.assert_allclose(velocity, 1 + decay * tensors[name], rtol=1e-6)
        np.testing.assert_allclose(parameter, tensors[name] - 0.5 * velocity, rtol=1e-5, atol=1e-6)


def test_sgd_finds_the_bottom_of_a_bowl(digits, run_of):
    ops, model = CpuOps(np.float64), named("mlp")
    parameters = ops.upload(model, {"dense2.bias": np.linspace(-4, 3, 10)})
    sgd = Sgd(model, parameters, ops)
    state = ops.start(run_of(digits(4, 0), 4, rates("one-cycle", 200, 0.05)))
    for _ in range(200):
        sgd.step({"dense2.bias": 2 * parameters["dense2.bias"]}, state)
        ops.end_step(state)
    assert np.linalg.norm(parameters["dense2.bias"]) < 1e-3
