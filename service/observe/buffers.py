"""Changes of metrics, collected in plain Python until they are flushed to prometheus_client."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from prometheus_client import Counter, Gauge, Histogram

_UNIT = 2.0**-24


def exact(value: float) -> float:
    """The nearest multiple of 2^-24: their sums up to 2^29 are exact, in whatever order.

    A total of several workers that became smaller by its last bit, as their files are read or
    merged in another order, would be a reset of the counter for Prometheus. NaN and infinity count
    as 0: they would stay in the total for ever.
    """
    if not math.isfinite(value):
        return 0.0
    return round(value / _UNIT) * _UNIT


class Buffered(Protocol):
    """Collects changes of a metric until the next flush."""

    def flush(self) -> None:
        """Add it to the library's metric."""
        ...


class BufferedCounter:
    """Buffers increments of one series."""

    __slots__ = ("_amount", "_series")

    def __init__(self, series: Counter) -> None:
        self._series = series
        self._amount = 0.0

    def inc(self, amount: float = 1) -> None:
        """Count `amount` more."""
        self._amount += amount

    def flush(self) -> None:
        """Write the collected changes to the metric."""
        if self._amount:
            self._series.inc(exact(self._amount))
            self._amount = 0.0


class BufferedGauge:
    """Buffers the last value of one series."""

    __slots__ = ("_changed", "_series", "_value")

    def __init__(self, series: Gauge) -> None:
        self._series = series
        self._value, self._changed = 0.0, False

    def set(self, value: float) -> None:
        """Replace the value."""
        self._value, self._changed = value, True

    def flush(self) -> None:
        """Write the collected changes to the metric."""
        if self._changed:
            self._series.set(self._value)
            self._changed = False


class BufferedHistogram:
    """Buffers observations of one series with upper bounds `bounds` and infinity."""

    __slots__ = ("_bounds", "_counts", "_series", "_sum")

    def __init__(self, series: Histogram, bounds: tuple[float, ...]) -> None:
        self._series, self._bounds = series, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one event."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count events: how many between each two bounds, and the sum of their values."""
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        self._sum += total

    def flush(self) -> None:
        """Write the collected changes to the metric.

        The only use of private attributes of prometheus_client: its public interface takes one
        event a call. pyproject.toml bounds the version.
        """
        if any(self._counts):
            for index, count in enumerate(self._counts):
                if count:
                    self._series._buckets[index].inc(count)
                    self._counts[index] = 0
            self._series._sum.inc(exact(self._sum))
            self._sum = 0.0


B = TypeVar("B", bound=Buffered)
Labels: TypeAlias = tuple[str, ...]


class Family(dict[Labels, B], Generic[B]):
    """The buffered series of one metric by the values of its labels, made when first used."""

    def __init__(self, metric: Counter | Gauge | Histogram, buffer: Callable[[Any], B]) -> None:
        super().__init__()
        self.metric = metric
        self._buffer = buffer

    def __missing__(self, labels: Labels) -> B:
        series = self[labels] = self._buffer(self.metric.labels(*labels) if labels else self.metric)
        return series

    def flush(self) -> None:
        """Write the collected changes to the metric."""
        for series in self.values():
            series.flush()
