"""Changes of metrics before they are flushed."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from service.observe.buffers import BufferedCounter, BufferedHistogram


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_stays_out_of_the_total_and_stops_no_later_flush(value):
    registry = CollectorRegistry()
    counter = BufferedCounter(Counter("busy", "-", registry=registry))
    histogram = BufferedHistogram(Histogram("took", "-", buckets=(1.0,), registry=registry), (1.0,))
    for one in (value, 0.5):
        counter.inc(one)
        counter.flush()
        histogram.observe(one)
        histogram.flush()
    found = {
        name: registry.get_sample_value(name) for name in ("busy_total", "took_sum", "took_count")
    }
    assert found == {"busy_total": 0.5, "took_sum": 0.5, "took_count": 2}
