"""The geometry of a block's epilogue (bias, activation, pooling), and its launch: `epilogue.cu`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lenet.cuda.capture import Launch
from lenet.cuda.kernels import FOLDER, NULL, Kernels, Macros
from lenet.model import Activation, Pool, window_count

THREADS = 256
"""Threads of a block, for kernels that do not sum."""

# Blocks of a grid: the best tried for lenet at batch 256 on an H200 (2026-11-20), though 396 were
# faster for the backward kernel on halves.
MAX_BLOCKS = 528


ONE_BLOCK_PIXELS = 512
"""Maximum pixels of a batch without pooling that training computes in one launch."""


@dataclass(frozen=True, slots=True)
class EpilogueShape:
    """The epilogue of a layer's output (rows, h, w, c), of which `channels` are not padding."""

    h: int
    w: int
    c: int
    channels: int
    pool: Pool | None
    activation: Activation
    norm: bool
    scalar: str

    @property
    def window(self) -> tuple[tuple[int, int], ...]:
        """(size, stride, padding)."""
        if self.pool is None:
            return (1, 1), (1, 1), (0, 0)
        if self.pool.kind == "global_average":
            return (self.h, self.w), (1, 1), (0, 0)
        return self.pool.size, self.pool.stride, self.pool.padding

    @property
    def output(self) -> tuple[int, int]:
        """(oh, ow)."""
        size, stride, padding = self.window
        return (
            window_count(self.h, size[0], stride[0], padding[0]),
            window_count(self.w, size[1], stride[1], padding[1]),
        )

    @property
    def index(self) -> str | None:
        """The dtype of the index of a maximum in its window; None without max pooling."""
        if self.pool is None or self.pool.kind != "max":
            return None
        return "uint8" if math.prod(self.pool.size) <= 256 else "uint16"

    @property
    def lanes(self) -> int:
        """Channels in 16 bytes."""
        return 8 if self.scalar == "__half" else 4

    def tiles(self) -> tuple[int, int]:
        """(tiles, channels of one), as `epilogue.cuh` divides the channels."""
        vectors = self.c // self.lanes
        width = vectors if vectors < 3 else 4
        return -(-vectors // width), width * self.lanes

    def macros(self) -> Macros:
        """The macros of `epilogue.cu`."""
        (window, stride, padding), (oh, ow) = self.window, self.output
        kind = "NONE" if self.pool is None else ("MAX" if self.pool.kind == "max" else "AVERAGE")
        return {
            "SCALAR": self.scalar,
            "C": self.c,
            "CHANNELS": self.channels,
            "H": self.h,
            "W": self.w,
            "OH": oh,
            "OW": ow,
            "WINDOW_H": window[0],
            "WINDOW_W": window[1],
            "STRIDE_H": stride[0],
            "STRIDE_W": stride[1],
            "PAD_H": padding[0],
            "PAD_W": padding[1],
            "POOL": kind,
            "NORM": int(self.norm),
            "ACTIVATION": self.activation.kind,
            "PARAMETER": float(self.activation.parameter),
            "INDEX": self.index or "uint8",
        }

    def blocks(self, pixels: int, threads: int = THREADS, most: int = MAX_BLOCKS) -> int:
        """Blocks along `pixels`: enough to fill the GPU, none without work."""
        tiles, tile_channels = self.tiles()
        vectors = tile_channels // self.lanes
        return max(1, min(-(-pixels * vectors // threads), -(-most // tiles)))


def launch(  # pragma: no cover - needs a GPU
    kernels: Kernels, shape: EpilogueShape, x: Any, bias: Any, y: Any
) -> Launch:
    """Prepare the launch of bias, activation and pooling from `x` to `y`, for serving."""
    rows = len(x)
    kernel = kernels.get(FOLDER / "epilogue.cu", "epilogue_forward", shape.macros())
    grid = shape.blocks(rows * math.prod(shape.output)), shape.tiles()[0]
    arguments = (x, NULL, NULL, NULL, bias, y, NULL, np.int32(rows))
    return lambda: kernel(grid, (THREADS,), arguments)
