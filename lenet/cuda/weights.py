"""One network's weights on the device, packed, in buffers that stay where they are.

What is captured or compiled knows addresses alone, so new weights are copied over the old, in
stream order: what was queued before computes with the old ones, what comes after with the new.
The packed tensors of the last two files stay on the device beside the buffers in use, so that
going back and forth between them is one copy. It refuses to know how anything is packed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import cupy
import numpy as np
from numpy.typing import NDArray

from lenet.cuda.memory import ALIGNMENT
from lenet.weightfile import WeightFile

Pack: TypeAlias = Callable[[WeightFile], Mapping[str, NDArray[Any]]]
"""The tensors of a file as the kernels read them; names and shapes depend on the model alone."""

_KEPT_FILES = 2


class DeviceWeights:
    """The tensors of `file` and then of others of the same architecture, as `pack` makes them."""

    def __init__(self, file: WeightFile, pack: Pack) -> None:
        self._pack = pack
        self._kept: OrderedDict[WeightFile, Any] = OrderedDict()
        packed = pack(file)
        self._offsets: dict[str, int] = {}
        self._size = 0
        for name, tensor in packed.items():
            self._offsets[name] = self._size
            self._size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._buffer = cupy.empty(self._size, cupy.uint8)
        self._tensors = {
            name: self._buffer[start : start + packed[name].nbytes]
            .view(packed[name].dtype)
            .reshape(packed[name].shape)
            for name, start in self._offsets.items()
        }
        self._kept[file] = cupy.asarray(self._flat(packed))
        self._current: WeightFile | None = None
        self.load(file)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    @property
    def size_bytes(self) -> int:
        """Device memory: the buffers in use and what may be kept beside them."""
        return (1 + _KEPT_FILES) * self._size

    def load(self, file: WeightFile) -> None:
        """Whatever is queued on the current stream from now on reads the weights of `file`."""
        if self._current is file:
            return
        if file not in self._kept:
            self._kept[file] = cupy.asarray(self._flat(self._pack(file)))
        self._kept.move_to_end(file)
        self._buffer.data.copy_from_device_async(
            self._kept[file].data, self._size, cupy.cuda.get_current_stream()
        )
        self._current = file
        while len(self._kept) > _KEPT_FILES:
            # CuPy gives memory back in the order of the stream: the copy from it comes first.
            self._kept.popitem(last=False)

    def _flat(self, packed: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        flat = np.zeros(self._size, np.uint8)
        for name, tensor in packed.items():
            start = self._offsets[name]
            flat[start : start + tensor.nbytes] = np.frombuffer(tensor.tobytes(), np.uint8)
        return flat
