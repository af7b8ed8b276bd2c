"""A weight file as an ONNX model: uint8 images in, logits and probabilities out.

The division by 255 is folded into the first layer's weights. Other optimizations are left to the
runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet.model import Activation, ConvBlock, Pool
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


def onnx_model(weights: WeightFile, channel_multiple: int = 1) -> ModelProto:
    """The network as ONNX.

    Input `images` uint8 (n, 28, 28); outputs `logits` and `probabilities` float32 (n, classes).

    The channels between layers are padded to a multiple of `channel_multiple`, with which some
    runtimes are faster. Nothing reads what they hold: their weights in the next layer are 0.
    """
    graph = _Graph()
    model = weights.model
    tensors = _padded(weights, channel_multiple)
    value = graph.add("Cast", [IMAGES], to=TensorProto.FLOAT)
    value = graph.add("Reshape", [value, graph.constant(np.array([-1, *model.input]), "input")])
    flat = False
    for index, (block, shape) in enumerate(zip(model.blocks, model.shapes(), strict=True)):
        scale = np.float32(SCALE if index == 0 else 1.0)
        weight = graph.constant(tensors[f"{shape.name}.weight"] * scale, shape.name)
        bias = graph.constant(tensors[f"{shape.name}.bias"], f"{shape.name}.bias")
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


def _padded(weights: WeightFile, channel_multiple: int) -> dict[str, NDArray[Any]]:
    """The tensors, with zeros for the additional channels of convolutions but the last layer's."""
    tensors = dict(weights.tensors)
    model = weights.model
    shapes = model.shapes()
    for block, shape, after in zip(model.blocks, shapes, shapes[1:], strict=False):
        if isinstance(block, ConvBlock):
            weight = tensors[f"{shape.name}.weight"]
            channels = len(weight)
            more = -channels % channel_multiple
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
