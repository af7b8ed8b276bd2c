"""What was measured of a training step, and how near it comes to what the hardware can do.

Source: Williams, Waterman & Patterson 2009, "Roofline". It refuses to take rates from a data sheet:
they are measured beside the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Key: TypeAlias = tuple[str, str]
"""(layer, part) of a call."""


class Rate(NamedTuple):
    """The most of something in a second, and how it was found."""

    per_s: float
    found_by: str


class Timed(NamedTuple):
    """The time of a call alone, its plan, "-" where there is no choice, and the workspace it has.

    The workspace is what cuDNN's plan asks for, what cuBLAS is given, None for our own kernels.
    """

    time_us: float
    plan: str = "-"
    workspace_bytes: int | None = None


class Times(NamedTuple):
    """The calls of a step on `device`, with the rates of the same run.

    `copy` counts bytes, each read and written, `product` multiplications and additions.
    """

    device: str
    calls: Mapping[Key, Timed]
    copy: Rate
    product: Rate

    @property
    def sum_us(self) -> float:
        """What the calls take one after another."""
        return sum(timed.time_us for timed in self.calls.values())

    def roofline(self, key: Key, operations: int, size_bytes: int) -> float:
        """The share of its time that the call would need at the measured rates."""
        least_s = max(operations / self.product.per_s, size_bytes / self.copy.per_s)
        return least_s / (1e-6 * self.calls[key].time_us)
