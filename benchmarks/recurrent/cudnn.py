"""An LSTM through cuDNN's RNN interface, which the library's frontend for Python does not have.

The C functions are called by ctypes on the handle of `lenet.cuda.device`. The sequence is unpacked
and time comes first: x (t, n, inputs), all of one length.

    descriptors   the network, the sequences x and y, the states h and c
    weights       one block of memory; cuDNN says where each gate's matrix and bias lie in it
    workspace     scratch memory of a call
    reserve       what a forward pass in training keeps for the backward passes
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import cupy
import numpy as np

from benchmarks.recurrent.reference import Layer
from lenet.cuda.device import Handle
from lenet.errors import DeviceError

Precision: TypeAlias = Literal["fp32", "tf32", "fp16"]

# Constants from cudnn_ops_v9.h and cudnn_adv_v9.h.
_FLOAT, _HALF = 0, 2  # cudnnDataType_t
_DEFAULT_MATH, _TENSOR_OP_MATH, _FMA_MATH = 0, 1, 3  # cudnnMathType_t; FMA never rounds to TF32
_MATH: dict[Precision, int] = {"fp32": _FMA_MATH, "tf32": _DEFAULT_MATH, "fp16": _TENSOR_OP_MATH}
ALGORITHMS = {"standard": (0, 1), "persistent": (1, 2), "persistent-dynamic": (2, 2)}
"""cudnnRNNAlgo_t, and cudnnRNNBiasMode_t: the persistent ones exist only with two biases, of which
the second stays 0."""

_LSTM, _ONE_DIRECTION, _LINEAR_INPUT = 2, 0, 0
_UNPACKED_TIME_FIRST = 0
_INFERENCE, _TRAINING = 0, 1
_ADD = 0  # cudnnWgradMode_t: the only one; gradients are added to what is there
_GATES = 4
_NOT_SUPPORTED = 3000


class NotSupported(DeviceError):
    """cuDNN has no such algorithm for these sizes."""


class CudnnLstm:
    """`layers` on the GPU, for `steps` of `batch` rows; arrays are float32, or float16 in fp16."""

    def __init__(
        self,
        handle: Handle,
        layers: Sequence[Layer],
        steps: int,
        batch: int,
        precision: Precision,
        algorithm: str = "standard",
        *,
        training: bool = False,
    ) -> None:
        """Raises: NotSupported, DeviceError."""
        self._library = ctypes.CDLL("libcudnn.so.9")
        self._library.cudnnGetErrorString.restype = ctypes.c_char_p
        self._handle, self._owner = ctypes.c_void_p(handle.cudnn.backend_handle), handle
        self._mode = _TRAINING if training else _INFERENCE
        self.dtype = np.dtype(np.float16 if precision == "fp16" else np.float32)
        kind = _HALF if precision == "fp16" else _FLOAT
        inputs, hidden = layers[0].w.shape[1], layers[0].r.shape[1]
        shape = (len(layers), batch, hidden)
        self._lengths = cupy.full(batch, steps, cupy.int32)

        dropout = self._new("cudnnCreateDropoutDescriptor")
        self._call(
            "cudnnSetDropoutDescriptor",
            dropout,
            self._handle,
            ctypes.c_float(0),
            None,
            ctypes.c_size_t(0),
            ctypes.c_ulonglong(0),
        )
        self._rnn = self._new("cudnnCreateRNNDescriptor")
        number, biases = ALGORITHMS[algorithm]
        self._call(
            "cudnnSetRNNDescriptor_v8",
            self._rnn,
            number,
            _LSTM,
            biases,
            _ONE_DIRECTION,
            _LINEAR_INPUT,
            kind,
            _FLOAT,
            _MATH[precision],
            inputs,
            hidden,
            hidden,
            len(layers),
            dropout,
            0,
        )
        if algorithm == "persistent-dynamic":  # compiles kernels for this batch
            self._call("cudnnBuildRNNDynamic", self._handle, self._rnn, batch)
        self._x, self._y = (self._sequence(kind, steps, batch, size) for size in (inputs, hidden))
        self._state = self._new("cudnnCreateTensorDescriptor")
        dims = (ctypes.c_int * 3)(*shape)
        strides = (ctypes.c_int * 3)(batch * hidden, hidden, 1)
        self._call("cudnnSetTensorNdDescriptor", self._state, kind, 3, dims, strides)

        sizes = [ctypes.c_size_t() for _ in range(3)]
        self._call("cudnnGetRNNWeightSpaceSize", self._handle, self._rnn, ctypes.byref(sizes[0]))
        self._call(
            "cudnnGetRNNTempSpaceSizes",
            self._handle,
            self._rnn,
            self._mode,
            self._x,
            *map(ctypes.byref, sizes[1:]),
        )
        self._weights, self.workspace, self._reserve = (
            cupy.zeros(max(1, size.value), cupy.uint8) for size in sizes
        )
        self._gradients = cupy.zeros_like(self._weights) if training else None
        self._shapes = [(one.w.shape, one.r.shape, one.b.shape) for one in layers]
        for number, layer in enumerate(layers):
            self._copy_in(number, layer)
        self.y = cupy.empty((steps, batch, hidden), self.dtype)
        self.h, self.c = cupy.empty(shape, self.dtype), cupy.empty(shape, self.dtype)
        self.dx = cupy.empty((steps, batch, inputs), self.dtype) if training else None

    def forward(self, x: Any, h: Any, c: Any) -> None:
        """Queue the pass of x (t, n, inputs) from the states (l, n, h) into `y`, `h` and `c`."""
        self._call(
            "cudnnRNNForward",
            self._handle,
            self._rnn,
            self._mode,
            _at(self._lengths),
            self._x,
            _at(x),
            self._y,
            _at(self.y),
            self._state,
            _at(h),
            _at(self.h),
            self._state,
            _at(c),
            _at(self.c),
            *_sized(self._weights),
            *_sized(self.workspace),
            *_sized(self._reserve),
        )

    def backward(self, x: Any, h: Any, c: Any, dy: Any) -> None:
        """Queue the gradients of x, into `dx`, and of the weights, for `dy` (t, n, h)."""
        self._call(
            "cudnnRNNBackwardData_v8",
            self._handle,
            self._rnn,
            _at(self._lengths),
            self._y,
            _at(self.y),
            _at(dy),
            self._x,
            _at(self.dx),
            self._state,
            _at(h),
            None,
            None,
            self._state,
            _at(c),
            None,
            None,
            *_sized(self._weights),
            *_sized(self.workspace),
            *_sized(self._reserve),
        )
        self._gradients.fill(0)
        self._call(
            "cudnnRNNBackwardWeights_v8",
            self._handle,
            self._rnn,
            _ADD,
            _at(self._lengths),
            self._x,
            _at(x),
            self._state,
            _at(h),
            self._y,
            _at(self.y),
            *_sized(self._gradients),
            *_sized(self.workspace),
            *_sized(self._reserve),
        )

    def gradients(self) -> list[Layer]:
        """Host copies of the weights' gradients after `backward`."""
        found = []
        for number, (w, r, b) in enumerate(self._shapes):
            parts = [np.empty(shape, self.dtype) for shape in (w, r, b)]
            for gate in range(_GATES):
                rows = slice(gate * w[0] // _GATES, (gate + 1) * w[0] // _GATES)
                for part, array in zip(
                    self._places(number, gate, self._gradients), parts, strict=True
                ):
                    array[rows] = self._view(part, array[rows].shape).get()
            found.append(Layer(*parts))
        return found

    def _copy_in(self, number: int, layer: Layer) -> None:
        arrays = layer.w, layer.r, layer.b
        for gate in range(_GATES):
            rows = slice(gate * len(layer.b) // _GATES, (gate + 1) * len(layer.b) // _GATES)
            for part, array in zip(self._places(number, gate, self._weights), arrays, strict=True):
                own = np.ascontiguousarray(array[rows], self.dtype)
                self._view(part, own.shape).set(own)

    def _places(self, layer: int, gate: int, block: Any) -> tuple[int, int, int]:
        """Addresses of w, r and b of a gate in `block`."""
        matrices, biases = [], []
        for number in (gate, gate + _GATES):
            shapes = [self._new("cudnnCreateTensorDescriptor") for _ in range(2)]
            matrix, bias = ctypes.c_void_p(), ctypes.c_void_p()
            self._call(
                "cudnnGetRNNWeightParams",
                self._handle,
                self._rnn,
                layer,
                *_sized(block),
                number,
                shapes[0],
                ctypes.byref(matrix),
                shapes[1],
                ctypes.byref(bias),
            )
            matrices.append(matrix.value or 0)
            biases.append(bias.value or 0)
            for one in shapes:
                self._call("cudnnDestroyTensorDescriptor", one)
        return matrices[0], matrices[1], biases[0]

    def _view(self, address: int, shape: tuple[int, ...]) -> Any:
        owner = self._weights
        size = int(np.prod(shape)) * self.dtype.itemsize
        memory = cupy.cuda.UnownedMemory(address, size, owner)
        return cupy.ndarray(shape, self.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def _sequence(self, kind: int, steps: int, batch: int, size: int) -> ctypes.c_void_p:
        made = self._new("cudnnCreateRNNDataDescriptor")
        lengths = (ctypes.c_int * batch)(*[steps] * batch)
        self._call(
            "cudnnSetRNNDataDescriptor",
            made,
            kind,
            _UNPACKED_TIME_FIRST,
            steps,
            batch,
            size,
            lengths,
            None,
        )
        return made

    def _new(self, function: str) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(function, ctypes.byref(made))
        return made

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            text = self._library.cudnnGetErrorString(status).decode()
            kind = NotSupported if status // 1000 * 1000 == _NOT_SUPPORTED else DeviceError
            raise kind(f"{function}: {text}")


def _at(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data.ptr)


def _sized(block: Any) -> tuple[ctypes.c_size_t, ctypes.c_void_p]:
    return ctypes.c_size_t(block.nbytes), _at(block)
