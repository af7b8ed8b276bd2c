"""An execution context: the plans of one network on one backend, one batch at a time.

A context belongs to the thread that made it, as the handles of a GPU backend do; only `launch` may
be called from other threads. It holds a plan for each bucket (1, 2, 4, ... largest), builds all of
them before the first request and validates the weights with the golden vectors of their file. A
batch larger than the largest bucket has to be split by the caller.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lenet.backend import Backend, BatchResult, Pending, Plan
from lenet.cuda.graphs import ConvolutionsBy, Precision
from lenet.errors import BackendUnavailable, GoldenMismatch, InvalidModel, WrongThread
from lenet.model import Model
from lenet.nvtx import span
from lenet.pixels import HEIGHT, WIDTH, Images
from lenet.reference import softmax
from lenet.staging import Staging
from lenet.weightfile import WeightFile

Device: TypeAlias = Literal["auto", "cpu", "cuda"]

_SOFTMAX_TOLERANCE = 1e-4
"""Largest difference of a probability from the softmax of the same plan's logits: in every
precision both are float32, rounded to 1e-7."""

Row = TypeVar("Row", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Target:
    """The device that a context computes on, and how.

    `index` is the number of the GPU. `precision`, `convolutions` and `profile` apply to GPUs;
    `convolutions` says whose kernels compute, and with `profile` nothing is captured, so that a
    profiler sees each layer by its name. `cpu_threads` applies to the CPU.
    """

    device: Literal["cpu", "cuda"]
    index: int = 0
    precision: Precision = "fp16"
    cpu_threads: int = 1
    profile: bool = False
    convolutions: ConvolutionsBy = "auto"


def choose(device: Device) -> tuple[Literal["cpu", "cuda"], str | None]:
    """Resolve `device`. If auto falls back to the CPU, the second value says why.

    Raises:
        BackendUnavailable: a GPU is requested and cannot be used; the message says what to do.
    """
    if device == "cpu":
        return "cpu", None
    try:
        gpus()
    except BackendUnavailable as exc:
        if device == "cuda":
            raise
        return "cpu", f"{exc.reason} (docs/operations.md says how to serve on a GPU)"
    return "cuda", None


def gpus() -> tuple[int, ...]:
    """The numbers of the GPUs that can be used, at least one.

    Raises:
        BackendUnavailable: no GPU can be used; the message says what is missing.
    """
    from lenet.cuda.device import usable

    return usable()


def open_staging(target: Target, count: int, size_bytes: int) -> Staging | None:
    """`count` buffers of `size_bytes`; None on the CPU and with `profile`, which do not use them.

    Raises:
        DeviceError: they cannot be allocated.
    """
    if target.device == "cpu" or target.profile:
        return None
    from lenet.cuda.device import translated
    from lenet.cuda.memory import page_locked

    with translated("allocating page-locked memory"):
        return Staging(page_locked(target.index, count, size_bytes))


def open_backend(target: Target, staging: Staging | None = None) -> Backend:
    """Open the backend of `target` for the calling thread.

    Large batches that lie in `staging` are computed from there.

    Raises:
        BackendUnavailable: it cannot run here; the message says why.
        DeviceError: the GPU cannot be used.
    """
    # Imported late: what one backend needs takes time and memory that the other has no use for.
    if target.device == "cpu":
        from lenet.cpu import CpuBackend

        return CpuBackend(target.cpu_threads)
    from lenet.cuda.backend import CudaBackend
    from lenet.cuda.engine_cache import EngineCache, default_cache

    cache = EngineCache(default_cache())
    return CudaBackend(
        target.index, target.precision, cache, target.profile, staging, target.convolutions
    )


def estimate_bytes(target: Target, model: Model, rows: int) -> int:
    """About the device memory that a context of `target` takes for batches of up to `rows` images.

    A function and not a method of a backend: when memory runs out there may be no backend to ask.
    """
    if target.device == "cpu":
        return 0
    from lenet.cuda.layers import estimate_bytes

    return estimate_bytes(model, rows, target.precision)


def architectures() -> tuple[int, ...]:
    """Compute capabilities that `compile_ahead` compiles for: 90 is 9.0."""
    from lenet.cuda.ahead import SHARED_BYTES

    return tuple(SHARED_BYTES)


def compile_ahead(
    files: Sequence[WeightFile], target: Target, largest: int, capabilities: Sequence[int]
) -> tuple[int, int]:
    """Compile the kernels of `files` for GPUs of some `architectures`; needs no GPU.

    For batches of up to `largest` images. They are kept beside the sources, where `open_backend`
    finds them.

    Returns:
        the number of programs that are there now, and of those that do not compile.

    Raises:
        BackendUnavailable: CUDA's compiler is not installed, or a model is not for GPUs.
        OSError: the folder cannot be written.
    """
    from lenet.cuda.ahead import compile_all, programs

    by, rows = target.convolutions, buckets(largest)
    return compile_all(
        (capability, program)
        for capability in capabilities
        for file in files
        for program in programs(file, target.precision, by, rows, capability)
    )


def buckets(largest: int) -> tuple[int, ...]:
    """Powers of two up to `largest`, and `largest` itself: (1, 2, 4, ..., largest)."""
    if largest < 1:
        raise ValueError(f"largest bucket is {largest}, expected at least 1")
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return tuple(powers if powers[-1] == largest else [*powers, largest])


class ExecutionContext:
    """Computes batches of 1 to `largest` images on `backend`, with `weights`.

    Use it as a context manager, or call `close`; one that is dropped open gives a ResourceWarning.

    Raises:
        GoldenMismatch: from `warm_up`, `stage` and `replace_weights`: the backend computes other
            logits than the trainer did.
        WrongThread: from every method but `launch`, if another thread calls it.
    """

    def __init__(self, backend: Backend, weights: WeightFile, largest: int) -> None:
        self._thread = threading.get_ident()
        self._backend = backend
        self.weights = weights
        """The weights of the next batch; to be read only."""
        self._buckets = buckets(largest)
        self._plans: Mapping[int, Plan] = {}
        self._golden_errors: dict[WeightFile, float] = {}  # of the served and the staged weights
        self._open = True

    @property
    def golden_error(self) -> float:
        """The largest difference from the golden logits, relative to the largest of them."""
        return self._golden_errors[self.weights]

    @property
    def tolerance(self) -> float:
        """The `golden_error` beyond which weights are not served."""
        return self._backend.tolerance

    @property
    def strategies(self) -> dict[int, str]:
        """The strategy of each bucket, by its rows. Any thread may ask."""
        return {bucket: plan.strategy for bucket, plan in sorted(self._plans.items())}

    @property
    def layers(self) -> dict[int, dict[str, str]]:
        """Who computes each layer of each bucket, by its rows. Any thread may ask."""
        return {bucket: dict(plan.layers) for bucket, plan in sorted(self._plans.items())}

    @property
    def device_bytes(self) -> int:
        """Device memory of all plans."""
        return self._backend.device_bytes

    @property
    def workspace_bytes(self) -> int:
        """The part of `device_bytes` that is scratch memory."""
        return self._backend.workspace_bytes

    @span("warm_up")
    def warm_up(self) -> None:
        """Build the plan of every bucket, run each once and validate the weights."""
        self._check()
        self._plans = self._backend.plans(self.weights, self._buckets)
        self._golden_errors = {self.weights: self._validate(self.weights)}

    @span("run")
    def run(self, images: Images) -> BatchResult:
        """Compute `images`, uint8 (n, 28, 28), 1 <= n <= largest, and wait for the result."""
        self._check()
        return self._plan(len(images)).run(images)

    def launch(self, images: Sequence[Images]) -> BatchResult | Pending | None:
        """Start a batch without waiting, from any thread; None if only `run` is supported.

        A batch that takes less time than handing it on is computed at once.

        `images`: its parts, each uint8 (n, 28, 28). Call no other method until the batch is done.

        Raises:
            DeviceError: the batch cannot be started.
        """
        return self._plan(sum(map(len, images))).launch(images)

    def _plan(self, rows: int) -> Plan:
        assert 1 <= rows <= self._buckets[-1], f"bug: a batch of {rows} rows"
        return self._plans[self._buckets[(rows - 1).bit_length()]]

    def poison(self) -> None:
        """Break the device; see `lenet.backend.Backend.poison`."""
        self._check()
        self._backend.poison()

    def hang(self) -> None:
        """Work for ever; see `lenet.backend.Backend.hang`."""
        self._check()
        self._backend.hang()

    @span("stage")
    def stage(self, weights: WeightFile) -> None:
        """Validate `weights`, so that `replace_weights` switches to them at once.

        The served weights stay the same, also on an error. One file can be staged at a time.

        Raises:
            InvalidModel: the architecture differs from that of the served weights.
        """
        self._check()
        if weights.model.fingerprint() != self.weights.model.fingerprint():
            raise InvalidModel(
                f"model {weights.model.name!r} has another architecture than the served "
                f"{self.weights.model.name!r}; load it as a model of its own"
            )
        try:
            self._backend.load(weights)
            error = self._validate(weights)
        finally:
            self._backend.load(self.weights)
        self._golden_errors = {self.weights: self.golden_error, weights: error}

    def replace_weights(self, weights: WeightFile) -> None:
        """Serve `weights` from the next batch on; on any error the old ones stay.

        Weights that are not staged are staged first. After that, switching between the two files
        costs one copy.

        Raises:
            InvalidModel: as `stage`.
        """
        self._check()
        if weights not in self._golden_errors:
            self.stage(weights)
        try:
            self._backend.load(weights)
            self.weights = weights
        finally:
            if self.weights is not weights:
                self._backend.load(self.weights)

    def close(self) -> None:
        """Free everything. Closing twice is allowed."""
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

    def _validate(self, weights: WeightFile) -> float:
        """Compute extreme images and the golden ones in each plan; return the largest error."""
        golden = weights.golden
        scale = float(np.abs(golden.logits).max()) or 1.0
        worst = 0.0
        for bucket, plan in self._plans.items():
            for images in _batches(_extremes(max(bucket, 3)), bucket):
                if not all(np.isfinite(answers).all() for answers in plan.answers(images)):
                    raise self._mismatch(
                        weights, bucket, "probabilities of black, white or noise are NaN", nan=True
                    )
            for images, wanted in zip(
                _batches(golden.images, bucket), _batches(golden.logits, bucket), strict=True
            ):
                logits = plan.logits(images)
                error = float(np.abs(logits - wanted).max()) / scale
                if not error <= self._backend.tolerance:
                    raise self._mismatch(
                        weights,
                        bucket,
                        f"golden logits differ by {error:.1e} of the largest, expected at most "
                        f"{self._backend.tolerance:.0e}",
                        nan=not math.isfinite(error),
                    )
                worst = max(worst, error)
                for answers in plan.answers(images):
                    distance = float(np.abs(answers - softmax(logits)).max())
                    if not distance <= _SOFTMAX_TOLERANCE:
                        raise self._mismatch(
                            weights,
                            bucket,
                            f"probabilities differ by {distance:.1e} from those of the logits, "
                            f"expected at most {_SOFTMAX_TOLERANCE:.0e}",
                        )
        return worst

    def _mismatch(
        self, weights: WeightFile, bucket: int, found: str, nan: bool = False
    ) -> GoldenMismatch:
        reason = "the weight file or the device is not what the trainer used"
        if nan and self._backend.precision == "fp16":
            reason = "activations beyond 65504 overflow in fp16; serve it with --precision tf32"
        return GoldenMismatch(
            f"model {weights.model.name!r} on backend {self._backend.name}: {found}, in bucket "
            f"{bucket}; {reason}"
        )


def _extremes(count: int) -> Images:
    """Black images, white ones and such of black and white pixels, in turn."""
    images = np.zeros((count, HEIGHT, WIDTH), np.uint8)
    images[1::3] = 255
    noise = images[2::3]
    noise[...] = 255 * np.random.default_rng(0).integers(0, 2, noise.shape, np.uint8)
    return images


def _batches(rows: NDArray[Row], size: int) -> Iterator[NDArray[Row]]:
    """`rows` in parts of up to `size`."""
    return (rows[start : start + size] for start in range(0, len(rows), size))
