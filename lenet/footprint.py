"""Device memory that serving a network takes, known by shape before any is asked for.

It refuses to ask a device: what is free is another question.
"""

from __future__ import annotations

import math

from lenet.cuda.fusion import is_first
from lenet.cuda.graphs import Precision
from lenet.cuda.packing import padded
from lenet.model import DenseBlock, Model
from lenet.pixels import HEIGHT, WIDTH

_LEAST_BYTES = 64 << 20  # what `lenet.cuda.memory.Arena` takes at a time
_COPIES = 6  # of the weights: three of each of two layouts


def context_bytes(model: Model, rows: int, precision: Precision) -> int:
    """About the bytes that one context on a GPU takes for batches of up to `rows` images.

    Images, answers, what each layer gives before and after its pooling, and the weights; without
    cuDNN's workspaces and what CUDA takes for itself.
    """
    width = 2 if precision == "fp16" else 4
    of_row = HEIGHT * WIDTH + 2 * 4 * model.classes
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        first = block is model.blocks[0] and is_first(block, precision)
        for channels, *sides in (shape.output,) if first else (shape.linear, shape.output):
            wide = channels if isinstance(block, DenseBlock) else padded(channels)
            of_row += width * wide * math.prod(sides)
    weights = sum(math.prod(shape) for shape in model.parameters().values())
    return max(rows * of_row, _LEAST_BYTES) + 4 * _COPIES * weights
