"""The hand-written CUDA kernels: compiled once by NVRTC, then launched by CuPy.

Shapes are macros, so each kernel is compiled for the network at hand and its loops unroll. What was
not compiled ahead of time, see `ahead`, CuPy compiles and keeps on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from lenet.cuda.device import Handle, is_sticky, translated
from lenet.cuda.graphs import Precision
from lenet.cuda.programs import FOLDER as FOLDER
from lenet.cuda.programs import Macros as Macros
from lenet.cuda.programs import Program
from lenet.model import Block

_log = logging.getLogger(__name__)

_DEFAULT_SHARED_BYTES = 48 << 10  # a function must be allowed more

_WITH_PARAMETER = ("clipped_relu", "elu")

NULL = np.uintp(0)
"""A null pointer as a kernel's argument."""

_ModuleKey: TypeAlias = tuple[int, Program]

_modules: WeakValueDictionary[_ModuleKey, Future[Any]] = WeakValueDictionary()
"""Modules in use, by GPU and program: the contexts of a model share them."""

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
        program = Program.of(source, macros)
        key = (self._handle.device, program)
        with _modules_lock:
            module = _modules.get(key)
            if module is None:
                module = _modules[key] = Future()
                arguments = program, self._handle.device, self._handle.capability, module
                Thread(
                    target=_load, args=arguments, name=f"nvrtc-{source.name}", daemon=True
                ).start()
        self._modules[key] = module
        return Kernel(source, name, module)


def _load(program: Program, device: int, capability: int, loaded: Future[Any]) -> None:
    try:
        import cupy

        cupy.cuda.Device(device).use()
        module = _compiled_ahead(program, capability)
        if module is None:
            module = cupy.RawModule(code=program.source.read_text(), options=program.options)
            module.compile()
    except BaseException as exc:  # noqa: BLE001 - top of a thread: the kernel's launch raises it
        loaded.set_exception(exc)
    else:
        loaded.set_result(module)


def _compiled_ahead(program: Program, capability: int) -> Any:  # pragma: no cover - needs a GPU
    """The module of a compiled form, None if there is none that can be loaded."""
    path = program.find(capability)
    if path is None:
        return None
    import cupy

    module = cupy.RawModule(path=str(path))
    try:
        module.compile()  # loads it
    except cupy.cuda.driver.CUDADriverError as exc:  # as of a newer CUDA than the driver's
        if is_sticky(exc):
            raise
        _log.warning("%s is compiled again: it cannot be loaded (%s)", path, exc)
        return None
    return module
