"""The CPU backend: ONNX Runtime with its CPU provider."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from lenet.backend import BatchResult
from lenet.errors import DeviceError
from lenet.onnx_graph import IMAGES, LOGITS, PROBABILITIES, onnx_model
from lenet.pixels import Images, Logits
from lenet.weightfile import WeightFile

_MAX_SESSIONS = 2
"""The served weights and those that replace them."""


@dataclass(slots=True)
class CpuPlan:
    """See `lenet.backend.Plan`. All plans share the session of their backend; none pads."""

    rows: int
    _backend: CpuBackend

    def run(self, images: Images) -> BatchResult:
        """Compute and wait. Works from any thread; the runtime releases the interpreter lock."""
        (probabilities,) = self._backend.session.run([PROBABILITIES], {IMAGES: images})
        return BatchResult(probabilities, len(images), captured=False)

    def launch(self, images: Images) -> None:
        """Not supported: the runtime computes on the calling thread."""

    def logits(self, images: Images) -> Logits:
        """See `lenet.backend.Plan.logits`."""
        logits: Logits = self._backend.session.run([LOGITS], {IMAGES: images})[0]
        return logits


class CpuBackend:
    """ONNX Runtime in float32, with `threads` threads for one batch."""

    name = "cpu"
    tolerance = 1e-4
    device_bytes = workspace_bytes = 0

    def __init__(self, threads: int = 1) -> None:
        # Since 1.29 the runtime sends usage data and stores an identifier unless this is set
        # before it is loaded. To allow that, set the variable to 0.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime

        self._make_session = onnxruntime.InferenceSession
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.inter_op_num_threads = 1
        # A spinning worker takes the core that the event loop needs.
        self._options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._options.log_severity_level = 3
        self._sessions: OrderedDict[WeightFile, Any] = OrderedDict()
        self.session: Any = None
        """The runtime's session of the loaded weights."""

    def plan(self, weights: WeightFile, rows: int) -> CpuPlan:
        """See `lenet.backend.Backend.plan`."""
        self.load(weights)
        return CpuPlan(rows, self)

    def load(self, weights: WeightFile) -> None:
        """Use the session of `weights`, which is made unless it was kept."""
        if weights not in self._sessions:
            self._sessions[weights] = self._make_session(
                onnx_model(weights).SerializeToString(),
                self._options,
                providers=["CPUExecutionProvider"],
            )
        self._sessions.move_to_end(weights)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        self.session = self._sessions[weights]

    def poison(self) -> None:
        """Raise what a GPU would raise. Nothing breaks here."""
        raise DeviceError("poisoned for a test", sticky=True)

    def close(self) -> None:
        """Drop the sessions."""
        self._sessions.clear()
        self.session = None
