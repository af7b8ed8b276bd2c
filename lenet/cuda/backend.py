"""The CUDA backend: a plan with a captured graph for each bucket, over shared weights and buffers.

A small bucket can be computed by two strategies, the fused network or layer by layer. Both are
timed when its plan is made, and the faster one is kept. All buckets share the weights and the
layers' buffers, since the batches of a backend run one after another on its stream. Once the plans
are made, only new weights allocate memory.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np

from lenet.cuda import fused_network, layers
from lenet.cuda.capture import Launch, captured, time_us
from lenet.cuda.device import Handle, translated
from lenet.cuda.engine_cache import Choice, EngineCache
from lenet.cuda.engines import EngineCatalog
from lenet.cuda.fused_network import MAX_ROWS, FusedNetwork
from lenet.cuda.graphs import Convolution, Precision, Product
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.layers import BuildContext, LayerByLayer
from lenet.cuda.memory import Arena, Buffers, Workspace
from lenet.cuda.plan import STAGED_ROWS, ChosenStrategy, CudaPlan, Strategy
from lenet.cuda.weights import DeviceWeights
from lenet.errors import DeviceError, OutOfDeviceMemory
from lenet.model import Model
from lenet.nvtx import span
from lenet.staging import Staging
from lenet.weightfile import WeightFile

_log = logging.getLogger(__name__)

TOLERANCES: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2}

# Layer by layer takes five launches for any batch: 8 rows of lenet took 34.7 us from host to host,
# and 15.6 us by the fused network (H200, 2026-11-20). Smaller buckets do not try it.
_LAYER_BY_LAYER_FROM_ROWS = 8

# cuDNN compiles a product, which takes up to 0.5 s; convolutions are ready.
_ENGINES_TRIED = {Convolution: 12, Product: 3}

_ROUNDS, _LAUNCHES = 15, 20  # when strategies are timed

COPIED_ROWS = 256
"""Layer by layer, smaller buckets read pixels from host memory and write probabilities there: 64
images took 18.7 us so and 31.6 with copies. Copies of large ones run beside the other context: with
two of them, 1,024 images a batch, 25 against 21 million images a second (H100, 2026-11-25)."""


class CudaBackend:
    """cuDNN, cuBLAS and our kernels on GPU number `device`, for the thread that makes it.

    With a `cache` the engines of large buckets are autotuned; without one, cuDNN's first choice is
    used. With `profile` nothing is captured, so that a profiler sees each layer in its own range.
    Large batches that lie in `staging` are copied to the device from there.

    Raises:
        BackendUnavailable: see `lenet.cuda.device.devices`.
        DeviceError: the device cannot be used.
    """

    name = "cuda"

    def __init__(
        self,
        device: int = 0,
        precision: Precision = "fp16",
        cache: EngineCache | None = None,
        profile: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self.precision, self.profile, self._cache = precision, profile, cache
        self._staging = None if profile else staging
        self._handle = Handle(device)
        self.stream = self._handle.stream
        self._kernels, self._arena, self._workspace = Kernels(self._handle), Arena(), Workspace()
        self._engines = EngineCatalog(
            self._handle, self._workspace, cache, cache is not None, _ENGINES_TRIED
        )
        self._weights: DeviceWeights | None = None
        self._fused_weights: DeviceWeights | None = None
        self._fused_network: FusedNetwork | None = None
        self._fused_network_runs = False

    @property
    def tolerance(self) -> float:
        """The tolerance of the precision, see `lenet.backend.Backend.tolerance`."""
        return TOLERANCES[self.precision]

    @property
    def device_bytes(self) -> int:
        """Weights, buffers and workspaces, without what cuDNN and the driver allocate."""
        weights = sum(tensors.size_bytes for tensors in self._loaded())
        return weights + self._arena.size_bytes + self.workspace_bytes

    @property
    def workspace_bytes(self) -> int:
        """The workspaces of cuDNN and cuBLAS."""
        return self._workspace.size_bytes + self._handle.cublas_bytes

    def plan(self, weights: WeightFile, rows: int) -> CudaPlan:
        """A plan for up to `rows` images. All plans of a backend are of one architecture."""
        self._handle.check()
        with translated(f"preparing {rows} rows of model {weights.model.name!r}"):
            self._load_or_open(weights)
            self._arena.rewind()  # the buckets share it: their batches run one after another
            buffers = Buffers.take(self._arena, rows, weights.model.classes)
            chosen = self._choose(weights.model, buffers)
            staging = self._staging if rows >= STAGED_ROWS else None
            return CudaPlan(buffers, self._handle, chosen, not self.profile, staging)

    def load(self, weights: WeightFile) -> None:
        """See `lenet.backend.Backend.load`."""
        self._handle.check()
        with translated(f"loading model {weights.model.name!r}"):
            for tensors in self._loaded():
                tensors.load(weights)

    def poison(self) -> None:
        """Write to an invalid address."""
        with translated("poisoning the device"):
            kernel = self._kernels.get(FOLDER / "unpack.cu", "unpack", {"SCALAR": "float"})
            invalid = np.uintp(16)
            kernel((1,), (32,), (invalid, invalid, np.int32(1)))
            self.stream.synchronize()

    def hang(self) -> None:
        """Wait for a kernel that does not end."""
        self._kernels.get(FOLDER / "hang.cu", "hang", {})((1,), (1,), ())
        self.stream.synchronize()

    def close(self) -> None:
        """Free the memory and close the handles. Closing twice is allowed."""
        self._weights = self._fused_weights = self._fused_network = None
        self._arena.free()
        self._workspace.free()
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loaded(self) -> list[DeviceWeights]:
        """The weights of both strategies."""
        return [found for found in (self._weights, self._fused_weights) if found is not None]

    def _load_or_open(self, weights: WeightFile) -> None:
        if self._weights is not None:
            self.load(weights)
            return
        model = weights.model
        layers.check(model)
        pack = partial(layers.pack, precision=self.precision, limits=self._handle.limits)
        self._weights = DeviceWeights(weights, pack)
        if self.precision != "fp16" or self.profile:
            return
        if fused_network.is_supported(model, self._handle.capability):
            self._fused_weights = DeviceWeights(
                weights, lambda file: fused_network.pack(file.model, file.tensors)
            )
            self._fused_network = FusedNetwork(model, self._fused_weights, self._kernels)

    def _choose(self, model: Model, buffers: Buffers) -> ChosenStrategy:
        """Prepare the strategies that are worth a try for this bucket, and take the fastest."""
        key = (
            f"{self._handle.name} | {self.precision} | strategy | rows {buffers.rows} | "
            f"model {model.fingerprint()}"
        )
        kept = None if self._cache is None else self._cache.get(key)
        cached = None if kept is None else kept.name
        found: list[ChosenStrategy] = []
        fused = self._tried_fused_network(model) if buffers.rows <= MAX_ROWS else None
        if fused is not None and cached != "layer_by_layer":
            from_host = partial(fused.queue_from_host, buffers)
            found.append(ChosenStrategy("fused_network", from_host, partial(fused.queue, buffers)))
        many = buffers.rows >= _LAYER_BY_LAYER_FROM_ROWS
        if not found or (many and cached != "fused_network"):
            network = LayerByLayer(model, buffers, self._build_context())
            copies = partial(_queue_with_copies, network, buffers)
            launch: Launch = copies if buffers.rows >= COPIED_ROWS else network.queue_from_host
            found.append(ChosenStrategy("layer_by_layer", launch, network.queue))
        found = [replace(one, launch=self._prepared(one.launch)) for one in found]
        if len(found) == 1:
            return found[0]
        # In turns: a GPU that was idle is slow at first.
        rounds = [[time_us(one.launch, 1, _LAUNCHES) for one in found] for _ in range(_ROUNDS)]
        medians = map(statistics.median, zip(*rounds, strict=True))
        measured_us = dict(zip((one.strategy for one in found), medians, strict=True))
        strategy = self._agreed(key, measured_us)
        (chosen,) = (one for one in found if one.strategy == strategy)
        return replace(chosen, measured_us=measured_us)

    def _agreed(self, key: str, measured_us: Mapping[Strategy, float]) -> Strategy:
        """The fastest strategy. The first result is cached: other contexts and restarts use it."""
        fastest = min(measured_us, key=measured_us.__getitem__)
        if self._cache is None:
            return fastest
        with self._cache.locked():
            cached = self._cache.get(key)
            for strategy in measured_us:
                if cached is not None and strategy == cached.name:
                    return strategy
            self._cache.put(key, Choice(fastest))
        return fastest

    def _tried_fused_network(self, model: Model) -> FusedNetwork | None:
        """The fused network, if it compiles and runs here: the first call tries it."""
        if self._fused_network is None or self._fused_network_runs:
            return self._fused_network
        try:
            with translated("running the fused network"):
                black = Buffers.take(self._arena, 1, model.classes)
                black.copy_in()
                self._fused_network.queue(black)
                self.stream.synchronize()
        except DeviceError as exc:
            if exc.sticky or isinstance(exc, OutOfDeviceMemory):
                raise
            _log.info("model %s is computed layer by layer: %s", model.name, exc)
            self._fused_network = self._fused_weights = None
        self._fused_network_runs = self._fused_network is not None
        return self._fused_network

    def _build_context(self) -> BuildContext:
        assert self._weights is not None, "bug: no weights are loaded"
        return BuildContext(
            self._handle, self.precision, self._weights, self._engines, self._kernels, self._arena
        )

    def _prepared(self, queue: Launch) -> Launch:
        """`queue` as a captured graph, or as it is for a profiler."""
        queue()  # loads every kernel, which a capture must not
        self._handle.synchronize()
        return queue if self.profile else captured(queue, self.stream)


def _queue_with_copies(network: LayerByLayer, buffers: Buffers) -> None:
    with span("copy in"):
        buffers.copy_in()
    network.queue()
    with span("copy out"):
        buffers.copy_out()
