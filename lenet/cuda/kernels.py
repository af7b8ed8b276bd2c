"""The hand-written CUDA kernels: read beside their caller, compiled once by NVRTC, launched.

Shapes are macros, so each kernel is compiled for the network at hand and its loops unroll; CuPy
keeps what NVRTC made on disk. It refuses to know what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

import cupy

from lenet.cuda.device import Handle, translated

Macros: TypeAlias = Mapping[str, str | int | float]

FOLDER = Path(__file__).parent
"""Where `epilogue.cu` and the headers for all kernels are."""


class Kernel:
    """A function of a CUDA file, which may still be compiled: its first launch waits for that.

    Raises:
        DeviceError: at the first launch, it does not compile, with the compiler's message, or
            cannot be loaded.
    """

    def __init__(self, source: Path, name: str, module: Future[Any]) -> None:
        self._source, self._name, self._module = source, name, module
        self._function: Any = None

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: Any) -> None:
        """Queue it on the current stream."""
        if self._function is None:
            with translated(f"compiling {self._name} of {self._source.name}"):
                self._function = self._module.result().get_function(self._name)
        self._function(grid, block, arguments)


class Kernels:
    """The kernels of one GPU, each compiled on a thread of its own from when it is asked for.

    The compiler takes half a second for the larger ones, in which cuDNN can be asked for plans.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._modules: dict[tuple[Path, tuple[str, ...]], Future[Any]] = {}

    def get(self, source: Path, name: str, macros: Macros) -> Kernel:
        """The function `name` of the CUDA file `source`, compiled with `macros`."""
        self._handle.check()
        words = tuple(sorted(f"-D{key}={_literal(value)}" for key, value in macros.items()))
        key = (source, words)
        if key not in self._modules:
            self._modules[key] = Future()
            asked = source, words, self._handle.device, self._modules[key]
            Thread(target=_compile, args=asked, name=f"nvrtc-{source.name}", daemon=True).start()
        return Kernel(source, name, self._modules[key])


def _compile(source: Path, words: tuple[str, ...], device: int, module: Future[Any]) -> None:
    try:
        cupy.cuda.Device(device).use()
        options = ("--std=c++17", f"-I{FOLDER}", f"-I{source.parent}", _headers(source), *words)
        made = cupy.RawModule(code=source.read_text(), options=options)
        made.compile()
    except BaseException as exc:  # noqa: BLE001 - a thread's end: who launches the kernel gets it
        module.set_exception(exc)
    else:
        module.set_result(made)


def _headers(source: Path) -> str:
    """A macro that differs where a header does, which CuPy's cache does not look into."""
    files = sorted({*FOLDER.glob("*.cuh"), *source.parent.glob("*.cuh")})
    digest = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return f"-DHEADERS=0x{digest[:16]}"


def _literal(value: str | int | float) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
