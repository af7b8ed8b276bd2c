"""Device memory that is taken once: an arena for what a step makes, a workspace for its plans.

A step takes its buffers from the arena in a fixed order and rewinds it at the end, so the next
step finds each buffer at the same address: that is what lets a captured CUDA graph be replayed.
It refuses to give single buffers back.
"""

from __future__ import annotations

import math
from typing import Any

import cupy

ALIGNMENT = 256
"""Bytes; what cudaMalloc itself promises, and more than any vector load asks for."""


class Arena:
    """Buffers one after another in slabs of device memory; `rewind` makes all of it free again."""

    def __init__(self, slab_bytes: int = 64 << 20) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[Any] = []
        self._current = self._offset = 0

    @property
    def size_bytes(self) -> int:
        """What all slabs take."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised C-contiguous CuPy array, aligned to `ALIGNMENT`.

        Raises:
            cupy.cuda.memory.OutOfMemoryError: the device has no room for another slab.
        """
        dtype = cupy.dtype(dtype)
        length = math.prod(shape) * dtype.itemsize
        rounded = -(-max(length, 1) // ALIGNMENT) * ALIGNMENT
        while self._current < len(self._slabs):
            slab = self._slabs[self._current]
            if self._offset + rounded <= slab.nbytes:
                start = self._offset
                self._offset += rounded
                return slab[start : start + length].view(dtype).reshape(shape)
            self._current, self._offset = self._current + 1, 0
        self._slabs.append(cupy.empty(max(rounded, self._slab_bytes), cupy.uint8))
        return self.take(shape, dtype)

    def rewind(self) -> None:
        """Everything taken so far may be taken again, in the same order at the same place."""
        self._current = self._offset = 0


class Workspace:
    """One scratch buffer for all plans of a stream, as large as the largest of them asks for.

    Plans of one stream run one after another, so they can share it. A buffer that became too small
    is kept: a captured graph may hold its address.
    """

    def __init__(self) -> None:
        self._buffers: list[Any] = []

    @property
    def size_bytes(self) -> int:
        """What the largest plan so far has asked for."""
        return self._buffers[-1].nbytes if self._buffers else 0

    def reserve(self, size_bytes: int) -> None:
        """Grow to at least `size_bytes`."""
        if size_bytes > self.size_bytes:
            self._buffers.append(cupy.empty(size_bytes, cupy.uint8))

    @property
    def pointer(self) -> int:
        """Its device address, 0 while nothing is reserved."""
        return int(self._buffers[-1].data.ptr) if self._buffers else 0
