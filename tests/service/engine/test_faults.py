from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from lenet.context import Target, open_backend
from lenet.cpu import CpuPlan
from lenet.errors import DeviceError
from service.engine.faults import Faults, FaultyContext

LONG_S = 20.0


@pytest.fixture
def make(random_weights, tiny):
    def make_(faults):
        context = FaultyContext(open_backend(Target("cpu")), random_weights(tiny), 2)
        context.faults = faults
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


def test_a_batch_that_hangs_holds_nobody_else_up(make):
    faults = Faults()
    hanging = threading.Event()
    came_back = threading.Event()

    class Never(threading.Event):
        def wait(self, timeout=None):
            hanging.set()
            return super().wait(LONG_S)

    faults._never = Never()

    def drive():
        with make(faults) as context:
            context.run(BATCH)
            came_back.set()

    faults.inject("hang")
    thread = threading.Thread(target=drive)
    thread.start()
    assert hanging.wait(LONG_S)
    with make(faults) as other:
        assert other.run(BATCH).probabilities.shape == (1, 10)
    assert not came_back.is_set()
    faults._never.set()
    thread.join(LONG_S)
    assert came_back.is_set()


def test_a_batch_is_launched_unless_its_fault_waits_for_the_contexts_thread(make, monkeypatch):
    def launch(plan, images):
        return SimpleNamespace(result=lambda: plan.run(images))

    monkeypatch.setattr(CpuPlan, "launch", launch)
    faults = Faults()
    with make(faults) as first, make(faults) as second:
        assert first.launch(BATCH).result().probabilities.shape == (1, 10)
        faults.inject("poison")
        for context in (first, second):
            assert context.launch(BATCH) is None
        with pytest.raises(DeviceError):
            second.run(BATCH)
        for context in (first, second):
            assert context.launch(BATCH).result().probabilities.shape == (1, 10)
