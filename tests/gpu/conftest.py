"""The GPU as a fixture, how arrays get there and back, and the skip where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lenet.cuda.device import devices
from lenet.errors import BackendUnavailable

TOLERANCE = {"fp32": 1e-5, "tf32": 1e-3, "mixed": 5e-3}
"""The largest ||got - expected|| / ||expected|| of one operation, forward or gradient: float32
sums, operands rounded to 10 bits, operands and results rounded to half."""


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


class WithoutGpu(pytest.Module):
    """A module that is not even imported: it could not find CuPy."""

    reason = ""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"needs a GPU: {self.reason}", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Skip every module here where there is no GPU, with what is missing."""
    try:
        devices()
    except BackendUnavailable as exc:
        module = WithoutGpu.from_parent(parent, path=module_path)
        module.reason = exc.reason
        return module
    return None


class Bench:
    """The operations under test beside float64 on NumPy, and the arrays of both.

    Canonical arrays are (n, c, h, w) or (n, units). The GPU has them channels last and padded; the
    NumPy operations batch last. Where the GPU stores half, the reference gets rounded values.
    """

    def __init__(self, precision: str) -> None:
        from trainer.ops_cpu import CpuOps
        from trainer.ops_cuda.ops import CudaOps

        self.precision = precision
        self.tolerance = TOLERANCE[precision]
        self.gpu = CudaOps(precision, autotune=False)
        self.cpu = CpuOps(np.float64)
        self.dtype = np.float16 if precision == "mixed" else np.float32

    def rounded(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self.dtype).astype(np.float64)

    def upload(self, array: np.ndarray, image: bool = False) -> Any:
        """Upload `array`; the padding holds zeros, as after every operation on the GPU."""
        import cupy

        from lenet.cuda.packing import padded

        channels = array.shape[1]
        wide = channels if image else padded(channels)
        extra = [(0, 0)] * array.ndim
        extra[1] = (0, wide - channels)
        full = np.pad(array, extra).astype(self.dtype)
        if array.ndim == 4:
            full = full.transpose(0, 2, 3, 1)
        return cupy.asarray(np.ascontiguousarray(full))

    def download(self, array: Any, channels: int) -> np.ndarray:
        """Download `array`; the padding must be zero."""
        import cupy

        host = cupy.asnumpy(array).astype(np.float64)
        assert not host[..., channels:].any(), "something was written into the padding"
        host = host[..., :channels]
        return host.transpose(0, 3, 1, 2) if host.ndim == 4 else host

    @staticmethod
    def batch_last(array: np.ndarray) -> np.ndarray:
        """Canonical to the reference's layout, batch last."""
        return np.ascontiguousarray(np.moveaxis(array, 0, -1))

    @staticmethod
    def batch_first(array: np.ndarray) -> np.ndarray:
        return np.moveaxis(array, -1, 0)

    def agrees(self, got: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> None:
        assert relative(got, expected) <= (tolerance or self.tolerance)


@pytest.fixture
def make_bench() -> Iterator[Callable[[str], Bench]]:
    made: list[Bench] = []

    def make(precision: str) -> Bench:
        made.append(Bench(precision))
        return made[-1]

    yield make
    for bench in made:
        bench.gpu.close()


@pytest.fixture(params=["fp32", "tf32", "mixed"])
def bench(request: pytest.FixtureRequest, make_bench: Callable[[str], Bench]) -> Bench:
    return make_bench(request.param)
