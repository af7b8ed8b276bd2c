"""Support and launch parameters of `first_filter.cu`. No GPU library is needed.

The kernel computes the weight gradient of a first convolution. For lenet at batch 256 it takes
14 to 17 us; cuDNN takes 56 to 70 us in float32, and for float16 with float32 sums it has no engine
for this shape (H200, cuDNN 9.19, 2026-11-20).
"""

from __future__ import annotations

from lenet.cuda.graphs import Convolution

THREADS = 512
"""Threads of a block."""

IMAGES = 2
"""Images that a block processes at a time."""

GROUP = 16
"""Blocks whose sums are added first."""

_SHARED_BYTES = 48 << 10


def fits(forward: Convolution) -> bool:
    """Whether the kernel supports `forward`: one input channel, a small filter, a small image."""
    _, h, w, c = forward.image
    _, r, s, _ = forward.filters
    rows = h + 2 * forward.padding[0] + 8
    columns = w + 2 * forward.padding[1] + 8 * forward.stride[1] + 8
    shared = 4 * (IMAGES * rows * columns + THREADS // 32 * s * 32)
    return c == 1 and r * s <= 49 and shared <= _SHARED_BYTES


def grid(forward: Convolution, multiprocessors: int) -> tuple[int, int]:
    """(blocks, tiles of 32 channels): up to one block a multiprocessor."""
    tiles = -(-forward.filters[0] // 32)
    return max(1, min(-(-forward.image[0] // IMAGES), multiprocessors // tiles)), tiles


def macros(forward: Convolution) -> dict[str, int]:
    """The macros of the kernel, without SCALAR."""
    _, h, w, _ = forward.image
    k, r, s, _ = forward.filters
    _, oh, ow, _ = forward.output
    named = {"R": r, "S": s, "C": k, "H": h, "W": w, "OH": oh, "OW": ow}
    for name, (vertical, horizontal) in (
        ("STRIDE", forward.stride),
        ("PAD", forward.padding),
        ("DILATION", forward.dilation),
    ):
        named |= {f"{name}_H": vertical, f"{name}_W": horizontal}
    return named
