from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lenet.context import Target, open_backend
from lenet.cpu import CpuPlan
from lenet.errors import DeviceError
from lenet.pixels import joined
from service.engine.faults import Faults, FaultyContext


@pytest.fixture
def make(random_weights, tiny):
    def make_(faults):
        context = FaultyContext(open_backend(Target("cpu")), random_weights(tiny), 2, faults)
        context.warm_up()
        return context

    return make_


BATCH = np.zeros((1, 28, 28), np.uint8)


def test_the_next_batch_and_no_other_finds_its_device_poisoned(make):
    faults = Faults()
    with make(faults) as first, make(faults) as second:
        first.run(BATCH)
        faults.inject("poison")
        with pytest.raises(DeviceError) as caught:
            second.run(BATCH)
        assert caught.value.sticky
        for context in (first, second):
            assert context.run(BATCH).probabilities.shape == (1, 10)


def test_a_batch_is_launched_unless_its_fault_waits_for_the_contexts_thread(make, monkeypatch):
    def launch(plan, parts):
        return SimpleNamespace(result=lambda: plan.run(joined(parts)))

    monkeypatch.setattr(CpuPlan, "launch", launch)
    faults = Faults()
    with make(faults) as first, make(faults) as second:
        assert first.launch([BATCH]).result().probabilities.shape == (1, 10)
        faults.inject("poison")
        for context in (first, second):
            assert context.launch([BATCH]) is None
        with pytest.raises(DeviceError):
            second.run(BATCH)
        for context in (first, second):
            assert context.launch([BATCH]).result().probabilities.shape == (1, 10)
