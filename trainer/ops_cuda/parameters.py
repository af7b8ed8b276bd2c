"""Trained tensors on the device: float32 masters in cuDNN's layout, with float16 copies.

In mixed precision the network multiplies with the float16 copy of a weight and the optimizer
updates the float32 master, so that small updates are not rounded away.
Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from lenet.cuda.packing import Packed, layout
from lenet.model import Model


@dataclass(eq=False, slots=True, weakref_slot=True)
class Parameter:
    """One packed tensor: `master` float32, `half` float16 once an operation has used it."""

    master: Any
    channels: int
    """The true size of the first axis."""

    half: Any = field(default=None)

    def operand(self, dtype: Any) -> Any:
        """The tensor in `dtype`, float32 or float16."""
        if dtype == cupy.float32:
            return self.master
        if self.half is None:
            self.half = self.master.astype(cupy.float16)
        return self.half

    def refresh(self) -> None:
        """Round the master into `half` again."""
        if self.half is not None:
            self.half[...] = self.master


def upload(model: Model, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Parameter]:
    """Canonical tensors, any of `model.parameters()`, onto the current GPU."""
    layouts = layout(model)
    uploaded: dict[str, Parameter] = {}
    for name, tensor in tensors.items():
        packed = layouts[name].pack(tensor.astype(np.float32))
        uploaded[name] = Parameter(cupy.asarray(packed), len(tensor))
    return uploaded


def download(model: Model, arrays: Mapping[str, Parameter | Any]) -> dict[str, NDArray[np.float32]]:
    """Canonical copies of parameters, or of gradients, which are plain packed arrays."""
    layouts = layout(model)
    return {name: _canonical(layouts[name], value) for name, value in arrays.items()}


def _canonical(packed: Packed, value: Parameter | Any) -> NDArray[np.float32]:
    array = value.master if isinstance(value, Parameter) else value
    host = cupy.asnumpy(array).astype(np.float32)
    return packed.unpack(host.reshape(packed.shape)).astype(np.float32)
