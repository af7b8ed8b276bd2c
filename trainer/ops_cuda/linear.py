"""The linear part of a block, forward and backward: convolutions by cuDNN, products by cuBLAS.

Nothing but the end of the step waits for the gradient of a weight, while the backward pass goes on
through that of the input; so weights' gradients are queued on a second stream, with handles and a
workspace of its own, and run beside everything else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import cupy

from lenet.cuda.cublas import Arithmetic
from lenet.cuda.device import Handle
from lenet.cuda.engine_cache import PlanCache
from lenet.cuda.engines import Planner
from lenet.cuda.graphs import Convolution, Uid
from lenet.cuda.kernels import Kernels
from lenet.cuda.memory import Arena, Workspace
from lenet.model import ConvBlock
from trainer.bounds import first_filter_fits
from trainer.ops_cuda.first_filter import FirstFilter
from trainer.ops_cuda.parameters import Parameter


class Convolved(NamedTuple):
    """What the backward of a convolution needs."""

    x: Any
    weight: Parameter
    forward: Convolution


class Multiplied(NamedTuple):
    """What the backward of a product needs; `x` as it was given."""

    x: Any
    weight: Parameter


class Linear:
    """Convolutions and products on `main`'s stream, weights' gradients on `aside`'s."""

    def __init__(
        self,
        main: Handle,
        aside: Handle,
        kernels: Kernels,
        arena: Arena,
        arithmetic: Arithmetic,
        cache: PlanCache | None,
        autotune: bool,
    ) -> None:
        self._main, self._aside, self._arena = main, aside, arena
        self._arithmetic = arithmetic
        self._dtype = cupy.float16 if arithmetic == "fp16" else cupy.float32
        self.planners = tuple(
            Planner(handle, Workspace(), cache, autotune) for handle in (main, aside)
        )
        self._first_filter = FirstFilter(aside, kernels, arena)

    def convolution(self, x: Any, weight: Parameter, block: ConvBlock) -> tuple[Any, Convolved]:
        """(n, h, w, c) -> (n, oh, ow, k)."""
        forward = Convolution(
            "forward",
            self._arithmetic,
            x.shape,
            weight.master.shape,
            block.stride,
            block.padding,
            block.dilation,
        )
        y = self._arena.take(forward.output, self._dtype)
        operand = weight.operand(self._dtype)
        plan = self.planners[0].plan(forward)
        plan.run({Uid.INPUT: x, Uid.WEIGHT: operand, Uid.OUTPUT: y})
        return y, Convolved(x, weight, forward)

    def convolution_backward(
        self, dy: Any, saved: Convolved, input_gradient: bool
    ) -> tuple[Any | None, Any]:
        """(dx, dweight); dweight in the dtype of the arithmetic, or float32 of the first filter."""
        x, weight, forward = saved
        with self._aside.fork(self._main):
            if not input_gradient and first_filter_fits(forward):
                dweight = self._first_filter.gradient(x, dy, forward)
            else:
                dweight = self._arena.take(weight.master.shape, self._dtype)
                plan = self._backward_plan(1, forward, "filter")
                plan.run({Uid.INPUT: x, Uid.WEIGHT: dy, Uid.OUTPUT: dweight})
        if not input_gradient:
            return None, dweight
        dx = self._arena.take(x.shape, self._dtype)
        operand = weight.operand(self._dtype)
        plan = self._backward_plan(0, forward, "data")
        plan.run({Uid.INPUT: dy, Uid.WEIGHT: operand, Uid.OUTPUT: dx})
        return dx, dweight

    def _backward_plan(
        self, lane: int, forward: Convolution, direction: Literal["filter", "data"]
    ) -> Any:
        return self.planners[lane].plan(replace(forward, direction=direction))

    def dense(self, x: Any, weight: Parameter) -> tuple[Any, Multiplied]:
        """(n, inputs) or (n, h, w, c) -> (n, units)."""
        y = self._arena.take((len(x), len(weight.master)), self._dtype)
        operand = weight.operand(self._dtype)
        flat = x.reshape(len(x), -1)
        self._main.cublas.product(flat, operand, y, self._arithmetic, transpose_b=True)
        return y, Multiplied(x, weight)

    def dense_backward(
        self, dy: Any, saved: Multiplied, input_gradient: bool
    ) -> tuple[Any | None, Any]:
        """Two products: dW = dy^T x, in float32, and dx = dy W."""
        x, weight = saved
        flat = x.reshape(len(x), -1)
        dweight = self._arena.take(weight.master.shape, cupy.float32)
        with self._aside.fork(self._main):
            self._aside.cublas.product(dy, flat, dweight, self._arithmetic, transpose_a=True)
        if not input_gradient:
            return None, dweight
        dx = self._arena.take(flat.shape, self._dtype)
        self._main.cublas.product(dy, weight.operand(self._dtype), dx, self._arithmetic)
        return dx.reshape(x.shape), dweight
