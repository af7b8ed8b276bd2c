"""The end of a step: one kernel updates all parameters, then the step is counted.

The kernel reads a table of all tensors, made when a set of updates is first seen: the arena returns
the same addresses in every step, so a run has one table.
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
        self._tables: dict[tuple[int, ...], _Table] = {}

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
        arguments = (state.step, state.scale, state.overflow, np.int32(interval))
        self._kernel("end_step")((1,), (1,), arguments)

    def _kernel(self, name: str) -> Any:
        return self._kernels.get(_SOURCE, name, {"CHUNK": _CHUNK})

    def _table(self, updates: Sequence[Update]) -> _Table:
        key = tuple(pointer for update in updates for pointer in _pointers(update))
        if key not in self._tables:
            rows = np.zeros(len(updates), _ROW)
            chunks: list[tuple[int, int]] = []
            for index, update in enumerate(updates):
                size = update.parameter.master.size
                flags = _WEIGHT_DECAY if update.name.endswith(".weight") else 0
                if update.gradient.dtype == cupy.float16:
                    flags |= _HALF_GRADIENT
                rows[index] = (*_pointers(update), size, flags)
                chunks += [(index, first) for first in range(0, size, _CHUNK)]
            self._tables[key] = _Table(
                cupy.asarray(rows.view(np.uint8)), cupy.asarray(np.array(chunks, np.int32))
            )
        return self._tables[key]


def _pointers(update: Update) -> tuple[int, ...]:
    half = update.parameter.half
    arrays = (update.parameter.master, update.gradient, update.velocity.master)
    return (*(int(array.data.ptr) for array in arrays), 0 if half is None else int(half.data.ptr))
