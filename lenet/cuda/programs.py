"""A CUDA file with macros, and its compiled form, which may be kept beside the sources.

`lenet.cuda.ahead` writes compiled forms, as when an image is built; `kernels` looks for them before
it compiles. A file is found by source, headers, macros and GPU, not by the compiler: what an older
one made runs as well. It is verified by its own digest, since a driver may crash on a damaged one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from lenet.files import write_atomically

_log = logging.getLogger(__name__)

Macros: TypeAlias = Mapping[str, str | int | float]

FOLDER = Path(__file__).parent
"""The folder of the kernels for serving and of the headers for all kernels."""

COMPILED = FOLDER / "compiled"
"""The folder of compiled forms. The service never writes to it."""


@dataclass(frozen=True, slots=True)
class Program:
    """The CUDA file `source` and the options of its macros; see `of`."""

    source: Path
    defines: tuple[str, ...]

    @classmethod
    def of(cls, source: Path, macros: Macros) -> Program:
        """The program of `source` with `macros`."""
        defines = (f"-D{key}={_literal(value)}" for key, value in macros.items())
        return cls(source, tuple(sorted(defines)))

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options. One has the headers' digest, since CuPy's cache ignores their text."""
        folders = (f"-I{folder}" for folder in dict.fromkeys((FOLDER, self.source.parent)))
        return ("--std=c++17", *folders, f"-DHEADERS=0x{self._headers()}", *self.defines)

    def write(self, capability: int, cubin: bytes) -> None:
        """Keep the compiled form for a compute capability: 90 is 9.0.

        Raises:
            OSError: the folder cannot be written.
        """
        name = self._name(capability)
        path = COMPILED / f"{name}.{_digest(cubin)}.cubin"
        write_atomically(path, cubin)
        for former in COMPILED.glob(f"{name}.*.cubin"):
            if former != path:
                former.unlink(missing_ok=True)  # another process may have

    def find(self, capability: int) -> Path | None:
        """The file of the compiled form, None if there is none or it is damaged."""
        for path in COMPILED.glob(f"{self._name(capability)}.*.cubin"):
            try:
                if _digest(path.read_bytes()) == path.suffixes[-2][1:]:
                    return path
                problem = "it is damaged"
            except OSError as exc:
                problem = f"it cannot be read ({exc.strerror})"
            _log.warning("%s is compiled again: %s", path, problem)
        return None

    def _name(self, capability: int) -> str:
        # Not the options, which hold paths.
        inputs = self.source.read_text(), self._headers(), *self.defines
        return f"sm_{capability}/{self.source.stem}-{_digest(repr(inputs).encode())}"

    def _headers(self) -> str:
        files = sorted({*FOLDER.glob("*.cuh"), *self.source.parent.glob("*.cuh")})
        return _digest(repr([(file.name, file.read_text()) for file in files]).encode())


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def _literal(value: str | int | float) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)
