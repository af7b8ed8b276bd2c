"""One batch in flight: an execution context and the plans it holds.

A context belongs to the thread that made it, as the handles of a GPU backend do; what a GPU
computes by itself, another thread may launch. It owns one plan
for each bucket (1, 2, 4, ... largest), builds all of them before the first request, and proves the
weights on the way. It refuses requests larger than its largest bucket: splitting is the queue's
work.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypeAlias

import numpy as np

from lenet.backend import Backend, Launched, Plan
from lenet.context_statistics import ContextStatistics
from lenet.cpu import CpuBackend
from lenet.errors import BackendUnavailable, GoldenMismatch, InvalidModel, WrongThread
from lenet.nvtx import span
from lenet.pixels import HEIGHT, WIDTH, Images, Probabilities
from lenet.weightfile import WeightFile

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Precision: TypeAlias = Literal["fp32", "tf32", "fp16"]
"""How a GPU multiplies; see `lenet.cuda.graphs`. The CPU has fp32 alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a context computes on."""

    device: Literal["cpu", "cuda"]
    index: int = 0
    """Which of the GPUs."""
    precision: Precision = "fp16"
    """Of a GPU."""
    cpu_threads: int = 1
    profile: bool = False
    """On a GPU: no captured graphs, so that a profiler sees each layer by its name."""


def choose(device: Device) -> tuple[Literal["cpu", "cuda"], str | None]:
    """The device that is meant, and, where auto came to be the CPU, why it is no GPU.

    Raises:
        BackendUnavailable: a GPU is asked for and cannot be used; the message says what to do.
    """
    if device == "cpu":
        return "cpu", None
    try:
        gpus()
    except BackendUnavailable as exc:
        if device == "cuda":
            raise
        return "cpu", str(exc)
    return "cuda", None


def gpus() -> int:
    """How many there are, at least one.

    Raises:
        BackendUnavailable: none that can be used; the message says what is missing.
    """
    from lenet.cuda.device import devices

    return devices()


def open_backend(target: Target) -> Backend:
    """The backend of `target`, for the thread that calls.

    Raises:
        BackendUnavailable: it cannot run here; the message says why.
        DeviceError: the GPU cannot be used.
    """
    if target.device == "cpu":
        return CpuBackend(target.cpu_threads)
    from lenet.cuda.backend import CudaBackend
    from lenet.cuda.engine_cache import PlanCache, default_cache

    cache = PlanCache(default_cache())
    return CudaBackend(target.index, target.precision, cache, target.profile)


def buckets(largest: int) -> tuple[int, ...]:
    """Powers of two up to `largest`, and `largest` itself: (1, 2, 4, ..., largest)."""
    if largest < 1:
        raise ValueError(f"largest bucket is {largest}, expected at least 1")
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return tuple(powers if powers[-1] == largest else [*powers, largest])


@dataclass(slots=True)
class LaunchedBatch:
    """What `ExecutionContext.launch` started; counted when it is collected."""

    _launched: Launched
    _count: Callable[[], None]

    def done(self) -> bool:
        """Whether it is computed; see `lenet.backend.Launched`.

        Raises:
            DeviceError: it failed.
        """
        return self._launched.done()

    def collect(self) -> Probabilities:
        """Its probabilities, once it is done."""
        probabilities = self._launched.collect()
        self._count()
        return probabilities


class ExecutionContext:
    """Runs batches of 1 to `largest` images on one backend, on one thread.

    Use it as a context manager, or call `close`; one dropped open gives a ResourceWarning.

    Raises:
        GoldenMismatch: from `warm_up`, `stage` and `replace_weights`, the weights fail their proof.
        WrongThread: from every method but `statistics` and `launch`, called on a thread not its
            own.
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
        # The largest first: beside its tuning a GPU's kernels for all of them are compiled.
        plans = {
            bucket: self._backend.plan(self._weights, bucket) for bucket in reversed(self._buckets)
        }
        error = self._prove(plans, self._weights)
        self._plans, self._proven = plans, {self._weights: error}
        self.statistics.golden_error = error
        self.statistics.device_bytes = self._backend.device_bytes
        self.statistics.workspace_bytes = self._backend.workspace_bytes

    @span("run")
    def run(self, images: Images) -> Probabilities:
        """Probabilities float32 (n, classes) of uint8 (n, 28, 28), 1 <= n <= largest."""
        self._check()
        rows = len(images)
        plan = self._plan(rows)
        probabilities = plan.run(images)
        self._count(plan, rows)
        return probabilities

    def launch(self, images: Images) -> LaunchedBatch | None:
        """As `run`, but it does not wait and may be called by any thread, as what it returns.

        No other method may be called between this and `collect`. None where only `run` can do it.

        Raises:
            DeviceError: the batch cannot be started.
        """
        rows = len(images)
        plan = self._plan(rows)
        launched = plan.launch(images)
        return (
            None if launched is None else LaunchedBatch(launched, partial(self._count, plan, rows))
        )

    def _plan(self, rows: int) -> Plan:
        assert 1 <= rows <= self._buckets[-1], f"bug: a batch of {rows} rows"
        return self._plans[self._buckets[(rows - 1).bit_length()]]

    def _count(self, plan: Plan, rows: int) -> None:
        statistics = self.statistics
        statistics.batches += 1
        statistics.rows += rows
        statistics.padding_rows += plan.computed_rows(rows) - rows
        statistics.graph_hits += plan.captured
        statistics.graph_misses += not plan.captured
        statistics.device_s = plan.device_s

    def poison(self) -> None:
        """Break the device on purpose: see `lenet.backend.Backend.poison`."""
        self._check()
        self._backend.poison()

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
            self._backend.close()

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
