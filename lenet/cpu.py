"""The CPU backend: ONNX Runtime, the embedded default, what a laptop serves with.

One session takes every batch size, so its plans share it and pad nothing. The sessions of two
weight files are kept: those that are served, and those that replace them. It refuses to use a GPU
provider: that would be another backend under this one's name.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lenet.errors import DeviceError
from lenet.onnx_graph import IMAGES, LOGITS, PROBABILITIES, onnx_model
from lenet.pixels import Images, Logits, Probabilities
from lenet.weightfile import WeightFile

_KEPT_SESSIONS = 2


@dataclass(slots=True)
class CpuPlan:
    """A view of a session; see `lenet.backend.Plan`."""

    batch: int
    session: Any
    open_session: Callable[[WeightFile], Any]

    def run(self, images: Images) -> Probabilities:
        """Probabilities; any thread, the runtime releases the interpreter lock."""
        probabilities: Probabilities = self.session.run([PROBABILITIES], {IMAGES: images})[0]
        return probabilities

    def launch(self, images: Images) -> None:
        """Nothing: the runtime computes on the thread that calls."""

    def logits(self, images: Images) -> Logits:
        """Logits of the same rows."""
        logits: Logits = self.session.run([LOGITS], {IMAGES: images})[0]
        return logits

    def replace(self, weights: WeightFile) -> None:
        """Look at the session of `weights` instead, which is made if it was not kept."""
        self.session = self.open_session(weights)

    def computed_rows(self, rows: int) -> int:
        """All of them and no more."""
        return rows

    captured = False
    device_s = None


class CpuBackend:
    """ONNX Runtime in float32, `threads` threads for one batch."""

    name = "cpu"
    tolerance = 1e-4

    def __init__(self, threads: int = 1) -> None:
        # Since 1.29 the runtime sends usage data and stores an identifier unless this is set
        # before it is loaded; whoever wants that sets it to 0.
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

    def plan(self, weights: WeightFile, batch: int) -> CpuPlan:
        """A plan for up to `batch` rows; the plans of one weight file share a session."""
        return CpuPlan(batch, self._session(weights), self._session)

    device_bytes = workspace_bytes = 0

    def poison(self) -> None:
        """Only says what a GPU would: nothing here can break."""
        raise DeviceError("poisoned for a test", sticky=True)

    def close(self) -> None:
        """The sessions go with it."""
        self._sessions.clear()

    def _session(self, weights: WeightFile) -> Any:
        if weights not in self._sessions:
            self._sessions[weights] = self._make_session(
                onnx_model(weights).SerializeToString(),
                self._options,
                providers=["CPUExecutionProvider"],
            )
        self._sessions.move_to_end(weights)
        while len(self._sessions) > _KEPT_SESSIONS:
            self._sessions.popitem(last=False)
        return self._sessions[weights]
