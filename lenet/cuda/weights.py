"""One network's weights on the device, packed, in buffers with fixed addresses.

Captured graphs and kernels hold only addresses, so new weights are copied over the old ones in
stream order: work queued before the copy uses the old weights, work queued after it the new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import cupy
import numpy as np
from numpy.typing import NDArray

from lenet.cuda.memory import ALIGNMENT
from lenet.cuda.packing import round_up
from lenet.weightfile import WeightFile

Pack: TypeAlias = Callable[[WeightFile], Mapping[str, NDArray[Any]]]
"""The tensors of a file as the kernels read them; names and shapes depend only on the model."""

_MAX_RESIDENT = 2


class DeviceWeights:
    """The tensors of `file`, later of others of the same architecture, as `pack` makes them.

    The packed tensors of the last two files stay on the device beside the buffers in use, so that
    switching between them is one copy on the device.
    """

    def __init__(self, file: WeightFile, pack: Pack) -> None:
        self._pack = pack
        self._resident: OrderedDict[WeightFile, Any] = OrderedDict()
        packed = pack(file)
        self._offsets: dict[str, int] = {}
        self._size = 0
        for name, tensor in packed.items():
            self._offsets[name] = self._size
            self._size += round_up(tensor.nbytes, ALIGNMENT)
        self._buffer = cupy.empty(self._size, cupy.uint8)
        self._tensors = {
            name: self._buffer[start : start + packed[name].nbytes]
            .view(packed[name].dtype)
            .reshape(packed[name].shape)
            for name, start in self._offsets.items()
        }
        self._resident[file] = cupy.asarray(self._flat(packed))
        self._current: WeightFile | None = None
        self.load(file)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    @property
    def size_bytes(self) -> int:
        """Device memory: the buffers in use and the resident copies, also those to come."""
        return (1 + _MAX_RESIDENT) * self._size

    def load(self, file: WeightFile) -> None:
        """Work queued on the current stream from now on reads the weights of `file`."""
        if self._current is file:
            return
        if file not in self._resident:
            self._resident[file] = cupy.asarray(self._flat(self._pack(file)))
        self._resident.move_to_end(file)
        self._buffer.data.copy_from_device_async(
            self._resident[file].data, self._size, cupy.cuda.get_current_stream()
        )
        self._current = file
        while len(self._resident) > _MAX_RESIDENT:
            # CuPy frees memory in stream order, so after the copy from it.
            self._resident.popitem(last=False)

    def _flat(self, packed: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        flat = np.zeros(self._size, np.uint8)
        for name, tensor in packed.items():
            start = self._offsets[name]
            flat[start : start + tensor.nbytes] = np.frombuffer(tensor.tobytes(), np.uint8)
        return flat
