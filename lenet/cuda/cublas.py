"""Matrix products with cuBLAS inside a capture.

CuPy 14 rejects every cuBLAS call while a stream is captured, though cuBLAS allows it. So the
library that CuPy has loaded is called through ctypes. With a workspace of its own cuBLAS allocates
nothing in a capture, and its sums keep their order.

Training uses a handle of cuBLAS, which takes 64 MiB of the GPU, with a workspace of 32 MiB. Serving
uses cublasLt: its handles take nothing, and an algorithm says how much workspace it needs (H100,
CUDA 13.0, 2026-11-26).
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
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
_NOT_SUPPORTED = 15  # cublasStatus_t
_TRANSPOSE_A, _EPILOGUE, _BIAS = 3, 7, 8  # cublasLtMatmulDescAttributes_t
_NOTHING, _WITH_BIAS = 1, {False: 4, True: 6}  # cublasLtEpilogue_t; the last with ReLU
_WORKSPACE_SIZE, _REDUCTIONS = 1, 3  # cublasLtMatmulPreferenceAttributes_t
_SUMS_IN_FLOAT = 2  # cublasLtReductionScheme_t: parts of a sum are added as float32
_ONE = ctypes.c_float(1)
_ZERO = ctypes.c_float(0)


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, whose first member is the algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Library:  # pragma: no cover - needs a GPU
    """The functions of cuBLAS and cublasLt, by name."""

    def __init__(self) -> None:
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

    def __call__(self, function: str, *arguments: Any, allowed: int = 0) -> int:
        """Call `function`; returns its status: 0, or `allowed`.

        Raises:
            DeviceError: it returned another one.
        """
        status = int(getattr(self._library, function)(*arguments))
        if status not in (0, allowed):
            text = self._library.cublasGetStatusString(status).decode()
            raise DeviceError(f"{function}: {text}")
        return status


class Cublas:  # pragma: no cover - needs a GPU
    """A cuBLAS handle on `stream`, for the thread that made it."""

    def __init__(self, stream: Any) -> None:
        import cupy

        self._call = _Library()
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        try:
            self._workspace = cupy.empty(WORKSPACE_BYTES, cupy.uint8)
            self.bind(stream)
        except BaseException:
            self._call("cublasDestroy_v2", self._handle)
            raise

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


@dataclass(frozen=True, slots=True)
class Product:  # pragma: no cover - needs a GPU
    """A product with its epilogue, see `CublasLt.product`; `run` may be captured."""

    workspace_bytes: int
    _call: _Library
    _arguments: tuple[Any, ...]

    def run(self, stream: Any, workspace: int) -> None:
        """Queue it on `stream`; `workspace` is the address of at least `workspace_bytes`.

        Raises:
            DeviceError: cuBLAS returned an error.
        """
        size, pointer = ctypes.c_size_t(self.workspace_bytes), ctypes.c_void_p(workspace or None)
        self._call("cublasLtMatmul", *self._arguments, pointer, size, ctypes.c_void_p(stream.ptr))


class CublasLt:  # pragma: no cover - needs a GPU
    """A cublasLt handle: products with an epilogue, by algorithms that are chosen beforehand."""

    def __init__(self) -> None:
        self._call = _Library()
        self._handle = ctypes.c_void_p()
        self._made = ExitStack()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._made.callback(self._call, "cublasLtDestroy", self._handle)

    def product(
        self, x: Any, weight: Any, bias: Any, out: Any, arithmetic: Arithmetic, relu: bool = False
    ) -> Product | None:
        """Prepare out (m, n) = x (m, k) times the transpose of weight (n, k), plus bias (n,).

        With ReLU if requested. Row-major, C-contiguous CuPy arrays. x and weight are both float32
        or float16, out is float32 or has their type; bias has the type of out, or is None. The
        algorithm is cuBLAS's first choice, the same each time.

        Returns:
            None if cuBLAS has no algorithm for it on this GPU.

        Raises:
            DeviceError: cuBLAS returned an error.
        """
        operation = self._make("MatmulDesc", _COMPUTE[arithmetic], _TYPE["float32"])
        self._set("MatmulDesc", operation, _TRANSPOSE_A, ctypes.c_int32(1))
        epilogue = _NOTHING if bias is None else _WITH_BIAS[relu]
        self._set("MatmulDesc", operation, _EPILOGUE, ctypes.c_uint32(epilogue))
        if bias is not None:
            self._set("MatmulDesc", operation, _BIAS, ctypes.c_void_p(bias.data.ptr))
        a, b, c = (self._layout(matrix) for matrix in (weight, x, out))
        preference = self._make("MatmulPreference")
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        self._set("MatmulPreference", preference, _WORKSPACE_SIZE, size)
        self._set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(_SUMS_IN_FLOAT))
        algorithm, count = _Algorithm(), ctypes.c_int()
        status = self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._handle, operation, a, b, c, c, preference, 1),
            *(ctypes.byref(algorithm), ctypes.byref(count)),
            allowed=_NOT_SUPPORTED,
        )
        if status or not count.value:
            return None
        x_at, weight_at, out_at = (ctypes.c_void_p(array.data.ptr) for array in (x, weight, out))
        arguments = (
            *(self._handle, operation, ctypes.byref(_ONE), weight_at, a, x_at, b),
            *(ctypes.byref(_ZERO), out_at, c, out_at, c, ctypes.byref(algorithm)),
        )
        return Product(algorithm.workspace_bytes, self._call, arguments)

    def close(self) -> None:
        """Destroy the handle and the descriptors of all products."""
        self._made.close()

    def _layout(self, matrix: Any) -> ctypes.c_void_p:
        """The layout of a row-major matrix, as the column-major transpose."""
        rows, columns = matrix.shape
        shape = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns)
        return self._make("MatrixLayout", _TYPE[matrix.dtype.name], *shape)

    def _make(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """A descriptor, destroyed by `close`."""
        descriptor = ctypes.c_void_p()
        self._call(f"cublasLt{kind}Create", ctypes.byref(descriptor), *arguments)
        self._made.callback(self._call, f"cublasLt{kind}Destroy", descriptor)
        return descriptor

    def _set(self, kind: str, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        function = f"cublasLt{kind}SetAttribute"
        self._call(function, descriptor, attribute, ctypes.byref(value), size)
