"""NVRTC, CUDA's compiler, by its C functions. It needs neither a GPU nor a driver.

Source: NVRTC's documentation, which is the same for CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from lenet.cuda.device import install
from lenet.errors import BackendUnavailable, DeviceError

# CuPy sets them too, so that compiled code is the same.
_AS_CUPY = ("-ftz=true", "--device-as-default-execution-space")


class Nvrtc:
    """The compiler and the headers of the installed CUDA wheels.

    Raises:
        BackendUnavailable: they are not installed.
    """

    def __init__(self) -> None:
        spec = find_spec("nvidia")
        packages = [] if spec is None else spec.submodule_search_locations or []
        for package, (libraries, headers) in product(map(Path, packages), _folders()):
            found = sorted((package / libraries / "lib").glob("libnvrtc*.so.*"))
            self._include = f"-I{package / headers / 'include'}"
            if found and (package / headers / "include/cuda_fp16.h").exists():
                break
        else:
            raise BackendUnavailable("CUDA's compiler NVRTC is not installed", install())
        try:
            for path in found:  # the second one opens the first, its built-in functions
                if ".alt." not in path.name:
                    self._library = ctypes.CDLL(str(path))
        except OSError as exc:
            raise BackendUnavailable(f"NVRTC cannot be loaded: {exc}", install()) from exc
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: Path, capability: int, options: Sequence[str]) -> tuple[bytes, str]:
        """The machine code of `source` for a compute capability, 90 for 9.0, and the log.

        Raises:
            DeviceError: it does not compile; the message is the compiler's.
        """
        words = (*options, *_AS_CUPY, self._include, f"--gpu-architecture=sm_{capability}")
        values = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        program = ctypes.c_void_p()
        arguments = source.read_bytes(), source.name.encode(), 0, None, None
        self._call("CreateProgram", ctypes.byref(program), *arguments)
        try:
            status = self._library.nvrtcCompileProgram(program, len(words), values)
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status:
                raise DeviceError(f"{source.name} does not compile for sm_{capability}: {log}")
            return self._read("CUBIN", program), log
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, content)
        return content.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, f"nvrtc{function}")(*arguments)
        if status:
            text = self._library.nvrtcGetErrorString(status).decode()
            raise DeviceError(f"nvrtc{function}: {text}")


def _folders() -> list[tuple[str, str]]:
    """Where the wheels of CUDA have libraries and headers, those that CuPy uses first."""
    folders = [("cu13", "cu13"), ("cuda_nvrtc", "cuda_runtime")]  # of CUDA 13, and of 12
    with suppress(PackageNotFoundError):
        version("cupy-cuda12x")
        folders.reverse()
    return folders


@cache
def nvrtc() -> Nvrtc:
    """The compiler, loaded once a process."""
    return Nvrtc()
