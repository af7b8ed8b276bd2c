"""The forward pass in NumPy, the reference for every backend.

It computes in the dtype of the tensors, so float64 tensors give a float64 reference. Clarity comes
before speed. `convolve_directly` is the definition; `convolve` computes the same as one matrix
product (im2col), and a test compares them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.model import Activation, ConvBlock, Model, Pair, Pool
from lenet.pixels import SCALE, Images

Array: TypeAlias = NDArray[Any]


def windows(x: Array, kernel: Pair, stride: Pair, dilation: Pair) -> Array:
    """All windows of x (n, c, h, w): a view (n, c, oh, ow, r, s), no copy."""
    reach = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(2, 3))
    return view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def pad(x: Array, padding: Pair, value: float = 0.0) -> Array:
    """Pad x (n, c, h, w) with `value`: `padding` rows above and below, columns left and right."""
    if padding == (0, 0):
        return x
    (rows, columns) = padding
    return np.pad(x, ((0, 0), (0, 0), (rows, rows), (columns, columns)), constant_values=value)


def convolve_directly(x: Array, weight: Array, block: ConvBlock) -> Array:
    """Convolution by its definition, a loop over output pixels: (n, c, h, w) -> (n, k, oh, ow)."""
    x = pad(x, block.padding)
    (r, s), (down, right), (dr, ds) = block.kernel, block.stride, block.dilation
    height = (x.shape[2] - dr * (r - 1) - 1) // down + 1
    width = (x.shape[3] - ds * (s - 1) - 1) // right + 1
    y = np.empty((len(x), len(weight), height, width), x.dtype)
    for i in range(height):
        for j in range(width):
            rows = slice(i * down, i * down + dr * (r - 1) + 1, dr)
            columns = slice(j * right, j * right + ds * (s - 1) + 1, ds)
            patch = x[:, np.newaxis, :, rows, columns]  # (n, 1, c, r, s) against (k, c, r, s)
            y[:, :, i, j] = (patch * weight).sum(axis=(2, 3, 4))
    return y


def convolve(x: Array, weight: Array, block: ConvBlock) -> Array:
    """Convolution as one matrix product: each window is a row of c r s numbers."""
    view = windows(pad(x, block.padding), block.kernel, block.stride, block.dilation)
    n, _, height, width = view.shape[:4]
    columns = view.transpose(0, 2, 3, 1, 4, 5).reshape(n * height * width, -1)
    y: Array = columns @ weight.reshape(len(weight), -1).T
    return y.reshape(n, height, width, -1).transpose(0, 3, 1, 2)


def activate(x: Array, activation: Activation) -> Array:
    """The activation, elementwise."""
    parameter = activation.parameter
    y: Array
    match activation.kind:
        case "identity":
            y = x
        case "relu":
            y = np.maximum(x, 0)
        case "clipped_relu":
            y = np.clip(x, 0, parameter)
        case "elu":
            y = np.where(x > 0, x, parameter * np.expm1(np.minimum(x, 0)))
        case "sigmoid":
            # exp of a negative number only: no overflow on either side.
            e = np.exp(-np.abs(x))
            y = np.where(x >= 0, 1 / (1 + e), e / (1 + e))
        case "tanh":
            y = np.tanh(x)
    return y


def pool(x: Array, window: Pool) -> Array:
    """Pooling of x (n, k, h, w)."""
    if window.kind == "global_average":
        average: Array = x.mean(axis=(2, 3), keepdims=True)
        return average
    outside = -np.inf if window.kind == "max" else 0.0
    view = windows(pad(x, window.padding, outside), window.size, window.stride, (1, 1))
    y: Array = view.max(axis=(4, 5)) if window.kind == "max" else view.mean(axis=(4, 5))
    return y


StepKind: TypeAlias = Literal["convolution", "pooling", "dense", "logits"]


class Step(NamedTuple):
    """A step of the forward pass: what the block `name` computed, (n, k, h, w) or (n, units)."""

    name: str
    kind: StepKind
    values: Array


def steps(model: Model, tensors: Mapping[str, Array], images: Images) -> Iterator[Step]:
    """The forward pass of a folded model, in the dtype of `tensors`.

    A block is one step, bias and activation included; its pooling is another. The last step is the
    logits.

    `images`: uint8 (n, 28, 28).
    """
    dtype = next(iter(tensors.values())).dtype
    shapes = model.shapes()
    x: Array = (images.astype(dtype) * dtype.type(SCALE)).reshape(len(images), *model.input)
    for block, shape in zip(model.blocks, shapes, strict=True):
        weight, bias = tensors[f"{shape.name}.weight"], tensors[f"{shape.name}.bias"]
        if isinstance(block, ConvBlock):
            x = activate(convolve(x, weight, block) + bias[:, None, None], block.activation)
            yield Step(shape.name, "convolution", x)
            if block.pool is not None:
                x = pool(x, block.pool)
                yield Step(shape.name, "pooling", x)
        else:
            x = activate(x.reshape(len(x), -1) @ weight.T + bias, block.activation)
            yield Step(shape.name, "logits" if shape is shapes[-1] else "dense", x)


def logits(model: Model, tensors: Mapping[str, Array], images: Images) -> Array:
    """Logits (n, classes), the last of `steps`."""
    return deque(steps(model, tensors, images), maxlen=1)[0].values


def softmax(x: Array) -> Array:
    """exp(x_i) / sum_j exp(x_j) along the last axis, shifted by the maximum against overflow."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    y: Array = e / e.sum(axis=-1, keepdims=True)
    return y
