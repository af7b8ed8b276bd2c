"""A whole network as one kernel, a cluster of blocks for each image: for the smallest batches.

It reads pixels and writes probabilities where they lie in page-locked host memory, so that a batch
is one launch and nothing else. It refuses what `fused_network.cu` was not written for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lenet.cuda.fusion import whole_macros
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.memory import Buffers
from lenet.cuda.packing import CLUSTER
from lenet.cuda.weights import DeviceWeights
from lenet.model import Model

MAX_ROWS = 64
"""No bucket above it is tried: from host to host 64 images took 50 us, layer by layer 43; of 32 it
was 33 against 43 (H200, 2026-11-20)."""

_SOURCE = FOLDER / "fused_network.cu"
_THREADS = 512


class Whole:
    """The kernel for `model`, which reads `weights` as `fusion.pack_whole` makes them.

    Raises:
        DeviceError: the network is too large for it.
    """

    def __init__(self, model: Model, weights: DeviceWeights, kernels: Kernels) -> None:
        self._kernel = kernels.get(_SOURCE, "whole_network", whole_macros(model))
        names = ("first", "first_bias", "second", "second_bias")
        convolutional = len(model.blocks) == 4
        tensors: list[Any] = [weights[name] if convolutional else np.uintp(0) for name in names]
        tensors += [weights[name] for name in ("hidden", "hidden_bias", "last", "last_bias")]
        self._tensors = tuple(tensors)

    def queue(self, buffers: Buffers) -> None:
        """Compute all rows, from and to the device."""
        self._queue(buffers.rows, buffers.pixels, buffers.logits, buffers.probabilities)

    def queue_from_host(self, buffers: Buffers) -> None:
        """Compute all rows, from and to the host, whose page-locked memory the device reaches."""
        pixels, probabilities = (
            np.uintp(array.ctypes.data)
            for array in (buffers.host_pixels, buffers.host_probabilities)
        )
        self._queue(buffers.rows, pixels, buffers.logits, probabilities)

    def _queue(self, rows: int, pixels: Any, logits: Any, probabilities: Any) -> None:
        arguments = (pixels, *self._tensors, logits, probabilities)
        self._kernel((CLUSTER * rows,), (_THREADS,), arguments)
