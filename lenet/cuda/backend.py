"""The CUDA backend: a plan with a captured graph for each bucket, over shared weights and buffers.

There are two strategies: a small bucket is computed by the fused network where it is supported,
every other one layer by layer, by our kernels or by cuDNN and cuBLAS. All buckets share the
weights and the layers' buffers, since the batches of a backend run one after another on its stream.
Once the plans are made, only new weights allocate memory.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from hashlib import sha256
from typing import Self

import numpy as np

from lenet.cuda import fused_network, layers
from lenet.cuda.capture import Launch, captured
from lenet.cuda.device import Handle, translated
from lenet.cuda.engine_cache import Choice, EngineCache
from lenet.cuda.engines import EngineCatalog
from lenet.cuda.fused_network import MAX_ROWS, FusedNetwork
from lenet.cuda.graphs import ConvolutionsBy, Precision
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.layers import BuildContext, LayerByLayer, report_once
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

_SLAB_BYTES = 2 << 20
"""The arena takes so much at a time. The driver gives no less, and a context of `lenet` needs 6 MB
for 1,024 rows."""

_MEASURE_ROUNDS, _ROUND_US = 9, 2_000

COPIED_ROWS = 256
"""Layer by layer, smaller buckets read pixels from host memory and write probabilities there: 64
images took 18.7 us so and 31.6 with copies. Copies of large ones run beside the other context: with
two of them, 1,024 images a batch, 25 against 21 million images a second (H100, 2026-11-25)."""


class CudaBackend:
    """cuDNN, cuBLAS and our kernels on GPU number `device`, for the thread that makes it.

    `convolutions` says who computes: "auto" our kernels where they support the network, and cuDNN
    and cuBLAS elsewhere; "cudnn" these two; "measured" whichever is faster, for each bucket. With a
    `cache` the engines of large buckets are autotuned and measured choices are kept; without one,
    cuDNN's first choice is used. With `profile` nothing is captured, so that a profiler sees each
    layer in its own range.
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
        convolutions: ConvolutionsBy = "auto",
    ) -> None:
        self.precision, self.profile, self._cache = precision, profile, cache
        self._staging = None if profile else staging
        self._handle = Handle(device)
        self.stream = self._handle.stream
        self._kernels, self._workspace = Kernels(self._handle), Workspace()
        self._arena = Arena(_SLAB_BYTES)
        self._engines = EngineCatalog(
            self._handle, self._workspace, cache, cache is not None, _ENGINES_TRIED
        )
        self._convolutions = convolutions
        # By whether our kernels are used, which read other layouts than cuDNN.
        self._weights: dict[bool, DeviceWeights] = {}
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
        return self._workspace.size_bytes

    def plan(self, weights: WeightFile, rows: int) -> CudaPlan:
        """A plan for up to `rows` images. All plans of a backend are of one architecture."""
        return self.plans(weights, (rows,))[rows]

    def plans(self, weights: WeightFile, buckets: Sequence[int]) -> dict[int, CudaPlan]:
        """A plan for each of `buckets`, by its rows; see `plan`.

        Where preparing them with our kernels fails, for whatever reason but a lost device or too
        little memory, it is done again with cuDNN and cuBLAS.
        """
        if self._convolutions == "measured":
            own = self._measured(weights, buckets)
        else:
            own = dict.fromkeys(buckets, self._convolutions == "auto")
        try:
            return self._made_plans(weights, own)
        except DeviceError as exc:
            if not any(own.values()) or exc.sticky or isinstance(exc, OutOfDeviceMemory):
                raise
            reason, *_ = str(exc).splitlines()
            report_once(
                f"model {weights.model.name}: cuDNN and cuBLAS compute it instead of our kernels, "
                f"which fail in {self.precision} on this {self._handle.name}: {reason}"
            )
        self._convolutions = "cudnn"
        self._fused_weights = self._fused_network = None
        self._weights.clear()
        return self._made_plans(weights, dict.fromkeys(buckets, False))

    def _made_plans(self, weights: WeightFile, own: Mapping[int, bool]) -> dict[int, CudaPlan]:
        """A plan for each bucket; `own`: whether our kernels compute it, by its rows.

        Kernels begin to compile when a network that needs them is built, and its first run waits
        for them. So the networks of all buckets are built before one of them runs.
        """
        self._handle.check()
        networks: list[tuple[Buffers, LayerByLayer | FusedNetwork]] = []
        plans: dict[int, CudaPlan] = {}
        with translated(f"preparing {max(own)} rows of model {weights.model.name!r}"):
            layers.check(weights.model)
            self.load(weights)
            if any(own[rows] for rows in own if rows <= MAX_ROWS):
                self._open_fused_network(weights)
            for rows in sorted(own, reverse=True):  # the others' buffers fit into the first's
                self._arena.rewind()  # the buckets share it: their batches run one after another
                buffers = Buffers.take(self._arena, rows, weights.model.classes)
                networks.append((buffers, self._network(weights, buffers, own[rows])))
            for buffers, network in networks:
                chosen = self._strategy(network, buffers)
                staging = self._staging if buffers.rows >= STAGED_ROWS else None
                plans[buffers.rows] = CudaPlan(
                    buffers, self._handle, chosen, not self.profile, staging
                )
        return plans

    def _measured(self, weights: WeightFile, buckets: Sequence[int]) -> dict[int, bool]:
        """Whether our kernels are faster than cuDNN and cuBLAS, for each bucket.

        Known choices come from the cache.
        """
        sources = sorted(FOLDER.glob("*.cu*"))
        digest = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        about = (
            f"{self._handle.name} | cuDNN {self._handle.cudnn_version} | kernels {digest} | "
            f"{weights.model.fingerprint()} | {self.precision} | rows "
        )
        with self._cache.locked() if self._cache is not None else nullcontext():
            known = {rows: self._cache and self._cache.get(f"{about}{rows}") for rows in buckets}
            own = {rows: choice.name == "own" for rows, choice in known.items() if choice}
            missing = [rows for rows in buckets if rows not in own]
            for rows, (own_us, library_us) in self._times_us(weights, missing).items():
                own[rows] = own_us <= library_us
                _log.info(
                    "model %s, %s, %d rows on this %s: %.1f us by our kernels, %.1f by cuDNN and "
                    "cuBLAS",
                    *(weights.model.name, self.precision, rows, self._handle.name),
                    *(own_us, library_us),
                )
                if self._cache is not None:
                    name = "own" if own[rows] else "library"
                    self._cache.put(f"{about}{rows}", Choice(name, b""))
        return own

    def _times_us(
        self, weights: WeightFile, buckets: Sequence[int]
    ) -> dict[int, tuple[float, float]]:
        """The time of each bucket by our kernels and by cuDNN and cuBLAS.

        Measured on backends of their own, which are closed again.
        """
        if not buckets:
            return {}
        try:
            with ExitStack() as opened:
                both = [
                    opened.enter_context(
                        CudaBackend(
                            self._handle.device, self.precision, self._cache, convolutions=by
                        )
                    ).plans(weights, buckets)
                    for by in ("auto", "cudnn")
                ]
                return {rows: _medians_us([plans[rows] for plans in both]) for rows in buckets}
        finally:
            self.stream.use()  # the others' streams were the current ones

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
        self._weights.clear()
        self._fused_weights = self._fused_network = None
        self._arena.free()
        self._workspace.free()
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loaded(self) -> list[DeviceWeights]:
        """The weights of all strategies."""
        fused = [] if self._fused_weights is None else [self._fused_weights]
        return [*self._weights.values(), *fused]

    def _open_fused_network(self, weights: WeightFile) -> None:
        if self.profile or self._fused_network is not None:
            return
        model = weights.model
        if fused_network.is_supported(model, self.precision, self._handle.capability):
            self._fused_weights = DeviceWeights(
                weights, lambda file: fused_network.pack(file.model, file.tensors)
            )
            self._fused_network = FusedNetwork(model, self._fused_weights, self._kernels)

    def _network(
        self, weights: WeightFile, buffers: Buffers, own: bool
    ) -> LayerByLayer | FusedNetwork:
        """How this bucket is computed."""
        model, small = weights.model, buffers.rows <= MAX_ROWS
        fused = self._tried_fused_network(model) if own and small else None
        return fused or LayerByLayer(model, buffers, self._build_context(weights, own))

    def _strategy(self, network: LayerByLayer | FusedNetwork, buffers: Buffers) -> ChosenStrategy:
        """Prepare this bucket."""
        if isinstance(network, FusedNetwork):
            launch = self._prepared(partial(network.queue_from_host, buffers))
            device = partial(network.queue, buffers)
            return ChosenStrategy("fused_network", network.layers, launch, device)
        copies = partial(_queue_with_copies, network, buffers)
        queue = copies if buffers.rows >= COPIED_ROWS else network.queue_from_host
        launch = self._prepared(queue)
        return ChosenStrategy("layer_by_layer", network.layers, launch, network.queue)

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
            reason, *_ = str(exc).splitlines()
            _log.info(
                "model %s: up to %d rows are computed layer by layer on this %s, after: %s",
                *(model.name, MAX_ROWS, self._handle.name, reason),
            )
            self._fused_network = self._fused_weights = None
        self._fused_network_runs = self._fused_network is not None
        return self._fused_network

    def _build_context(self, weights: WeightFile, own: bool) -> BuildContext:
        handle, precision = self._handle, self.precision
        if own not in self._weights:
            pack = partial(layers.pack, precision=precision, limits=handle.limits, own=own)
            self._weights[own] = DeviceWeights(weights, pack)
        return BuildContext(
            handle,
            precision,
            self._weights[own],
            self._engines,
            self._kernels,
            self._arena,
            self._workspace,
            own,
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


def _medians_us(plans: Sequence[CudaPlan]) -> tuple[float, float]:
    """The times of one bucket's two plans."""
    noise = np.random.default_rng(0)
    for plan in plans:
        plan.pixels[...] = noise.integers(0, 256, plan.pixels.shape, np.uint8)
        plan.time_us(10)  # warms up
    launches = max(5, min(200, int(_ROUND_US / min(plan.time_us(10) for plan in plans))))
    # Alternating, so that a drift of the clock affects both alike.
    rounds = [[plan.time_us(launches) for plan in plans] for _ in range(_MEASURE_ROUNDS)]
    own_us, library_us = map(statistics.median, zip(*rounds, strict=True))
    return own_us, library_us
