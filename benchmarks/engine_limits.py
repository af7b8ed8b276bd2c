"""What no engine can exceed on this GPU: the pixels must reach it, and it must multiply.

Both are measured, neither is from a data sheet.
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from benchmarks.stopwatch import cupy_timer, rounds_us
from lenet.model import Model
from lenet.pixels import PIXELS

_COPY_BYTES = 256 * 2**20
_SIDE = 8192
_BLOCK = 1 << 20  # random values, repeated: more would take longer to make than to multiply


def limits(model: Model) -> dict[str, float]:
    """The two limits of GPU 0, and what they are in images of `model`.

    `copy_gb_s`: from pinned memory to the device, 256 MiB at a time. `matmul_tflops`: a product of
    two 8192 x 8192 matrices of random float16 that sums in float32. Medians of rounds.

    Raises:
        DeviceError: the GPU cannot be used.
    """
    import cupy

    from lenet.cuda.device import Handle, translated

    random = np.random.default_rng(1)
    with Handle(0) as handle, translated("measuring the limits"):
        timer = cupy_timer(handle.stream)
        memory = cupy.cuda.alloc_pinned_memory(_COPY_BYTES)
        pinned = np.frombuffer(memory, np.uint8, _COPY_BYTES)
        pinned[...] = random.integers(0, 256, _COPY_BYTES, np.uint8)
        there = cupy.empty(_COPY_BYTES, np.uint8)
        copy_us = rounds_us(lambda: there.set(pinned, handle.stream), timer)
        blocks = (random.uniform(-1, 1, _BLOCK).astype(np.float16) for _ in range(2))
        a, b = (cupy.asarray(np.resize(block, (_SIDE, _SIDE))) for block in blocks)
        product = cupy.empty_like(a)
        product_us = rounds_us(lambda: handle.cublas.product(a, b, product, "fp16"), timer)
    return rates(model, statistics.median(copy_us), statistics.median(product_us))


def rates(model: Model, copy_us: float, product_us: float) -> dict[str, float]:
    """The limits from what one copy and one product took."""
    copy_bytes_s, operations_s = 1e6 * _COPY_BYTES / copy_us, 1e6 * 2 * _SIDE**3 / product_us
    return {
        "copy_gb_s": copy_bytes_s / 1e9,
        "matmul_tflops": operations_s / 1e12,
        "copy_images_per_s": copy_bytes_s / PIXELS,
        "matmul_images_per_s": operations_s / operations(model),
    }


def operations(model: Model) -> int:
    """Multiplications and additions of the layers of `model` for one image."""
    parameters = model.parameters()
    return sum(
        2 * math.prod(shape.linear) * math.prod(parameters[f"{shape.name}.weight"][1:])
        for shape in model.shapes()
    )
