"""The narrow waist: what a device must offer to serve a weight file.

Whole-model level, so that a backend may fuse what it likes and the service never learns what a
kernel is.
"""

from __future__ import annotations

from typing import Protocol

from lenet.pixels import Images, Logits, Probabilities
from lenet.weightfile import WeightFile


class Launched(Protocol):
    """A batch that a device computes while its caller does something else."""

    def done(self) -> bool:
        """Whether it is computed.

        Raises:
            DeviceError: it failed.
        """
        ...

    def collect(self) -> Probabilities:
        """Its probabilities, once it is done."""
        ...


class Plan(Protocol):
    """One network made ready for batches of up to `batch` rows, on the thread that made it."""

    @property
    def batch(self) -> int:
        """The largest number of rows."""
        ...

    def run(self, images: Images) -> Probabilities:
        """Probabilities of `images`, uint8 (n, 28, 28), 1 <= n <= batch."""
        ...

    def launch(self, images: Images) -> Launched | None:
        """As `run`, but it does not wait and works from any thread; None where only `run` can.

        One batch at a time: it is done before the next `launch` or `run` of the same backend.

        Raises:
            DeviceError: it cannot be started.
        """
        ...

    def logits(self, images: Images) -> Logits:
        """Logits of the same rows, computed by the same arithmetic; for proof, not for serving."""
        ...

    def replace(self, weights: WeightFile) -> None:
        """Compute with `weights`, of the same architecture, from the next `run` on.

        Nothing that was made ready is made again: a device copies the weights into the buffers
        that the plan reads, behind what its stream already does, so that a captured graph stays
        valid. What a backend made of the two files used last it keeps, so that going back and
        forth between them costs no more than that copy. Plans of one backend and one file may
        share those buffers: replace the weights of all of them before the next run of any.
        """
        ...

    def computed_rows(self, rows: int) -> int:
        """How many rows the device works on when given `rows`; the difference is padding."""
        ...

    @property
    def captured(self) -> bool:
        """Whether `run` replays a captured graph."""
        ...

    @property
    def device_s(self) -> float | None:
        """Seconds of the device's clock that the last `run` took; None where none was read."""
        ...


class Backend(Protocol):
    """A device and the precision it computes in."""

    @property
    def name(self) -> str:
        """As `LENET_DEVICE` spells it."""
        ...

    @property
    def tolerance(self) -> float:
        """The largest |logit - golden logit| / max |golden logits| that its precision explains."""
        ...

    def plan(self, weights: WeightFile, batch: int) -> Plan:
        """Make the network ready for up to `batch` rows.

        Raises:
            BackendUnavailable: the device cannot run this network; the message says why.
            OutOfDeviceMemory: it does not fit.
        """
        ...

    @property
    def device_bytes(self) -> int:
        """Device memory that its plans take: weights, buffers and workspace."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """The part of it that is scratch, shared by all plans."""
        ...

    def poison(self) -> None:
        """Break the device as a faulty kernel would, for a test of what is done about it.

        Raises:
            DeviceError: a sticky one, now or at the next `run`, and at every one from then on.
        """
        ...

    def close(self) -> None:
        """Give everything back; closing twice is allowed."""
        ...
