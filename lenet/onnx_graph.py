"""A weight file as an ONNX model: uint8 images in, logits and probabilities out.

The division by 255 is folded into the first layer's weights. Other optimizations are left to the
runtime.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet import winograd
from lenet.model import Activation, Block, BlockShape, ConvBlock, Pool
from lenet.onnx_subset_pb2 import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
    ValueInfoProto,
)
from lenet.pixels import HEIGHT, SCALE, WIDTH
from lenet.weightfile import WeightFile

IMAGES = "images"
LOGITS = "logits"
PROBABILITIES = "probabilities"

_OPSET = 17
_IR_VERSION = 8  # the oldest with opset 17, for older runtimes

_DATA_TYPES = {np.float32: TensorProto.FLOAT, np.int64: TensorProto.INT64}

_ACTIVATIONS = {
    "relu": "Relu",
    "elu": "Elu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "clipped_relu": "Clip",
}


_TILE_HEIGHT, _TILE_WIDTHS = 4, (8, 4)
"""Outputs that Winograd's algorithm computes together; the first width that fits. Logits of lenet
are wrong by 2e-6 with tiles of 4 x 8, by 5e-7 with 4 x 4, and by 1e-5 with 8 x 8, which would take
another 5 % less time (AMD EPYC, 2026-11-23)."""

_LEAST_INPUTS = 16
"""With fewer input channels, the transforms may cost more than the products save: with 5 x 5
filters, batches of 8 and more take up to 1.3 times as long with 4 inputs, 0.9 to 1.25 times with 8,
and 0.35 to 1.0 times from 16 on (AMD EPYC with AVX-512, 2026-11-24)."""


def onnx_model(
    weights: WeightFile, channel_multiple: int = 1, *, use_winograd: bool = False
) -> ModelProto:
    """The network as ONNX.

    Input `images` uint8 (n, 28, 28); outputs `logits` and `probabilities` float32 (n, classes).

    At least `channel_multiple` channels between two layers are padded to a multiple of it, with
    which some runtimes are faster. Nothing reads what they hold: their weights in the next layer
    are 0.

    With `use_winograd`, the convolutions that `suits_winograd` names are computed by Winograd's
    algorithm, out of matrix products. They read and write channels that are not padded.
    """
    graph = _Graph()
    model = weights.model
    by_winograd = [
        use_winograd and suits_winograd(block, shape)
        for block, shape in zip(model.blocks, model.shapes(), strict=True)
    ]
    tensors = _padded(weights, channel_multiple, by_winograd)
    value = graph.add("Cast", [IMAGES], to=TensorProto.FLOAT)
    value = graph.add("Reshape", [value, graph.constant(np.array([-1, *model.input]), "input")])
    flat = False
    for index, (block, shape) in enumerate(zip(model.blocks, model.shapes(), strict=True)):
        scaled = tensors[f"{shape.name}.weight"] * np.float32(SCALE if index == 0 else 1.0)
        bias = graph.constant(tensors[f"{shape.name}.bias"], f"{shape.name}.bias")
        if by_winograd[index]:
            value = graph.winograd(value, scaled, bias, block.activation, shape)
            continue
        weight = graph.constant(scaled, shape.name)
        if isinstance(block, ConvBlock):
            value = graph.add(
                "Conv",
                [value, weight, bias],
                strides=block.stride,
                pads=block.padding * 2,
                dilations=block.dilation,
            )
        else:
            if not flat:
                value, flat = graph.add("Flatten", [value]), True
            value = graph.add("Gemm", [value, weight, bias], transB=1)
        value = graph.activation(value, block.activation)
        if isinstance(block, ConvBlock) and block.pool is not None:
            value = graph.pool(value, block.pool)
    graph.nodes[-1].output[0] = LOGITS
    graph.nodes.append(_node("Softmax", [LOGITS], PROBABILITIES, axis=-1))
    outputs = [
        _value(name, TensorProto.FLOAT, ["n", model.classes]) for name in (LOGITS, PROBABILITIES)
    ]
    return ModelProto(
        ir_version=_IR_VERSION,
        producer_name="lenet-serve",
        graph=GraphProto(
            node=graph.nodes,
            name=model.name,
            initializer=graph.constants,
            input=[_value(IMAGES, TensorProto.UINT8, ["n", HEIGHT, WIDTH])],
            output=outputs,
        ),
        opset_import=[OperatorSetIdProto(domain="", version=_OPSET)],
    )


def suits_winograd(block: Block, shape: BlockShape) -> bool:
    """Whether `block` can be computed by Winograd's algorithm.

    So can the convolutions of LeNet after the first, and those like them: the outputs are whole
    tiles, no pooling window lies in two, and there are enough input channels.
    """
    return (
        isinstance(block, ConvBlock)
        and block.kernel in {(3, 3), (4, 4), (5, 5)}
        and (block.stride, block.padding, block.dilation) == ((1, 1), (0, 0), (1, 1))
        and block.pool == Pool("max")
        and shape.input[0] >= _LEAST_INPUTS
        and shape.linear[1] % _TILE_HEIGHT == 0
        and shape.linear[2] % min(_TILE_WIDTHS) == 0
    )


def _node(operation: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    found = [_attribute(name, value) for name, value in sorted(attributes.items())]
    return NodeProto(op_type=operation, input=inputs, output=[output], attribute=found)


def _attribute(name: str, value: int | float | Sequence[int]) -> AttributeProto:
    if isinstance(value, int):
        return AttributeProto(name=name, type=AttributeProto.INT, i=value)
    if isinstance(value, float):
        return AttributeProto(name=name, type=AttributeProto.FLOAT, f=value)
    return AttributeProto(name=name, type=AttributeProto.INTS, ints=value)


def _value(name: str, dtype: TensorProto.DataType, shape: Sequence[str | int]) -> ValueInfoProto:
    """An input or output; a word in `shape` names a size that varies."""
    dimensions = [
        TensorShapeProto.Dimension(dim_param=size)
        if isinstance(size, str)
        else TensorShapeProto.Dimension(dim_value=size)
        for size in shape
    ]
    tensor = TypeProto.Tensor(elem_type=dtype, shape=TensorShapeProto(dim=dimensions))
    return ValueInfoProto(name=name, type=TypeProto(tensor_type=tensor))


def _padded(
    weights: WeightFile, channel_multiple: int, by_winograd: Sequence[bool]
) -> dict[str, NDArray[Any]]:
    """The tensors, with zeros for the additional channels of convolutions but the last layer's."""
    tensors = dict(weights.tensors)
    model = weights.model
    shapes = model.shapes()
    blocks = zip(model.blocks, by_winograd, shapes, shapes[1:], strict=False)
    for block, is_winograd, shape, after in blocks:
        if isinstance(block, ConvBlock) and not is_winograd:
            weight = tensors[f"{shape.name}.weight"]
            channels = len(weight)
            more = -channels % channel_multiple if channels >= channel_multiple else 0
            tensors[f"{shape.name}.weight"] = np.pad(weight, ((0, more), *[(0, 0)] * 3))
            tensors[f"{shape.name}.bias"] = np.pad(tensors[f"{shape.name}.bias"], (0, more))
            # (out, in, height, width), or (out, in x height x width) where a dense layer follows.
            reader = tensors[f"{after.name}.weight"]
            parts = reader.reshape(len(reader), channels, -1)
            parts = np.pad(parts, ((0, 0), (0, more), (0, 0)))
            rest = (-1,) if reader.ndim == 2 else (channels + more, *reader.shape[2:])
            tensors[f"{after.name}.weight"] = parts.reshape(len(reader), *rest)
    return tensors


class _Graph:
    """Nodes in order, each with one output named after its position."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def constant(self, value: NDArray[Any], name: str) -> str:
        little_endian = value.astype(value.dtype.newbyteorder("<"), copy=False)
        self.constants.append(
            TensorProto(
                name=name,
                dims=value.shape,
                data_type=_DATA_TYPES[value.dtype.type],
                raw_data=little_endian.tobytes(),
            )
        )
        return name

    def add(self, operation: str, inputs: Sequence[str], **attributes: Any) -> str:
        output = f"{operation.lower()}_{len(self.nodes)}"
        self.nodes.append(_node(operation, inputs, output, **attributes))
        return output

    def activation(self, value: str, activation: Activation) -> str:
        if activation.kind == "identity":
            return value
        inputs, attributes = [value], {}
        if activation.kind == "clipped_relu":
            name = f"ceiling_{len(self.nodes)}"
            bounds = {f"floor_{name}": 0.0, name: activation.parameter}
            inputs += [
                self.constant(np.array(bound, np.float32), key) for key, bound in bounds.items()
            ]
        if activation.kind == "elu":
            attributes["alpha"] = activation.parameter
        return self.add(_ACTIVATIONS[activation.kind], inputs, **attributes)

    def pool(self, value: str, pool: Pool) -> str:
        if pool.kind == "global_average":
            return self.add("GlobalAveragePool", [value])
        window = {"kernel_shape": pool.size, "strides": pool.stride, "pads": pool.padding * 2}
        if pool.kind == "max":
            return self.add("MaxPool", [value], **window)
        return self.add("AveragePool", [value], count_include_pad=1, **window)

    def winograd(
        self,
        value: str,
        weight: NDArray[Any],
        bias: str,
        activation: Activation,
        shape: BlockShape,
    ) -> str:
        """A block that `suits_winograd`. `value` is (n, channels, h, w), with c or more channels.

        Letters as in `lenet.model`; a tile has (th, tw) inputs, (mh, mw) outputs and (qh, qw) after
        pooling, and an image has (rows, columns) of them. Comments show shapes. The steps are those
        of `lenet.winograd`: B^T d B, times G g G^T and summed over c, then A^T m A.
        """
        (c, h, w), (k, oh, ow), pooled = shape.input, shape.linear, shape.output[1:]
        mh, mw = _TILE_HEIGHT, next(width for width in _TILE_WIDTHS if ow % width == 0)
        vertical, horizontal = (winograd.matrices(m, weight.shape[2]) for m in (mh, mw))
        th, tw, qh, qw = len(vertical.g), len(horizontal.g), mh // 2, mw // 2
        rows, columns = oh // mh, ow // mw
        # Pixels become the slowest dimension: then each step below is a few large copies or
        # matrix products for all images and channels.
        if weight.shape[1] > c:
            value = self.channels(value, c)
        value = self.transpose(self.reshape(value, -1, h * w))  # (h w, n c)
        if rows * columns > 1:
            corners = np.add.outer(mh * w * np.arange(rows), mw * np.arange(columns))
            pixels = np.add.outer(w * np.arange(th), np.arange(tw))
            value = self.gather(value, np.add.outer(pixels, corners))
        value = self.in_two_dimensions(value, vertical.b_t, horizontal.b_t)
        # (th tw, rows columns n, c) times (th tw, c, k)
        filters = vertical.g @ weight[:, :c].astype(np.float64) @ horizontal.g.T  # (k, c, th, tw)
        filters = filters.transpose(2, 3, 1, 0).reshape(th * tw, c, k).astype(np.float32)
        value = self.reshape(value, th * tw, -1, c)
        value = self.add("MatMul", [value, self.constant(filters, shape.name)])
        # The two outputs that are pooled together become two halves of the tile.
        halves = (
            matrix.reshape(-1, 2, matrix.shape[1]).swapaxes(0, 1).reshape(matrix.shape)
            for matrix in (vertical.a_t, horizontal.a_t)
        )
        value = self.in_two_dimensions(value, *halves)
        value = self.larger_half(self.reshape(value, 2, -1), axis=0)
        value = self.larger_half(self.reshape(value, qh, 2, -1), axis=1)
        # After the maximum, as activations do not decrease: a quarter of the values is left.
        value = self.add("Add", [self.reshape(value, qh * qw * rows * columns, -1, k), bias])
        value = self.activation(value, activation)
        if rows * columns > 1:
            order = np.arange(qh * qw * rows * columns).reshape(qh, qw, rows, columns)
            value = self.gather(value, order.transpose(2, 0, 3, 1).reshape(-1))
        value = self.transpose(self.reshape(value, math.prod(pooled), -1))  # (n k, pooled)
        return self.reshape(value, -1, k, *pooled)

    def in_two_dimensions(
        self, value: str, vertical: NDArray[np.float64], horizontal: NDArray[np.float64]
    ) -> str:
        """(i, j, ...) -> (u, v, ...), by matrices (u, i) for the first dimension and (v, j)."""
        (u, i), (_, j) = vertical.shape, horizontal.shape
        first, second = (
            self.constant(matrix.astype(np.float32), f"{name}_{len(self.nodes)}")
            for name, matrix in (("vertical", vertical), ("horizontal", horizontal))
        )
        value = self.add("MatMul", [first, self.reshape(value, i, -1)])
        return self.add("MatMul", [second, self.reshape(value, u, j, -1)])

    def larger_half(self, value: str, axis: int) -> str:
        """The elementwise maximum of the two halves of `value` along `axis`."""
        halves = [f"half_{len(self.nodes)}_{half}" for half in (0, 1)]
        parts = [_attribute("axis", axis)]
        self.nodes.append(NodeProto(op_type="Split", input=[value], output=halves, attribute=parts))
        return self.add("Max", halves)

    def reshape(self, value: str, *shape: int) -> str:
        name = f"shape_{len(self.nodes)}"
        return self.add("Reshape", [value, self.constant(np.array(shape), name)])

    def transpose(self, value: str) -> str:
        return self.add("Transpose", [value], perm=(1, 0))

    def gather(self, value: str, indices: NDArray[Any]) -> str:
        """The rows `indices` of `value`, in the shape of `indices`."""
        name = f"indices_{len(self.nodes)}"
        return self.add("Gather", [value, self.constant(indices, name)], axis=0)

    def channels(self, value: str, count: int) -> str:
        """The first `count` channels of `value`."""
        bounds = [
            self.constant(np.array([number]), f"{name}_{len(self.nodes)}")
            for name, number in (("start", 0), ("end", count), ("axis", 1))
        ]
        return self.add("Slice", [value, *bounds])
