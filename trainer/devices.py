"""Opens the device that a network is trained on.

It knows which device can do what, and refuses in one sentence what none can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import DeviceUnavailable
from trainer.ops import TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.settings import Device, Precision


@contextmanager
def open_ops(device: Device, precision: Precision, gpus: int = 1) -> Iterator[TrainingOps]:
    """The operations of `device`; auto is the GPU where there is one, else the CPU.

    Raises:
        DeviceUnavailable: it is not here, or cannot do what is asked of it.
    """
    if device == "cuda":
        raise DeviceUnavailable("--device is cuda, which is not available here; try --device cpu")
    if precision != "fp32":
        raise DeviceUnavailable(
            f"--precision is {precision}, expected fp32: the CPU has no other, and no GPU is used"
        )
    if gpus != 1:
        raise DeviceUnavailable(f"--gpus is {gpus}, expected 1: no GPU is used")
    yield CpuOps()
