"""The choice of a cuDNN plan for an operation: the first that works, or the fastest of all.

cuDNN offers some ten plans for an operation, and the one it would take is often not the fastest:
455 us against 287 for a 24 -> 50 channel 5x5 convolution (fp16, H200, 2026-11-20). What was
measured is kept on disk under GPU, cuDNN version and operation. Plans whose sums come out in
another order each time are never taken: with the same plans, the same seed gives the same weights.
It refuses to know what an operation is for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cudnn
import cupy
import numpy as np

from lenet.cuda.capture import captured, time_us
from lenet.cuda.device import Handle, is_sticky, translated
from lenet.cuda.engine_cache import PlanCache
from lenet.cuda.graphs import Operation, Uid
from lenet.cuda.memory import Workspace

_log = logging.getLogger(__name__)

MAX_WORKSPACE_BYTES = 256 << 20

_REPEATS = 20  # executions in one captured graph: launches must not be what is timed
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """An operation made ready; `run` may be captured into a CUDA graph."""

    operation: Operation
    name: str
    workspace_bytes: int
    _graph: Any
    _handle: Handle
    _workspace: Workspace

    def run(self, addresses: Mapping[Uid, Any]) -> None:
        """Queue it on the handle's stream; `addresses` holds a CuPy array for each tensor."""
        pointers = {int(uid): int(array.data.ptr) for uid, array in addresses.items()}
        with translated(f"running {self.operation}"):
            self._graph.execute(pointers, self._workspace.pointer, self._handle.cudnn)


class Planner:
    """Makes the plan of an operation, each once; all share one workspace.

    With `autotune` all plans of an operation are tried, or, for a kind of operation that is in
    `most`, so many of the first that can be captured: those come first that cuDNN believes to be
    fast. Without, the first of them is taken. `check_stop` is called before each is tried; it may
    raise, which ends the search.
    """

    def __init__(
        self,
        handle: Handle,
        workspace: Workspace,
        cache: PlanCache | None,
        autotune: bool,
        most: Mapping[type[Operation], int] | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> None:
        self._handle = handle
        self._workspace = workspace
        self._cache = cache
        self._autotune, self._most = autotune, most or {}
        self._check_stop = check_stop
        self.plans: dict[Operation, Plan] = {}

    def plan(self, operation: Operation, tune: bool = True) -> Plan:
        """The plan of `operation`, measured or remembered if this planner autotunes and `tune`.

        Raises:
            DeviceError: cuDNN has no plan for it.
        """
        if operation not in self.plans:
            with translated(f"planning {operation}"):
                self.plans[operation] = self._made(operation, tune and self._autotune)
        return self.plans[operation]

    def _made(self, operation: Operation, tune: bool) -> Plan:
        self._handle.check()
        versions = f"cuDNN {self._handle.cudnn_version}"
        key = f"{self._handle.name} | {versions} | {operation}" + ("" if tune else " | not tuned")
        if self._cache is None:
            return self._built(operation, tune, None)
        if (plan := self._kept(key, operation)) is not None:
            return plan
        with self._cache.locked():
            # Another context or process may have come first; then its choice is everyone's.
            if (plan := self._kept(key, operation)) is not None:
                return plan
            plan = self._built(operation, tune, self._cache.get(key))
            self._cache.put(key, plan.name)
            self._cache.put_plan(_with_frontend(key), plan.name, bytes(plan._graph.serialize()))
        return plan

    def _kept(self, key: str, operation: Operation) -> Plan | None:
        """The plan as it was built before, on this machine, in a tenth of the time."""
        assert self._cache is not None, "bug: nothing is kept"
        name = self._cache.get(key)
        data = None if name is None else self._cache.plan(_with_frontend(key), name)
        if name is None or data is None:
            return None
        graph = cudnn.pygraph(handle=self._handle.cudnn)
        try:
            graph.deserialize(list(data))
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as exc:
            if is_sticky(exc):
                raise
            _log.warning("a kept cuDNN plan is built anew: %s", exc)
            return None
        return self._plan(operation, name, graph.get_workspace_size(), graph)

    def _built(self, operation: Operation, tune: bool, known: str | None) -> Plan:
        """A plan built by cuDNN: the `known` one, if it is offered."""
        graph = operation.graph(self._handle.cudnn)
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        unwanted = [cudnn.numerical_note.NONDETERMINISTIC]
        if operation.precision == "fp32":
            unwanted.append(cudnn.numerical_note.TENSOR_CORE)
        graph.deselect_numeric_notes(unwanted)
        graph.deselect_workspace_greater_than(MAX_WORKSPACE_BYTES)
        graph.check_support()
        names = [
            graph.get_plan_name_at_index(index) for index in range(graph.get_execution_plan_count())
        ]
        if known in names:
            index = names.index(known)
            graph.build_plan_at_index(index)
        else:
            most = self._most.get(type(operation)) if tune else 1
            index = self._fastest(operation, graph, len(names), most)
        size = graph.get_workspace_size_plan_at_index(index)
        return self._plan(operation, names[index], size, graph)

    def _plan(self, operation: Operation, name: str, size_bytes: int, graph: Any) -> Plan:
        self._workspace.reserve(size_bytes)
        return Plan(operation, name, size_bytes, graph, self._handle, self._workspace)

    def _fastest(self, operation: Operation, graph: Any, count: int, most: int | None) -> int:
        """The index of the fastest, built, of the first `most` plans that can be captured."""
        times: dict[int, float] = {}
        problem: Exception | None = None
        for index in range(count):
            if len(times) == most:
                break
            if self._check_stop is not None:
                self._check_stop()
            try:
                graph.build_plan_at_index(index)
                size = graph.get_workspace_size_plan_at_index(index)
                times[index] = _replayed_us(self._handle, graph, operation, size)
            except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as exc:
                if is_sticky(exc):
                    raise
                problem = exc  # it cannot be built, or not be run, or not be captured
        if not times:
            raise RuntimeError(f"none of {count} plans can be used: {problem}")
        best = min(times, key=times.__getitem__)
        graph.build_plan_at_index(best)
        return best


def _with_frontend(key: str) -> str:
    # A plan is written in the form of the package that drives cuDNN.
    return f"{key} | frontend {cudnn.__version__}"


def _replayed_us(handle: Handle, graph: Any, operation: Operation, workspace_bytes: int) -> float:
    # Neither zeros, on which a GPU runs faster, nor NaN: halves, which read as floats are small.
    values = np.random.default_rng(0).uniform(-1, 1, 1 << 16).astype(np.float16)
    buffers = {
        int(uid): cupy.asarray(np.resize(values, size // 2))
        for uid, size in operation.tensor_bytes().items()
    }
    workspace = cupy.empty(max(workspace_bytes, 1), cupy.uint8)
    pointers = {uid: int(buffer.data.ptr) for uid, buffer in buffers.items()}
    # The buffers are made, and what had them before is done, on streams that the new one does not
    # wait for; nor may anything else run beside what is timed.
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)

    def repeated() -> None:
        for _ in range(_REPEATS):
            graph.execute(pointers, workspace.data.ptr, handle.cudnn)

    with handle.on(stream):
        graph.execute(pointers, workspace.data.ptr, handle.cudnn)
        stream.synchronize()
        launch = captured(repeated, stream)
        launch()
        return time_us(launch, _ROUNDS) / _REPEATS
