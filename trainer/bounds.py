"""What our own CUDA kernels can take, by shape alone: no GPU is needed to know it.

It refuses to launch anything; that is `trainer.ops_cuda`, which asks here first.
"""

from __future__ import annotations

from lenet.cuda.graphs import Convolution

FILTER_IMAGES = 2
"""How many images a block of `first_filter.cu` has at a time."""

FILTER_THREADS = 512
"""The threads of such a block."""

_SHARED_BYTES = 48 << 10


def first_filter_fits(forward: Convolution) -> bool:
    """Whether `first_filter.cu` can do it: one input channel, a small filter, a small image."""
    _, h, w, c = forward.image
    _, r, s, _ = forward.filters
    rows = h + 2 * forward.padding[0] + 8
    columns = w + 2 * forward.padding[1] + 8 * forward.stride[1] + 8
    shared = 4 * (FILTER_IMAGES * rows * columns + FILTER_THREADS // 32 * s * 32)
    return c == 1 and r * s <= 49 and shared <= _SHARED_BYTES
