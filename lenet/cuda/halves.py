"""Float32 as the sum of two float16 numbers, for tensor cores, which multiply these.

Powers of two move operands of any size into their range. Source: Ootomo & Yokota 2022, arXiv
2203.03341; they scale each low half instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lenet.model import Activation
from lenet.weightfile import WeightFile


def halves(values: NDArray[np.float32], count: int) -> list[NDArray[np.float16]]:
    """`count` halves whose sum is nearly `values`, the largest first."""
    found: list[NDArray[np.float16]] = []
    for _ in range(count):
        found.append(values.astype(np.float16))
        values = values - found[-1]
    return found


def exponents(largest: ArrayLike) -> NDArray[np.int32]:
    """Exponents of the powers of two that move each of `largest` to between 2^14 and 2^15.

    Those of numbers below 2^-111 are smaller, so that a float32 holds the power.
    """
    _, found = np.frexp(np.asarray(largest, float))
    return np.asarray(np.clip(15 - found, -126, 126), np.int32)


def scales(of_input: ArrayLike, of_weights: ArrayLike, size: int) -> NDArray[np.float32]:
    """Factors of a layer's sums that undo those of its operands, as a kernel reads them.

    Args:
        of_input: exponent of the factor of the inputs.
        of_weights: exponents of the factors of the weights of each channel or unit.
        size: channels or units with padding.

    Returns:
        float32 (size, 2), powers of two: one factor might exceed float32, the product of two does
        not.
    """
    undone = -(np.asarray(of_input, np.int32) + np.asarray(of_weights, np.int32))
    found = np.zeros((size, 2), np.int32)
    found[: len(undone)] = np.stack([undone // 2, undone - undone // 2], axis=1)
    return np.ldexp(np.float32(1), found)


def largest_input(file: WeightFile, name: str) -> float:
    """A bound of the inputs of the layer `name` that no image exceeds, whose pixels are 0 to 1."""
    largest = 1.0
    for block, shape in zip(file.model.blocks, file.model.shapes(), strict=True):
        if shape.name == name:
            break
        weight, bias = (file.tensors[f"{shape.name}.{kind}"] for kind in ("weight", "bias"))
        largest = largest_output(block.activation, weight, bias, largest)
    return largest


def largest_output(
    activation: Activation, weight: NDArray[np.float32], bias: NDArray[np.float32], largest: float
) -> float:
    """A bound of a layer's outputs, given one of its inputs.

    `weight` is (k, ...), `bias` (k,).
    """
    sums = abs(weight.astype(float)).reshape(len(weight), -1).sum(1)
    bound = float((largest * sums + abs(bias.astype(float))).max())
    if activation.kind in ("sigmoid", "tanh"):
        return 1.0
    return bound * max(1.0, activation.parameter) if activation.kind == "elu" else bound
