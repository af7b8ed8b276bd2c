"""The CUDA backend: a plan with a captured graph for each bucket, over shared weights and buffers.

There are two strategies: a small bucket is computed by the fused network where it is supported,
every other one layer by layer. All buckets share the weights and the layers' buffers, since the
batches of a backend run one after another on its stream. Once the plans are made, only new weights
allocate memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Self

import numpy as np

from lenet.cuda import fused_network, layers
from lenet.cuda.capture import Launch, captured
from lenet.cuda.device import Handle, translated
from lenet.cuda.engine_cache import EngineCache
from lenet.cuda.engines import EngineCatalog
from lenet.cuda.fused_network import MAX_ROWS, FusedNetwork
from lenet.cuda.graphs import Precision
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.layers import BuildContext, LayerByLayer
from lenet.cuda.memory import Arena, Buffers, Workspace
from lenet.cuda.plan import STAGED_ROWS, ChosenStrategy, CudaPlan
from lenet.cuda.weights import DeviceWeights
from lenet.errors import DeviceError, OutOfDeviceMemory
from lenet.model import Model
from lenet.nvtx import span
from lenet.staging import Staging
from lenet.weightfile import WeightFile

_log = logging.getLogger(__name__)

TOLERANCES: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2}

_ENGINES_TRIED = 12

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
        self._own_convolutions = True

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
        return self.plans(weights, (rows,))[rows]

    def plans(self, weights: WeightFile, buckets: Sequence[int]) -> dict[int, CudaPlan]:
        """A plan for each of `buckets`, by its rows; see `plan`.

        Where preparing them with our kernels of convolutions fails, for whatever reason but a lost
        device or too little memory, it is done again with cuDNN's.
        """
        try:
            return self._made_plans(weights, buckets)
        except DeviceError as exc:
            own = self._own_convolutions and layers.has_own_convolutions(
                weights.model, self.precision, self._handle.limits
            )
            if not own or exc.sticky or isinstance(exc, OutOfDeviceMemory):
                raise
            reason, *_ = str(exc).splitlines()
            _log.warning(
                "model %s: cuDNN computes its convolutions instead of our kernels, after: %s",
                weights.model.name,
                reason,
            )
        self._own_convolutions = self._fused_network_runs = False
        self._weights = self._fused_weights = self._fused_network = None
        return self._made_plans(weights, buckets)

    def _made_plans(self, weights: WeightFile, buckets: Sequence[int]) -> dict[int, CudaPlan]:
        """A plan for each bucket.

        Kernels begin to compile when a network that needs them is built, and its first run waits
        for them. So the networks of all buckets are built before one of them runs.
        """
        self._handle.check()
        networks: list[tuple[Buffers, LayerByLayer | FusedNetwork]] = []
        plans: dict[int, CudaPlan] = {}
        with translated(f"preparing {max(buckets)} rows of model {weights.model.name!r}"):
            self._load_or_open(weights)
            for rows in sorted(buckets, reverse=True):  # the others' buffers fit into the first's
                self._arena.rewind()  # the buckets share it: their batches run one after another
                buffers = Buffers.take(self._arena, rows, weights.model.classes)
                networks.append((buffers, self._network(weights.model, buffers)))
            for buffers, network in networks:
                chosen = self._strategy(network, buffers)
                staging = self._staging if buffers.rows >= STAGED_ROWS else None
                plans[buffers.rows] = CudaPlan(
                    buffers, self._handle, chosen, not self.profile, staging
                )
        return plans

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
        pack = partial(
            layers.pack,
            precision=self.precision,
            limits=self._handle.limits,
            own=self._own_convolutions,
        )
        self._weights = DeviceWeights(weights, pack)
        if self.precision != "fp16" or self.profile:
            return
        if fused_network.is_supported(model, self._handle.capability):
            self._fused_weights = DeviceWeights(
                weights, lambda file: fused_network.pack(file.model, file.tensors)
            )
            self._fused_network = FusedNetwork(model, self._fused_weights, self._kernels)

    def _network(self, model: Model, buffers: Buffers) -> LayerByLayer | FusedNetwork:
        """How this bucket is computed."""
        fused = self._tried_fused_network(model) if buffers.rows <= MAX_ROWS else None
        return fused or LayerByLayer(model, buffers, self._build_context())

    def _strategy(self, network: LayerByLayer | FusedNetwork, buffers: Buffers) -> ChosenStrategy:
        """Prepare this bucket."""
        if isinstance(network, FusedNetwork):
            launch: Launch = self._prepared(partial(network.queue_from_host, buffers))
            return ChosenStrategy("fused_network", launch, partial(network.queue, buffers))
        copies = partial(_queue_with_copies, network, buffers)
        queue = copies if buffers.rows >= COPIED_ROWS else network.queue_from_host
        return ChosenStrategy("layer_by_layer", self._prepared(queue), network.queue)

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
            self._handle,
            self.precision,
            self._weights,
            self._engines,
            self._kernels,
            self._arena,
            self._own_convolutions,
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
