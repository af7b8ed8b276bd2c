"""The layout of tensor core operands, element by element; and CuPy and cuDNN by their errors."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


class Mma:
    """Which weight a lane has at a place, as `ptx.cuh` describes it."""

    @staticmethod
    def normal(*shape):
        return np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)

    @staticmethod
    def picked(tensor, *place):
        """The elements of `tensor` at `place`, and 0 outside of it."""
        place = np.broadcast_arrays(*place)
        sizes = zip(place, tensor.shape, strict=True)
        inside = np.all([(at >= 0) & (at < size) for at, size in sizes], axis=0)
        return np.where(inside, tensor[tuple(np.where(inside, at, 0) for at in place)], 0)

    @staticmethod
    def b(lane, place):
        """(k within a step, column) of the right operand."""
        return 8 * (place // 2) + 2 * (lane % 4) + place % 2, lane // 4

    @classmethod
    def first_filter(cls, weight, k, channel):
        """The weight of tap `k` of a filter whose rows have an even number of taps."""
        r, s = np.divmod(k, -(-weight.shape[3] // 2) * 2)
        return cls.picked(weight * np.float32(256 / 255), channel, 0, r, s)


@pytest.fixture
def mma():
    return Mma


class CudaError(RuntimeError):
    """As CuPy's CUDARuntimeError and CUDADriverError."""

    def __init__(self, status: int, message: str = "cudaError: something happened") -> None:
        super().__init__(message)
        self.status = status


class RuntimeApiError(CudaError):
    pass


class DriverApiError(CudaError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class CompileException(Exception):
    pass


class GraphNotSupportedError(Exception):
    pass


@dataclass
class Machine:
    """What CuPy 14.2 and nvidia-cudnn-frontend 1.28 find; an error is raised when it is asked."""

    count: int | CudaError = 1
    driver: int = 13_000
    version: int | Exception = 91_900
    version_text: str = "9.19.0"
    memory: tuple[int, int] | CudaError = (1_500_000, 80_000_000)


def found(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with one GPU, a driver, CuPy and cuDNN; the test may take things away."""
    machine = Machine()
    cupy, cuda, cudnn = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cudnn")
    cupy.cuda = cuda
    cuda.cublas = SimpleNamespace()
    cuda.runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeApiError,
        getDeviceCount=lambda: found(machine.count),
        runtimeGetVersion=lambda: 13_020,
        driverGetVersion=lambda: machine.driver,
        memGetInfo=lambda: found(machine.memory),
    )
    cuda.driver = SimpleNamespace(CUDADriverError=DriverApiError)
    cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cuda.compiler = SimpleNamespace(CompileException=CompileException)
    cudnn.cudnnGraphNotSupportedError = GraphNotSupportedError
    cudnn.backend_version = lambda: found(machine.version)
    cudnn.backend_version_string = lambda: machine.version_text
    for name, module in {"cupy": cupy, "cupy.cuda": cuda, "cudnn": cudnn}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return machine


@pytest.fixture
def errors() -> SimpleNamespace:
    """The foreign errors, by whose they are."""
    return SimpleNamespace(
        runtime=RuntimeApiError,
        driver=DriverApiError,
        memory=OutOfMemoryError,
        compiler=CompileException,
        graph=GraphNotSupportedError,
    )
