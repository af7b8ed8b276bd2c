"""Device memory that is allocated once: an arena for buffers, a workspace, page-locked staging.

A step takes its buffers from the arena in a fixed order and rewinds it at the end, so the next step
gets each buffer at the same address. That is what lets a captured CUDA graph be replayed. Single
buffers are not freed. Host memory for copies is page-locked, so that they run without the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import cupy
import numpy as np

from lenet.pixels import HEIGHT, WIDTH, Images

ALIGNMENT = 256
"""Bytes; what cudaMalloc guarantees, and more than any vector load needs."""


class Arena:
    """Buffers one after another in slabs of device memory; `rewind` frees them."""

    def __init__(self, slab_bytes: int = 64 << 20) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[Any] = []
        self._current = self._offset = 0

    @property
    def size_bytes(self) -> int:
        """The size of all slabs."""
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

    def mark(self) -> tuple[int, int]:
        """The current position, for `rewind`."""
        return self._current, self._offset

    def rewind(self, mark: tuple[int, int] = (0, 0)) -> None:
        """Free what was taken after `mark`; the same requests get the same addresses again."""
        self._current, self._offset = mark

    def free(self) -> None:
        """Drop the slabs; none of their buffers is used any more."""
        self._slabs.clear()
        self.rewind()


class Workspace:
    """A scratch buffer for all engines of a stream, as large as the largest of them needs.

    The engines of a stream run one after another, so they can share it. A buffer that became too
    small is kept, because a captured graph may hold its address.
    """

    def __init__(self) -> None:
        self._buffers: list[Any] = []

    @property
    def size_bytes(self) -> int:
        """The size of all buffers, also of those that became too small."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def reserve(self, size_bytes: int) -> None:
        """Grow to at least `size_bytes`."""
        if size_bytes > (self._buffers[-1].nbytes if self._buffers else 0):
            self._buffers.append(cupy.empty(size_bytes, cupy.uint8))

    @property
    def pointer(self) -> int:
        """The device address; 0 if nothing is reserved."""
        return int(self._buffers[-1].data.ptr) if self._buffers else 0

    def free(self) -> None:
        """Drop all buffers; no engine runs any more."""
        self._buffers.clear()


def page_locked(device: int, count: int, size_bytes: int) -> list[Any]:
    """Buffers of bytes that every GPU can read; `device` becomes the thread's current one.

    It stays so: to go back to GPU 0 would open that, which takes 520 MiB of its memory (H100, CUDA
    13.0, 2026-11-26), also in a worker that computes on another.
    """
    cupy.cuda.Device(device).use()
    return [_pinned((size_bytes,), np.uint8) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The inputs and outputs of one batch; the `host_` ones are NumPy arrays, page-locked.

    pixels: uint8 (rows, 28, 28); logits, probabilities: float32 (rows, classes).
    """

    host_pixels: Any
    host_probabilities: Any
    pixels: Any
    logits: Any
    probabilities: Any

    @classmethod
    def take(cls, arena: Arena, rows: int, classes: int) -> Self:
        """Buffers with black images; the device memory comes from the arena."""
        answers = rows, classes
        pixels = _pinned((rows, HEIGHT, WIDTH), np.uint8)
        pixels[...] = 0
        return cls(
            pixels,
            _pinned(answers, np.float32),
            arena.take(pixels.shape, cupy.uint8),
            arena.take(answers, cupy.float32),
            arena.take(answers, cupy.float32),
        )

    @property
    def rows(self) -> int:
        """The largest number of images."""
        return len(self.host_pixels)

    @property
    def pixels_on_host(self) -> Any:
        """The address of `host_pixels`, for kernels."""
        return np.uintp(self.host_pixels.ctypes.data)

    @property
    def probabilities_on_host(self) -> Any:
        """The address of `host_probabilities`, for kernels."""
        return np.uintp(self.host_probabilities.ctypes.data)

    def copy_in(self) -> None:
        """Queue the copy of the pixels to the device."""
        runtime = cupy.cuda.runtime
        to, source = self.pixels.data.ptr, self.host_pixels.ctypes.data
        _copy(to, source, self.pixels.nbytes, runtime.memcpyHostToDevice)

    def copy_from(self, images: Images, stream: Any) -> None:
        """Queue on `stream` the copy of page-locked `images` to the device."""
        runtime = cupy.cuda.runtime
        to, source = self.pixels.data.ptr, images.ctypes.data
        runtime.memcpyAsync(to, source, images.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def copy_out(self) -> None:
        """Queue the copy of the probabilities to the host."""
        runtime = cupy.cuda.runtime
        to, source = self.host_probabilities.ctypes.data, self.probabilities.data.ptr
        _copy(to, source, self.probabilities.nbytes, runtime.memcpyDeviceToHost)


def _copy(to: int, source: int, size: int, kind: int) -> None:
    # By the runtime's function: CuPy's arrays cannot be copied to or from the host in a capture.
    stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memcpyAsync(to, source, size, kind, stream.ptr)


def _pinned(shape: tuple[int, ...], dtype: Any) -> Any:
    count = math.prod(shape)
    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)
