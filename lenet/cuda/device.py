"""A stream of one GPU with its cuDNN and cuBLAS handles, owned by one thread.

The libraries are loaded and their handles opened when they are first used. cuDNN requires that a
handle stays on one thread, and CuPy's current device and stream belong to a thread, so a `Handle`
checks its caller. The errors of CUDA's libraries become `DeviceError` here, and only here is it
decided which of them leave the process unusable.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

from lenet.cuda.cublas import Cublas, CublasLt
from lenet.errors import BackendUnavailable, DeviceError, OutOfDeviceMemory, WrongThread

CUDNN_MAJOR = 9
"""The only major version whose Graph API this package supports."""

_OLDEST_CUDA, _NEWEST_CUDA = 12, 13  # of the extras of pyproject.toml
_NO_GPU = "use the cpu device"

OLDEST_CAPABILITY = 75
"""Compute capability from which on GPUs have the matrix instructions of our kernels: Turing's."""

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # cudaDeviceAttr

# Values of cudaError_t; CUresult has the same numbers.
_OUT_OF_MEMORY = 2
_INSUFFICIENT_DRIVER = 35
_NO_DEVICE = 100
# Errors that leave the CUDA context, and with it the process, unusable: those of which
# driver_types.h of CUDA 13.0 says that the process must be relaunched, uncorrectable errors of
# memory and links, and the unknown error.
_STICKY = frozenset(
    {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999}
)


def install(cuda: int | None = None) -> str:
    """Advice for CUDA's major version `cuda`, None if it is not known."""
    if cuda is None:
        older = f"where nvidia-smi says CUDA {_OLDEST_CUDA}, take cuda{_OLDEST_CUDA}"
        return f"{install(_NEWEST_CUDA)}; {older}"
    return (
        "install it in a checkout with .venv/bin/python -m pip install --constraint "
        f"constraints.txt -e '.[cuda{cuda}]', with a wheel as python -m pip install "
        f"'lenet_serve-VERSION-py3-none-any.whl[cuda{cuda}]', in Docker with "
        f"--target service-cuda{cuda}"
    )


def _load_cupy() -> Any:
    """The module `cupy`.

    Raises:
        BackendUnavailable: a package or a shared library is missing; the message says which.
    """
    try:
        import cupy
        from cupy.cuda import cublas  # noqa: F401  # loads the library, a package of its own
    except ImportError as exc:
        reason = f"CuPy cannot be loaded ({_line(exc.__cause__ or exc)})"  # CuPy's own is a page
        if isinstance(exc, ModuleNotFoundError) and exc.name == "cupy":
            reason = "CuPy is not installed"
        raise BackendUnavailable(reason, install()) from exc
    return cupy


def load_cudnn() -> Any:
    """The module `cudnn`, with a version of the library that this package supports.

    Raises:
        BackendUnavailable: it is missing or of another major version; the message says what to do.
    """
    try:
        import cudnn
    except (ImportError, OSError, RuntimeError, AssertionError) as exc:
        # The frontend 1.28 asserts that its neighbour package holds one libcudnn.
        raise BackendUnavailable(
            f"cuDNN's Python package nvidia-cudnn-frontend cannot be loaded ({_line(exc)})",
            install(),
        ) from exc
    try:
        version = int(cudnn.backend_version())
    except (OSError, RuntimeError) as exc:
        raise BackendUnavailable(
            f"libcudnn.so.{CUDNN_MAJOR} cannot be loaded ({_line(exc)})",
            f"add its folder to LD_LIBRARY_PATH, or {install()}",
        ) from exc
    if version // 10_000 != CUDNN_MAJOR:
        raise BackendUnavailable(
            f"found cuDNN {cudnn.backend_version_string()}, expected major version {CUDNN_MAJOR}",
            install(),
        )
    return cudnn


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())


def devices() -> int:
    """The number of GPUs, at least one, after a check of CuPy and the driver.

    Raises:
        BackendUnavailable: no GPU, no driver or one too old; the message says what was found, what
            is needed and what to do.
    """
    cupy = _load_cupy()
    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as exc:
        if exc.status == _INSUFFICIENT_DRIVER:
            needed, found = runtime.runtimeGetVersion() // 1000, runtime.driverGetVersion()
            raise _driver(needed, found) from exc
        if exc.status != _NO_DEVICE:
            raise BackendUnavailable(
                f"the GPUs cannot be counted ({_line(exc)})", f"see nvidia-smi, or {_NO_GPU}"
            ) from exc
        count = 0
    if not count:
        raise BackendUnavailable(
            "there is no NVIDIA GPU", f"nvidia-smi must list one, or {_NO_GPU}"
        )
    return count


def usable() -> tuple[int, ...]:
    """The numbers of the GPUs that answer and are new enough, at least one. Opens none of them.

    Raises:
        BackendUnavailable: see `devices`; or all are too old or do not answer.
    """
    found: list[int] = []
    problems: list[BackendUnavailable] = []
    for one in range(devices()):
        try:
            _check_capability(one)
        except BackendUnavailable as exc:
            problems.append(exc)
        else:
            found.append(one)
    if not found:
        raise problems[0]
    return tuple(found)


def check(device: int) -> None:
    """Check that GPU number `device` can be used, without opening it.

    Raises:
        BackendUnavailable: see `devices`; or there is no GPU of that number, or it is too old or
            does not answer.
    """
    count = devices()
    if not 0 <= device < count:
        raise BackendUnavailable(f"there is no GPU {device}, expected 0 to {count - 1}")
    _check_capability(device)


def _check_capability(device: int) -> None:
    import cupy

    try:
        if _capability(device) < OLDEST_CAPABILITY:
            raise _too_old(device)
    except cupy.cuda.runtime.CUDARuntimeError as exc:  # as of a GPU that fell off the bus
        raise BackendUnavailable(
            f"GPU {device} does not answer ({_line(exc)})", f"see nvidia-smi, or {_NO_GPU}"
        ) from exc


def _capability(device: int) -> int:
    """The compute capability: 90 is 9.0."""
    import cupy

    attribute = cupy.cuda.runtime.deviceGetAttribute
    major, minor = attribute(_CAPABILITY_MAJOR, device), attribute(_CAPABILITY_MINOR, device)
    return 10 * int(major) + int(minor)


def _too_old(device: int) -> BackendUnavailable:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    found, expected = (
        f"{one // 10}.{one % 10}" for one in (_capability(device), OLDEST_CAPABILITY)
    )
    return BackendUnavailable(
        f"GPU {device} is a {name} of compute capability {found}, expected {expected} or above",
        _NO_GPU,
    )


def _driver(needed: int, found: int) -> BackendUnavailable:
    """The error of a missing or old driver.

    `needed`: CUDA's major version. `found`: the newest CUDA x.y that the driver supports, as
    1000 x + 10 y; 0 without a driver.
    """
    if not found:
        return BackendUnavailable(
            f"there is no NVIDIA driver, and CuPy needs one for CUDA {needed}",
            f"install it (nvidia-smi must list the GPU), or {_NO_GPU}",
        )
    advice = "install a newer driver"
    if _OLDEST_CUDA <= found // 1000 < needed:
        advice += f", or CuPy for this one: {install(found // 1000)}"
    version = f"{found // 1000}.{found % 1000 // 10}"
    return BackendUnavailable(
        f"the NVIDIA driver is for CUDA {version}, and CuPy needs one for CUDA {needed}", advice
    )


class translated:  # noqa: N801 - read as a verb: with translated("doing this")
    """Turns errors of CuPy, cuDNN, cuBLAS and NCCL into `DeviceError`.

    Raises:
        OutOfDeviceMemory: too little device memory is left.
        DeviceError: any other of their errors; `sticky` says whether the process is lost.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        # The foreign classes are looked up on an error only: this is entered for every batch.
        if isinstance(error, Exception) and isinstance(error, _foreign()):
            raise _translation(self._what, error) from error


def _foreign() -> tuple[type[Exception], ...]:
    cupy = _load_cupy()
    cudnn = sys.modules.get("cudnn")  # None: it was not loaded, so the error is not its
    return (
        cupy.cuda.memory.OutOfMemoryError,
        cupy.cuda.runtime.CUDARuntimeError,
        cupy.cuda.driver.CUDADriverError,
        RuntimeError,  # NCCL's is one, and the cuDNN frontend raises it for every bad status
        *(() if cudnn is None else (cudnn.cudnnGraphNotSupportedError,)),
        cupy.cuda.compiler.CompileException,
    )


def _translation(what: str, problem: Exception) -> DeviceError:
    cuda = _load_cupy().cuda
    if isinstance(problem, cuda.memory.OutOfMemoryError):
        return _out_of_memory(what, problem, cuda.runtime)
    if isinstance(problem, cuda.runtime.CUDARuntimeError | cuda.driver.CUDADriverError):
        if problem.status == _OUT_OF_MEMORY:
            return _out_of_memory(what, problem, cuda.runtime)
        return DeviceError(f"{what}: {problem}", sticky=is_sticky(problem))
    return DeviceError(f"{what}: {problem}")


def is_sticky(problem: Exception) -> bool:
    """Whether the process is lost after `problem`, an error of CuPy."""
    return getattr(problem, "status", None) in _STICKY


def _out_of_memory(what: str, problem: Exception, runtime: Any) -> OutOfDeviceMemory:
    try:
        free, total = runtime.memGetInfo()
        room = f"{free / 1e6:.0f} of {total / 1e6:.0f} MB of memory free, which is not enough"
    except runtime.CUDARuntimeError:
        room = "too little memory free even for a CUDA context"
    return OutOfDeviceMemory(
        f"{what}: the GPU has {room} ({_line(problem)}); use a smaller batch or another GPU"
    )


class Limits(NamedTuple):
    """Limits of a GPU, by which kernels of ours are chosen and divided."""

    capability: int
    """Compute capability: 90 is 9.0."""
    shared_bytes: int
    """The most shared memory of a block of threads."""
    multiprocessors: int


class Handle:  # pragma: no cover - needs a GPU
    """A stream on GPU `device` and the handles of libraries, for the thread that made it.

    `device` and `stream` become the thread's current ones for CuPy, and stay so after `close`.

    Raises:
        BackendUnavailable: see `check`.
        DeviceError: the device cannot be used.
    """

    def __init__(self, device: int = 0) -> None:
        check(device)
        import cupy

        self.device = device
        self._thread = threading.get_ident()
        self._open = True
        self._current = cupy.cuda.get_current_stream
        self._free_blocks = cupy.get_default_memory_pool().free_all_blocks
        self._opened = ExitStack()
        self._cudnn: Any = None
        self._cublas: Cublas | None = None
        self._cublas_lt: CublasLt | None = None
        with translated(f"opening GPU {device}"):
            cupy.cuda.Device(device).use()
            self.stream = self._bound = cupy.cuda.Stream(non_blocking=True)
            self.stream.use()
            properties = cupy.cuda.runtime.getDeviceProperties(device)
            self.capability = _capability(device)
        self.name: str = properties["name"].decode()
        self.multiprocessors: int = properties["multiProcessorCount"]
        shared_bytes = properties["sharedMemPerBlockOptin"]
        self.limits = Limits(self.capability, shared_bytes, self.multiprocessors)

    @property
    def cudnn(self) -> Any:
        """The cuDNN handle. Its first use takes 8 MiB of the GPU, which a capture must not do.

        Raises:
            BackendUnavailable: see `load_cudnn`.
            DeviceError: it cannot be opened.
        """
        self.check()
        if self._cudnn is None:
            cudnn = load_cudnn()
            with translated("opening cuDNN"):
                self._cudnn = cudnn.create_handle()
                self._opened.callback(cudnn.destroy_handle, self._cudnn)
                cudnn.set_stream(self._cudnn, self._bound.ptr)
        return self._cudnn

    @property
    def cudnn_version(self) -> str:
        """The version of cuDNN, which is loaded for it."""
        version: str = load_cudnn().backend_version_string()
        return version

    @property
    def cublas(self) -> Cublas:
        """The cuBLAS handle. Its first use takes 96 MiB of the GPU, which a capture must not do.

        Raises:
            BackendUnavailable: cuBLAS cannot be loaded.
            DeviceError: it cannot be opened.
        """
        self.check()
        if self._cublas is None:
            with translated("opening cuBLAS"):
                self._cublas = Cublas(self._bound)
            self._opened.callback(self._cublas.close)
        return self._cublas

    @property
    def cublas_lt(self) -> CublasLt:
        """The cublasLt handle, without a workspace.

        Raises:
            BackendUnavailable: cuBLAS cannot be loaded.
            DeviceError: it cannot be opened.
        """
        self.check()
        if self._cublas_lt is None:
            with translated("opening cuBLAS"):
                self._cublas_lt = CublasLt()
            self._opened.callback(self._cublas_lt.close)
        return self._cublas_lt

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue on `stream` inside the block, instead of on the handle's own."""
        self.check()
        current, bound = self._current(), self._bound
        try:
            self._bind(stream)
            stream.use()
            yield
        finally:
            self._bind(bound)
            current.use()

    @contextmanager
    def fork(self, main: Handle) -> Iterator[None]:
        """Queue on this handle's stream inside the block, after what `main` has queued so far."""
        self.check()
        current = self._current()
        self.stream.wait_event(main.stream.record())
        try:
            self.stream.use()
            yield
        finally:
            current.use()

    def join(self, other: Handle) -> None:
        """Queue what follows after what `other` has queued so far."""
        self.check()
        self.stream.wait_event(other.stream.record())

    def _bind(self, stream: Any) -> None:
        self._bound = stream
        if self._cudnn is not None:
            load_cudnn().set_stream(self._cudnn, stream.ptr)
        if self._cublas is not None:
            self._cublas.bind(stream)

    def check(self) -> None:
        """Check the calling thread.

        Raises:
            WrongThread: it is not the one that made the handle.
        """
        if threading.get_ident() != self._thread:
            raise WrongThread("a cuDNN handle works only on the thread that made it")
        assert self._open, "bug: the handle is closed"

    def synchronize(self) -> None:
        """Wait for everything on the stream; errors of earlier work appear here."""
        self.check()
        with translated("waiting for the GPU"):
            self.stream.synchronize()

    def close(self) -> None:
        """Free everything. Closing twice is allowed."""
        if self._open:
            self.check()
            self._open = False
            with translated("closing the GPU's handles"):
                self._opened.close()
                # CuPy keeps what is freed for the stream that it was allocated on.
                self._free_blocks(self.stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeviceError:
            # After a fault nothing can be freed, and the fault is the error to report.
            if kind is None:
                raise
