"""The CPU backend: ONNX Runtime with its CPU provider."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lenet.backend import BatchResult
from lenet.errors import DeviceError
from lenet.onnx_graph import IMAGES, LOGITS, PROBABILITIES, onnx_model
from lenet.pixels import HEIGHT, WIDTH, Images, Logits, Probabilities, joined
from lenet.weightfile import WeightFile

_MAX_SESSIONS = 2
"""The served weights and those that replace them."""

_CHANNEL_MULTIPLE = 16
"""The runtime computes channels in blocks; with AVX-512 of 16. Not measured at the start, nor is
Winograd's algorithm: workers would compute other bits where their measurements differ. Microseconds
an image of 64, as they are and padded: lenet 40.4 and 37.4, lenet-classic 39.8 and 38.1; lenet-6-16
9.7 and 14.3, if its 6 channels were padded, too (one core of an AMD EPYC, 2026-11-24)."""

_QUICK_S = 2.5e-3
"""A batch that takes less is computed where it is launched. Handing it to another thread and back
costs a lone request about as much as the network; a longer one would block the caller's loop."""


@dataclass(slots=True)
class CpuPlan:
    """A plan without padding. All plans of a backend share its session."""

    rows: int
    layers: Mapping[str, str]
    _backend: CpuBackend
    _quick: bool = False
    """Whether `rows` images take less than `_QUICK_S`."""
    strategy: ClassVar[str] = "onnxruntime"

    def run(self, images: Images) -> BatchResult:
        """Compute and wait. Works from any thread; the runtime releases the interpreter lock."""
        (probabilities,) = self._backend.session.run([PROBABILITIES], {IMAGES: images})
        return BatchResult(probabilities, len(images), captured=False)

    def launch(self, images: Sequence[Images]) -> BatchResult | None:
        """Compute a quick batch at once; None for a longer one, which `run` is for."""
        if not self._quick:
            return None
        return self.run(images[0] if len(images) == 1 else joined(images))

    def logits(self, images: Images) -> Logits:
        """See `lenet.backend.Plan.logits`."""
        logits: Logits = self._backend.session.run([LOGITS], {IMAGES: images})[0]
        return logits

    def answers(self, images: Images) -> list[Probabilities]:
        """See `lenet.backend.Plan.answers`: there is one way."""
        return [self.run(images).probabilities]


class CpuBackend:
    """ONNX Runtime in float32, with `threads` threads for one batch."""

    name = "cpu"
    precision = "fp32"
    tolerance = 1e-4
    device_bytes = workspace_bytes = 0
    _arena_shared: ClassVar[bool] = False

    def __init__(self, threads: int = 1) -> None:
        # Since 1.29 the runtime sends usage data and stores an identifier unless this is set
        # before it is loaded. To allow that, set the variable to 0.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime

        # One arena for all sessions, which grows by what is asked: 20 MiB less with five models.
        if not CpuBackend._arena_shared:
            CpuBackend._arena_shared = True
            kinds = onnxruntime.OrtAllocatorType, onnxruntime.OrtMemType
            memory = onnxruntime.OrtMemoryInfo(
                "Cpu", kinds[0].ORT_ARENA_ALLOCATOR, 0, kinds[1].DEFAULT
            )
            as_requested = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1})
            onnxruntime.create_and_register_allocator(memory, as_requested)
        self._make_session = onnxruntime.InferenceSession
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.inter_op_num_threads = 1
        # A pattern is one block for each batch size: 16 MiB with five models, and no faster.
        self._options.enable_mem_pattern = False
        # A spinning worker takes the core that the event loop needs.
        self._options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._options.add_session_config_entry("session.use_env_allocators", "1")
        self._options.log_severity_level = 3
        self._sessions: OrderedDict[WeightFile, Any] = OrderedDict()
        self.session: Any = None
        """The runtime's session of the loaded weights."""

    def plan(self, weights: WeightFile, rows: int) -> CpuPlan:
        """See `lenet.backend.Backend.plan`."""
        self.load(weights)
        layers = dict.fromkeys((shape.name for shape in weights.model.shapes()), CpuPlan.strategy)
        plan = CpuPlan(rows, layers, self)
        black = np.zeros((rows, HEIGHT, WIDTH), np.uint8)
        for _ in range(3):  # the first run allocates
            start = time.perf_counter()
            plan.run(black)
            if time.perf_counter() - start < _QUICK_S:
                plan._quick = True
                break  # more runs of every batch size took 80 ms with five models
        return plan

    def plans(self, weights: WeightFile, buckets: Sequence[int]) -> dict[int, CpuPlan]:
        """See `lenet.backend.Backend.plans`."""
        # The largest first: with five models 2 MiB less than the other way.
        return {rows: self.plan(weights, rows) for rows in sorted(buckets, reverse=True)}

    def load(self, weights: WeightFile) -> None:
        """Use the session of `weights`, which is made unless it was kept."""
        if weights not in self._sessions:
            graph = onnx_model(weights, _CHANNEL_MULTIPLE, use_winograd=True)
            self._sessions[weights] = self.open(graph.SerializeToString())
        self._sessions.move_to_end(weights)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self.session = self._sessions[weights]

    def open(self, content: bytes) -> Any:
        """A session of the runtime for an ONNX model."""
        return self._make_session(content, self._options, providers=["CPUExecutionProvider"])

    def poison(self) -> None:
        """Raise what a GPU would raise. Nothing breaks here."""
        raise DeviceError("poisoned for a test", sticky=True)

    def hang(self) -> None:
        """Wait for ever."""
        threading.Event().wait()

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()
        self.session = None
