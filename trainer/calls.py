"""The calls that a training step on a GPU makes, by pure shape arithmetic: no GPU is needed.

Shapes are those in memory: channels last, and padded as `lenet.cuda.packing` says. It refuses to
say how long a call takes: that is `trainer.inspection`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lenet.cuda.graphs import Convolution
from lenet.cuda.packing import layout, padded
from lenet.model import IDENTITY, Block, BlockShape, ConvBlock, Model, Shape
from lenet.pixels import HEIGHT, WIDTH
from trainer.bounds import first_filter_fits
from trainer.roofline import Key
from trainer.settings import Precision

Part: TypeAlias = Literal[
    "forward", "input gradient", "weight gradient", "tail forward", "tail backward", "step"
]

_CONVOLUTION = {
    "forward": "cuDNN convolution forward",
    "data": "cuDNN convolution data gradient",
    "filter": "cuDNN convolution filter gradient",
}
_PRODUCT = "cuBLAS product"
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step.

    `operations` are the multiplications and additions of a matrix product or convolution, 0 of
    anything else. `size_bytes` is the least that has to be read and written: each array once, but
    twice what a batch norm needs before and after its sums. `convolution` is cuDNN's, if it is.
    """

    layer: str
    part: Part
    source: Shape
    result: Shape
    routine: str
    operations: int
    size_bytes: int
    convolution: Convolution | None = None

    @property
    def key(self) -> Key:
        """What tells it from the other calls."""
        return self.layer, self.part


def step_calls(model: Model, batch: int, precision: Precision) -> list[Call]:
    """The calls of one step on `batch` images, in the order in which they are queued."""
    width = 2 if precision == "mixed" else _FLOAT32
    image = (batch, HEIGHT, WIDTH, 1)
    pixels = math.prod(image)
    forward: list[Call] = []
    backward: list[Call] = []
    for index, (block, shape) in enumerate(zip(model.blocks, model.shapes(), strict=True)):
        if isinstance(block, ConvBlock):
            linear = list(_convolution(model, block, shape, batch, precision, index == 0))
        else:
            linear = list(_dense(model, shape, batch, width, index == 0))
        tail, tail_backward = _tail(block, shape, batch, width)
        forward += [linear[0], tail]
        backward[:0] = [tail_backward, *linear[1:]]
    logits = _lying(model.shapes()[-1].output, batch)
    updated = _update_bytes(model, forward + backward, precision)
    return [
        Call("batch", "step", image[:-1], image, "our batch kernel", 0, pixels * (1 + width)),
        *forward,
        Call("loss", "step", logits, logits, "our loss kernel", 0, 2 * width * math.prod(logits)),
        *backward,
        Call("update", "step", (), (), "our update kernels", 0, updated),
    ]


def _lying(shape: Shape, batch: int, first: bool = False) -> Shape:
    """A canonical shape of one image as it lies in memory; a network's image has one channel."""
    channels = shape[0] if first else padded(shape[0])
    return (batch, *shape[1:], channels)


def _convolution(
    model: Model, block: ConvBlock, shape: BlockShape, batch: int, precision: Precision, first: bool
) -> Iterator[Call]:
    n, h, w, c = _lying(shape.input, batch, first)
    k, r, s, _ = layout(model)[f"{shape.name}.weight"].shape
    forward = Convolution(
        "forward",
        "fp16" if precision == "mixed" else precision,
        (n, h, w, c),
        (k, r, s, c),
        block.stride,
        block.padding,
        block.dilation,
    )
    yield _by_cudnn(shape.name, "forward", forward, forward.image, forward.output)
    backward = replace(forward, direction="filter")
    if first and first_filter_fits(forward):
        halves = sum(backward.tensor_bytes().values())
        dweight = math.prod(forward.filters)
        width = 2 if precision == "mixed" else _FLOAT32
        yield Call(
            shape.name,
            "weight gradient",
            forward.output,
            forward.filters,
            "our first_filter kernel",
            forward.operations,
            halves + (_FLOAT32 - width) * dweight,
        )
    else:
        yield _by_cudnn(shape.name, "weight gradient", backward, forward.output, forward.filters)
    if not first:
        backward = replace(forward, direction="data")
        yield _by_cudnn(shape.name, "input gradient", backward, forward.output, forward.image)


def _by_cudnn(name: str, part: Part, convolution: Convolution, source: Shape, to: Shape) -> Call:
    routine = _CONVOLUTION[convolution.direction]
    size = sum(convolution.tensor_bytes().values())
    return Call(name, part, source, to, routine, convolution.operations, size, convolution)


def _dense(model: Model, shape: BlockShape, batch: int, width: int, first: bool) -> Iterator[Call]:
    units, inputs = layout(model)[f"{shape.name}.weight"].shape
    x, y, weight = (batch, inputs), (batch, units), (units, inputs)
    operations = 2 * batch * units * inputs
    activations = width * batch * (units + inputs)
    size = activations + width * units * inputs
    name = shape.name
    yield Call(name, "forward", x, y, _PRODUCT, operations, size)
    in_float32 = activations + _FLOAT32 * units * inputs
    yield Call(name, "weight gradient", y, weight, _PRODUCT, operations, in_float32)
    if not first:
        yield Call(name, "input gradient", y, x, _PRODUCT, operations, size)


def _tail(block: Block, shape: BlockShape, batch: int, width: int) -> tuple[Call, Call]:
    """Batch norm reads all of x for its moments, and all of x and dy for its two sums, first."""
    source, to = _lying(shape.linear, batch), _lying(shape.output, batch)
    x, y = width * math.prod(source), width * math.prod(to)
    pool = block.pool if isinstance(block, ConvBlock) else None
    taps = 0
    if pool is not None and pool.kind == "max":
        taps = math.prod(to) * (1 if math.prod(pool.size) <= 256 else 2)
    passes = 2 if block.batch_norm else 1
    read = y + taps + x
    if not block.batch_norm and pool is None and block.activation == IDENTITY:
        read, written = y, 0  # dx is dy: only the bias is left
    else:
        written = x
    name, routine = shape.name, "our tail kernels"
    return (
        Call(name, "tail forward", source, to, routine, 0, passes * x + y + taps),
        Call(name, "tail backward", to, source, routine, 0, passes * read + written),
    )


def _update_bytes(model: Model, calls: Sequence[Call], precision: Precision) -> int:
    """Weight and velocity read and written, the gradient read; under mixed precision its copy."""
    halved = {
        call.layer
        for call in calls
        if precision == "mixed" and call.part == "weight gradient" and call.convolution
    }
    size_bytes, layouts = 0, layout(model)
    for name in model.parameters():
        owner, _, kind = name.partition(".")
        if kind in ("mean", "variance"):
            continue
        gradient = 2 if kind == "weight" and owner in halved else _FLOAT32
        copy = 2 if kind == "weight" and precision == "mixed" else 0
        size_bytes += (4 * _FLOAT32 + gradient + copy) * math.prod(layouts[name].shape)
    return size_bytes
