"""One thread's way to one GPU: a stream with a cuDNN and a cuBLAS handle bound to it.

cuDNN asks that a handle stay with its thread, and CuPy's current device and stream are the
thread's own, so a `Handle` checks who calls. Foreign errors become `DeviceError` here, and here
alone it is decided which of them leave the process lost. It refuses to allocate memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from lenet.errors import BackendUnavailable, DeviceError, OutOfDeviceMemory, WrongThread

CUDNN_MAJOR = 9
"""The only major version whose Graph API this package speaks."""

_INSTALL = "pip install 'lenet-serve[cuda12]' (or [cuda13])"
_OLDEST_CUDA = 12  # of these extras

# Of cudaError_t; CUresult has the same numbers.
_OUT_OF_MEMORY = 2
_INSUFFICIENT_DRIVER = 35
_NO_DEVICE = 100
# What leaves the CUDA context, and with it the process, unusable: those of which driver_types.h of
# CUDA 13.0 says that the process must be relaunched, uncorrectable memory and links, and unknown.
_STICKY = frozenset(
    {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999}
)


def _libraries() -> tuple[Any, Any]:
    """(cupy, cudnn), or one sentence on which of them is missing.

    Raises:
        BackendUnavailable: a package or a shared library is missing.
    """
    try:
        import cupy
        from cupy.cuda import cublas  # noqa: F401  # loads the library, a package of its own
    except ImportError as exc:
        reason = _line(exc.__cause__ or exc)  # CuPy makes a page of what it stumbled over
        raise BackendUnavailable(
            f"CuPy cannot be loaded ({reason}); the cuda backend needs it and CUDA's libraries: "
            f"{_INSTALL}"
        ) from exc
    try:
        import cudnn
    except (ImportError, OSError, RuntimeError, AssertionError) as exc:
        # The frontend 1.28 asserts that its neighbour package holds one libcudnn.
        raise BackendUnavailable(
            f"cuDNN's Python package cannot be loaded ({_line(exc)}); the cuda backend needs "
            f"nvidia-cudnn-frontend and libcudnn.so.{CUDNN_MAJOR}: {_INSTALL}"
        ) from exc
    return cupy, cudnn


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())


def devices() -> int:
    """How many GPUs there are, at least one, with everything that a handle needs in place.

    Raises:
        BackendUnavailable: no GPU, no driver or one too old, no cuDNN or one of another major
            version; the message says what was found, what is needed and what to type.
    """
    cupy, cudnn = _libraries()
    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as exc:
        if exc.status == _INSUFFICIENT_DRIVER:
            needed, found = runtime.runtimeGetVersion() // 1000, runtime.driverGetVersion()
            raise BackendUnavailable(_driver(needed, found)) from exc
        if exc.status != _NO_DEVICE:
            raise BackendUnavailable(
                f"the GPUs cannot be counted ({_line(exc)}), and the cuda backend needs one: see "
                "what nvidia-smi says, or use the cpu device"
            ) from exc
        count = 0
    if not count:
        raise BackendUnavailable(
            "there is no NVIDIA GPU here (nvidia-smi lists them), and the cuda backend needs one; "
            "use the cpu device"
        )
    try:
        version = int(cudnn.backend_version())
    except (OSError, RuntimeError) as exc:
        raise BackendUnavailable(
            f"libcudnn.so.{CUDNN_MAJOR} cannot be loaded ({_line(exc)}): {_INSTALL}, or put its "
            "folder into LD_LIBRARY_PATH"
        ) from exc
    if version // 10_000 != CUDNN_MAJOR:
        raise BackendUnavailable(
            f"cuDNN {cudnn.backend_version_string()} was found, expected major version "
            f"{CUDNN_MAJOR}: {_INSTALL}"
        )
    return count


def _driver(needed: int, found: int) -> str:
    """What is wrong with the driver: `needed` is CUDA's major version, `found` 0 or 1000 x + 10 y.

    CUDA x.y is meant, of which the driver knows.
    """
    if not found:
        return (
            f"there is no NVIDIA driver here, and CuPy needs one for CUDA {needed}: install it "
            "(nvidia-smi must list the GPU), or use the cpu device"
        )
    advice = "install a newer driver"
    if _OLDEST_CUDA <= found // 1000 < needed:
        advice += f", or the CuPy for this one: pip install 'lenet-serve[cuda{found // 1000}]'"
    return (
        f"the NVIDIA driver is for CUDA {found // 1000}.{found % 1000 // 10}, and CuPy needs one "
        f"for CUDA {needed}: {advice}"
    )


class translated:  # noqa: N801 - read as a verb: with translated("doing this")
    """Turns whatever CuPy, cuDNN, cuBLAS or NCCL raise inside into `DeviceError`.

    Raises:
        OutOfDeviceMemory: too little device memory is left.
        DeviceError: anything else that they raise; `sticky` says whether the process is lost.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        # What is foreign is looked up when something is raised: this is entered every batch.
        if isinstance(error, Exception) and isinstance(error, _foreign()):
            raise _translation(self._what, error) from error


def _foreign() -> tuple[type[Exception], ...]:
    cupy, cudnn = _libraries()
    return (
        cupy.cuda.memory.OutOfMemoryError,
        cupy.cuda.runtime.CUDARuntimeError,
        cupy.cuda.driver.CUDADriverError,
        RuntimeError,  # NCCL's is one, and the cuDNN frontend raises it for every bad status
        cudnn.cudnnGraphNotSupportedError,
        cupy.cuda.compiler.CompileException,
    )


def _translation(what: str, problem: Exception) -> DeviceError:
    cupy, _ = _libraries()
    cuda = cupy.cuda
    if isinstance(problem, cuda.memory.OutOfMemoryError):
        return _out_of_memory(what, problem, cuda.runtime)
    if isinstance(problem, cuda.runtime.CUDARuntimeError | cuda.driver.CUDADriverError):
        if problem.status == _OUT_OF_MEMORY:
            return _out_of_memory(what, problem, cuda.runtime)
        return DeviceError(f"{what}: {problem}", sticky=is_sticky(problem))
    return DeviceError(f"{what}: {problem}")


def is_sticky(problem: Exception) -> bool:
    """Whether the process is lost after `problem`, an error of CuPy's."""
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


class Handle:
    """A stream, a cuDNN handle and a cuBLAS handle on GPU `device`, for the thread that made it.

    Making it makes `device` and `stream` the thread's current ones for CuPy, also after `close`.

    Raises:
        BackendUnavailable: see `devices`; or there is no GPU of that number.
        DeviceError: the device cannot be used.
    """

    def __init__(self, device: int = 0) -> None:
        count = devices()
        if not 0 <= device < count:
            raise BackendUnavailable(
                f"GPU {device} was asked for, expected 0 to {count - 1}: that is all there are"
            )
        import cudnn
        import cupy

        from lenet.cuda.cublas import Cublas

        self.device = device
        self._thread = threading.get_ident()
        self._open = True
        self._current = cupy.cuda.get_current_stream
        self._set_stream = cudnn.set_stream
        with translated(f"opening GPU {device}"), ExitStack() as opened:
            cupy.cuda.Device(device).use()
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.stream.use()
            self.cudnn = cudnn.create_handle()
            opened.callback(cudnn.destroy_handle, self.cudnn)
            self.cublas = Cublas(self.stream)
            opened.callback(self.cublas.close)
            self._bind(self.stream)
            properties = cupy.cuda.runtime.getDeviceProperties(device)
            self._opened = opened.pop_all()
        self.name: str = properties["name"].decode()
        self.multiprocessors: int = properties["multiProcessorCount"]
        self.capability: int = 10 * properties["major"] + properties["minor"]
        self.cudnn_version: str = cudnn.backend_version_string()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue on `stream` inside, instead of on the handle's own."""
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
        """Queue on this handle's stream inside, behind what `main` has queued so far."""
        self.check()
        current = self._current()
        self.stream.wait_event(main.stream.record())
        try:
            self.stream.use()
            yield
        finally:
            current.use()

    def join(self, other: Handle) -> None:
        """What is queued from now on comes behind what `other` has queued so far."""
        self.check()
        self.stream.wait_event(other.stream.record())

    def _bind(self, stream: Any) -> None:
        self._bound = stream
        self._set_stream(self.cudnn, stream.ptr)
        self.cublas.bind(stream)

    def check(self) -> None:
        """Refuse another thread.

        Raises:
            WrongThread: called from another thread than the one that made the handle.
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
        """Give everything back; closing twice is allowed."""
        if self._open:
            self.check()
            self._open = False
            with translated("giving the GPU back"):
                self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeviceError:
            # After a fault nothing can be given back, and the fault is what has to be told.
            if kind is None:
                raise
