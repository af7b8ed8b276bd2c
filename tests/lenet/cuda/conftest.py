"""Modules in the places of CuPy and of cuDNN's frontend: what they do is what the test says.

As CuPy 14.2 and nvidia-cudnn-frontend 1.28 behave where there is no GPU: the names of errors,
their classes and what they say were seen there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


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


@dataclass(eq=False)
class Stream:
    """Knows its number; whatever is done to it is written down."""

    gpu: Gpu
    ptr: int

    def use(self) -> None:
        self.gpu.current = self

    def record(self) -> str:
        return f"event of {self.ptr}"

    def wait_event(self, event: str) -> None:
        self.gpu.events.append(f"{self.ptr} waits for {event}")

    def synchronize(self) -> None:
        if self.gpu.problem is not None:
            raise self.gpu.problem
        self.gpu.events.append(f"{self.ptr} is waited for")


@dataclass
class Gpu:
    """What the two modules find; `problem` is raised by whatever waits for the GPU."""

    count: int | CudaError = 1
    driver: int = 13_000
    version: int | Exception = 91_900
    version_text: str = "9.19.0"
    memory: tuple[int, int] | CudaError = (1_500_000, 80_000_000)
    problem: Exception | None = None
    cublas_problem: Exception | None = None
    closing_problem: Exception | None = None
    device: int = -1
    current: Any = None
    bound: dict[str, int] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._streams = 0
        self.current = self.stream()

    def stream(self, non_blocking: bool = True) -> Stream:
        """A new one: 1, 2, 3, ..., the first of which is the thread's when the test begins."""
        self._streams += 1
        return Stream(self, self._streams)

    def use_device(self, number: int) -> SimpleNamespace:
        def use() -> None:
            self.device = number

        return SimpleNamespace(use=use)

    def bind(self, library: str, ptr: int) -> None:
        self.bound[library] = ptr


def found(value: Any) -> Any:
    """`value`, or the error that it is."""
    if isinstance(value, Exception):
        raise value
    return value


def cupy_module(gpu: Gpu) -> dict[str, ModuleType]:
    """As they stand in sys.modules: `cupy` and `cupy.cuda`, of which `cublas` is an attribute."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda = cuda
    cuda.cublas = SimpleNamespace()
    cuda.runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeApiError,
        getDeviceCount=lambda: found(gpu.count),
        runtimeGetVersion=lambda: 13_020,
        driverGetVersion=lambda: gpu.driver,
        memGetInfo=lambda: found(gpu.memory),
        getDeviceProperties=lambda _: {
            "name": b"NVIDIA H200",
            "multiProcessorCount": 132,
            "major": 9,
            "minor": 0,
        },
    )
    cuda.driver = SimpleNamespace(CUDADriverError=DriverApiError)
    cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cuda.compiler = SimpleNamespace(CompileException=CompileException)
    cuda.Device = gpu.use_device
    cuda.Stream = gpu.stream
    cuda.get_current_stream = lambda: gpu.current
    return {"cupy": cupy, "cupy.cuda": cuda}


def cudnn_module(gpu: Gpu) -> ModuleType:
    cudnn = ModuleType("cudnn")
    cudnn.cudnnGraphNotSupportedError = GraphNotSupportedError
    cudnn.backend_version = lambda: found(gpu.version)
    cudnn.backend_version_string = lambda: gpu.version_text
    cudnn.create_handle = lambda: "cuDNN's handle"
    cudnn.set_stream = lambda handle, ptr: gpu.bind(handle, ptr)
    cudnn.destroy_handle = lambda handle: gpu.events.append(f"{handle} is destroyed")
    return cudnn


def cublas_module(gpu: Gpu) -> ModuleType:
    """In the place of `lenet.cuda.cublas`, which finds its library by the operating system."""

    class Cublas:
        def __init__(self, stream: Stream) -> None:
            if gpu.cublas_problem is not None:
                raise gpu.cublas_problem
            self.bind(stream)

        def bind(self, stream: Stream) -> None:
            gpu.bind("cuBLAS", stream.ptr)

        def close(self) -> None:
            if gpu.closing_problem is not None:
                raise gpu.closing_problem
            gpu.events.append("cuBLAS is closed")

    module = ModuleType("lenet.cuda.cublas")
    module.Cublas = Cublas
    return module


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A machine with one GPU and all that a handle needs; the test may take things away."""
    gpu = Gpu()
    modules = cupy_module(gpu)
    modules |= {"cudnn": cudnn_module(gpu), "lenet.cuda.cublas": cublas_module(gpu)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return gpu


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
