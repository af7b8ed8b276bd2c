"""The narrow waist: what a device offers so that a weight file can be served on it.

A backend gets the whole network at once, so it may fuse layers as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lenet.pixels import Images, Logits, Probabilities
from lenet.weightfile import WeightFile


@dataclass(slots=True)  # not frozen: one is made for each batch, and freezing doubles its cost
class BatchResult:
    """One computed batch. The plan makes it; it is passed up unchanged to the metrics."""

    probabilities: Probabilities
    computed_rows: int
    """Rows that the device computed; those beyond the batch's own are padding."""
    captured: bool
    """Whether a captured graph was replayed."""
    device_s: float | None = None
    """Seconds by the device's clock; None if this batch was not timed."""


class Pending(Protocol):
    """A batch that the device is computing. Any thread may use it."""

    def done(self) -> bool:
        """Whether the batch is finished. Does not wait.

        Raises:
            DeviceError: the batch failed.
        """
        ...

    def result(self) -> BatchResult:
        """The result. Call it once, after `done` returned True."""
        ...


class Plan(Protocol):
    """One network, prepared for batches of up to `rows` images.

    It works on the thread that made it, except for `launch`.
    """

    @property
    def rows(self) -> int:
        """The largest number of images in a batch."""
        ...

    @property
    def strategy(self) -> str:
        """How the network is computed."""
        ...

    @property
    def layers(self) -> Mapping[str, str]:
        """Who computes each layer, by its name: a library, or a kernel of ours."""
        ...

    def run(self, images: Images) -> BatchResult:
        """Compute `images`, uint8 (n, 28, 28), 1 <= n <= rows, and wait for the result."""
        ...

    def launch(self, images: Sequence[Images]) -> BatchResult | Pending | None:
        """Start a batch without waiting, from any thread; None if only `run` is supported.

        A result is one that was computed at once.

        `images`: its parts, each uint8 (n, 28, 28), which the caller may change from then on.
        A backend computes one batch at a time: wait for it before the next `launch` or `run`.

        Raises:
            DeviceError: the batch cannot be started.
        """
        ...

    def logits(self, images: Images) -> Logits:
        """Logits of `images`, computed by the same arithmetic as `run`. For validation."""
        ...

    def answers(self, images: Images) -> Sequence[Probabilities]:
        """The result of `run` and of every other way to compute a batch. For validation."""
        ...


class Backend(Protocol):
    """A device and its precision, with the plans of one network."""

    @property
    def name(self) -> str:
        """The device's name as in the setting LENET_DEVICE."""
        ...

    @property
    def precision(self) -> str:
        """The arithmetic: fp32, tf32 or fp16."""
        ...

    @property
    def tolerance(self) -> float:
        """The largest |logit - golden logit| / max |golden logits| that its precision explains."""
        ...

    def plan(self, weights: WeightFile, rows: int) -> Plan:
        """Load `weights` and prepare the network for batches of up to `rows` images.

        Raises:
            BackendUnavailable: the device cannot run this network; the message says why.
            OutOfDeviceMemory: the plan does not fit.
        """
        ...

    def plans(self, weights: WeightFile, buckets: Sequence[int]) -> Mapping[int, Plan]:
        """`plan` for each of `buckets`, by its rows. Raises what `plan` raises."""
        ...

    def load(self, weights: WeightFile) -> None:
        """Make all plans compute with `weights`, of the same architecture, from the next batch on.

        Captured graphs stay valid: the weights are copied into the buffers that the plans read,
        after the work that is already queued. The prepared tensors of the last two files are kept,
        so switching between them costs one copy.
        """
        ...

    @property
    def device_bytes(self) -> int:
        """Device memory of all plans: weights, buffers and workspaces."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """The part of `device_bytes` that is scratch memory, shared by all plans."""
        ...

    def poison(self) -> None:
        """Break the device as a faulty kernel would. For tests of the recovery.

        Raises:
            DeviceError: a sticky one, from this call or from the next `run`, and ever after.
        """
        ...

    def hang(self) -> None:
        """Work for ever, as a faulty kernel would. For tests of the recovery."""
        ...

    def close(self) -> None:
        """Free everything. Closing twice is allowed."""
        ...
