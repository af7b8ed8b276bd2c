"""Which processor cores the service has and which the load: what `taskset` does, from within.

A load that takes its time from what it measures makes it look slow, so each gets cores of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cores:
    """Numbers of the cores of each; the same one where there is one alone."""

    service: tuple[int, ...]
    load: tuple[int, ...]

    def __str__(self) -> str:
        if self.service == self.load:
            return (
                f"core {spans(self.load)} for service and load: compare, and take no number alone"
            )
        return f"cores {spans(self.service)} for the service, {spans(self.load)} for the load"


def split(available: Sequence[int], load: int) -> Cores:
    """The last `load` of the cores for the load, all but one at most; the others for the service.

    Where there is one core alone, both get it.
    """
    load = min(load, len(available) - 1)
    if not load:
        return Cores(tuple(available), tuple(available))
    return Cores(tuple(available[:-load]), tuple(available[-load:]))


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as `taskset --cpu-list` takes them: 0-3,8."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)


@contextlib.contextmanager
def on(cores: Sequence[int]) -> Iterator[None]:
    """Inside, this thread and what it starts run on `cores`; what was started stays there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
