"""The plan of one bucket: from page-locked pixels to probabilities in one graph launch.

The graph holds the network, which reads and writes the host's memory, or is between two copies. Any
thread may launch it, since replaying a graph uses neither cuDNN nor cuBLAS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import cupy
import numpy as np

from lenet import nvtx
from lenet.backend import BatchResult
from lenet.cuda.capture import Launch, captured, time_us
from lenet.cuda.device import Handle, translated
from lenet.cuda.memory import Buffers
from lenet.nvtx import span
from lenet.pixels import Images, Logits, Probabilities, joined
from lenet.staging import Staging

Strategy: TypeAlias = Literal["fused_network", "layer_by_layer"]

_TIMED_EVERY = 16  # batches: reading the device's clock costs some microseconds
_FEW_PARTS = 4  # more are small, and joining them first is faster
_NOT_READY = 600  # cudaErrorNotReady

STAGED_ROWS = 256
"""Batches in buckets of so many rows and more are taken from `Staging`. The copy of 1,024 images
took the CPU 95 us (an H200's host, 2026-11-23); that of few is short, and they are joined."""


@dataclass(frozen=True, slots=True)
class ChosenStrategy:
    """How a bucket computes.

    `layers` says who computes each layer: cudnn, cublas or the name of a kernel of ours. `launch`
    runs from host memory to host memory, `network` from device memory to device memory.
    """

    strategy: Strategy
    layers: Mapping[str, str]
    launch: Launch
    network: Launch


class CudaPlan:
    """A bucket of `rows` images; see `lenet.backend.Plan`. A smaller batch costs as much.

    `captured`: the launch of `chosen` replays a graph. With `staging` there is a second graph,
    without the copy in, for images that lie there.
    """

    def __init__(
        self,
        buffers: Buffers,
        handle: Handle,
        chosen: ChosenStrategy,
        captured: bool,
        staging: Staging | None = None,
    ) -> None:
        self.rows = buffers.rows
        self.pixels: Images = buffers.host_pixels
        """Page-locked uint8 (rows, 28, 28); `run` copies its images here."""
        self.captured = captured
        self.strategy, self.layers = chosen.strategy, chosen.layers
        self._buffers, self._stream, self._device = buffers, handle.stream, handle.device
        self._launch, self._network = chosen.launch, chosen.network
        self._events = cupy.cuda.Event(), cupy.cuda.Event()
        self._batches = 0
        self._replay: Launch | None = None
        self._staging = staging
        self._launch_staged = chosen.launch if staging is None else self._captured_without_copy()

    def _captured_without_copy(self) -> Launch:
        def queue() -> None:
            self._network()
            self._buffers.copy_out()

        return captured(queue, self._stream)

    @span("compute")
    def run(self, images: Images) -> BatchResult:
        """Copy in, compute, copy out and wait."""
        self.pixels[: len(images)] = images
        return self.run_in_place(len(images))

    def run_in_place(self, rows: int) -> BatchResult:
        """Run on the first `rows` images in `pixels`."""
        timed = self._start()
        with translated("running a batch"):
            self._stream.synchronize()
        return self._result(rows, timed)

    def launch(self, images: Sequence[Images]) -> PendingBatch | None:
        """See `lenet.backend.Plan.launch`; None if nothing is captured."""
        if not self.captured:
            return None
        opened = nvtx.begin("compute")
        rows = sum(map(len, images))
        if self._staging is not None and len(images) == 1 and self._staging.holds(images[0]):
            return PendingBatch(self, rows, self._start(images[0]), opened, images[0])
        if len(images) > _FEW_PARTS:
            self.pixels[:rows] = joined(images)
        else:
            np.concatenate(images, out=self.pixels[:rows])
        return PendingBatch(self, rows, self._start(), opened)

    def logits(self, images: Images) -> Logits:
        """See `lenet.backend.Plan.logits`."""
        self.run(images)
        with translated("reading logits"):
            logits: Logits = self._buffers.logits[: len(images)].get()
        return logits

    def answers(self, images: Images) -> list[Probabilities]:
        """See `lenet.backend.Plan.answers`: by both graphs, if there are two."""
        rows, answers = len(images), self._buffers.host_probabilities
        answers[...] = np.nan  # what a graph does not write is not taken for its answer
        found = [self.run(images).probabilities]
        if self._staging is not None:
            answers[...] = np.nan
            timed = self._start(self.pixels[:rows])  # page-locked, as what is staged
            with translated("running a batch"):
                self._stream.synchronize()
            found.append(self._result(rows, timed).probabilities)
        return found

    def replay(self) -> None:
        """Queue the network alone, without the copies, on the images of the last batch.

        For timing.
        """
        if self._replay is None:
            self._buffers.copy_in()
            self._replay = captured(self._network, self._stream)
        self._replay()

    def time_us(self, launches: int) -> float:
        """Microseconds of one of `launches` in a row of the network alone; see `replay`."""
        with translated("timing a batch"), self._stream:
            return time_us(self.replay, 1, launches)

    def _start(self, staged: Images | None = None) -> bool:
        """Launch a batch, of `pixels` or of `staged` images; return whether the device times it."""
        self._batches += 1
        timed = self._batches % _TIMED_EVERY == 0
        start, stop = self._events
        with translated("starting a batch"):
            cupy.cuda.runtime.setDevice(self._device)  # the thread may also serve other GPUs
            if timed:
                start.record(self._stream)
            if staged is None:
                self._launch()
            else:
                self._buffers.copy_from(staged, self._stream)
                self._launch_staged()
            if timed:
                stop.record(self._stream)
        return timed

    def _done(self) -> bool:
        status = cupy.cuda.runtime.streamQuery(self._stream.ptr)
        if status:
            if status == _NOT_READY:
                return False
            with translated("running a batch"):
                cupy.cuda.runtime.check_status(status)
        return True

    def _result(self, rows: int, timed: bool) -> BatchResult:
        device_s = None
        if timed:
            with translated("reading the device's clock"):
                device_s = cupy.cuda.get_elapsed_time(*self._events) / 1e3
        # A copy: the next batch overwrites the buffer.
        probabilities = self._buffers.host_probabilities[:rows].copy()
        return BatchResult(probabilities, self.rows, self.captured, device_s)


@dataclass(slots=True)
class PendingBatch:
    """The batch that a plan launched last; see `lenet.backend.Pending`."""

    _plan: CudaPlan
    _rows: int
    _timed: bool
    _range: Any
    _staged: Images | None = None
    """Images that the device reads: kept until the batch is done."""

    def done(self) -> bool:
        """Ask the driver, without waiting."""
        return self._plan._done()

    def result(self) -> BatchResult:
        """See `lenet.backend.Pending.result`."""
        result = self._plan._result(self._rows, self._timed)
        nvtx.end(self._range)
        return result
