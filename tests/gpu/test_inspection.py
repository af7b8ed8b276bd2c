"""The inspected calls are those that the operations make, and each of them is timed."""

from __future__ import annotations

import pytest

from lenet.cuda.engine_cache import PlanCache
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model, named
from trainer.calls import step_calls
from trainer.inspection import measure, report

WIDE = Model("wide", (ConvBlock(8, (8, 8)), DenseBlock(10, activation=IDENTITY)))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
@pytest.mark.parametrize("model", [named("lenet"), named("mlp"), WIDE], ids=lambda m: m.name)
def test_every_call_is_timed_and_has_the_plan_of_its_shape(model, precision, tmp_path):
    calls = step_calls(model, 32, precision)
    times, step_us = measure(model, 32, precision, PlanCache(tmp_path / "plans.json"))
    assert set(times.calls) == {call.key for call in calls}
    planned = (tmp_path / "plans.json").read_text() if model.name != "mlp" else ""
    for call in calls:
        timed = times.calls[call.key]
        assert timed.time_us > 0
        assert (timed.plan == "-") == call.routine.startswith("our ")
        assert (timed.workspace_bytes is None) == call.routine.startswith("our ")
        if call.convolution is not None:
            assert str(call.convolution) in planned
            assert timed.plan in planned
    # No step is faster than its slowest call.
    assert step_us > 0.9 * max(timed.time_us for timed in times.calls.values())
    assert len(report(calls, times, step_us).splitlines()) == len(calls) + 5
