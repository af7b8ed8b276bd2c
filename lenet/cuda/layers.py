"""A network layer by layer: cuDNN's fused operations and our kernels, over fixed buffers.

The buffers are taken once, so the launches can be captured into a CUDA graph and replayed. What is
fused with what is `fusion`'s affair. It refuses to copy images or answers: that is the plan's work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from lenet.cuda import fusion
from lenet.cuda.device import Handle
from lenet.cuda.engines import Planner
from lenet.cuda.epilogue import THREADS, TailShape
from lenet.cuda.graphs import Convolution, Operation, Precision, Product, Uid
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.memory import Arena, Buffers
from lenet.cuda.packing import padded
from lenet.cuda.weights import DeviceWeights
from lenet.model import RELU, Block, BlockShape, ConvBlock, DenseBlock, Model
from lenet.nvtx import span
from lenet.pixels import HEIGHT, WIDTH

# Smaller convolutions cost little more than their launch; of a smaller product cuDNN's first plan
# was 1 us behind its best one, and each plan tried costs the first start 0.2 s (H200, 2026-11-20).
_TUNED_FROM_ROWS = {Convolution: 256, Product: 1024}
_WIDE_FROM_ROWS = 512  # from here on a block of conv1.cu takes two images
_TALL_FROM_ROWS = 4096  # from here on a warp of dense_softmax.cu takes two rows
_FIRST_BLOCKS = 4  # of conv1.cu, resident on a multiprocessor


@dataclass(frozen=True, slots=True)
class Tools:
    """What all buckets of a backend build with; `weights` as `fusion.pack_layers` makes them."""

    handle: Handle
    precision: Precision
    weights: DeviceWeights
    planner: Planner
    kernels: Kernels
    arena: Arena


class Layers:
    """The launches of `model` for one batch, over `buffers` and what it takes of the arena.

    Raises:
        DeviceError: cuDNN has no plan for a layer.
    """

    def __init__(self, model: Model, buffers: Buffers, tools: Tools) -> None:
        self._model, self._rows, self._precision = model, buffers.rows, tools.precision
        self._tools, self._arena, self._kernels = tools, tools.arena, tools.kernels
        self._dtype = cupy.float16 if tools.precision == "fp16" else cupy.float32
        self._scalar = "__half" if tools.precision == "fp16" else "float"
        self._launches: list[tuple[str, Callable[[], None]]] = []
        rest = list(zip(model.blocks, model.shapes(), strict=True))
        if fusion.is_first(model.blocks[0], tools.precision):
            x = self._first(*rest.pop(0), buffers.pixels)
        else:
            x = self._unpack(buffers.pixels)
        *hidden, (_, last) = rest
        for block, shape in hidden:
            x = self._block(block, shape.name, x)
        self._last(last.name, x, buffers)

    def queue(self) -> None:
        """Compute all rows, from and to the device; each layer in a range of its name."""
        for name, launch in self._launches:
            with span(name):
                launch()

    def _first(self, block: Block, shape: BlockShape, pixels: Any) -> Any:
        assert isinstance(block, ConvBlock), "bug: not a convolution"
        images = 2 if self._rows >= _WIDE_FROM_ROWS else 1
        macros = fusion.first_macros(block, shape) | {"SCALAR": self._scalar, "IMAGES": images}
        _, oh, ow = shape.output
        c = padded(block.channels)
        y = self._arena.take((self._rows, oh, ow, c), self._dtype)
        kernel = self._kernels.get(FOLDER / "conv1.cu", "first_convolution", macros)
        weight, bias = self._tensors(shape.name)
        grid = (
            min(-(-self._rows // images), _FIRST_BLOCKS * self._tools.handle.multiprocessors),
            len(weight),
        )
        arguments = (pixels, weight, bias, y, np.int32(self._rows))
        self._add(shape.name, lambda: kernel(grid, (128,), arguments))
        return y

    def _unpack(self, pixels: Any) -> Any:
        x = self._arena.take((self._rows, HEIGHT, WIDTH, 1), self._dtype)
        grid = (-(-x.size // (16 * THREADS)),)
        kernel = self._kernels.get(FOLDER / "unpack.cu", "unpack", {"SCALAR": self._scalar})
        arguments = (pixels, x, np.int32(self._rows))
        self._add("unpack", lambda: kernel(grid, (THREADS,), arguments))
        return x

    def _block(self, block: Block, name: str, x: Any) -> Any:
        weight, bias = self._tensors(name)
        fused = fusion.is_fused(block, self._precision)
        relu = fused and block.activation == RELU
        if isinstance(block, ConvBlock):
            geometry = block.stride, block.padding, block.dilation
            convolution = Convolution(
                "forward", self._precision, x.shape, weight.shape, *geometry, bias=fused, relu=relu
            )
            y = self._arena.take(convolution.output, self._dtype)
            self._cudnn(name, convolution, x, weight, bias if fused else None, y)
        else:
            x, (n, k) = x.reshape(self._rows, -1), weight.shape
            y = self._arena.take((self._rows, n), self._dtype)
            if self._precision == "fp32":
                product = self._tools.handle.cublas.product
                self._add(name, lambda: product(x, weight, y, "fp32", transpose_b=True))
            else:
                operation = Product(self._precision, self._rows, n, k, bias=fused, relu=relu)
                self._cudnn(name, operation, x, weight, bias if fused else None, y)
        return y if fused else self._tail(block, name, y, bias)

    def _cudnn(
        self, name: str, operation: Operation, x: Any, weight: Any, bias: Any | None, y: Any
    ) -> None:
        plan = self._tools.planner.plan(operation, self._rows >= _TUNED_FROM_ROWS[type(operation)])
        addresses = {Uid.INPUT: x, Uid.WEIGHT: weight, Uid.OUTPUT: y}
        if bias is not None:
            addresses[Uid.BIAS] = bias
        self._add(name, lambda: plan.run(addresses))

    def _tail(self, block: Block, name: str, x: Any, bias: Any) -> Any:
        h, w = x.shape[1:3] if x.ndim == 4 else (1, 1)
        pool = block.pool if isinstance(block, ConvBlock) else None
        channels = block.units if isinstance(block, DenseBlock) else block.channels
        shape = TailShape(h, w, x.shape[-1], channels, pool, block.activation, False, self._scalar)
        y = self._arena.take((self._rows, *shape.output, shape.c), self._dtype)
        tiles, _ = shape.tiles()
        grid = shape.blocks(self._rows * math.prod(shape.output)), tiles
        kernel = self._kernels.get(FOLDER / "epilogue.cu", "epilogue_forward", shape.macros())
        null = np.uintp(0)
        arguments = (x, null, null, null, bias, y, null, np.int32(self._rows))
        self._add(f"{name}.tail", lambda: kernel(grid, (THREADS,), arguments))
        return y if x.ndim == 4 else y.reshape(self._rows, shape.c)

    def _last(self, name: str, x: Any, buffers: Buffers) -> None:
        weight, bias = self._tensors(name)
        flat = x.reshape(self._rows, -1)
        rows = 2 if self._rows >= _TALL_FROM_ROWS else 1
        macros = {
            "SCALAR": self._scalar,
            "I": flat.shape[1],
            "CLASSES": self._model.classes,
            "ROWS": rows,
        }
        kernel = self._kernels.get(FOLDER / "dense_softmax.cu", "last_dense_softmax", macros)
        grid = (-(-self._rows // (4 * rows)),)  # four warps a block
        answers = buffers.logits, buffers.probabilities
        arguments = (flat, weight, bias, *answers, np.int32(self._rows))
        self._add(name, lambda: kernel(grid, (128,), arguments))

    def _tensors(self, name: str) -> tuple[Any, Any]:
        weights = self._tools.weights
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    def _add(self, name: str, launch: Callable[[], None]) -> None:
        self._launches.append((name, launch))
