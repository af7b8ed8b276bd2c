"""The hand-written CUDA kernels: compiled once by NVRTC, then launched by CuPy.

Shapes are macros, so each kernel is compiled for the network at hand and its loops unroll. CuPy
keeps the compiled code on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from lenet.cuda.device import Handle, translated
from lenet.cuda.graphs import Precision
from lenet.model import Block

Macros: TypeAlias = Mapping[str, str | int | float]

FOLDER = Path(__file__).parent
"""The folder of the kernels for serving and of the headers for all kernels."""

_DEFAULT_SHARED_BYTES = 48 << 10  # a function must be allowed more

_WITH_PARAMETER = ("clipped_relu", "elu")

NULL = np.uintp(0)
"""A null pointer as a kernel's argument."""

_ModuleKey: TypeAlias = tuple[int, Path, tuple[str, ...]]

_modules: WeakValueDictionary[_ModuleKey, Future[Any]] = WeakValueDictionary()
"""Modules in use, by GPU, file and macros: the contexts of a model share them."""

_modules_lock = Lock()


def storage_dtype(precision: Precision) -> np.dtype[Any]:
    """The type of activations, and of the weights that cuDNN and cuBLAS read."""
    return np.dtype(np.float16 if precision == "fp16" else np.float32)


def activation_parameters(blocks: Iterable[Block]) -> set[float]:
    """The parameters of activations that have one. The macro PARAMETER is one of them."""
    activations = (block.activation for block in blocks)
    return {float(one.parameter) for one in activations if one.kind in _WITH_PARAMETER}


def scalar(dtype: Any) -> str:
    """The macro SCALAR for arrays of `dtype`."""
    return "__half" if dtype == np.float16 else "float"


class Kernel:  # pragma: no cover - needs a GPU
    """A function of a CUDA file. Its first launch waits until the file is compiled.

    Raises:
        DeviceError: at the first launch: the file does not compile, with the compiler's message, or
            the function cannot be loaded.
    """

    def __init__(self, source: Path, name: str, module: Future[Any]) -> None:
        self._source, self._name, self._module = source, name, module
        self._function: Any = None

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: Any,
        shared_bytes: int = 0,
    ) -> None:
        """Queue it on the current stream, with `shared_bytes` of dynamic shared memory a block."""
        if self._function is None:
            with translated(f"compiling {self._name} of {self._source.name}"):
                self._function = self._module.result().get_function(self._name)
                if shared_bytes > _DEFAULT_SHARED_BYTES:
                    self._function.max_dynamic_shared_size_bytes = shared_bytes
        self._function(grid, block, arguments, shared_mem=shared_bytes)


class Kernels:  # pragma: no cover - needs a GPU
    """The kernels of one GPU. Each is compiled on its own thread, from when it is requested.

    The large ones take half a second, so request all before the first is launched. What several
    objects of this class request is compiled and loaded once.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._modules: dict[_ModuleKey, Future[Any]] = {}

    def get(self, source: Path, name: str, macros: Macros) -> Kernel:
        """The function `name` of the CUDA file `source`, compiled with `macros`."""
        self._handle.check()
        defines = tuple(sorted(f"-D{key}={_literal(value)}" for key, value in macros.items()))
        key = (self._handle.device, source, defines)
        with _modules_lock:
            module = _modules.get(key)
            if module is None:
                module = _modules[key] = Future()
                arguments = source, defines, self._handle.device, module
                Thread(
                    target=_compile, args=arguments, name=f"nvrtc-{source.name}", daemon=True
                ).start()
        self._modules[key] = module
        return Kernel(source, name, module)


def _compile(source: Path, defines: tuple[str, ...], device: int, compiled: Future[Any]) -> None:
    try:
        import cupy

        cupy.cuda.Device(device).use()
        options = ("--std=c++17", f"-I{FOLDER}", f"-I{source.parent}", _headers(source), *defines)
        module = cupy.RawModule(code=source.read_text(), options=options)
        module.compile()
    except BaseException as exc:  # noqa: BLE001 - top of a thread: the kernel's launch raises it
        compiled.set_exception(exc)
    else:
        compiled.set_result(module)


def _headers(source: Path) -> str:  # pragma: no cover - needs a GPU
    """A macro with the digest of the headers, which CuPy's cache does not look at."""
    files = sorted({*FOLDER.glob("*.cuh"), *source.parent.glob("*.cuh")})
    digest = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return f"-DHEADERS=0x{digest[:16]}"


def _literal(value: str | int | float) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
