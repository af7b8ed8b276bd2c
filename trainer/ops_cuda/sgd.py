"""The end of a step: one kernel updates all parameters, then the step is counted.

The kernel reads a table of all tensors. It is looked up by its content, and a run has one: the
arena returns the same addresses in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np

from lenet.cuda.kernels import Kernels
from trainer.ops import Update
from trainer.ops_cuda.state import FOLDER, GROWTH_INTERVAL, RunState

_SOURCE = FOLDER / "sgd.cu"
_CHUNK = 2048  # elements of one block
_THREADS = 512
_WEIGHT_DECAY, _HALF_GRADIENT = 1, 2  # flags of the kernel
_ROW = np.dtype(
    {
        "names": ["weight", "gradient", "velocity", "copy", "size", "flags"],
        "formats": [np.uint64, np.uint64, np.uint64, np.uint64, np.int32, np.int32],
    }
)  # struct Update of the kernel


class _Table(NamedTuple):
    rows: Any
    chunks: Any


class FusedSgd:
    """SGD with momentum, plain or Nesterov's; divides the loss scale out of the gradients."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._tables: dict[tuple[tuple[int, ...], ...], _Table] = {}

    def step(
        self,
        updates: Sequence[Update],
        state: RunState,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        """Update every parameter, or none if a scaled gradient overflowed."""
        table = self._table(updates)
        grid = (len(table.chunks),)
        if state.scaled:
            self._kernel("find_overflow")(
                grid, (_THREADS,), (table.rows, table.chunks, state.overflow)
            )
        self._kernel("sgd_step")(
            grid,
            (_THREADS,),
            (
                table.rows,
                table.chunks,
                state.rates,
                state.step,
                state.scale,
                state.overflow,
                np.float32(momentum),
                np.float32(weight_decay),
                np.int32(nesterov),
            ),
        )

    def end_step(self, state: RunState) -> None:
        """Count the step and set the loss scale of the next."""
        interval = GROWTH_INTERVAL if state.scaled else 0
        counted = state.step, state.scale, state.overflow, state.skipped
        self._kernel("end_step")((1,), (1,), (*counted, np.int32(interval)))

    def _kernel(self, name: str) -> Any:
        return self._kernels.get(_SOURCE, name, {"CHUNK": _CHUNK})

    def _table(self, updates: Sequence[Update]) -> _Table:
        key = tuple(map(_row, updates))
        if key not in self._tables:
            chunks = [
                (index, first)
                for index, update in enumerate(updates)
                for first in range(0, update.parameter.master.size, _CHUNK)
            ]
            self._tables[key] = _Table(
                cupy.asarray(np.array(list(key), _ROW).view(np.uint8)),
                cupy.asarray(np.array(chunks, np.int32)),
            )
        return self._tables[key]


def _row(update: Update) -> tuple[int, ...]:
    parameter, gradient = update.parameter, update.gradient
    flags = _WEIGHT_DECAY if update.name.endswith(".weight") else 0
    if gradient.dtype == cupy.float16:
        flags |= _HALF_GRADIENT
    arrays = (parameter.master, gradient, update.velocity.master, parameter.half)
    pointers = (0 if array is None else int(array.data.ptr) for array in arrays)
    return (*pointers, int(parameter.master.size), flags)
