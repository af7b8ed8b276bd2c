"""Matrix products with cuBLAS inside a capture.

CuPy 14 rejects every cuBLAS call while a stream is captured, though cuBLAS allows it. So the
library that CuPy has loaded is called through ctypes. With a workspace of its own cuBLAS allocates
nothing in a capture, and its sums keep their order.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
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
_WITH_BIAS = {False: 4, True: 6}  # cublasLtEpilogue_t; the second with ReLU
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
        try:
            self._workspace = cupy.empty(WORKSPACE_BYTES, cupy.uint8)
            self.bind(stream)
        except BaseException:
            self._call("cublasDestroy_v2", self._handle)
            raise

    def bind(self, stream: Any) -> None:
        """Queue on `stream` from now on."""
        self._stream = ctypes.c_void_p(stream.ptr)
        self._call("cublasSetStream_v2", self._handle, self._stream)
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

    def dense(
        self, x: Any, weight: Any, bias: Any, out: Any, arithmetic: Arithmetic, relu: bool
    ) -> None:
        """Write x (m, k) times the transpose of weight (n, k), plus bias (n,), to out (m, n).

        With ReLU if requested. Row-major, C-contiguous CuPy arrays of one type, float32 or
        float16. The algorithm is cuBLAS's first choice, the same each time.

        Raises:
            DeviceError: cuBLAS returned an error.
        """
        with ExitStack() as made:
            operation, layouts, algorithm = self._dense(
                made, x, weight, bias, out, arithmetic, relu
            )
            if algorithm is None:
                raise DeviceError("cuBLAS has no algorithm for a product with bias")
            weight_layout, x_layout, out_layout, _ = layouts
            out_address = ctypes.c_void_p(out.data.ptr)
            self._call(
                "cublasLtMatmul",
                self._handle,
                operation,
                ctypes.byref(_ONE),
                ctypes.c_void_p(weight.data.ptr),
                weight_layout,
                ctypes.c_void_p(x.data.ptr),
                x_layout,
                ctypes.byref(_ZERO),
                out_address,
                out_layout,
                out_address,
                out_layout,
                ctypes.byref(algorithm),
                ctypes.c_void_p(self._workspace.data.ptr),
                ctypes.c_size_t(WORKSPACE_BYTES),
                self._stream,
            )

    def has_dense(
        self, x: Any, weight: Any, bias: Any, out: Any, arithmetic: Arithmetic, relu: bool
    ) -> bool:
        """Whether cuBLAS has an algorithm for `dense` on this GPU."""
        with ExitStack() as made:
            return self._dense(made, x, weight, bias, out, arithmetic, relu)[-1] is not None

    def _dense(
        self,
        made: ExitStack,
        x: Any,
        weight: Any,
        bias: Any,
        out: Any,
        arithmetic: Arithmetic,
        relu: bool,
    ) -> tuple[ctypes.c_void_p, list[ctypes.c_void_p], _Algorithm | None]:
        """The operation of `dense`, the layouts of its matrices, and cuBLAS's first choice."""
        operation = self._made(made, "MatmulDesc", _COMPUTE[arithmetic], _TYPE["float32"])
        self._set("MatmulDesc", operation, _TRANSPOSE_A, ctypes.c_int32(1))
        self._set("MatmulDesc", operation, _EPILOGUE, ctypes.c_uint32(_WITH_BIAS[relu]))
        self._set("MatmulDesc", operation, _BIAS, ctypes.c_void_p(bias.data.ptr))
        layouts = [self._layout(made, matrix) for matrix in (weight, x, out, out)]
        preference = self._made(made, "MatmulPreference")
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        self._set("MatmulPreference", preference, _WORKSPACE_SIZE, size)
        self._set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(_SUMS_IN_FLOAT))
        algorithm, count = _Algorithm(), ctypes.c_int()
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle,  # a handle of cuBLAS is one of cublasLt, too
            operation,
            *layouts,
            preference,
            1,
            ctypes.byref(algorithm),
            ctypes.byref(count),
        )
        if status != _NOT_SUPPORTED:
            self._check("cublasLtMatmulAlgoGetHeuristic", status)
        found = status == 0 and count.value > 0
        return operation, layouts, algorithm if found else None

    def close(self) -> None:
        """Destroy the handle and free its workspace."""
        self._call("cublasDestroy_v2", self._handle)
        self._workspace = None

    def _layout(self, made: ExitStack, matrix: Any) -> ctypes.c_void_p:
        """The layout of a row-major matrix, as the column-major transpose."""
        rows, columns = matrix.shape
        shape = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns)
        return self._made(made, "MatrixLayout", _TYPE[matrix.dtype.name], *shape)

    def _made(self, made: ExitStack, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """A descriptor of cublasLt, which `made` destroys."""
        descriptor = ctypes.c_void_p()
        self._call(f"cublasLt{kind}Create", ctypes.byref(descriptor), *arguments)
        made.callback(self._call, f"cublasLt{kind}Destroy", descriptor)
        return descriptor

    def _set(self, kind: str, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        function = f"cublasLt{kind}SetAttribute"
        self._call(function, descriptor, attribute, ctypes.byref(value), size)

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, status: int) -> None:
        if status:
            text = self._library.cublasGetStatusString(status).decode()
            raise DeviceError(f"{function}: {text}")
