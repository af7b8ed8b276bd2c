"""Convolutions by cuDNN and products by cuBLAS, forward and backward.

Nothing but the end of the step waits for the gradient of a weight. So weight gradients are queued
on a second stream, with handles and a workspace of its own, and run beside the backward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import numpy as np

from lenet.cuda.cublas import Arithmetic
from lenet.cuda.device import Handle
from lenet.cuda.engines import Engine, EngineCatalog
from lenet.cuda.graphs import Convolution, Uid
from lenet.cuda.kernels import Kernels, Macros, scalar, storage_dtype
from lenet.cuda.memory import Arena
from lenet.model import ConvBlock
from trainer.ops_cuda import first_filter
from trainer.ops_cuda.parameters import Parameter
from trainer.ops_cuda.state import FOLDER

_COUNTERS = 4096


class SavedConvolution(NamedTuple):
    """Saved for the gradients of a convolution."""

    x: Any
    weight: Parameter
    forward: Convolution


class SavedProduct(NamedTuple):
    """Saved for the gradients of a product; `x` has the shape that `dense` was given."""

    x: Any
    weight: Parameter


class Linear:
    """Convolutions and products on `main`'s stream, weight gradients on `wgrad_handle`'s.

    `engines` are those of the two handles, in this order.
    """

    def __init__(
        self,
        main: Handle,
        wgrad_handle: Handle,
        engines: tuple[EngineCatalog, EngineCatalog],
        kernels: Kernels,
        arena: Arena,
        arithmetic: Arithmetic,
    ) -> None:
        self._main, self._wgrad_handle = main, wgrad_handle
        self._engines, self._wgrad_engines = engines
        self._kernels, self._arena = kernels, arena
        self._arithmetic = arithmetic
        self._dtype = storage_dtype(arithmetic)
        # Zeros between any two launches of first_filter.cu.
        self._counters = cupy.zeros(_COUNTERS, cupy.uint32)
        for handle in (main, wgrad_handle):
            _ = handle.cublas  # its first use allocates memory, which a capture forbids

    def engine(self, convolution: Convolution) -> Engine:
        """The engine that computes `convolution`, chosen at its first use."""
        wgrad = convolution.direction == "filter"
        return (self._wgrad_engines if wgrad else self._engines).engine(convolution)

    def forward(self, x: Any, weight: Parameter, block: ConvBlock) -> Convolution:
        """The description of `convolution`."""
        geometry = block.stride, block.padding, block.dilation
        return Convolution("forward", self._arithmetic, x.shape, weight.master.shape, *geometry)

    def convolution(
        self, x: Any, weight: Parameter, block: ConvBlock
    ) -> tuple[Any, SavedConvolution]:
        """(n, h, w, c) -> (n, oh, ow, k)."""
        forward = self.forward(x, weight, block)
        y = self._arena.take(forward.output, self._dtype)
        operand = weight.operand(self._dtype)
        self.engine(forward).run({Uid.INPUT: x, Uid.WEIGHT: operand, Uid.OUTPUT: y})
        return y, SavedConvolution(x, weight, forward)

    def convolution_weight_gradient(self, dy: Any, saved: SavedConvolution) -> Any:
        """(k, r, s, c), in the dtype of the arithmetic, or float32 from `first_filter.cu`."""
        x, weight, forward = saved
        with self._wgrad_handle.fork(self._main):
            if first_filter.fits(forward):
                return self._first_filter(x, dy, forward)
            dweight = self._arena.take(weight.master.shape, self._dtype)
            engine = self.engine(replace(forward, direction="filter"))
            engine.run({Uid.INPUT: x, Uid.WEIGHT: dy, Uid.OUTPUT: dweight})
            return dweight

    def convolution_input_gradient(self, dy: Any, saved: SavedConvolution) -> Any:
        """(n, h, w, c)."""
        x, weight, forward = saved
        dx = self._arena.take(x.shape, self._dtype)
        operand = weight.operand(self._dtype)
        engine = self.engine(replace(forward, direction="data"))
        engine.run({Uid.INPUT: dy, Uid.WEIGHT: operand, Uid.OUTPUT: dx})
        return dx

    def dense(self, x: Any, weight: Parameter) -> tuple[Any, SavedProduct]:
        """(n, inputs) or (n, h, w, c) -> (n, units)."""
        y = self._arena.take((len(x), len(weight.master)), self._dtype)
        operand = weight.operand(self._dtype)
        flat = x.reshape(len(x), -1)
        self._main.cublas.product(flat, operand, y, self._arithmetic, transpose_b=True)
        return y, SavedProduct(x, weight)

    def dense_weight_gradient(self, dy: Any, saved: SavedProduct) -> Any:
        """One product, dW = dy^T x: float32 (units, inputs)."""
        x, weight = saved
        dweight = self._arena.take(weight.master.shape, cupy.float32)
        with self._wgrad_handle.fork(self._main):
            self._wgrad_handle.cublas.product(
                dy, x.reshape(len(x), -1), dweight, self._arithmetic, transpose_a=True
            )
        return dweight

    def dense_input_gradient(self, dy: Any, saved: SavedProduct) -> Any:
        """One product, dx = dy W, in the shape of x."""
        x, weight = saved
        dx = self._arena.take((len(x), weight.master.shape[1]), self._dtype)
        self._main.cublas.product(dy, weight.operand(self._dtype), dx, self._arithmetic)
        return dx.reshape(x.shape)

    def _first_filter(self, x: Any, dy: Any, forward: Convolution) -> Any:
        """The gradient, float32 (k, r, s, 1), from x (n, h, w, 1) and dy (n, oh, ow, k)."""
        blocks, tiles = first_filter.grid(forward, self._wgrad_handle.multiprocessors)
        assert (blocks // first_filter.GROUP + 2) * tiles <= _COUNTERS, "bug: too few counters"
        _, r, s, _ = forward.filters
        partial = self._arena.take((blocks * tiles * r * s * 32,), cupy.float32)
        dweight = self._arena.take(forward.filters, cupy.float32)
        macros: Macros = {"SCALAR": scalar(x.dtype), **first_filter.macros(forward)}
        kernel = self._kernels.get(FOLDER / "first_filter.cu", "first_filter_gradient", macros)
        kernel(
            (blocks, tiles),
            (first_filter.THREADS,),
            (x, dy, partial, self._counters, dweight, np.int32(len(x))),
        )
        return dweight
