"""The backends that one body of tests runs over, and a device that pads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lenet import reference
from lenet.context import Target, open_backend
from lenet.errors import DeviceError
from lenet.weightfile import WeightFile


@dataclass
class ReferencePlan:
    batch: int
    weights: WeightFile

    def logits(self, images: np.ndarray) -> np.ndarray:
        assert 1 <= len(images) <= self.batch
        return reference.logits(self.weights.model, self.weights.tensors, images)

    def run(self, images: np.ndarray) -> np.ndarray:
        return reference.softmax(self.logits(images))

    def launch(self, images: np.ndarray) -> None:
        """As on a CPU: nothing computes by itself."""

    def replace(self, weights: WeightFile) -> None:
        self.weights = weights

    def computed_rows(self, rows: int) -> int:
        """As on a device with one captured graph a bucket: always all of the bucket."""
        return self.batch

    captured = False
    device_s = None


@dataclass
class LaunchedRows:
    """What a plan launched, done at the second look."""

    plan: ReferencePlan
    images: np.ndarray
    looks: int = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def collect(self) -> np.ndarray:
        return self.plan.run(self.images)


class LaunchingPlan(ReferencePlan):
    """As on a device that computes by itself, by captured graphs and with a clock."""

    def launch(self, images: np.ndarray) -> LaunchedRows:
        return LaunchedRows(self, images)

    captured = True
    device_s = 0.25


class ReferenceBackend:
    """NumPy in plain sight, float32; its plans launch if they are a `LaunchingPlan`."""

    name = "reference"
    tolerance = 1e-4

    def __init__(self, make_plan: type[ReferencePlan] = ReferencePlan) -> None:
        self.planned: list[int] = []
        self.make_plan = make_plan

    def plan(self, weights: WeightFile, batch: int) -> ReferencePlan:
        self.planned.append(batch)
        return self.make_plan(batch, weights)

    device_bytes = workspace_bytes = 0

    def poison(self) -> None:
        raise DeviceError("poisoned for a test", sticky=True)

    def close(self) -> None:
        self.planned.clear()


@pytest.fixture
def reference_backend():
    return ReferenceBackend()


@pytest.fixture
def launching_backend():
    return ReferenceBackend(LaunchingPlan)


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    """Every backend that this machine has."""
    return (
        ReferenceBackend() if request.param == "reference" else open_backend(Target(request.param))
    )
