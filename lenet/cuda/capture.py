"""The capture of CUDA graphs, and times measured by CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

Launch: TypeAlias = Callable[[], None]
"""Queues work on a stream and does not wait for it."""


def captured(queue: Launch, stream: Any) -> Launch:
    """Capture what `queue` puts on `stream` as a CUDA graph; calling the result launches it.

    The capture is ended on every failure: a thread with an open capture cannot even destroy its
    handles. The stream of a failed capture is unusable, and the error of `queue` is raised.
    """
    stream.begin_capture()
    try:
        queue()
    except BaseException:
        with suppress(RuntimeError):  # the capture's own error; that of `queue` says more
            stream.end_capture()
        raise
    graph = stream.end_capture()
    graph.upload(stream)
    return partial(graph.launch, stream)


def time_us(
    launch: Launch, rounds: int, launches: int = 1
) -> float:  # pragma: no cover - needs a GPU
    """Microseconds of one of `launches` in a row on the current stream: the median of `rounds`.

    Measured by CUDA events, because other threads may take the host's time meanwhile.
    """
    import cupy

    times: list[float] = []
    for _ in range(rounds):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(launches):
            launch()
        stop.record()
        stop.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, stop) / launches)
    return statistics.median(times)
