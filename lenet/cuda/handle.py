"""One thread's way to one GPU: a stream with a cuDNN and a cuBLAS handle bound to it.

cuDNN asks that a handle stay with its thread, and CuPy's current device and stream are the
thread's own, so a `Handle` checks who calls. Foreign errors become `DeviceError` here, and here
alone it is decided which of them leave the process lost. It refuses to allocate memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from lenet.errors import BackendUnavailable, DeviceError, OutOfDeviceMemory, WrongThread

CUDNN_MAJOR = 9
"""The only major version whose Graph API this package speaks."""

_INSTALL = "pip install 'lenet-serve[cuda12]' (or [cuda13])"

# Of cudaError_t: what leaves the CUDA context, and with it the process, unusable.
_STICKY = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})
_INSUFFICIENT_DRIVER = 35
_NO_DEVICE = 100


def _libraries() -> tuple[Any, Any]:
    """(cupy, cudnn), or one sentence on which of them is missing.

    Raises:
        BackendUnavailable: a package or a shared library is missing.
    """
    try:
        import cupy
    except ImportError as exc:
        raise BackendUnavailable(
            f"CuPy cannot be loaded ({exc}); the cuda backend needs it: {_INSTALL}"
        ) from exc
    try:
        import cudnn
    except (ImportError, OSError, RuntimeError) as exc:
        raise BackendUnavailable(
            f"cuDNN's Python package cannot be loaded ({exc}); the cuda backend needs "
            f"nvidia-cudnn-frontend and libcudnn.so.{CUDNN_MAJOR}: {_INSTALL}"
        ) from exc
    return cupy, cudnn


def devices() -> int:
    """How many GPUs there are, at least one, with everything that a handle needs in place.

    Raises:
        BackendUnavailable: no GPU, a driver too old, no cuDNN or one of another major version;
            the message says what was found, what is needed and what to type.
    """
    cupy, cudnn = _libraries()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        if exc.status == _INSUFFICIENT_DRIVER:
            raise BackendUnavailable(
                "the NVIDIA driver is older than CuPy's CUDA "
                f"{cupy.cuda.runtime.runtimeGetVersion() // 1000}; install a newer driver, or the "
                "CuPy of the driver's CUDA (nvidia-smi shows it)"
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
            f"libcudnn.so.{CUDNN_MAJOR} cannot be loaded ({exc}): {_INSTALL}, or put its folder "
            "into LD_LIBRARY_PATH"
        ) from exc
    if version // 10_000 != CUDNN_MAJOR:
        raise BackendUnavailable(
            f"cuDNN {cudnn.backend_version_string()} was found, expected major version "
            f"{CUDNN_MAJOR}: {_INSTALL}"
        )
    return count


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn whatever CuPy, cuDNN or NCCL raise inside into `DeviceError`.

    Raises:
        OutOfDeviceMemory: too little device memory is left.
        DeviceError: anything else that they raise; `sticky` says whether the process is lost.
    """
    cupy, cudnn = _libraries()
    foreign = [
        cupy.cuda.runtime.CUDARuntimeError,
        cupy.cuda.driver.CUDADriverError,
        cudnn.cudnnGraphNotSupportedError,
        cupy.cuda.compiler.CompileException,
    ]
    nccl = getattr(cupy.cuda, "nccl", None)  # absent where libnccl is
    if nccl is not None and nccl.available:
        foreign.append(nccl.NcclError)
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as exc:
        free, total = cupy.cuda.runtime.memGetInfo()
        raise OutOfDeviceMemory(
            f"{what}: the GPU has {free / 1e6:.0f} of {total / 1e6:.0f} MB of memory free, which "
            f"is not enough ({exc}); use a smaller batch or another GPU"
        ) from exc
    except tuple(foreign) as exc:
        status = getattr(exc, "status", 0)
        raise DeviceError(f"{what}: {exc}", sticky=status in _STICKY) from exc
    except RuntimeError as exc:
        # The frontend raises this bare type for every status of cuDNN's.
        raise DeviceError(f"{what}: {exc}") from exc


class Handle:
    """A stream, a cuDNN handle and a cuBLAS handle on GPU `device`, for the thread that made it.

    Making it makes `device` and `stream` the thread's current ones for CuPy, until `close`.

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

        self._current = cupy.cuda.get_current_stream

        self._thread = threading.get_ident()
        self._open = True
        self._cudnn_module = cudnn
        with translated(f"opening GPU {device}"):
            self._device = cupy.cuda.Device(device)
            self._device.use()
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.stream.use()
            self.cudnn = cudnn.create_handle()
            cudnn.set_stream(self.cudnn, self.stream.ptr)
            self.cublas = Cublas(self.stream)
            properties = cupy.cuda.runtime.getDeviceProperties(device)
        self.name: str = properties["name"].decode()
        self.multiprocessors: int = properties["multiProcessorCount"]
        self.cudnn_version: str = cudnn.backend_version_string()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Queue on `stream` inside, instead of on the handle's own."""
        self.check()
        before = self._current()
        try:
            self._bind(stream)
            stream.use()
            yield
        finally:
            self._bind(self.stream)
            before.use()

    @contextmanager
    def fork(self, main: Handle) -> Iterator[None]:
        """Queue on this handle's stream inside, behind what `main` has queued so far."""
        self.check()
        self.stream.wait_event(main.stream.record())
        try:
            self.stream.use()
            yield
        finally:
            main.stream.use()

    def join(self, other: Handle) -> None:
        """What is queued from now on comes behind what `other` has queued so far."""
        self.stream.wait_event(other.stream.record())

    def _bind(self, stream: Any) -> None:
        self._cudnn_module.set_stream(self.cudnn, stream.ptr)
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
        with translated("waiting for the GPU"):
            self.stream.synchronize()

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""
        if self._open:
            self.check()
            self._open = False
            self._cudnn_module.destroy_handle(self.cudnn)
            self.cublas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
