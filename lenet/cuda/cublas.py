"""Matrix products with cuBLAS inside a capture.

CuPy 14 rejects every cuBLAS call while a stream is captured, though cuBLAS allows it. So the
library that CuPy has loaded is called through ctypes. With a workspace of its own cuBLAS allocates
nothing in a capture, and its sums keep their order.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal, TypeAlias

from lenet.errors import BackendUnavailable, DeviceError

Arithmetic: TypeAlias = Literal["fp32", "tf32", "fp16"]
"""Type of the operands: float32, float32 rounded to TF32, or float16. Sums are float32."""

WORKSPACE_BYTES = 32 << 20
"""The size that NVIDIA recommends for Hopper."""

_OPERATION = {False: 0, True: 1}  # cublasOperation_t
_TYPE = {"float32": 0, "float16": 2}  # cudaDataType_t
_COMPUTE = {"fp32": 69, "tf32": 77, "fp16": 68}  # cublasComputeType_t; 69 is pedantic: never TF32
_DEFAULT_ALGORITHM = -1
_ONE = ctypes.c_float(1)
_ZERO = ctypes.c_float(0)


class Cublas:  # pragma: no cover - needs a GPU
    """A cuBLAS handle on `stream`, for the thread that made it."""

    def __init__(self, stream: Any) -> None:
        import cupy
        from cupy.cuda import cublas  # noqa: F401  # loads the library that is opened below

        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        try:
            self._library = ctypes.CDLL(f"libcublas.so.{major}")
        except OSError as exc:
            raise BackendUnavailable(
                f"libcublas.so.{major} cannot be loaded ({exc})", "CuPy's extra [ctk] installs it"
            ) from exc
        self._library.cublasGetStatusString.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._workspace = cupy.empty(WORKSPACE_BYTES, cupy.uint8)
        self.bind(stream)

    def bind(self, stream: Any) -> None:
        """Queue on `stream` from now on."""
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))
        # Setting the stream restores cuBLAS's own workspace.
        self._call(
            "cublasSetWorkspace_v2",
            self._handle,
            ctypes.c_void_p(self._workspace.data.ptr),
            ctypes.c_size_t(WORKSPACE_BYTES),
        )

    def product(
        self,
        a: Any,
        b: Any,
        out: Any,
        arithmetic: Arithmetic,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        """Write op(a) (m, k) op(b) (k, n) to out (m, n).

        Row-major, C-contiguous CuPy arrays, each float32 or float16. cuBLAS is column-major, where
        these are their transposes; so it computes out^T = op(b)^T op(a)^T.

        Raises:
            DeviceError: cuBLAS returned an error.
        """
        m, n = out.shape
        k = a.shape[0] if transpose_a else a.shape[1]
        self._call(
            "cublasGemmEx",
            self._handle,
            _OPERATION[transpose_b],
            _OPERATION[transpose_a],
            n,
            m,
            k,
            ctypes.byref(_ONE),
            ctypes.c_void_p(b.data.ptr),
            _TYPE[b.dtype.name],
            b.shape[1],
            ctypes.c_void_p(a.data.ptr),
            _TYPE[a.dtype.name],
            a.shape[1],
            ctypes.byref(_ZERO),
            ctypes.c_void_p(out.data.ptr),
            _TYPE[out.dtype.name],
            n,
            _COMPUTE[arithmetic],
            _DEFAULT_ALGORITHM,
        )

    def close(self) -> None:
        """Destroy the handle and free its workspace."""
        self._call("cublasDestroy_v2", self._handle)
        self._workspace = None

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            text = self._library.cublasGetStatusString(status).decode()
            raise DeviceError(f"{function}: {text}")
