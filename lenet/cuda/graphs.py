"""cuDNN's operation graphs; `engines` chooses what runs them.

An operation is frozen data, the key under which its engine is cached. All tensors are channels
last: images (n, h, w, c), filters (k, r, s, c). cuDNN lists dimensions in the order n c h w, and
the strides give the order in memory. cuDNN is imported when a graph is built: shapes need no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, TypeAlias

from lenet.model import Pair, window_count

Precision: TypeAlias = Literal["fp32", "tf32", "fp16"]
"""How an engine multiplies: float32 without tensor cores, or float32 rounded to TF32 or float16 on
tensor cores. Sums are float32 in all three."""

ConvolutionsBy: TypeAlias = Literal["auto", "cudnn", "measured"]
"""Who computes the layers of a bucket: our kernels where they support the network, cuDNN and
cuBLAS, or whichever of the two is faster."""


class Uid(IntEnum):
    """The tensors of a graph, as keys of the addresses that an engine gets."""

    INPUT = 1
    WEIGHT = 2
    BIAS = 3
    OUTPUT = 4


@dataclass(frozen=True, slots=True)
class Convolution:
    """A cross-correlation or one of its gradients.

    `forward` computes (n, oh, ow, k) from the images as INPUT, with bias and ReLU in the same
    kernel if requested. `data` computes the gradient of the images from that of the output as
    INPUT. `filter` computes the gradient of the filters from the images as INPUT and the output's
    gradient as WEIGHT.
    """

    direction: Literal["forward", "data", "filter"]
    precision: Precision
    image: tuple[int, int, int, int]  # n, h, w, c
    filters: tuple[int, int, int, int]  # k, r, s, c
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    bias: bool = False
    relu: bool = False
    pitch: int = 0
    """The image's channels in memory, the first c of which are read; 0: there are no more."""

    @property
    def output(self) -> tuple[int, int, int, int]:
        """(n, oh, ow, k), the shape of the forward result."""
        n, h, w, _ = self.image
        k, r, s, _ = self.filters
        geometry = zip((h, w), (r, s), self.stride, self.padding, self.dilation, strict=True)
        oh, ow = (window_count(*axis) for axis in geometry)
        return n, oh, ow, k

    def tensor_bytes(self) -> dict[Uid, int]:
        """The size of each tensor that an engine gets."""
        width = _width(self.precision)
        n, h, w, c = self.image
        shapes = (n, h, w, self.pitch or c), self.filters, self.output
        image, filters, output = (width * math.prod(shape) for shape in shapes)
        if self.direction == "filter":
            return {Uid.INPUT: image, Uid.WEIGHT: output, Uid.OUTPUT: filters}
        if self.direction == "data":
            return {Uid.INPUT: output, Uid.WEIGHT: filters, Uid.OUTPUT: image}
        sizes = {Uid.INPUT: image, Uid.WEIGHT: filters, Uid.OUTPUT: output}
        return sizes | ({Uid.BIAS: width * self.filters[0]} if self.bias else {})

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * math.prod(self.output) * math.prod(self.filters[1:])

    def graph(self, handle: Any) -> Any:  # pragma: no cover - needs a GPU
        """The cuDNN graph, validated."""
        graph = _graph(self.precision, handle)
        options = {
            "padding": list(self.padding),
            "stride": list(self.stride),
            "dilation": list(self.dilation),
        }
        image = _channels_last(self.image, self.pitch)
        filters = _channels_last(self.filters)
        output = _channels_last(self.output)
        if self.direction == "forward":
            x = _tensor(graph, Uid.INPUT, image)
            y = graph.conv_fprop(image=x, weight=_tensor(graph, Uid.WEIGHT, filters), **options)
            if self.bias:
                k = self.filters[0]
                bias = _tensor(graph, Uid.BIAS, ([1, k, 1, 1], [k, 1, k, k]))
                y = graph.bias(input=y, bias=bias)
            if self.relu:
                y = graph.relu(input=y)
            return _finished(graph, y, output)
        if self.direction == "data":
            dy = _tensor(graph, Uid.INPUT, output)
            weight = _tensor(graph, Uid.WEIGHT, filters)
            return _finished(graph, graph.conv_dgrad(loss=dy, filter=weight, **options), image)
        x, dy = _tensor(graph, Uid.INPUT, image), _tensor(graph, Uid.WEIGHT, output)
        return _finished(graph, graph.conv_wgrad(image=x, loss=dy, **options), filters)


def _width(precision: Precision) -> int:
    return 2 if precision == "fp16" else 4


def _graph(precision: Precision, handle: Any) -> Any:
    import cudnn

    half = precision == "fp16"
    return cudnn.pygraph(
        io_data_type=cudnn.data_type.HALF if half else cudnn.data_type.FLOAT,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )


def _channels_last(shape: Sequence[int], pitch: int = 0) -> tuple[list[int], list[int]]:
    """(dimensions, strides) in cuDNN's order n c h w, of an (n, h, w, pitch or c) in memory."""
    n, h, w, c = shape
    wide = pitch or c
    return [n, c, h, w], [h * w * wide, 1, w * wide, wide]


def _tensor(graph: Any, uid: Uid, geometry: tuple[list[int], list[int]]) -> Any:
    dimensions, strides = geometry
    return graph.tensor(name=uid.name, dim=dimensions, stride=strides, uid=int(uid))


def _finished(graph: Any, output: Any, geometry: tuple[list[int], list[int]]) -> Any:
    dimensions, strides = geometry
    output.set_output(True).set_dim(dimensions).set_stride(strides).set_uid(int(Uid.OUTPUT))
    graph.validate()
    return graph
