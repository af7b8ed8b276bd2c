"""How long short calls take: on the device between two events, on the host by its clock.

A device's time is that of many calls queued one after another, divided by their number: a launch
hides behind the call before it, unless launching takes longer than computing, and then that is
what the caller waits for. It refuses to time a single call on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

Call: TypeAlias = Callable[[], object]

Timer: TypeAlias = Callable[[Call, int], float]
"""`timer(call, count)`: microseconds that the device needs for `count` calls."""

ROUNDS = 9

_WARM_UP_CALLS = 10
_ROUND_US = 20_000.0
_LEAST_CALLS, _MOST_CALLS = 10, 2_000
_HOST_S = 0.3


def cupy_timer(stream: Any) -> Timer:
    """For calls that queue on `stream`, a CuPy stream of the current device."""
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
    """For calls that queue on PyTorch's current stream."""
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
    """Microseconds of a call in each round of about 20 ms, after a warm-up."""
    timer(call, _WARM_UP_CALLS)
    about_us = timer(call, _WARM_UP_CALLS) / _WARM_UP_CALLS
    fitting = round(_ROUND_US / about_us) if about_us > 0 else _MOST_CALLS
    count = min(max(fitting, _LEAST_CALLS), _MOST_CALLS)
    return [timer(call, count) / count for _ in range(rounds)]


def host_us(call: Call, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Microseconds of every single one of the calls that fit into 0.3 s; `clock` in seconds."""
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
    """`<name>_us`, the median of the rounds, and `<name>_spread_us`, their [least, most]."""
    return {
        f"{name}_us": statistics.median(times_us),
        f"{name}_spread_us": [min(times_us), max(times_us)],
    }


def host_summary(times_us: Sequence[float]) -> dict[str, float]:
    """`host_us`, the median of single calls, and `host_p99_us`."""
    median, p99 = np.quantile(times_us, (0.5, 0.99), method="inverted_cdf")
    return {"host_us": float(median), "host_p99_us": float(p99)}
