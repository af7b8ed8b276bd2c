"""The hand-written CUDA kernels: read beside their caller, compiled once by NVRTC, launched.

Shapes are macros, so each kernel is compiled for the network at hand and its loops unroll; CuPy
keeps what NVRTC made on disk. It refuses to know what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import cupy

from lenet.cuda.handle import Handle, translated

Macros: TypeAlias = Mapping[str, str | int | float]

FOLDER = Path(__file__).parent
"""Where `tail.cu` and the headers for all kernels are."""


class Kernels:
    """Compiled kernels of one GPU, each made when it is first asked for."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._modules: dict[tuple[Path, tuple[tuple[str, str], ...]], Any] = {}

    def get(self, source: Path, name: str, macros: Macros) -> Any:
        """The function `name` of the CUDA file `source`, compiled with `macros`.

        Raises:
            DeviceError: it does not compile, with the compiler's message, or cannot be loaded.
        """
        self._handle.check()
        words = tuple(sorted((key, _literal(value)) for key, value in macros.items()))
        key = (source, words)
        if key not in self._modules:
            options = ["--std=c++17", f"-I{FOLDER}", f"-I{source.parent}"]
            options += [f"-D{macro}={value}" for macro, value in words]
            with translated(f"compiling {source.name}"):
                module = cupy.RawModule(code=source.read_text(), options=tuple(options))
                module.compile()
            self._modules[key] = module
        with translated(f"loading {name} of {source.name}"):
            return self._modules[key].get_function(name)


def _literal(value: str | int | float) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
