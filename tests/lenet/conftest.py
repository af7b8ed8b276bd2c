"""The backends that one body of tests runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from lenet import reference
from lenet.backend import BatchResult
from lenet.context import Target, open_backend
from lenet.errors import DeviceError
from lenet.weightfile import WeightFile


@dataclass
class ReferencePlan:
    """Pads each batch to all of its rows, as a captured graph does."""

    rows: int
    backend: ReferenceBackend

    def logits(self, images: np.ndarray) -> np.ndarray:
        self.backend.validations += 1
        return self._logits(images)

    def run(self, images: np.ndarray) -> BatchResult:
        return BatchResult(reference.softmax(self._logits(images)), self.rows, captured=False)

    def answers(self, images: np.ndarray) -> list[np.ndarray]:
        return [self.run(images).probabilities]

    def _logits(self, images: np.ndarray) -> np.ndarray:
        assert 1 <= len(images) <= self.rows
        weights = self.backend.weights
        return reference.logits(weights.model, weights.tensors, images)

    def launch(self, images: list[np.ndarray]) -> PendingRows | None:
        return PendingRows(self, np.concatenate(images)) if self.backend.launches else None


@dataclass
class PendingRows:
    """Done at the second poll."""

    plan: ReferencePlan
    images: np.ndarray
    polls: int = 0

    def done(self) -> bool:
        self.polls += 1
        return self.polls > 1

    def result(self) -> BatchResult:
        return replace(self.plan.run(self.images), captured=True, device_s=0.25)


class ReferenceBackend:
    """NumPy, float32."""

    name = "reference"
    precision = "fp32"
    tolerance = 1e-4

    def __init__(self, launches: bool = False) -> None:
        self.planned: list[int] = []
        self.launches = launches
        self.validations = 0  # calls of `logits`

    def plan(self, weights: WeightFile, rows: int) -> ReferencePlan:
        self.planned.append(rows)
        self.load(weights)
        return ReferencePlan(rows, self)

    def plans(self, weights: WeightFile, buckets: Sequence[int]) -> dict[int, ReferencePlan]:
        return {rows: self.plan(weights, rows) for rows in buckets}

    def load(self, weights: WeightFile) -> None:
        self.weights = weights

    device_bytes, workspace_bytes = 5000, 1000

    def poison(self) -> None:
        raise DeviceError("poisoned for a test", sticky=True)

    def hang(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.planned.clear()


@pytest.fixture
def reference_backend():
    return ReferenceBackend()


@pytest.fixture
def launching_backend():
    return ReferenceBackend(launches=True)


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    """Every backend that this machine has."""
    return (
        ReferenceBackend() if request.param == "reference" else open_backend(Target(request.param))
    )
