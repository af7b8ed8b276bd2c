"""The strategy "layer by layer": cuDNN's fused operations and our kernels, over fixed buffers.

    first two            `convolutions`: one kernel from pixels to the second's pooled activations.
                         Where it does not support them, or the network has one convolution:
    first convolution    `conv1`: one kernel from pixels to pooled activations. Where it does not
                         support the block: `unpack.cu`, then as any other convolution
    convolution          cuDNN, then the `epilogue`: bias, activation, pooling. Without pooling
                         cuDNN adds the bias and applies ReLU itself
    dense                of few rows by `dense.cu`, of many in float32 by `dense_halves.cu`; else
                         cuBLAS with bias and ReLU. With another activation cuBLAS, then the
                         epilogue
    last dense           `dense_softmax.cu`: product, bias and softmax in one kernel

This is with our kernels. Without them, cuDNN computes every convolution and cuBLAS every product;
what is left for us is `unpack.cu`, the epilogue, and `bias_softmax.cu` behind the last product.
Where cuBLAS has no algorithm for a product, `dense.cu` or `dense_softmax.cu` computes the layer.

The buffers are taken once, so the launches can be captured into a CUDA graph and replayed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lenet.cuda import conv1, dense_halves, epilogue
from lenet.cuda.capture import Launch
from lenet.cuda.convolutions import Convolutions
from lenet.cuda.device import Handle, Limits
from lenet.cuda.graphs import Convolution, Precision, Uid
from lenet.cuda.halves import largest_input
from lenet.cuda.kernels import FOLDER, NULL, Kernels, Macros, scalar, storage_dtype
from lenet.cuda.packing import PIXEL_SCALE, layout, padded
from lenet.errors import BackendUnavailable
from lenet.model import IDENTITY, RELU, Block, BlockShape, ConvBlock, DenseBlock, Model
from lenet.nvtx import span
from lenet.pixels import HEIGHT, WIDTH
from lenet.weightfile import WeightFile

if TYPE_CHECKING:  # these import CuPy, which packing does not need
    from lenet.cuda.cublas import Product
    from lenet.cuda.engines import EngineCatalog
    from lenet.cuda.memory import Arena, Buffers, Workspace
    from lenet.cuda.weights import DeviceWeights

_log = logging.getLogger(__name__)

MAX_CLASSES = 64
"""A thread of `dense_softmax.cu` has a sum of each class in a register."""

# Smaller convolutions cost little more than their launch. With cuDNN's first choice 32 images took
# 44 us, and 256 with the fastest one 36 (TF32, two of 3x3, stride 2, H100, 2026-11-26).
_TUNED_FROM_ROWS = 16
# A warp of dense_softmax.cu takes two rows from so many rows on, of up to so many classes.
_TWO_ROWS_FROM_ROWS = 4096
_TWO_ROWS_CLASSES = 32
# Up to so many rows and multiplications `dense.cu` is as fast as cuBLAS or faster, but for 1 us at
# most (H100, 2026-11-25, docs/benchmarks/dense-h100.txt).
_DENSE_ROWS = 256
_DENSE_MULTIPLICATIONS: dict[Precision, int] = {
    "fp16": 13 << 20,
    "tf32": 16 << 20,
    "fp32": 32 << 20,
}
_ROWS_OF_A_WARP = 8  # in dense.cu
_FUSED_ACTIVATIONS = (IDENTITY, RELU)
_WEIGHT_COPIES = 9  # three for each of two strategies, and of halves


def check(model: Model) -> None:
    """Check that the kernels support `model`.

    Raises:
        BackendUnavailable: the message names the model, and what it has and may have.
    """
    if isinstance(model.blocks[0], ConvBlock) and model.input != (1, HEIGHT, WIDTH):
        raise BackendUnavailable(
            f"model {model.name!r} has a convolution of an image of {model.input}, expected "
            f"{(1, HEIGHT, WIDTH)} on a GPU",
            "use the cpu device",
        )
    if model.classes > MAX_CLASSES:
        raise BackendUnavailable(
            f"model {model.name!r} has {model.classes} classes, expected at most {MAX_CLASSES} on "
            "a GPU",
            "use the cpu device",
        )


def is_small(rows: int, weights: int, precision: Precision) -> bool:
    """Whether `dense.cu` computes a hidden dense layer of so many weights."""
    return rows <= _DENSE_ROWS and rows * weights <= _DENSE_MULTIPLICATIONS[precision]


def takes_halves(model: Model, name: str, precision: Precision, limits: Limits) -> bool:
    """Whether `dense_halves.cu` computes this layer for many rows: a hidden dense one."""
    names = [shape.name for shape in model.shapes()]
    before = names.index(name)
    return (
        name != names[-1]
        and isinstance(model.blocks[before], DenseBlock)
        and dense_halves.is_supported(precision, limits, before)
    )


def is_fused(block: Block) -> bool:
    """Whether cuDNN or cuBLAS computes the whole epilogue of `block`."""
    pooled = isinstance(block, ConvBlock) and block.pool is not None
    return block.activation in _FUSED_ACTIVATIONS and not pooled


def pack(
    file: WeightFile, precision: Precision, limits: Limits, own: bool = True
) -> dict[str, Any]:
    """The tensors of `file` under their canonical names, as the layers read them.

    `own`: whether our kernels are used.
    """
    model, dtype = file.model, storage_dtype(precision)
    layouts, shapes = layout(model), model.shapes()
    packed: dict[str, Any] = {}
    both = Convolutions.of(model, precision, limits) if own else None
    for block, shape in zip(model.blocks, shapes, strict=True):
        names = f"{shape.name}.weight", f"{shape.name}.bias"
        weight, bias = (file.tensors[name] for name in names)
        first = shape is shapes[0]
        by_conv1 = own and both is None and first and conv1.is_supported(block, precision)
        if both is not None and shape in shapes[:2]:
            packed[names[0]] = both.pack_first(weight) if first else both.pack_second(weight)
        elif by_conv1:
            packed[names[0]] = conv1.fragments(weight, conv1.parts(precision))
        else:
            scaled = weight * np.float32(PIXEL_SCALE) if first else weight
            packed[names[0]] = layouts[names[0]].pack(scaled).astype(dtype)
            if isinstance(block, ConvBlock) and precision == "fp32":
                # Without tensor cores cuDNN is faster without the padding: 1.0 and 1.5 ms for 8,192
                # images of 20 -> 50 channels (H100, 2026-11-26).
                packed[names[0]] = packed[names[0]][..., : shape.input[0]]
        if own and takes_halves(model, shape.name, precision, limits):
            wide, largest = packed[names[0]], largest_input(file, shape.name)
            packed[f"{shape.name}.halves"] = dense_halves.pack(wide)
            packed[f"{shape.name}.factors"] = dense_halves.factors(wide, largest)
        if both is not None and precision == "fp32" and shape is shapes[1]:
            first_weight, first_bias = (
                file.tensors[f"{shapes[0].name}.{kind}"] for kind in ("weight", "bias")
            )
            packed[f"{shape.name}.scales"] = both.scales(first_weight, first_bias, weight)
        # A bias that a library adds has the type of the activations; our kernels add float32.
        added_by_library = is_fused(block) and shape is not shapes[-1] and not by_conv1
        wide = layouts[names[1]].pack(bias)
        packed[names[1]] = wide.astype(dtype if added_by_library else np.float32)
    return packed


def estimate_bytes(model: Model, rows: int, precision: Precision) -> int:
    """About the most device memory that a backend takes for batches of up to `rows` images.

    Images, answers, the output of each layer before and after its pooling, and the weights; without
    the workspaces of cuDNN and cuBLAS and what CUDA takes for itself.
    """
    width = storage_dtype(precision).itemsize
    row_bytes = HEIGHT * WIDTH + 2 * 4 * model.classes
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        by_conv1 = block is model.blocks[0] and conv1.is_supported(block, precision)
        for channels, *sides in (shape.output,) if by_conv1 else (shape.linear, shape.output):
            wide = channels if isinstance(block, DenseBlock) else padded(channels)
            row_bytes += width * wide * math.prod(sides)
    weights = sum(math.prod(shape) for shape in model.parameters().values())
    return rows * row_bytes + 4 * _WEIGHT_COPIES * weights


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Shared by the buckets of a backend; `weights` are packed by `pack` for the same `own`."""

    handle: Handle
    precision: Precision
    weights: DeviceWeights
    engines: EngineCatalog
    kernels: Kernels
    arena: Arena
    workspace: Workspace
    own: bool
    """Whether our kernels are used."""


class LayerByLayer:  # pragma: no cover - needs a GPU
    """The launches of `model` for one bucket, over `buffers` and others taken from the arena.

    Raises:
        DeviceError: cuDNN has no engine for a layer.
    """

    def __init__(self, model: Model, buffers: Buffers, build: BuildContext) -> None:
        self.layers: dict[str, str] = {}
        """Who computes each layer: cudnn, cublas, or the name of a kernel of ours."""
        self._model, self._rows, self._build = model, buffers.rows, build
        self._dtype = storage_dtype(build.precision)
        self._launches: list[tuple[str, Launch]] = []
        self._from_host: list[tuple[str, Launch]] = []
        blocks = list(zip(model.blocks, model.shapes(), strict=True))
        first, first_shape = blocks[0]
        limits = build.handle.limits
        both = Convolutions.of(model, build.precision, limits) if build.own else None
        if both is not None:
            x, rest = self._convolutions(both, buffers), blocks[2:]
        elif build.own and conv1.is_supported(first, build.precision):
            assert isinstance(first, ConvBlock), "bug: not a convolution"
            x, rest = self._conv1(first, first_shape, buffers), blocks[1:]
        else:
            x, rest = self._unpack(buffers), blocks
        *hidden, (_, last) = rest
        for block, shape in hidden:
            x = self._block(block, shape.name, x)
        self._last(last.name, x, buffers)

    def queue(self) -> None:
        """Compute all rows, from device memory to device memory; an NVTX range for each layer."""
        _queue(self._launches)

    def queue_from_host(self) -> None:
        """Compute all rows without copies: pixels and probabilities lie in page-locked host memory.

        The first kernel reads the pixels while it computes, and the last one writes each
        probability once.
        """
        _queue(self._from_host)

    def _add(self, name: str, launch: Launch, from_host: Launch | None = None) -> None:
        self._launches.append((name, launch))
        self._from_host.append((name, from_host or launch))

    def _convolutions(self, both: Convolutions, buffers: Buffers) -> Any:
        first, second, *_ = both.model.shapes()
        _, oh, ow = second.output
        y = self._take(oh, ow, padded(both.second.channels))
        weights, biases = zip(self._tensors(first.name), self._tensors(second.name), strict=True)
        kernels, limits = self._build.kernels, self._build.handle.limits
        fp32 = self._build.precision == "fp32"
        scales = self._build.weights[f"{second.name}.scales"] if fp32 else NULL
        self._add(
            f"{first.name}, {second.name}",
            *(
                both.launch(kernels, limits, pixels, weights, biases, scales, y)
                for pixels in (buffers.pixels, buffers.pixels_on_host)
            ),
        )
        self.layers |= dict.fromkeys((first.name, second.name), "convolutions")
        return y

    def _conv1(self, block: ConvBlock, shape: BlockShape, buffers: Buffers) -> Any:
        _, oh, ow = shape.output
        y = self._take(oh, ow, padded(block.channels))
        kernels, multiprocessors = self._build.kernels, self._build.handle.multiprocessors
        weight, bias = self._tensors(shape.name)
        self._add(
            shape.name,
            *(
                conv1.launch(kernels, multiprocessors, block, shape, pixels, weight, bias, y)
                for pixels in (buffers.pixels, buffers.pixels_on_host)
            ),
        )
        self.layers[shape.name] = "first_convolution"
        return y

    def _unpack(self, buffers: Buffers) -> Any:
        x = self._take(HEIGHT, WIDTH, 1)
        grid = (-(-x.size // (16 * epilogue.THREADS)),)
        macros = {"SCALAR": scalar(self._dtype)}
        kernel = self._build.kernels.get(FOLDER / "unpack.cu", "unpack", macros)
        rows = np.int32(self._rows)
        self._add(
            "unpack",
            *(
                partial(kernel, grid, (epilogue.THREADS,), (pixels, x, rows))
                for pixels in (buffers.pixels, buffers.pixels_on_host)
            ),
        )
        return x

    def _block(self, block: Block, name: str, x: Any) -> Any:
        weight, bias = self._tensors(name)
        precision = self._build.precision
        fused = is_fused(block)
        relu = fused and block.activation == RELU
        if isinstance(block, ConvBlock):
            geometry = block.stride, block.padding, block.dilation
            image, pitch = (*x.shape[:3], weight.shape[3]), x.shape[3]
            operation = Convolution(
                "forward",
                *(precision, image, weight.shape, *geometry),
                bias=fused,
                relu=relu,
                pitch=0 if pitch == weight.shape[3] else pitch,
            )
            y = self._take(*operation.output[1:])
            self._cudnn(name, operation, x, weight, bias, y)
        else:
            x, y = x.reshape(self._rows, -1), self._take(len(weight))
            own, limits = self._build.own, self._build.handle.limits
            many = own and self._rows >= dense_halves.FROM_ROWS
            if many and takes_halves(self._model, name, precision, limits):
                self._dense_halves(block, name, x, bias, y)
                return y
            small = own and is_small(self._rows, weight.size, precision)
            if small or not self._cublas(name, x, weight, bias if fused else None, y, relu):
                self._dense(block, name, x, weight, bias, y)
                return y
        return y if fused else self._epilogue(block, name, y, bias)

    def _dense(self, block: DenseBlock, name: str, x: Any, weight: Any, bias: Any, y: Any) -> None:
        macros: Macros = {
            "SCALAR": scalar(self._dtype),
            "BIAS": scalar(bias.dtype),
            "I": x.shape[1],
            "U": y.shape[1],
            "UNITS": block.units,
            "ROWS": min(self._rows, _ROWS_OF_A_WARP),
            "ACTIVATION": block.activation.kind,
            "PARAMETER": float(block.activation.parameter),
        }
        kernel = self._build.kernels.get(FOLDER / "dense.cu", "dense", macros)
        grid = y.shape[1] // 4, -(-self._rows // _ROWS_OF_A_WARP)
        arguments = (x, weight, bias, y, np.int32(self._rows))
        self._add(name, partial(kernel, grid, (128,), arguments))
        self.layers[name] = "dense"

    def _dense_halves(self, block: DenseBlock, name: str, x: Any, bias: Any, y: Any) -> None:
        weights, limits = self._build.weights, self._build.handle.limits
        tensors = weights[f"{name}.halves"], bias, weights[f"{name}.factors"]
        kernels = self._build.kernels
        self._add(name, dense_halves.launch(kernels, limits, block, x, *tensors, y))
        self.layers[name] = "dense_halves"

    def _cublas(
        self, name: str, x: Any, weight: Any, bias: Any, y: Any, relu: bool = False
    ) -> bool:
        """Have cuBLAS compute it; False if it has no algorithm, which is logged."""
        handle, workspace = self._build.handle, self._build.workspace
        product = handle.cublas_lt.product(x, weight, bias, y, self._build.precision, relu)
        if product is None:
            report_once(
                f"model {self._model.name}: our kernel computes {name}, as cuBLAS has no algorithm "
                f"for it in {self._build.precision} on this {handle.name}"
            )
            return False
        workspace.reserve(product.workspace_bytes)
        self._add(name, partial(_run_product, product, handle, workspace))
        self.layers[name] = "cublas"
        return True

    def _cudnn(
        self, name: str, operation: Convolution, x: Any, weight: Any, bias: Any, y: Any
    ) -> None:
        engine = self._build.engines.engine(operation, self._rows >= _TUNED_FROM_ROWS)
        addresses = {Uid.INPUT: x, Uid.WEIGHT: weight, Uid.OUTPUT: y}
        if operation.bias:
            addresses[Uid.BIAS] = bias
        self._add(name, partial(engine.run, addresses))
        self.layers[name] = "cudnn"

    def _epilogue(self, block: Block, name: str, x: Any, bias: Any) -> Any:
        h, w = x.shape[1:3] if x.ndim == 4 else (1, 1)
        pool = block.pool if isinstance(block, ConvBlock) else None
        channels = block.units if isinstance(block, DenseBlock) else block.channels
        shape = epilogue.EpilogueShape(
            h, w, x.shape[-1], channels, pool, block.activation, False, scalar(self._dtype)
        )
        y = self._take(*(shape.output if x.ndim == 4 else ()), shape.c)
        launch = epilogue.launch(self._build.kernels, shape, x, bias, y)
        self._add(f"{name}.epilogue", launch)
        return y

    def _last(self, name: str, x: Any, buffers: Buffers) -> None:
        weight, bias = self._tensors(name)
        flat = x.reshape(self._rows, -1)
        if not self._build.own:
            y = self._build.arena.take((self._rows, len(weight)), np.float32)
            if self._cublas(name, flat, weight, None, y):
                self._bias_softmax(name, y, bias, buffers)
                return
        self._dense_softmax(name, flat, weight, bias, buffers)

    def _bias_softmax(self, name: str, x: Any, bias: Any, buffers: Buffers) -> None:
        macros = {"PITCH": x.shape[1], "CLASSES": buffers.logits.shape[1]}
        kernel = self._build.kernels.get(FOLDER / "bias_softmax.cu", "bias_softmax", macros)
        grid = (-(-self._rows // 4),)  # four warps a block
        self._add(
            f"{name}.epilogue",
            *(
                partial(
                    kernel, grid, (128,), (x, bias, buffers.logits, answers, np.int32(self._rows))
                )
                for answers in (buffers.probabilities, buffers.probabilities_on_host)
            ),
        )

    def _dense_softmax(
        self, name: str, flat: Any, weight: Any, bias: Any, buffers: Buffers
    ) -> None:
        classes = buffers.logits.shape[1]
        rows = 2 if self._rows >= _TWO_ROWS_FROM_ROWS and classes <= _TWO_ROWS_CLASSES else 1
        macros = {
            "SCALAR": scalar(self._dtype),
            "I": flat.shape[1],
            "CLASSES": classes,
            "ROWS": rows,
        }
        source = FOLDER / "dense_softmax.cu"
        kernel = self._build.kernels.get(source, "dense_softmax", macros)
        grid = (-(-self._rows // (4 * rows)),)  # four warps a block
        given = (flat, weight, bias, buffers.logits)
        self._add(
            name,
            *(
                partial(kernel, grid, (128,), (*given, answers, np.int32(self._rows)))
                for answers in (buffers.probabilities, buffers.probabilities_on_host)
            ),
        )
        self.layers[name] = "dense_softmax"

    def _tensors(self, name: str) -> tuple[Any, Any]:
        weights = self._build.weights
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    def _take(self, *shape: int) -> Any:
        return self._build.arena.take((self._rows, *shape), self._dtype)


@cache
def report_once(text: str) -> None:
    """Log `text` once a process, whatever the number of contexts and batch sizes."""
    _log.warning(text)


def _run_product(product: Product, handle: Handle, workspace: Workspace) -> None:
    product.run(handle.stream, workspace.pointer)


def _queue(launches: list[tuple[str, Launch]]) -> None:  # pragma: no cover - needs a GPU
    for name, launch in launches:
        with span(name):
            launch()
