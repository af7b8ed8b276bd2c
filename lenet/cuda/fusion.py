"""What of a network is computed together when it is served, and its weights packed for that.

    first convolution    one kernel: bytes in, pooled activations out; where `conv1.cu` was not
                         written for it, `unpack.cu` and then as any other
    convolution          cuDNN, then `epilogue.cu`: bias, activation, pooling; without pooling cuDNN
                         adds bias and ReLU itself
    dense                cuDNN with bias and ReLU, or cuDNN and `epilogue.cu`
    last dense           one kernel: product, bias, softmax

Or all of it in the one kernel of `fused_network.cu`. Pure NumPy; it refuses to launch anything.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lenet.cuda.graphs import Precision
from lenet.cuda.packing import PIXEL_SCALE, first_fragments, layout, padded, whole_fragments
from lenet.errors import BackendUnavailable
from lenet.model import IDENTITY, RELU, Block, BlockShape, ConvBlock, DenseBlock, Model, Pool
from lenet.pixels import HEIGHT, WIDTH
from lenet.weightfile import WeightFile

MAX_CLASSES = 32
"""Of a network: in `dense_softmax.cu` each lane of a warp writes one."""

_BY_CUDNN = (IDENTITY, RELU)  # what it computes in the kernel of the convolution or product
_MAX_FILTER_STEPS = 8  # of 16 taps: conv1.cu keeps its filter in registers
_HOPPER = 90
_WITH_PARAMETER = ("clipped_relu", "elu")


def check(model: Model) -> None:
    """Refuse a network that the kernels were not written for.

    Raises:
        BackendUnavailable: the message names the model and what is too large.
    """
    if model.classes > MAX_CLASSES:
        raise BackendUnavailable(
            f"model {model.name!r} has {model.classes} classes, expected at most {MAX_CLASSES} on "
            "a GPU; use the cpu device"
        )


def is_first(block: Block, precision: Precision) -> bool:
    """Whether `conv1.cu` computes `block` as the first of a network."""
    if not isinstance(block, ConvBlock) or not _is_plain(block):
        return False
    r, s = block.kernel
    steps = -(-r * -(-s // 2) // 8)
    sides = zip((HEIGHT, WIDTH), block.padding, block.kernel, strict=True)
    return (
        (block.pool is None or _halves(block.pool))
        and all(side + 2 * padding - k >= 1 for side, padding, k in sides)
        and parts(precision) * steps <= _MAX_FILTER_STEPS
    )


def is_fused(block: Block, precision: Precision) -> bool:
    """Whether cuDNN computes the epilogue; not for fp32 products, see `graphs.Product`."""
    if isinstance(block, DenseBlock):
        return block.activation in _BY_CUDNN and precision != "fp32"
    return block.activation in _BY_CUDNN and block.pool is None


def is_whole(model: Model, capability: int) -> bool:
    """Whether `fused_network.cu` supports `model` on this compute capability (90 is 9.0).

    It may still be too large for a block's memory: then it does not compile.
    """
    kinds = tuple(type(block) for block in model.blocks)
    parameters = {
        block.activation.parameter
        for block in model.blocks
        if block.activation.kind in _WITH_PARAMETER
    }
    return (
        capability >= _HOPPER
        and kinds in ((DenseBlock,) * 2, (ConvBlock,) * 2 + (DenseBlock,) * 2)
        and all(
            isinstance(block, ConvBlock)
            and _is_plain(block)
            and block.pool is not None
            and _halves(block.pool)
            for block in model.blocks[:-2]
        )
        and len(parameters) <= 1
    )


def parts(precision: Precision) -> int:
    """Halves whose sum is a weight of `conv1.cu`."""
    return 1 if precision == "fp16" else 2


def pack_layers(file: WeightFile, precision: Precision) -> dict[str, Any]:
    """The tensors of `file` under their canonical names, as they are read layer by layer."""
    model, dtype = file.model, np.float16 if precision == "fp16" else np.float32
    layouts, shapes = layout(model), model.shapes()
    packed: dict[str, Any] = {}
    for block, shape in zip(model.blocks, shapes, strict=True):
        names = f"{shape.name}.weight", f"{shape.name}.bias"
        weight, bias = (file.tensors[name] for name in names)
        if shape is shapes[0] and is_first(block, precision):
            packed[names[0]] = first_fragments(weight, parts(precision))
        else:
            scaled = weight * np.float32(PIXEL_SCALE) if shape is shapes[0] else weight
            packed[names[0]] = layouts[names[0]].pack(scaled).astype(dtype)
        # What cuDNN adds has the type of the images, what our kernels add is float32.
        added_by_cudnn = (
            is_fused(block, precision)
            and shape is not shapes[-1]
            and not (shape is shapes[0] and is_first(block, precision))
        )
        wide = layouts[names[1]].pack(bias)
        packed[names[1]] = wide.astype(dtype if added_by_cudnn else np.float32)
    return packed


def pack_whole(file: WeightFile) -> dict[str, Any]:
    """The tensors of `file` by the names of the arguments of `fused_network.cu`."""
    return dict(whole_fragments(file.model, file.tensors))


def first_macros(block: ConvBlock, shape: BlockShape) -> dict[str, str | int | float]:
    """What `conv1.cu` is compiled with, but for SCALAR and IMAGES."""
    _, oh, ow = shape.output
    return {
        "H": shape.input[1],
        "W": shape.input[2],
        "R": block.kernel[0],
        "S": block.kernel[1],
        "PAD_H": block.padding[0],
        "PAD_W": block.padding[1],
        "OH": oh,
        "OW": ow,
        "C": padded(block.channels),
        "CHANNELS": block.channels,
        "POOL": block.pool.kind.upper() if block.pool else "NONE",
        "ACTIVATION": block.activation.kind,
        "PARAMETER": float(block.activation.parameter),
    }


def whole_macros(model: Model) -> dict[str, str | int | float]:
    """What `fused_network.cu` is compiled with."""
    *convolutions, hidden, last = model.blocks
    assert isinstance(hidden, DenseBlock), "bug: not described"
    assert isinstance(last, DenseBlock), "bug: not described"
    parameters = [
        block.activation.parameter
        for block in model.blocks
        if block.activation.kind in _WITH_PARAMETER
    ]
    macros: dict[str, str | int | float] = {
        "CONVOLUTIONS": len(convolutions),
        "H": model.input[1],
        "W": model.input[2],
        "UNITS": hidden.units,
        "CLASSES": last.units,
        "ACTIVATION": hidden.activation.kind,
        "PARAMETER": float(parameters[0]) if parameters else 1.0,
    }
    for block, n in zip(convolutions, ("", "2"), strict=False):
        assert isinstance(block, ConvBlock), "bug: not described"
        assert block.pool is not None, "bug: not described"
        macros |= {
            f"R{n}": block.kernel[0],
            f"S{n}": block.kernel[1],
            f"PAD{n}_H": block.padding[0],
            f"PAD{n}_W": block.padding[1],
            f"POOL{n}": block.pool.kind.upper(),
            f"C{n}": -(-block.channels // 8) * 8,
            f"ACTIVATION_{n or 1}": block.activation.kind,
        }
    return macros


def _is_plain(block: ConvBlock) -> bool:
    return block.stride == block.dilation == (1, 1)


def _halves(pool: Pool) -> bool:
    return (
        pool.kind != "global_average"
        and pool.size == pool.stride == (2, 2)
        and pool.padding == (0, 0)
    )


_ARENA_BYTES = 64 << 20  # what `lenet.cuda.memory.Arena` takes at a time
_WEIGHT_COPIES = 6  # three of each of two layouts


def estimate_bytes(model: Model, rows: int, precision: Precision) -> int:
    """About the bytes that one context on a GPU takes for batches of up to `rows` images.

    Images, answers, what each layer gives before and after its pooling, and the weights; without
    cuDNN's workspaces and what CUDA takes for itself.
    """
    width = 2 if precision == "fp16" else 4
    row_bytes = HEIGHT * WIDTH + 2 * 4 * model.classes
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        first = block is model.blocks[0] and is_first(block, precision)
        for channels, *sides in (shape.output,) if first else (shape.linear, shape.output):
            wide = channels if isinstance(block, DenseBlock) else padded(channels)
            row_bytes += width * wide * math.prod(sides)
    weights = sum(math.prod(shape) for shape in model.parameters().values())
    return max(rows * row_bytes, _ARENA_BYTES) + 4 * _WEIGHT_COPIES * weights
