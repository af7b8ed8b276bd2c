"""A bucket: the batch sizes that one captured graph serves, from pinned pixels to probabilities.

Everything that a batch needs is queued by one launch: the copy in, the network, the copy out. A
captured graph is launched from any thread, since neither cuDNN nor cuBLAS takes part in its replay.
It refuses to know how the network is computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import cupy

from lenet import nvtx
from lenet.cuda.device import Handle, translated
from lenet.cuda.memory import Buffers
from lenet.nvtx import span
from lenet.pixels import Images, Logits, Probabilities
from lenet.weightfile import WeightFile

Launch: TypeAlias = Callable[[], None]
Way: TypeAlias = Literal["whole", "layers"]
"""Through the network: one kernel for all of it, or layer by layer."""

_TIMED_EVERY = 16  # batches: asking the device's clock costs some microseconds
_NOT_READY = 600  # of cudaError_t
_ROUNDS, _LAUNCHES = 7, 20


@dataclass(frozen=True, slots=True)
class Choice:
    """How a bucket computes: `launch` from host to host, `network` on the device alone.

    `tried_us` is what a launch of each way took, copies included, in microseconds, where there were
    several.
    """

    way: Way
    tried_us: Mapping[Way, float]
    launch: Launch
    network: Launch


class CudaPlan:
    """A bucket of `batch` rows; see `lenet.backend.Plan`. A smaller batch costs as much.

    `load` is called for new weights. `captured` says whether the launch replays a graph.
    """

    def __init__(
        self,
        buffers: Buffers,
        handle: Handle,
        load: Callable[[WeightFile], None],
        choice: Choice,
        captured: bool,
    ) -> None:
        self.batch = buffers.rows
        self.pixels: Images = buffers.host_pixels
        """Page-locked, (batch, 28, 28): where `run` copies its images to."""
        self.captured = captured
        self.device_s: float | None = None
        self._buffers, self._handle, self._load = buffers, handle, load
        self._device = handle.device
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._batches = self._rows = 0
        self._range: Any = None
        self.way, self.ways_us = choice.way, choice.tried_us
        self._launch, self._network = choice.launch, choice.network
        self._replay: Launch | None = None

    @span("compute")
    def run(self, images: Images) -> Probabilities:
        """Copies, computes, copies back and waits."""
        self.pixels[: len(images)] = images
        return self.run_in_place(len(images))

    def run_in_place(self, rows: int) -> Probabilities:
        """As `run`, of the first `rows` of `pixels`."""
        self._start(rows)
        with translated("running a batch"):
            self._handle.stream.synchronize()
        return self.collect()

    def launch(self, images: Images) -> Self | None:
        """The plan itself, which has one batch at a time; None if it is not captured."""
        if not self.captured:
            return None
        self._range = nvtx.begin("compute")
        self.pixels[: len(images)] = images
        self._start(len(images))
        return self

    def done(self) -> bool:
        """Asks the driver, which does not wait."""
        status = cupy.cuda.runtime.streamQuery(self._handle.stream.ptr)
        if status:
            if status == _NOT_READY:
                return False
            with translated("running a batch"):
                cupy.cuda.runtime.check_status(status)
        return True

    def collect(self) -> Probabilities:
        """A copy, since the next batch overwrites them."""
        self.device_s = None
        if self._timed:
            with translated("reading the device's clock"):
                self.device_s = cupy.cuda.get_elapsed_time(*self._events) / 1e3
        nvtx.end(self._range)
        self._range = None
        probabilities: Probabilities = self._buffers.host_probabilities[: self._rows].copy()
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
            self._replay = captured(self._network, self._handle.stream)
        self._replay()

    def replace(self, weights: WeightFile) -> None:
        """Copies the weights behind what is queued; of the plans of one backend the first does."""
        self._load(weights)

    def computed_rows(self, rows: int) -> int:
        """All of the bucket."""
        return self.batch

    @property
    def _timed(self) -> bool:
        return self._batches % _TIMED_EVERY == 0

    def _start(self, rows: int) -> None:
        self._rows = rows
        self._batches += 1
        start, stop = self._events
        stream = self._handle.stream
        with translated("starting a batch"):
            cupy.cuda.runtime.setDevice(self._device)  # the thread may serve other GPUs, too
            if self._timed:
                start.record(stream)
            self._launch()
            if self._timed:
                stop.record(stream)


def captured(queue: Launch, stream: Any) -> Launch:
    """The launch of a CUDA graph of what `queue` queues on `stream`."""
    stream.begin_capture()
    try:
        queue()
    except BaseException:
        # A thread that captures cannot even give its handles back; what failed is to be told.
        with suppress(RuntimeError):
            stream.end_capture()
        raise
    graph = stream.end_capture()
    graph.upload(stream)
    return partial(graph.launch, stream)


def launched_us(launch: Launch) -> float:
    """The time of a launch among others on the current stream: the median of some rounds.

    By the device's clock, since threads that make ready other contexts take the host's time.
    """
    times = []
    for _ in range(_ROUNDS):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(_LAUNCHES):
            launch()
        stop.record()
        stop.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, stop) / _LAUNCHES)
    return float(statistics.median(times))
