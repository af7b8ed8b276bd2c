"""Times of short calls: on the device between two events, on the host by its clock.

A device time is the time of many queued calls divided by their number. The launch of a call
overlaps the call before it, so the result is the larger of the launch time and the compute time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Call: TypeAlias = Callable[[], object]

Timer: TypeAlias = Callable[[Call, int], float]
"""`timer(call, count)`: microseconds between events around `count` queued calls."""

ROUNDS = 9

PERCENTILES = {f"p{percent:g}": percent for percent in (50.0, 90.0, 99.0, 99.9)}

_WARM_UP_CALLS = 10
_ROUND_US = 20_000.0
_LEAST_CALLS, _MOST_CALLS = 10, 2_000
_HOST_S = 0.3


def cupy_timer(stream: Any) -> Timer:
    """A timer for calls that queue work on `stream`, a CuPy stream of the current device."""
    import cupy

    def time_us(call: Call, count: int) -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for _ in range(count):
            call()
        stop.record(stream)
        stop.synchronize()
        return 1e3 * float(cupy.cuda.get_elapsed_time(start, stop))

    return time_us


def torch_timer() -> Timer:
    """A timer for calls that queue work on PyTorch's current stream."""
    import torch

    def time_us(call: Call, count: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return 1e3 * float(start.elapsed_time(stop))

    return time_us


def rounds_us(call: Call, timer: Timer, rounds: int = ROUNDS) -> list[float]:
    """The mean time of a call in us in each round of about 20 ms, after a warm-up."""
    timer(call, _WARM_UP_CALLS)
    about_us = timer(call, _WARM_UP_CALLS) / _WARM_UP_CALLS
    fitting = round(_ROUND_US / about_us) if about_us > 0 else _MOST_CALLS
    count = min(max(fitting, _LEAST_CALLS), _MOST_CALLS)
    return [timer(call, count) / count for _ in range(rounds)]


def host_us(call: Call, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The time of each call in us, for 0.3 s after a warm-up; `clock` returns seconds."""
    for _ in range(_WARM_UP_CALLS):
        call()
    times_us = []
    after_s = clock()
    end_s = after_s + _HOST_S
    while after_s < end_s:
        before_s = clock()
        call()
        after_s = clock()
        times_us.append(1e6 * (after_s - before_s))
    return times_us


def summary(name: str, times_us: Sequence[float]) -> dict[str, Any]:
    """`<name>_us`, the median of rounds, and `<name>_spread_us`, their [minimum, maximum]."""
    return {
        f"{name}_us": statistics.median(times_us),
        f"{name}_spread_us": [min(times_us), max(times_us)],
    }


def host_summary(times_us: Sequence[float]) -> dict[str, float]:
    """`host_us`, the median of single calls, and `host_p99_us`, both values that occurred."""
    median, p99 = np.quantile(times_us, (0.5, 0.99), method="inverted_cdf")
    return {"host_us": float(median), "host_p99_us": float(p99)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` percent of them do not exceed."""
    # Rounded: 99.9 % of 2,000 is 1998.0000000000002 in floating point.
    rank = max(1, math.ceil(round(len(values) * percent / 100, 6)))
    return float(np.partition(values, rank - 1)[rank - 1])


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, `PERCENTILES` and maximum; empty without values."""
    if not len(values):
        return {}
    found = {name: percentile(values, percent) for name, percent in PERCENTILES.items()}
    return {"mean": float(np.mean(values)), **found, "max": float(np.max(values))}
