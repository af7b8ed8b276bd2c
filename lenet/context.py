"""One batch in flight: an execution context and the plans it holds.

A context belongs to the thread that made it, as the handles of a GPU backend do. It owns one plan
for each bucket (1, 2, 4, ... largest), builds all of them before the first request, and proves the
weights on the way. It refuses requests larger than its largest bucket: splitting is the queue's
work.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Self

import numpy as np

from lenet.backend import Backend, Plan
from lenet.cpu import CpuBackend
from lenet.errors import BackendUnavailable, GoldenMismatch, InvalidModel, WrongThread
from lenet.nvtx import span
from lenet.pixels import HEIGHT, WIDTH, Images, Probabilities
from lenet.weightfile import WeightFile

BACKENDS = ("auto", "cpu")


def open_backend(name: str, *, cpu_threads: int = 1) -> Backend:
    """The backend called `name`, one of `BACKENDS`.

    Raises:
        BackendUnavailable: unknown; the message lists what there is.
    """
    if name not in BACKENDS:
        raise BackendUnavailable(f"backend {name!r} is unknown, expected one of {BACKENDS}")
    return CpuBackend(cpu_threads)


def buckets(largest: int) -> tuple[int, ...]:
    """Powers of two up to `largest`, and `largest` itself: (1, 2, 4, ..., largest)."""
    if largest < 1:
        raise ValueError(f"largest bucket is {largest}, expected at least 1")
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return tuple(powers if powers[-1] == largest else [*powers, largest])


@dataclass(slots=True)
class ContextStatistics:
    """What a context has done since it was made; written by its thread, read by any."""

    device: str = ""
    batches: int = 0
    rows: int = 0
    padding_rows: int = 0
    golden_error: float = 0.0


class ExecutionContext:
    """Runs batches of 1 to `largest` images on one backend, on one thread.

    Use it as a context manager, or call `close`; one dropped open gives a ResourceWarning.

    Raises:
        GoldenMismatch: from `warm_up`, `stage` and `replace_weights`, the weights fail their proof.
        WrongThread: from every method but `statistics`, called on a thread not its own.
    """

    def __init__(self, backend: Backend, weights: WeightFile, largest: int) -> None:
        self._thread = threading.get_ident()
        self._backend = backend
        self._weights = weights
        self._buckets = buckets(largest)
        self._plans: dict[int, Plan] = {}
        self._proven: dict[WeightFile, float] = {}  # golden error by weights: served, staged
        self._open = True
        self.statistics = ContextStatistics(backend.name)

    @property
    def weights(self) -> WeightFile:
        """What the next `run` computes with."""
        return self._weights

    @span("warm_up")
    def warm_up(self) -> None:
        """Build the plan of every bucket, run each once, and prove the weights."""
        self._check()
        plans = {bucket: self._backend.plan(self._weights, bucket) for bucket in self._buckets}
        error = self._prove(plans, self._weights)
        self._plans, self._proven = plans, {self._weights: error}
        self.statistics.golden_error = error

    @span("run")
    def run(self, images: Images) -> Probabilities:
        """Probabilities float32 (n, classes) of uint8 (n, 28, 28), 1 <= n <= largest."""
        self._check()
        rows = len(images)
        assert 1 <= rows <= self._buckets[-1], f"bug: a batch of {rows} rows"
        plan = self._plans[self._buckets[(rows - 1).bit_length()]]
        probabilities = plan.run(images)
        self.statistics.batches += 1
        self.statistics.rows += rows
        self.statistics.padding_rows += plan.computed_rows(rows) - rows
        return probabilities

    @span("stage")
    def stage(self, weights: WeightFile) -> None:
        """Prove `weights`, so that replacing the served ones by them takes no time.

        Served before and after, whatever happens, are the same weights. One file can be staged.

        Raises:
            InvalidModel: another architecture than the one this context was made for.
        """
        self._check()
        if weights.model.fingerprint() != self._weights.model.fingerprint():
            raise InvalidModel(
                f"model {weights.model.name!r} has another architecture than the served "
                f"{self._weights.model.name!r}; load it as a model of its own"
            )
        try:
            self._load(weights)
            error = self._prove(self._plans, weights)
        finally:
            self._load(self._weights)
        self._proven = {self._weights: self._proven[self._weights], weights: error}

    def replace_weights(self, weights: WeightFile) -> None:
        """Serve `weights` from the next `run` on; on any error the old ones stay.

        Weights that are neither staged nor those that were served when others were staged are
        staged first. Between those two this goes back and forth at the price of a copy.

        Raises:
            InvalidModel: as `stage`.
        """
        self._check()
        if weights not in self._proven:
            self.stage(weights)
        try:
            self._load(weights)
            self._weights = weights
        finally:
            if self._weights is not weights:
                self._load(self._weights)
        self.statistics.golden_error = self._proven[weights]

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""
        if self._open:
            self._check()
            self._plans = {}
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=1)

    def _check(self) -> None:
        if threading.get_ident() != self._thread:
            raise WrongThread("an execution context works only on the thread that made it")
        if not self._open:
            raise RuntimeError("bug: the execution context is closed")

    def _load(self, weights: WeightFile) -> None:
        for plan in self._plans.values():
            plan.replace(weights)

    def _prove(self, plans: dict[int, Plan], weights: WeightFile) -> float:
        """The largest golden error of `plans`, which hold `weights`, each run once with zeros."""
        golden = weights.golden
        scale = float(np.abs(golden.logits).max()) or 1.0
        worst = 0.0
        for bucket, plan in plans.items():
            plan.run(np.zeros((bucket, HEIGHT, WIDTH), np.uint8))
            for start in range(0, len(golden.images), bucket):
                rows = slice(start, start + bucket)
                difference = plan.logits(golden.images[rows]) - golden.logits[rows]
                error = float(np.abs(difference).max()) / scale
                if not error <= self._backend.tolerance:
                    raise GoldenMismatch(
                        f"model {weights.model.name!r} on backend {self._backend.name}: golden "
                        f"logits differ by {error:.1e} of the largest in bucket {bucket}, expected "
                        f"at most {self._backend.tolerance:.0e}; the weight file or the device is "
                        "not what the trainer saw"
                    )
                worst = max(worst, error)
        return worst
