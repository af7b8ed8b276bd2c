"""The cuDNN engine of an operation: the first that works, or the fastest, autotuned once.

cuDNN offers about ten engines for an operation, and its first choice is often not the fastest: 455
us against 287 for a 5x5 convolution of 24 -> 50 channels (fp16, H200, 2026-11-20). Choices are kept
on disk by GPU, cuDNN version and operation. Nondeterministic engines, whose sums have another order
in each run, are never used: with the same engines, the same seed gives the same weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from lenet.cuda.capture import captured, time_us
from lenet.cuda.device import Handle, is_sticky, load_cudnn, translated
from lenet.cuda.engine_cache import Choice, EngineCache
from lenet.cuda.graphs import Convolution, Precision, Uid
from lenet.cuda.memory import Workspace

_log = logging.getLogger(__name__)

_MAX_WORKSPACE_BYTES: dict[Precision, int] = {"fp16": 256 << 20, "tf32": 256 << 20, "fp32": 1 << 30}
"""In float32 the fast engines rearrange the images in their workspace: with at most 256 MiB, 8,192
images of 32 channels took 5.3 ms instead of 2.1 (3x3, H100, 2026-11-26)."""

_REPEATS = 20  # executions in one captured graph, so that the launch is not what is timed
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Engine:
    """A built execution plan of cuDNN for `operation`; `run` may be captured."""

    operation: Convolution
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


class EngineCatalog:
    """One engine for each operation; all of them share `workspace`.

    With `autotune` every engine that cuDNN offers is timed, or only the first `most` that can be
    captured: cuDNN sorts them by expected speed. Without it the first is taken. `check_stop` is
    called before each engine is tried and ends the search by raising; no RuntimeError, which would
    be taken for one of cuDNN.
    """

    def __init__(
        self,
        handle: Handle,
        workspace: Workspace,
        cache: EngineCache | None,
        autotune: bool,
        most: int | None = None,
        check_stop: Callable[[], None] | None = None,
    ) -> None:
        self._handle = handle
        self._workspace = workspace
        self._cache = cache
        self._autotune, self._most = autotune, most
        self._check_stop = check_stop
        self._engines: dict[tuple[Convolution, bool], Engine] = {}

    def engine(self, operation: Convolution, tune: bool = True) -> Engine:
        """The engine of `operation`, timed or cached if this catalog autotunes and `tune` is set.

        Raises:
            DeviceError: cuDNN has no engine for it.
        """
        tune = tune and self._autotune
        if (operation, tune) not in self._engines:
            with translated(f"choosing an engine for {operation}"):
                self._engines[operation, tune] = self._choose(operation, tune)
        return self._engines[operation, tune]

    def _choose(self, operation: Convolution, tune: bool) -> Engine:
        self._handle.check()
        if self._cache is None:
            return self._build(operation, tune)
        # The serialized form depends on cuDNN and on its Python package.
        frontend = load_cudnn().__version__
        versions = f"cuDNN {self._handle.cudnn_version} | frontend {frontend}"
        key = f"{self._handle.name} | {versions} | {operation}" + ("" if tune else " | not tuned")
        if (engine := self._cached(self._cache.get(key), operation)) is not None:
            return engine
        with self._cache.locked():
            # Another thread or process may have chosen meanwhile: its choice holds for all.
            if (engine := self._cached(self._cache.get(key), operation)) is not None:
                return engine
            engine = self._build(operation, tune)
            self._cache.put(key, Choice(engine.name, bytes(engine._graph.serialize())))
        return engine

    def _cached(self, choice: Choice | None, operation: Convolution) -> Engine | None:
        """The engine of `choice`; ten times faster than building it."""
        if choice is None:
            return None
        cudnn = load_cudnn()
        graph = cudnn.pygraph(handle=self._handle.cudnn)
        try:
            graph.deserialize(list(choice.engine))
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as exc:
            if is_sticky(exc):
                raise
            _log.warning("a cached cuDNN engine is built again: %s", exc)
            return None
        return self._engine(operation, choice.name, graph.get_workspace_size(), graph)

    def _build(self, operation: Convolution, tune: bool) -> Engine:
        """Build the fastest engine, or the first that works."""
        cudnn = load_cudnn()
        graph = operation.graph(self._handle.cudnn)
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        unwanted = [cudnn.numerical_note.NONDETERMINISTIC]
        if operation.precision == "fp32":
            unwanted.append(cudnn.numerical_note.TENSOR_CORE)
        graph.deselect_numeric_notes(unwanted)
        graph.deselect_workspace_greater_than(_MAX_WORKSPACE_BYTES[operation.precision])
        graph.check_support()
        index = self._fastest(operation, graph, self._most if tune else 1)
        size = graph.get_workspace_size_plan_at_index(index)
        return self._engine(operation, graph.get_plan_name_at_index(index), size, graph)

    def _engine(self, operation: Convolution, name: str, size_bytes: int, graph: Any) -> Engine:
        self._workspace.reserve(size_bytes)
        return Engine(operation, name, size_bytes, graph, self._handle, self._workspace)

    def _fastest(self, operation: Convolution, graph: Any, most: int | None) -> int:
        """Build the fastest of the first `most` engines that can be captured; return its index."""
        cudnn = load_cudnn()
        count = graph.get_execution_plan_count()
        times: dict[int, float] = {}
        problem = ""
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
                # It cannot be built, run or captured. Only the text is kept: the exception refers
                # to this frame and to those of all callers, and NCCL waits for graphs held there.
                problem = str(exc)
        if not times:
            raise RuntimeError(f"none of {count} engines can be used: {problem}")
        best = min(times, key=times.__getitem__)
        graph.build_plan_at_index(best)
        return best


def _replayed_us(handle: Handle, graph: Any, operation: Convolution, workspace_bytes: int) -> float:
    # Neither zeros, on which a GPU runs faster, nor NaN: halves, which are small read as floats.
    values = np.random.default_rng(0).uniform(-1, 1, 1 << 16).astype(np.float16)
    buffers = {
        int(uid): cupy.asarray(np.resize(values, size // 2))
        for uid, size in operation.tensor_bytes().items()
    }
    workspace = cupy.empty(max(workspace_bytes, 1), cupy.uint8)
    pointers = {uid: int(buffer.data.ptr) for uid, buffer in buffers.items()}
    # The new stream does not wait for the one on which the buffers were filled. Not the device:
    # another thread may be capturing there, and to wait for all streams would end its capture.
    cupy.cuda.get_current_stream().synchronize()
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
