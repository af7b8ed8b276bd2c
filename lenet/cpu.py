"""The CPU backend: ONNX Runtime with its CPU provider."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from lenet.backend import BatchResult
from lenet.errors import DeviceError
from lenet.model import ConvBlock
from lenet.onnx_graph import IMAGES, LOGITS, PROBABILITIES, onnx_model, suits_winograd
from lenet.pixels import HEIGHT, WIDTH, Images, Logits, joined
from lenet.weightfile import WeightFile

_Key = TypeVar("_Key")

_MAX_SESSIONS = 2
"""The served weights and those that replace them."""

_CHANNEL_MULTIPLES = (1, 8, 16)
"""How the channels may be padded. The runtime computes them in blocks, whose size depends on the
machine: with AVX-512, 8 images of lenet took 74 us each as they are and 69 us padded to 16."""

_TRIED_ROWS, _TRIALS = 8, 9

_QUICK_S = 2.5e-3
"""A batch that takes less is computed where it is launched. Handing it to another thread and back
costs a lone request about as much as the network; a longer one would block the caller's loop."""


@dataclass(slots=True)
class Computed:
    """A batch that was computed when it was launched; see `lenet.backend.Pending`."""

    _result: BatchResult

    def done(self) -> bool:
        """True."""
        return True

    def result(self) -> BatchResult:
        """See `lenet.backend.Pending.result`."""
        return self._result


@dataclass(slots=True)
class CpuPlan:
    """See `lenet.backend.Plan`. All plans share the session of their backend; none pads."""

    rows: int
    _backend: CpuBackend
    _quick: bool = False
    """Whether `rows` images take less than `_QUICK_S`."""

    def run(self, images: Images) -> BatchResult:
        """Compute and wait. Works from any thread; the runtime releases the interpreter lock."""
        (probabilities,) = self._backend.session.run([PROBABILITIES], {IMAGES: images})
        return BatchResult(probabilities, len(images), captured=False)

    def launch(self, images: Sequence[Images]) -> Computed | None:
        """Compute a quick batch at once; None for a longer one, which `run` is for."""
        return Computed(self.run(joined(images))) if self._quick else None

    def logits(self, images: Images) -> Logits:
        """See `lenet.backend.Plan.logits`."""
        logits: Logits = self._backend.session.run([LOGITS], {IMAGES: images})[0]
        return logits


class CpuBackend:
    """ONNX Runtime in float32, with `threads` threads for one batch."""

    name = "cpu"
    tolerance = 1e-4
    device_bytes = workspace_bytes = 0
    _channel_multiple: ClassVar[int | None] = None
    """The fastest, measured once in a process: it depends on the machine."""
    _use_winograd: ClassVar[dict[str, bool]] = {}
    """Whether it is faster, by the fingerprint of a network: it depends on both."""
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
        plan = CpuPlan(rows, self)
        black = np.zeros((rows, HEIGHT, WIDTH), np.uint8)
        for _ in range(3):  # the first run allocates
            start = time.perf_counter()
            plan.run(black)
            if time.perf_counter() - start < _QUICK_S:
                plan._quick = True
                break  # more runs of every batch size took 80 ms with five models
        return plan

    def load(self, weights: WeightFile) -> None:
        """Use the session of `weights`, which is made unless it was kept."""
        if weights not in self._sessions:
            self._sessions[weights] = self._fastest(weights)
        self._sessions.move_to_end(weights)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self.session = self._sessions[weights]

    def open(self, content: bytes) -> Any:
        """A session of the runtime for an ONNX model."""
        return self._make_session(content, self._options, providers=["CPUExecutionProvider"])

    def _fastest(self, weights: WeightFile) -> Any:
        """A session of the fastest graph."""

        def session(channel_multiple: int = 1, *, use_winograd: bool = False) -> Any:
            model = onnx_model(weights, channel_multiple, use_winograd=use_winograd)
            return self.open(model.SerializeToString())

        model = weights.model
        if not isinstance(model.blocks[0], ConvBlock):
            return session()
        multiple = CpuBackend._channel_multiple
        if multiple is None:
            multiple = _fastest_of({m: session(m) for m in _CHANNEL_MULTIPLES})
            CpuBackend._channel_multiple = multiple
        if not any(map(suits_winograd, model.blocks, model.shapes())):
            return session(multiple)
        fingerprint = model.fingerprint()
        use_winograd = CpuBackend._use_winograd.get(fingerprint)
        if use_winograd is None:
            use_winograd = _fastest_of(
                {use: session(multiple, use_winograd=use) for use in (False, True)}
            )
            CpuBackend._use_winograd[fingerprint] = use_winograd
        return session(multiple, use_winograd=use_winograd)

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


def _fastest_of(sessions: Mapping[_Key, Any]) -> _Key:
    """The key of the session with the least time of some runs."""
    black = np.zeros((_TRIED_ROWS, HEIGHT, WIDTH), np.uint8)
    times: dict[_Key, float] = dict.fromkeys(sessions, math.inf)
    for _ in range(_TRIALS):
        for key, session in sessions.items():
            start = time.perf_counter()
            session.run([PROBABILITIES], {IMAGES: black})
            times[key] = min(times[key], time.perf_counter() - start)
    return min(times, key=times.__getitem__)
