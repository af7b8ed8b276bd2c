"""The one function of cuBLAS that a network needs, called where CuPy will not: inside a capture.

CuPy 14 refuses every cuBLAS call while a stream is being captured, though cuBLAS allows it; so
this module talks to the library that CuPy has loaded, through ctypes. With a workspace of its own
(`Handle` gives it one) cuBLAS takes no memory in a capture, and its sums keep their order. It
refuses to convert layouts: matrices are row-major, and C-contiguous.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal, TypeAlias

import cupy

from lenet.errors import BackendUnavailable, DeviceError

Arithmetic: TypeAlias = Literal["fp32", "tf32", "fp16"]
"""Float32 throughout, float32 rounded to TF32, or float16 operands; sums are float32."""

WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends for Hopper."""

_OPERATION = {False: 0, True: 1}  # cublasOperation_t
_TYPE = {"float32": 0, "float16": 2}  # cudaDataType_t
_COMPUTE = {"fp32": 69, "tf32": 77, "fp16": 68}  # cublasComputeType_t; 69 is pedantic: never TF32
_DEFAULT_ALGORITHM = -1
_ONE = ctypes.c_float(1)
_ZERO = ctypes.c_float(0)


class Cublas:
    """A cuBLAS handle on `stream`; the thread's own, as the cuDNN handle is."""

    def __init__(self, stream: Any) -> None:
        from cupy.cuda import cublas  # noqa: F401  # loads the library that is asked for below

        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        try:
            self._library = ctypes.CDLL(f"libcublas.so.{major}")
        except OSError as exc:
            raise BackendUnavailable(
                f"libcublas.so.{major} cannot be loaded ({exc}); CuPy's extra [ctk] brings it"
            ) from exc
        self._library.cublasGetStatusString.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._workspace = cupy.empty(WORKSPACE_BYTES, cupy.uint8)
        self.bind(stream)

    def bind(self, stream: Any) -> None:
        """Queue what follows on `stream`."""
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))
        # Setting the stream puts cuBLAS's own workspace back.
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
        """Write op(a) (m, k) op(b) (k, n) to out (m, n), CuPy arrays, float32 or float16 each.

        cuBLAS counts columns first, where a row-major matrix is its own transpose; so it is asked
        for out^T = op(b)^T op(a)^T.

        Raises:
            DeviceError: cuBLAS refused.
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
        """Destroy the handle."""
        self._call("cublasDestroy_v2", self._handle)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            text = self._library.cublasGetStatusString(status).decode()
            raise DeviceError(f"{function}: {text}")
