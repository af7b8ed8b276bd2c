import numpy as np
import pytest

from trainer.optimizer import WARM_UP, one_cycle, rates, step_decay


def test_one_cycle_rises_to_its_peak_and_falls_to_almost_nothing():
    found = one_cycle(1000, 0.4).tolist()
    top = round(WARM_UP * 1000)
    assert found[0] == pytest.approx(0.4 / 25)
    assert found[top] == pytest.approx(0.4)
    assert found[top // 2] == pytest.approx(0.4 * (1 + 1 / 25) / 2)
    assert found[(top + 1000) // 2] == pytest.approx(0.4 * (1 + 1e-4) / 2)
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert 0 < found[-1] < 0.4 / 1000


def test_step_decay_drops_tenfold_at_half_and_at_three_quarters():
    found = step_decay(100, 0.1)[[0, 49, 50, 74, 75, 99]]
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_the_rates_of_a_run_are_those_of_its_schedule():
    for schedule, function in (("one-cycle", one_cycle), ("step", step_decay)):
        found = rates(schedule, 40, 0.3)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, function(40, 0.3).astype(np.float32))
