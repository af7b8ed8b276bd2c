"""The CUDA backend: one captured graph a bucket, from pinned pixels to pinned probabilities.

Everything that one batch needs is queued by one launch: the copy in, the network, the copy out.
For small buckets there are two ways through the network, one kernel for all or layer by layer;
each is measured when the bucket is made ready, and the faster one is kept. The weights lie in one
place for all buckets, and so do the buffers of the layers: batches of one backend run one after
another on its stream. It takes no memory once its plans are made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import cupy
import numpy as np

from lenet.cuda import whole
from lenet.cuda.fusion import is_whole, pack_layers, pack_whole
from lenet.cuda.graphs import Precision
from lenet.cuda.handle import Handle, translated
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.layers import Layers, Tools
from lenet.cuda.memory import Arena, Buffers, Workspace
from lenet.cuda.plan_cache import PlanCache
from lenet.cuda.plans import Planner
from lenet.cuda.weights import DeviceWeights
from lenet.cuda.whole import Whole
from lenet.errors import DeviceError
from lenet.model import Model
from lenet.nvtx import span
from lenet.pixels import Images, Logits, Probabilities
from lenet.weightfile import WeightFile

Way: TypeAlias = Literal["whole", "layers"]

TOLERANCES: dict[Precision, float] = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2}

# cuDNN 9.19 has no convolution in true float32 for 1 or 8 images of lenet's, and for 32 it has.
_LEAST_ROWS: dict[Precision, int] = {"fp32": 32, "tf32": 1, "fp16": 1}

# Layer by layer costs five launches, whatever the batch: below it never won (lenet, H200).
_LAYERS_FROM_ROWS = 8
_TIMED_EVERY = 16  # batches: asking the device's clock costs some microseconds
_TRIALS = 30
_PLANS_TRIED = 8  # of an operation: trying all 40 made a first start take 30 s

Launch: TypeAlias = Callable[[], None]


class CudaPlan:
    """A bucket of `batch` rows; see `lenet.backend.Plan`. A smaller batch costs as much.

    `buffers` has as many rows or more.

    `ways_us` says what each way through the network took that was tried, from host to host, in
    microseconds; `way` is the fastest, which `run` takes.
    """

    def __init__(
        self,
        batch: int,
        buffers: Buffers,
        handle: Handle,
        load: Callable[[WeightFile], None],
        launches: Mapping[Way, Launch],
        networks: Mapping[Way, Launch],
        captured: bool,
    ) -> None:
        self.batch = batch
        self.pixels: Images = buffers.host_pixels[:batch]
        """Page-locked, (batch, 28, 28): where `run` copies its images to."""
        self.captured = captured
        self.device_s: float | None = None
        self._buffers, self._handle, self._load = buffers, handle, load
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._batches = 0
        self.ways_us = {way: self._timed_us(launch) for way, launch in launches.items()}
        self.way = min(self.ways_us, key=self.ways_us.__getitem__)
        self._launch = launches[self.way]
        self._network = networks[self.way]
        self._replay: Launch | None = None

    @span("compute")
    def run(self, images: Images) -> Probabilities:
        """Copies, computes, copies back and waits."""
        rows = len(images)
        self.pixels[:rows] = images
        return self.run_in_place(rows)

    def run_in_place(self, rows: int) -> Probabilities:
        """As `run`, of the first `rows` of `pixels`."""
        self._batches += 1
        with translated("running a batch"):
            if self._batches % _TIMED_EVERY:
                self._launch()
                self._handle.stream.synchronize()
                self.device_s = None
            else:
                self._launch_timed()
        probabilities: Probabilities = self._buffers.host_probabilities[:rows].copy()
        return probabilities

    def logits(self, images: Images) -> Logits:
        """As `run`."""
        self.run(images)
        with translated("reading logits"):
            logits: Logits = self._buffers.logits[: len(images)].get()
        return logits

    def replay(self) -> None:
        """Queue the network alone, on the device, on what it was last given: for timing it."""
        if self._replay is None:
            self._buffers.copy_in()
            self._replay = _captured(self._network, self._handle.stream)
        self._replay()

    def replace(self, weights: WeightFile) -> None:
        """Copies the weights behind what is queued; of the plans of one backend the first does."""
        self._load(weights)

    def computed_rows(self, rows: int) -> int:
        """All of the bucket."""
        return self._buffers.rows

    def _launch_timed(self) -> None:
        start, stop = self._events
        start.record()
        self._launch()
        stop.record()
        stop.synchronize()
        self.device_s = cupy.cuda.get_elapsed_time(start, stop) / 1e3

    def _timed_us(self, launch: Launch) -> float:
        """The median of some launches, waited for."""
        times = []
        for _ in range(_TRIALS):
            started = time.perf_counter()
            launch()
            self._handle.stream.synchronize()
            times.append(time.perf_counter() - started)
        return 1e6 * statistics.median(times)


class CudaBackend:
    """cuDNN, cuBLAS and our kernels on GPU number `device`, for the thread that makes it.

    With a `cache` of plans the convolutions and products of large buckets are measured; without
    one, cuDNN's first choice is taken. With `profile` nothing is captured, so that a profiler sees
    each layer in a range of its name.

    Raises:
        BackendUnavailable: see `lenet.cuda.handle.devices`.
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
        self.precision, self.profile = precision, profile
        self._handle = Handle(device)
        self.stream = self._handle.stream
        self._kernels, self._arena, self._workspace = Kernels(self._handle), Arena(), Workspace()
        self._planner = Planner(
            self._handle, self._workspace, cache, cache is not None, _PLANS_TRIED
        )
        self._file: WeightFile | None = None
        self._weights: dict[Way, DeviceWeights] = {}
        self._whole: Whole | None = None

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

    def plan(self, weights: WeightFile, batch: int) -> CudaPlan:
        """A captured graph for up to `batch` rows; the plans of one backend share the weights."""
        self._handle.check()
        with translated(f"making ready for {batch} rows of model {weights.model.name!r}"):
            self._open(weights)
            self._arena.rewind()  # buckets share it: they run one after another
            rows = max(batch, _LEAST_ROWS[self.precision])
            buffers = Buffers.take(self._arena, rows, weights.model.classes)
            host, device = self._ways(weights.model, buffers)
            launches = {way: self._ready(queue) for way, queue in host.items()}
            return CudaPlan(
                batch, buffers, self._handle, self.load, launches, device, not self.profile
            )

    def _ways(self, model: Model, buffers: Buffers) -> tuple[dict[Way, Launch], dict[Way, Launch]]:
        """Each way that is worth a try, from host to host and on the device alone."""
        host: dict[Way, Launch] = {}
        device: dict[Way, Launch] = {}
        if self._whole is not None and buffers.rows <= whole.MAX_ROWS:
            host["whole"] = partial(self._whole.queue_from_host, buffers)
            device["whole"] = partial(self._whole.queue, buffers)
        if self._whole is None or buffers.rows >= _LAYERS_FROM_ROWS:
            network = Layers(model, buffers, self._tools())
            host["layers"] = partial(_queue_copies, network, buffers)
            device["layers"] = network.queue
        return host, device

    def load(self, weights: WeightFile) -> None:
        """Compute with `weights` from the next launch on."""
        self._handle.check()
        with translated(f"loading model {weights.model.name!r}"):
            for tensors in self._weights.values():
                tensors.load(weights)

    def poison(self) -> None:
        """Write where nothing is."""
        kernel = self._kernels.get(FOLDER / "unpack.cu", "unpack", {"SCALAR": "float"})
        with translated("poisoning the device"):
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
        pack = partial(pack_layers, precision=self.precision)
        self._weights["layers"] = DeviceWeights(weights, pack)
        if self.precision != "fp16" or self.profile:
            return
        if is_whole(weights.model, self._handle.capability):
            tensors = DeviceWeights(weights, pack_whole)
            try:
                self._whole = Whole(weights.model, tensors, self._kernels)
            except DeviceError:  # larger than a block's memory: the layers can do it
                return
            self._weights["whole"] = tensors

    def _tools(self) -> Tools:
        return Tools(
            self._handle,
            self.precision,
            self._weights["layers"],
            self._planner,
            self._kernels,
            self._arena,
        )

    def _ready(self, queue: Launch) -> Launch:
        """What launches all that `queue` queues: a graph, unless each layer is to be seen."""
        queue()  # loads every kernel, which a capture must not
        self._handle.synchronize()
        return queue if self.profile else _captured(queue, self.stream)


def _queue_copies(network: Layers, buffers: Buffers) -> None:
    with span("copy in"):
        buffers.copy_in()
    network.queue()
    with span("copy out"):
        buffers.copy_out()


def _captured(queue: Launch, stream: Any) -> Launch:
    """The launch of a CUDA graph of what `queue` queues on `stream`."""
    stream.begin_capture()
    queue()
    graph = stream.end_capture()
    graph.upload(stream)
    return partial(graph.launch, stream)
