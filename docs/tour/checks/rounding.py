"""Probabilities with the operands of each layer rounded to half, TF32 and float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lenet import reference
from lenet.model import ConvBlock
from lenet.weightfile import WeightFile

file = WeightFile.read(Path("weights/lenet/2.safetensors"))
random = np.random.default_rng(0)
noise = random.integers(0, 64, (200, 28, 28), np.uint8)
images = np.maximum(file.golden.images[random.integers(0, 10, 200)], noise)


def tf32(x: np.ndarray) -> np.ndarray:
    """`x` to the nearest of 10 bits of fraction."""
    bits = x.astype(np.float32).view(np.uint32) + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def probabilities(rounded: Callable[[Any], Any]) -> np.ndarray:
    """Those of the network with the operands of each layer `rounded`."""
    x = images.reshape(-1, 1, 28, 28) / 255.0
    for block, shape in zip(file.model.blocks, file.model.shapes(), strict=True):
        w, b = (file.tensors[f"{shape.name}.{part}"].astype(float) for part in ("weight", "bias"))
        x, w = rounded(x).astype(float), rounded(w).astype(float)
        if isinstance(block, ConvBlock):
            x = reference.convolve(x, w, block) + b[:, None, None]
            x = reference.pool(reference.activate(x, block.activation), block.pool)
        else:
            x = reference.activate(x.reshape(len(x), -1) @ w.T + b, block.activation)
    return reference.softmax(x)


exact = probabilities(lambda x: x)
for name, rounded in (("half", np.float16), ("TF32", tf32), ("float32", np.float32)):
    print(f"{name:8} {np.abs(probabilities(rounded) - exact).max():.1e}")
