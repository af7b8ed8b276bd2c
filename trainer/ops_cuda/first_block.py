"""The first block of a network in mixed precision, without its convolution's output.

`first_block.cu` computes batch norm's moments and all gradients from the moments of the patches. So
the convolution alone computes nothing: `Unwritten` stands for its output until the epilogue, which
outside training computes it after all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lenet.cuda.graphs import Convolution
from lenet.cuda.kernels import Kernels, Macros
from lenet.cuda.packing import round_up
from lenet.model import RELU, ConvBlock, Pool
from trainer.ops import EPSILON, RUNNING_SHARE, Epilogue

if TYPE_CHECKING:  # these import CuPy, which the choice does not need
    from lenet.cuda.device import Handle
    from lenet.cuda.memory import Arena
    from trainer.ops_cuda.parameters import Parameter

_SOURCE = Path(__file__).parent / "first_block.cu"
_THREADS = 512
_IMAGES = 2  # that a block processes at a time
_GROUP = 12  # blocks whose sums are added first
_MAX_BLOCKS = 132  # one on a multiprocessor of an H200; at most _GROUP ** 2
_COUNTERS = _MAX_BLOCKS // _GROUP + 1
_MAX_CHANNELS = _MAX_TAPS = 32  # the constant 1 is a tap, too
_PARTIAL = 1024  # floats of a block
_MAX_PIXELS = 4096  # of a padded image: in shared memory there are two images twice


@dataclass(frozen=True, slots=True, eq=False)
class Unwritten:
    """The output of a convolution that was not computed. Only training has its gradients."""

    x: Any
    weight: Parameter
    block: ConvBlock
    forward: Convolution

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(n, oh, ow, c)."""
        return self.forward.output


class SavedFirst(NamedTuple):
    """Saved for the gradients of the block."""

    of: Unwritten
    epilogue: Epilogue
    y: Any
    index: Any
    mean: Any
    variance: Any
    patches: Any


class FirstGradient(NamedTuple):
    """Stands for the gradient of the convolution's output; that of its filters is known."""

    dweight: Any


def fits(forward: Convolution, block: ConvBlock) -> bool:
    """Whether the kernels compute `block`, whose convolution is `forward`."""
    _, h, w, c = forward.image
    channels, r, s, _ = forward.filters
    _, oh, ow, _ = forward.output
    ph, pw = forward.padding
    return (
        forward.precision == "fp16"
        and c == 1
        and forward.stride == forward.dilation == (1, 1)
        and r * s < _MAX_TAPS
        and channels <= _MAX_CHANNELS
        and (h + 2 * ph) * round_up(w + 2 * pw, 16) <= _MAX_PIXELS
        and oh % 2 == ow % 2 == w % 4 == 0
        and block.batch_norm
        and block.activation == RELU
        and block.pool == Pool("max")
    )


class FirstBlock:  # pragma: no cover - needs a GPU
    """Launches the kernels on the handle's stream, with buffers from the arena."""

    def __init__(self, handle: Handle, kernels: Kernels, arena: Arena) -> None:
        import cupy

        self._handle, self._kernels, self._arena = handle, kernels, arena
        # Zeros between any two launches.
        self._counters = cupy.zeros(_COUNTERS, cupy.uint32)

    def forward(self, of: Unwritten, epilogue: Epilogue) -> tuple[Any, SavedFirst]:
        """The pooled output (n, oh / 2, ow / 2, c); moves the running moments."""
        norm = epilogue.norm
        assert norm is not None, "bug: not supported"
        n, oh, ow, c = of.forward.output
        y = self._arena.take((n, oh // 2, ow // 2, c), np.float16)
        index = self._arena.take(y.shape, np.uint8)
        mean, variance = (self._arena.take((c,), np.float32) for _ in range(2))
        _, r, s, _ = of.forward.filters
        patches = self._arena.take((c + 1, r * s), np.float32)
        partial = self._arena.take((self._blocks(n) * _PARTIAL,), np.float32)
        rows = np.int32(n)
        running = norm.mean.master, norm.variance.master
        weight = of.weight.master
        self._launch(
            of,
            "first_block_moments",
            (of.x, weight, partial, self._counters, patches, mean, variance, *running, rows),
        )
        scaled = mean, variance, norm.gamma.master, norm.beta.master
        self._launch(of, "first_block_forward", (of.x, weight, *scaled, y, index, rows))
        return y, SavedFirst(of, epilogue, y, index, mean, variance, patches)

    def backward(self, dy: Any, saved: SavedFirst) -> tuple[FirstGradient, tuple[Any, Any]]:
        """The gradient of the filters, float32 (c, r, s, 1), and (dgamma, dbeta)."""
        of, epilogue, y, index, mean, variance, patches = saved
        assert epilogue.norm is not None, "bug: not supported"
        n, c = len(y), y.shape[-1]
        dweight = self._arena.take(of.weight.master.shape, np.float32)
        dgamma, dbeta = (self._arena.take((c,), np.float32) for _ in range(2))
        partial = self._arena.take((self._blocks(n) * _PARTIAL,), np.float32)
        moments = mean, variance, epilogue.norm.gamma.master, patches
        sums = partial, self._counters, dweight, dgamma, dbeta
        arguments = (of.x, y, dy, index, of.weight.master, *moments, *sums, np.int32(n))
        self._launch(of, "first_block_backward", arguments)
        return FirstGradient(dweight), (dgamma, dbeta)

    def _blocks(self, rows: int) -> int:
        return min(-(-rows // _IMAGES), _MAX_BLOCKS)

    def _launch(self, of: Unwritten, kernel: str, arguments: tuple[Any, ...]) -> None:
        n, h, w, _ = of.forward.image
        c, r, s, _ = of.forward.filters
        macros: Macros = {
            "H": h,
            "W": w,
            "R": r,
            "S": s,
            "PAD_H": of.forward.padding[0],
            "PAD_W": of.forward.padding[1],
            "POOL": "MAX",
            "C": c,
            "CHANNELS": of.weight.channels,
            "EPSILON": float(EPSILON),
            "RUNNING_SHARE": float(RUNNING_SHARE),
        }
        function = self._kernels.get(_SOURCE, kernel, macros)
        function((self._blocks(n),), (_THREADS,), arguments)
