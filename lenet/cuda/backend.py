"""The CUDA backend: one captured graph a bucket, all over the same weights and buffers.

For small buckets there are two ways through the network, one kernel for all or layer by layer;
each is measured when the bucket is made ready, and the faster one is kept. The weights lie in one
place for all buckets, and so do the buffers of the layers: batches of one backend run one after
another on its stream. Once its plans are made, only other weights take memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Self

import numpy as np

from lenet.cuda.capture import Launch, captured, time_us
from lenet.cuda.device import Handle, translated
from lenet.cuda.engine_cache import PlanCache
from lenet.cuda.engines import Planner
from lenet.cuda.fused_network import MAX_ROWS, Whole
from lenet.cuda.fusion import check, is_whole, pack_layers, pack_whole
from lenet.cuda.graphs import Convolution, Precision, Product
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.layers import Layers, Tools
from lenet.cuda.memory import Arena, Buffers, Workspace
from lenet.cuda.plan import ChosenStrategy, CudaPlan, Strategy
from lenet.cuda.weights import DeviceWeights
from lenet.errors import DeviceError, OutOfDeviceMemory
from lenet.model import Model
from lenet.nvtx import span
from lenet.weightfile import WeightFile

_log = logging.getLogger(__name__)

TOLERANCES: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2}

# Layer by layer costs five launches, whatever the batch: 8 rows of lenet took 36 us from host to
# host where one kernel took 16 (H200, 2026-11-20), and fewer are not tried.
_LAYERS_FROM_ROWS = 8

# A product is compiled by cuDNN, which takes up to 0.4 s; convolutions it has at hand.
_ROUNDS, _LAUNCHES = 7, 20  # of a strategy that is timed

_PLANS_TRIED = {Convolution: 12, Product: 3}


class CudaBackend:
    """cuDNN, cuBLAS and our kernels on GPU number `device`, for the thread that makes it.

    With a `cache` of plans the convolutions and products of large buckets are measured; without
    one, cuDNN's first choice is taken. With `profile` nothing is captured, so that a profiler sees
    each layer in a range of its name.

    Raises:
        BackendUnavailable: see `lenet.cuda.device.devices`.
        DeviceError: the device cannot be used.
    """

    name = "cuda"

    def __init__(
        self,
        device: int = 0,
        precision: Precision = "fp16",
        cache: PlanCache | None = None,
        profile: bool = False,
    ) -> None:
        self.precision, self.profile, self._cache = precision, profile, cache
        self._handle = Handle(device)
        self.stream = self._handle.stream
        self._kernels, self._arena, self._workspace = Kernels(self._handle), Arena(), Workspace()
        self._planner = Planner(
            self._handle, self._workspace, cache, cache is not None, _PLANS_TRIED
        )
        self._weights: dict[Strategy, DeviceWeights] = {}
        self._whole: Whole | None = None
        self._whole_runs = False

    @property
    def tolerance(self) -> float:
        """What the precision explains."""
        return TOLERANCES[self.precision]

    @property
    def device_bytes(self) -> int:
        """Weights, buffers and workspace; cuDNN, cuBLAS and the driver take their own."""
        weights = sum(tensors.size_bytes for tensors in self._weights.values())
        return weights + self._arena.size_bytes + self._workspace.size_bytes

    @property
    def workspace_bytes(self) -> int:
        """What cuDNN's plans asked for."""
        return self._workspace.size_bytes

    def plan(self, weights: WeightFile, rows: int) -> CudaPlan:
        """A captured graph for up to `rows` rows; the plans of one backend share the weights.

        All of them are of one architecture.
        """
        self._handle.check()
        with translated(f"making ready for {rows} rows of model {weights.model.name!r}"):
            self._open(weights)
            self._arena.rewind()  # buckets share it: they run one after another
            buffers = Buffers.take(self._arena, rows, weights.model.classes)
            key = f"the way of {rows} rows through {weights.model.fingerprint()}"
            host, device = self._ways(weights.model, buffers, self._remembered(key))
            launches = {way: self._ready(queue) for way, queue in host.items()}
            tried_us: dict[Strategy, float] = {}
            if len(launches) > 1:
                tried_us = {
                    way: time_us(launch, _ROUNDS, _LAUNCHES) for way, launch in launches.items()
                }
            way = self._fastest(key, tried_us) if tried_us else next(iter(launches))
            chosen = ChosenStrategy(way, tried_us, launches[way], device[way])
            return CudaPlan(buffers, self._handle, chosen, not self.profile)

    def _ways(
        self, model: Model, buffers: Buffers, known: str | None
    ) -> tuple[dict[Strategy, Launch], dict[Strategy, Launch]]:
        """The way that is `known` to be the fastest, or each that is worth a try.

        From host to host, and on the device alone.
        """
        host: dict[Strategy, Launch] = {}
        device: dict[Strategy, Launch] = {}
        network = self._whole_network(model) if buffers.rows <= MAX_ROWS else None
        if network is not None and known != "layer_by_layer":
            host["fused_network"] = partial(network.queue_from_host, buffers)
            device["fused_network"] = partial(network.queue, buffers)
        if not host or (buffers.rows >= _LAYERS_FROM_ROWS and known != "fused_network"):
            layers = Layers(model, buffers, self._tools())
            host["layer_by_layer"] = partial(_queue_copies, layers, buffers)
            device["layer_by_layer"] = layers.queue
        return host, device

    def load(self, weights: WeightFile) -> None:
        """Compute with `weights` from the next launch on."""
        self._handle.check()
        with translated(f"loading model {weights.model.name!r}"):
            for tensors in self._weights.values():
                tensors.load(weights)

    def poison(self) -> None:
        """Write where nothing is."""
        with translated("poisoning the device"):
            kernel = self._kernels.get(FOLDER / "unpack.cu", "unpack", {"SCALAR": "float"})
            nowhere = np.uintp(16)
            kernel((1,), (32,), (nowhere, nowhere, np.int32(1)))
            self.stream.synchronize()

    def close(self) -> None:
        """Give the handle back; closing twice is allowed."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, weights: WeightFile) -> None:
        """Put the weights on the device, as each way wants them."""
        if self._weights:
            self.load(weights)
            return
        check(weights.model)
        pack = partial(pack_layers, precision=self.precision)
        self._weights["layer_by_layer"] = DeviceWeights(weights, pack)
        if self.precision != "fp16" or self.profile:
            return
        if is_whole(weights.model, self._handle.capability):
            tensors = DeviceWeights(weights, pack_whole)
            self._weights["fused_network"] = tensors
            self._whole = Whole(weights.model, tensors, self._kernels)

    def _whole_network(self, model: Model) -> Whole | None:
        """The network as one kernel, if it runs here: that is tried once."""
        if self._whole is None or self._whole_runs:
            return self._whole
        try:
            with translated("running a network as one kernel"):
                black = Buffers.take(self._arena, 1, model.classes)
                black.copy_in()
                self._whole.queue(black)
                self.stream.synchronize()
        except DeviceError as exc:
            if exc.sticky or isinstance(exc, OutOfDeviceMemory):
                raise
            _log.info("model %s goes layer by layer: %s", model.name, exc)
            self._whole = None
            del self._weights["fused_network"]
        self._whole_runs = self._whole is not None
        return self._whole

    def _remembered(self, key: str) -> str | None:
        return None if self._cache is None else self._cache.get(self._here(key))

    def _fastest(self, key: str, tried_us: Mapping[Strategy, float]) -> Strategy:
        """The same for other contexts and at the next start: what was found first counts."""
        fastest = min(tried_us, key=tried_us.__getitem__)
        if self._cache is None:
            return fastest
        with self._cache.locked():
            known = self._remembered(key)
            for way in tried_us:
                if way == known:
                    return way
            self._cache.put(self._here(key), fastest)
        return fastest

    def _here(self, key: str) -> str:
        return f"{self._handle.name} | {self.precision} | {key}"

    def _tools(self) -> Tools:
        return Tools(
            self._handle,
            self.precision,
            self._weights["layer_by_layer"],
            self._planner,
            self._kernels,
            self._arena,
        )

    def _ready(self, queue: Launch) -> Launch:
        """What launches all that `queue` queues: a graph, unless each layer is to be seen."""
        queue()  # loads every kernel, which a capture must not
        self._handle.synchronize()
        return queue if self.profile else captured(queue, self.stream)


def _queue_copies(network: Layers, buffers: Buffers) -> None:
    with span("copy in"):
        buffers.copy_in()
    network.queue()
    with span("copy out"):
        buffers.copy_out()
