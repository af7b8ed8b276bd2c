"""The outputs of each layer for one image, for people to look at.

The values are those of `lenet.reference` in float32, each layer's as bytes between its lowest and
its highest value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.model import ConvBlock, Model, Pair, Shape
from lenet.pixels import Images
from lenet.reference import StepKind, softmax, steps
from lenet.weightfile import Float32, WeightFile

MAX_OPERATIONS = 1 << 24
"""The most `operations` of a network that is explained."""

MAX_VALUES = 1 << 18
"""The most values that the layers of an explanation have together. Layers beyond it have no data.
"""

_SEED = 20

LayerKind: TypeAlias = StepKind | Literal["filters"]


@dataclass(frozen=True, slots=True)
class Change:
    """How the network is changed before it computes.

    Without `biases` all of them are 0. The weights of the block `noisy` get normal noise, the same
    each time, of `noise` times their standard deviation.
    """

    biases: bool = True
    noisy: str = ""
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of a layer: a value is low + byte * (high - low) / 255, to half such a step.

    `data` holds the bytes, in C order; None beyond `MAX_VALUES`. The last layer has none, but
    `logits` and `probabilities`, float32 (classes,).
    """

    name: str
    kind: LayerKind
    shape: Shape
    low: float
    high: float
    data: bytes | None
    logits: Float32 | None = None
    probabilities: Float32 | None = None


def explain(weights: WeightFile, image: Images, change: Change) -> Iterator[Layer]:
    """The filters of a first convolution, then every step of the forward pass, up to the logits.

    `image`: uint8 (1, 28, 28).
    """
    model = weights.model
    tensors = _changed(weights.tensors, change)
    left = MAX_VALUES
    first = model.shapes()[0].name
    if isinstance(model.blocks[0], ConvBlock):
        layer = _layer(first, "filters", tensors[f"{first}.weight"], left)
        left -= len(layer.data or b"")
        yield layer
    for name, kind, values in steps(model, tensors, image):
        layer = _layer(name, kind, values[0], left)
        left -= len(layer.data or b"")
        yield layer


def operations(model: Model) -> int:
    """Multiplications and copied values of one image's forward pass: they bound time and memory."""
    parameters, total = model.parameters(), 0
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        total += math.prod(shape.linear) * math.prod(parameters[f"{shape.name}.weight"][1:])
        if isinstance(block, ConvBlock):
            total += _padded(shape.input, block.padding)
            if (pool := block.pool) is not None:
                window = shape.linear[1:] if pool.kind == "global_average" else pool.size
                total += math.prod(shape.output) * math.prod(window)
                total += _padded(shape.linear, pool.padding)
    return total


def _padded(shape: Shape, padding: Pair) -> int:
    c, h, w = shape
    return c * (h + 2 * padding[0]) * (w + 2 * padding[1])


def _changed(tensors: Mapping[str, Float32], change: Change) -> Mapping[str, Float32]:
    changed = dict(tensors)
    if not change.biases:
        for name, tensor in tensors.items():
            if name.endswith(".bias"):
                changed[name] = np.zeros_like(tensor)
    if change.noise:
        name = f"{change.noisy}.weight"
        weight = tensors[name]
        noise = np.random.default_rng(_SEED).standard_normal(weight.shape, np.float32)
        noise *= np.float32(change.noise) * weight.std()
        noise += weight
        changed[name] = noise
    return changed


def _layer(name: str, kind: LayerKind, values: NDArray[np.float32], left: int) -> Layer:
    low, high = float(values.min()), float(values.max())
    if kind == "logits":
        return Layer(name, kind, values.shape, low, high, None, values, softmax(values))
    data = None
    if values.size <= left:
        scale = 255 / (high - low) if high > low else 0.0
        data = np.rint((values - np.float32(low)) * np.float32(scale)).astype(np.uint8).tobytes()
    return Layer(name, kind, values.shape, low, high, data)
