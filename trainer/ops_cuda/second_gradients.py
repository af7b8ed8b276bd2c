"""Gradients of a convolution between few channels, in halves.

`input_gradient.cu` computes that of its input, `weight_gradient.cu` that of its filters.

Here are the convolutions that the kernels support, their macros and how their work is divided. No
GPU library is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lenet.cuda.device import Limits
from lenet.cuda.graphs import Convolution
from lenet.cuda.kernels import Kernels, Macros

_FOLDER = Path(__file__).parent
_AMPERE = 80
_WARP = 32
_CHUNK_BYTES, _CHANNELS, _STEP = 16, 8, 16  # of a chunk: bytes, channels; depth of a product
_IMAGES = 2  # beside each other, for the gradient of the input
_REGISTERS, _MOST_REGISTERS = 1 << 16, 255  # of a multiprocessor, of a thread
_FLAG_BYTES = 16  # of last_block of reduce.cuh
_OTHER_REGISTERS = 48  # of a thread, besides sums and operands


@dataclass(frozen=True, slots=True)
class InputGradient:
    """How `input_gradient.cu` is launched for `forward` with `inputs` -> `outputs` true channels.

    `parts` groups of warps divide the products.
    """

    forward: Convolution
    inputs: int
    outputs: int
    parts: int

    @classmethod
    def of(
        cls, forward: Convolution, inputs: int, outputs: int, limits: Limits
    ) -> InputGradient | None:
        """None if the kernel does not support it on such a GPU, or with less than 8 warps."""
        if not _is_plain(forward, limits):
            return None
        for parts in range(16, 0, -1):
            found = cls(forward, inputs, outputs, parts)
            warps = found.threads // _WARP
            if (
                8 <= warps <= 16
                and math.prod(forward.filters[1:3]) * _ceil(inputs, _CHANNELS) <= found.threads
                and parts <= forward.filters[2] * _ceil(outputs, _STEP)
                and found.registers() <= min(_REGISTERS // found.threads, _MOST_REGISTERS)
                and found.shared_bytes() <= limits.shared_bytes
            ):
                return found
        return None

    @property
    def threads(self) -> int:
        """Threads of a block: a warp for 8 columns of the images in a part."""
        return _WARP * self.parts * _ceil(_IMAGES * self.forward.image[2], 8)

    def registers(self) -> int:
        """About what a thread needs; with more than it has, it would spill."""
        tiles = _ceil(self.inputs, _CHANNELS)
        pairs = _ceil(self.forward.image[1], 2)
        return 4 * pairs * tiles + 2 * self.forward.filters[1] * tiles + 8 + _OTHER_REGISTERS

    def shared_bytes(self) -> int:
        """The shared memory of a block: filters, images of dy, and a sum for each part."""
        _, h, w, _ = self.forward.image
        _, r, s, _ = self.forward.filters
        _, oh, ow, _ = self.forward.output
        tiles, steps = _ceil(self.inputs, _CHANNELS), _ceil(self.outputs, _STEP)
        border = s - 1 - self.forward.padding[1]
        pixels = border + _IMAGES * (ow + border)
        filters = steps * _STEP * (r * s * tiles | 1) * _CHUNK_BYTES
        dy = (oh + 2) * pixels * (2 * steps | 1) * _CHUNK_BYTES
        return filters + dy + 4 * self.parts * h * _IMAGES * w * (tiles | 1) * 8

    def macros(self) -> Macros:
        """The macros of the kernel."""
        own = {"OUTPUTS": self.outputs, "PARTS": self.parts}
        return _macros(self.forward, self.inputs) | own

    def launch(  # pragma: no cover - needs a GPU
        self, kernels: Kernels, limits: Limits, dy: Any, weight: Any, dx: Any
    ) -> None:
        """Queue dx (n, h, w, c) from dy (n, oh, ow, k) and weight (k, r, s, c)."""
        kernel = kernels.get(_FOLDER / "input_gradient.cu", "input_gradient", self.macros())
        grid = (min(_ceil(len(dx), _IMAGES), limits.multiprocessors),)
        kernel(grid, (self.threads,), (dy, weight, dx, np.int32(len(dx))), self.shared_bytes())


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """How `weight_gradient.cu` is launched for `forward` with `inputs` true input channels.

    `images` are loaded together.
    """

    forward: Convolution
    inputs: int
    images: int

    @classmethod
    def of(cls, forward: Convolution, inputs: int, limits: Limits) -> WeightGradient | None:
        """None if the kernel does not support it on such a GPU."""
        if not _is_plain(forward, limits):
            return None
        for images in (4, 2, 1):
            found = cls(forward, inputs, images)
            shared_bytes = found.shared_bytes() + _FLAG_BYTES
            if found.unit_parts <= 4 and shared_bytes <= limits.shared_bytes:
                return found
        return None

    @property
    def units(self) -> int:
        """Columns of the product, in tiles of 8."""
        return self.forward.filters[2] * _ceil(self.inputs, _CHANNELS)

    @property
    def unit_parts(self) -> int:
        """Parts of the columns: a warp has up to 8 tiles."""
        return _ceil(self.units, 8)

    @property
    def sets(self) -> int:
        """Warps that divide the positions: there are 8 warps, or 6 with three parts."""
        return 8 // self.unit_parts

    @property
    def tiles(self) -> int:
        """Tiles of 16 output channels in a block."""
        return min(2, _ceil(self.forward.filters[0], _STEP))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _WARP * self.unit_parts * self.sets

    @property
    def parts(self) -> int:
        """Parts of the filters, each of some blocks."""
        k, r, _, _ = self.forward.filters
        return r * _ceil(k, _STEP * self.tiles)

    def grid(self, limits: Limits) -> tuple[int, int]:
        """(blocks of a part, parts): up to one block a multiprocessor."""
        blocks = max(1, min(self.forward.image[0], limits.multiprocessors // self.parts))
        return blocks, self.parts

    def partial_size(self, limits: Limits) -> int:
        """The sums of all blocks, in floats."""
        blocks, parts = self.grid(limits)
        return blocks * parts * _STEP * self.tiles * self.units * _CHANNELS

    def shared_bytes(self) -> int:
        """The shared memory of a block: twice the images, later the sums of its warps."""
        _, oh, ow, _ = self.forward.output
        chunks = _ceil(self.inputs, _CHANNELS)
        x = oh * (ow + self.forward.filters[2] - 1) * (chunks | 1) * _CHUNK_BYTES
        dy = _ceil(oh * ow, _STEP) * _STEP * (2 * self.tiles | 1) * _CHUNK_BYTES
        sums = 4 * self.sets * _STEP * self.tiles * (self.units | 1) * 8
        return max(2 * self.images * (x + dy), sums)

    def macros(self) -> Macros:
        """The macros of the kernel."""
        return _macros(self.forward, self.inputs) | {
            "M_TILES": self.tiles,
            "UNIT_PARTS": self.unit_parts,
            "SETS": self.sets,
            "IMAGES": self.images,
        }

    def launch(  # pragma: no cover - needs a GPU
        self,
        kernels: Kernels,
        limits: Limits,
        x: Any,
        dy: Any,
        partial: Any,
        counters: Any,
        dweight: Any,
    ) -> None:
        """Queue dweight, float32 (k, r, s, c), from x (n, h, w, c) and dy (n, oh, ow, k).

        partial: at least `partial_size` float32.
        counters: at least `parts` uint32, 0 before and after.
        """
        kernel = kernels.get(_FOLDER / "weight_gradient.cu", "weight_gradient", self.macros())
        arguments = (x, dy, partial, counters, dweight, np.int32(len(x)))
        kernel(self.grid(limits), (self.threads,), arguments, self.shared_bytes())


def _is_plain(forward: Convolution, limits: Limits) -> bool:
    """Whether it is a convolution of halves, without stride and dilation, between many channels."""
    k, r, s, c = forward.filters
    return (
        forward.precision == "fp16"
        and limits.capability >= _AMPERE
        and forward.stride == forward.dilation == (1, 1)
        and forward.padding[0] < r
        and forward.padding[1] < s
        and k % _CHANNELS == c % _CHANNELS == 0
    )


def _macros(forward: Convolution, inputs: int) -> dict[str, str | int]:
    _, h, w, c = forward.image
    k, r, s, _ = forward.filters
    _, oh, ow, _ = forward.output
    named = {"H": h, "W": w, "OH": oh, "OW": ow, "R": r, "S": s, "C": c, "K": k, "INPUTS": inputs}
    padding = {"PAD_H": forward.padding[0], "PAD_W": forward.padding[1]}
    return named | padding | {"SCALAR": "__half"}


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
