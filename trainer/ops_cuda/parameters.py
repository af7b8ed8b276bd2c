"""Trained tensors on the device: float32 masters in cuDNN's layout, halves of them where needed.

Under mixed precision the network multiplies with a half of each weight while the optimiser goes
on moving the master, so that small updates are not rounded away.
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


@dataclass(eq=False, slots=True)
class Parameter:
    """One packed tensor: `master` float32, `half` float16 once an operation asked for it."""

    master: Any
    channels: int
    """The true size of the first axis."""

    half: Any = field(default=None)

    def operand(self, dtype: Any) -> Any:
        """The tensor as an operation of `dtype` takes it."""
        if dtype == cupy.float32:
            return self.master
        if self.half is None:
            self.half = self.master.astype(cupy.float16)
        return self.half

    def fill(self, packed: NDArray[Any]) -> None:
        """New values from the host, into the same memory."""
        self.master.set(np.ascontiguousarray(packed, np.float32))
        self.refresh()

    def refresh(self) -> None:
        """Round the master once more."""
        if self.half is not None:
            self.half[...] = self.master


def place(model: Model, tensors: Mapping[str, NDArray[Any]]) -> dict[str, Parameter]:
    """Canonical tensors, any of `model.parameters()`, onto the current GPU."""
    layouts = layout(model)
    placed: dict[str, Parameter] = {}
    for name, tensor in tensors.items():
        packed = layouts[name].pack(tensor.astype(np.float32))
        placed[name] = Parameter(cupy.asarray(packed), len(tensor))
    return placed


def read(model: Model, placed: Mapping[str, Parameter | Any]) -> dict[str, NDArray[np.float32]]:
    """Canonical copies of parameters, or of gradients, which are plain packed arrays."""
    layouts = layout(model)
    return {name: _canonical(layouts[name], value) for name, value in placed.items()}


def write(
    model: Model, placed: Mapping[str, Parameter], tensors: Mapping[str, NDArray[Any]]
) -> None:
    """New values into the same memory."""
    layouts = layout(model)
    for name, parameter in placed.items():
        parameter.fill(layouts[name].pack(tensors[name]))


def _canonical(packed: Packed, value: Parameter | Any) -> NDArray[np.float32]:
    array = value.master if isinstance(value, Parameter) else value
    host = cupy.asnumpy(array).astype(np.float32)
    return packed.unpack(host.reshape(packed.shape)).astype(np.float32)
