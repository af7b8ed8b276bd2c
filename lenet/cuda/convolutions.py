"""The first two convolutions of a network in one kernel: `convolutions.cu`.

It computes on tensor cores, in float32 too. Here are the networks that the kernel supports, its
macros, the packing of its weights and its launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.cuda.capture import Launch
from lenet.cuda.conv1 import filter_matrix, is_plain, mma_b, parts
from lenet.cuda.device import Limits
from lenet.cuda.graphs import Precision
from lenet.cuda.halves import exponents, halves, largest_output, scales
from lenet.cuda.kernels import (
    FOLDER,
    Kernels,
    Macros,
    activation_parameters,
    scalar,
    storage_dtype,
)
from lenet.cuda.packing import padded, round_up, zero_pad_to
from lenet.model import ConvBlock, Model

Fragments: TypeAlias = NDArray[np.float16] | NDArray[np.float32]

_SOURCE = FOLDER / "convolutions.cu"
_AMPERE = 80
_PRODUCTS: dict[Precision, int] = {"fp16": 0, "tf32": 1, "fp32": 3}
_CHUNK_BYTES = 16
_WARPS = 16  # of a block
_MAX_DEPTHS = 8


@dataclass(frozen=True, slots=True)
class Split:
    """How the work is divided: see `convolutions.cu`."""

    teams: int
    team: int
    slices: int = 1
    parts: int = 1
    depths: int = 1


@dataclass(frozen=True, slots=True)
class Convolutions:
    """The geometry of the kernel for the first two blocks of `model`; see `of`."""

    model: Model
    precision: Precision

    @classmethod
    def of(cls, model: Model, precision: Precision, limits: Limits) -> Convolutions | None:
        """None if the kernel does not support the network on such a GPU.

        The kernel writes at most 15 channels of padding behind the second convolution's, to a
        multiple of 16. With 1 to 8 channels there are 8 in memory, with 33 to 48 there are 64:
        these are not supported, nor are 65 to 80 and so on.
        """
        first, second, *_ = (*model.blocks, None, None)
        if not (isinstance(first, ConvBlock) and isinstance(second, ConvBlock)):
            return None
        found = cls(model, precision)
        if (
            limits.capability >= _AMPERE
            and is_plain(first)
            and is_plain(second)
            and first.pool is not None
            and second.pool is not None
            and len(activation_parameters((first, second))) <= 1
            and padded(second.channels) % 16 == 0
            and padded(second.channels) - second.channels < 16
            and found.shared_bytes(Split(1, 1)) <= limits.shared_bytes
        ):
            return found
        return None

    @property
    def first(self) -> ConvBlock:
        """The first block."""
        block = self.model.blocks[0]
        assert isinstance(block, ConvBlock), "bug: not supported"
        return block

    @property
    def second(self) -> ConvBlock:
        """The second block."""
        block = self.model.blocks[1]
        assert isinstance(block, ConvBlock), "bug: not supported"
        return block

    def macros(self, split: Split) -> Macros:
        """The macros of the kernel."""
        first, second = self.first, self.second
        assert first.pool is not None, "bug: not supported"
        assert second.pool is not None, "bug: not supported"
        _, h, w = self.model.input
        return {
            "SCALAR": scalar(storage_dtype(self.precision)),
            "PRODUCTS": _PRODUCTS[self.precision],
            "H": h,
            "W": w,
            "R": first.kernel[0],
            "S": first.kernel[1],
            "PAD_H": first.padding[0],
            "PAD_W": first.padding[1],
            "POOL": first.pool.kind.upper(),
            "C": round_up(first.channels, 8),
            "CHANNELS1": first.channels,
            "R2": second.kernel[0],
            "S2": second.kernel[1],
            "PAD2_H": second.padding[0],
            "PAD2_W": second.padding[1],
            "POOL2": second.pool.kind.upper(),
            "K": padded(second.channels),
            "CHANNELS": second.channels,
            "ACTIVATION": second.activation.kind,
            "ACTIVATION_1": first.activation.kind,
            "ACTIVATION_2": second.activation.kind,
            "PARAMETER": next(iter(activation_parameters((first, second))), 1.0),
            "TEAMS": split.teams,
            "TEAM": split.team,
            "SLICES": split.slices,
            "PARTS": split.parts,
            "DEPTHS": split.depths,
        }

    def shared_bytes(self, split: Split) -> int:
        """The shared memory of a block of threads: filters, offsets, images, parts of sums."""
        first, second = self.first, self.second
        channels, *sides = self.model.shapes()[0].output
        (h, ph), (w, pw) = zip(sides, second.padding, strict=True)
        r, s = second.kernel
        chunks = -(-channels // self._chunk_channels)
        steps = -(-r * s * chunks // 2)
        pixel, half = (chunks | 1) * _CHUNK_BYTES, (w + 2 * pw + 1) // 2
        wanted = (w + 2 * pw - s + 1) // 2 * pixel // 2 // 16 * 16 % 64
        pitch = 2 * half * pixel + (wanted - 2 * half * pixel) % 64
        taps = filter_matrix(np.zeros((1, 1, *first.kernel), np.float32), 8)
        padded_channels = round_up(channels, 8)
        first_bytes = parts(self.precision) * len(taps) * padded_channels * 2
        slice_tiles, part_tiles = self._tiles(split)
        filters = (
            steps * (256 * self._planes * slice_tiles + 16) + first_bytes + 4 * padded_channels
        )
        images = split.teams * (self._copies_bytes() + self._planes * (h + 2 * ph) * pitch)
        sums = (split.depths - 1) * self._groups * split.parts * part_tiles * 1024
        return filters + images + sums

    @property
    def _planes(self) -> int:
        """The halves whose sum is an operand of the second convolution, 1 in TF32."""
        return 2 if self.precision == "fp32" else 1

    @property
    def _chunk_channels(self) -> int:
        """The channels of a pixel in 16 bytes of the second convolution's input."""
        return 4 if self.precision == "tf32" else 8

    def _tiles(self, split: Split) -> tuple[int, int]:
        """The tiles of a slice and of a part of it."""
        everything = tiles(self.second.channels)
        pairs = -(-self._pairs // split.slices)
        part = -(-pairs // split.parts)
        return min(2 * pairs, everything), min(2 * part, everything)

    @property
    def _pairs(self) -> int:
        """Pairs of tiles."""
        return -(-tiles(self.second.channels) // 2)

    @property
    def _groups(self) -> int:
        """Groups of eight quads."""
        _, h, w = self.model.shapes()[1].output
        return -(-h * w // 8)

    def _copies_bytes(self) -> int:
        """`conv1::Copies`."""
        _, qh, qw = self.model.shapes()[0].output
        _, h, w = self.model.input
        r, s = self.first.kernel
        ph, pw = self.first.padding
        rows = max(h + ph, 2 * qh + r - 1)
        pitch = round_up(max(w + pw, 2 * (qw + (s + 1) // 2 - 1)), 16)
        return 2 * rows * pitch * 2

    def split(self, rows: int, limits: Limits) -> Split:
        """How the work of `rows` images is divided.

        Many images: the number of teams with the least time, about that of half an image and of
        the teams for each round. Few: several blocks for each image, as far as there are
        multiprocessors, and several warps for each sum. Measured on an H100, 2026-11-25.
        """
        teams = min(
            (n for n in (1, 2, 4, 8) if self._fits(Split(n, 1), limits)),
            key=lambda n: -(-rows // (n * limits.multiprocessors)) * (2 * n + 1),
        )
        # Where one multiplication takes long, more warps hide it.
        slow = self.precision == "tf32" and teams == 1
        warps = min(_WARPS, max(2 * self._groups, _WARPS if slow else _WARPS // 2))
        team = max(min(2, self._groups), warps // teams)
        slices = 1 if teams > 1 else min(self._pairs, max(1, limits.multiprocessors // rows))
        pairs = -(-self._pairs // slices)
        slices = -(-self._pairs // pairs)
        parts = min(pairs, max(1, team // self._groups))
        # So many pairs of a warp stay in registers; in fp32 it has two sums of each.
        few = self.precision == "fp32" and teams * team > _WARPS // 2
        parts = max(parts, -(-pairs // (2 if few else 4)))
        tasks = self._groups * parts
        for depths in range(min(_MAX_DEPTHS, team // tasks) if teams == 1 else 1, 1, -1):
            split = Split(1, tasks * depths, slices, parts, depths)
            if self._fits(split, limits):
                return split
        return Split(teams, team, slices, parts)

    def _fits(self, split: Split, limits: Limits) -> bool:
        return self.shared_bytes(split) <= limits.shared_bytes

    def pack_first(self, weight: NDArray[Any]) -> Fragments:
        """The first filters (k, 1, r, s) as the lanes of a warp read them.

        Returns:
            float16 (halves, steps, tiles, 32 lanes, 4), C-contiguous: the halves of each weight,
            in fp32 scaled as `scales` says.
        """
        if self.precision == "fp32":
            weight = np.ldexp(np.asarray(weight, np.float32), exponents(abs(weight).max()))
        matrix = filter_matrix(weight, round_up(self.first.channels, 8))
        return np.stack(halves(mma_b(matrix), parts(self.precision)))

    def pack_second(self, weight: NDArray[Any]) -> Fragments:
        """The second filters (k, c, r, s) as the lanes of a warp read them.

        Returns:
            (steps, tiles, 32 lanes, planes, 2, values in 4 bytes), C-contiguous: float32 in TF32,
            else float16. A step covers two chunks, of 16 bytes of channels each. In fp32 the planes
            are the halves of each weight, which is scaled as `scales` says.
        """
        weight = weight.astype(np.float32)
        k, c, r, s = weight.shape
        values = self._chunk_channels
        size = r, s, round_up(c, values), round_up(k, 16)
        if self.precision == "fp32":
            weight = np.ldexp(weight, exponents(abs(weight).max((1, 2, 3)))[:, None, None, None])
        taps = zero_pad_to(weight.transpose(2, 3, 1, 0), size)
        chunks = taps.reshape(-1, values, size[-1])
        chunks = zero_pad_to(chunks, (round_up(len(chunks), 2), *chunks.shape[1:]))
        # Channel 16 a + 4 t + 2 b + e is column 2 t + e of tile 2 a + b.
        axes = chunks.reshape(-1, 2, 4, values // 4, size[-1] // 16, 4, 2, 2)
        # step, half, t of k, value; a, t, b, e -> step, a, b, (t, e), t of k, half, value
        ordered = axes.transpose(0, 4, 6, 5, 7, 2, 1, 3)
        lanes = ordered.reshape(len(ordered), -1, 32, 2, values // 4)[:, : tiles(k)]
        if self.precision == "tf32":
            return np.ascontiguousarray(lanes[:, :, :, None])
        return np.stack(halves(lanes, self._planes), axis=3)

    def scales(
        self, weight: NDArray[Any], bias: NDArray[Any], weight2: NDArray[Any]
    ) -> NDArray[np.float32]:
        """The factors of fp32, by which halves hold filters and activations of any size.

        Args:
            weight: (k, 1, r, s), of the first convolution.
            bias: (k,), likewise.
            weight2: (k, c, r, s), of the second one.

        Returns:
            float32 (1 + K, 2), powers of two. First the factor of the first convolution's sums,
            which undoes that of its filters, and the factor of its output, which no image brings
            beyond 2^15. Then, for each output channel, two factors of the second's sums: their
            product undoes the factors of the output and of the filter.
        """
        of_output = exponents(largest_output(self.first.activation, weight, bias, 1.0))
        of_first = np.ldexp(np.float32(1), [[-exponents(abs(weight).max()), of_output]])
        of_second = exponents(abs(weight2).max((1, 2, 3)))
        rest = scales(of_output, of_second, padded(len(weight2)))
        return np.concatenate([of_first, rest], dtype=np.float32)

    def launch(  # pragma: no cover - needs a GPU
        self,
        kernels: Kernels,
        limits: Limits,
        images: Any,
        weights: tuple[Any, Any],
        biases: tuple[Any, Any],
        scales: Any,
        y: Any,
        divided: Split | None = None,
    ) -> Launch:
        """Prepare the launch from `images`, uint8 (n, 28, 28), to `y`, (n, oh, ow, K)."""
        rows = len(y)
        divided = divided or self.split(rows, limits)
        kernel = kernels.get(_SOURCE, "convolutions", self.macros(divided))
        size = self.shared_bytes(divided)
        blocks = min(-(-rows // divided.teams), limits.multiprocessors // divided.slices)
        grid = (blocks, divided.slices)
        threads = (32 * divided.team * divided.teams,)
        arguments = (images, *weights, *biases, scales, y, np.int32(rows))
        return lambda: kernel(grid, threads, arguments, size)


def tiles(channels: int) -> int:
    """The tiles of eight output channels: pairs, but the last may be alone with two channels."""
    rest = channels % 16
    return channels // 16 * 2 + (0 if rest == 0 else 1 if rest <= 2 else 2)
