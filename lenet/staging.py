"""Page-locked receive buffers that a GPU reads directly, without another copy by the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lenet.pixels import Images


class Staging:
    """Hands out `buffers`, arrays of bytes. For one thread."""

    def __init__(self, buffers: Iterable[NDArray[Any]]) -> None:
        self._free = list(buffers)
        self._spans = [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in self._free]

    def take(self, size_bytes: int) -> memoryview | None:
        """The beginning of a buffer, of `size_bytes`; None if none is free or large enough.

        It is free again when nothing refers to what this returned, nor to a part of it.
        """
        if not self._free or size_bytes > self._free[-1].nbytes:
            return None
        buffer = self._free.pop()
        # Not a slice: for a view of that, NumPy would keep the buffer and drop the slice.
        part = np.frombuffer(buffer.data, np.uint8, size_bytes)
        weakref.finalize(part, self._free.append, buffer).atexit = False
        view: memoryview = part.data
        return view

    def holds(self, images: Images) -> bool:
        """Whether `images` lie in one of the buffers."""
        address = images.ctypes.data
        return any(start <= address < stop for start, stop in self._spans)
