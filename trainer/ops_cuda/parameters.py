"""Trained tensors on the device: float32 masters in cuDNN's layout, with float16 copies.

In mixed precision the network multiplies with the float16 copy of a weight and the optimizer
updates the float32 master, so that small updates are not rounded away. The copy is made with the
master, and whatever writes the master writes the copy.
Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from lenet.cuda.packing import Packed, layout
from lenet.model import Model


@dataclass(eq=False, slots=True, weakref_slot=True)
class Parameter:
    """One packed tensor: `master` float32, and `half`, its float16 copy if operations read that."""

    master: Any
    channels: int
    """The true size of the first axis."""

    half: Any = None

    def operand(self, dtype: Any) -> Any:
        """The tensor in `dtype`, float32 or float16."""
        if dtype == cupy.float32:
            return self.master
        assert self.half is not None, "bug: uploaded without a float16 copy"
        return self.half

    def refresh(self) -> None:
        """Round the master into `half` again."""
        if self.half is not None:
            self.half[...] = self.master


def upload(model: Model, tensors: Mapping[str, NDArray[Any]], halves: bool) -> dict[str, Parameter]:
    """Canonical tensors, any of `model.parameters()`, onto the current GPU.

    With `halves` each weight has a float16 copy.
    """
    layouts = layout(model)
    uploaded: dict[str, Parameter] = {}
    for name, tensor in tensors.items():
        packed = layouts[name].pack(tensor.astype(np.float32))
        master = cupy.asarray(packed)
        half = master.astype(cupy.float16) if halves and name.endswith(".weight") else None
        uploaded[name] = Parameter(master, len(tensor), half)
    return uploaded


def download(model: Model, arrays: Mapping[str, Parameter | Any]) -> dict[str, NDArray[np.float32]]:
    """Canonical copies of parameters, or of gradients, which are plain packed arrays."""
    layouts = layout(model)
    return {name: _canonical(layouts[name], value) for name, value in arrays.items()}


def _canonical(packed: Packed, value: Parameter | Any) -> NDArray[np.float32]:
    array = value.master if isinstance(value, Parameter) else value
    host = cupy.asnumpy(array).astype(np.float32)
    return packed.unpack(host.reshape(packed.shape)).astype(np.float32)
