"""Tallies beside the library's own series, to which the same happens at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter, Gauge, Histogram

from service.metrics import CounterTally, GaugeTally, HistogramTally

BOUNDS = (0.5, 1.0, 2.5)
# Eighths: their sums are exact in any order.
SIZES = st.integers(-8, 40).map(lambda eighths: eighths / 8) | st.sampled_from(BOUNDS)


def shown(series):
    """What an exposition has of it."""
    (family,) = series.collect()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def histogram():
    return Histogram("size", "Of an event.", buckets=BOUNDS, registry=None)


@given(st.lists(st.lists(SIZES, max_size=8), min_size=1, max_size=4))
def test_a_histogram_shows_what_it_would_have_shown_without_a_tally(between_flushes):
    tallied, plain = histogram(), histogram()
    tally = HistogramTally(tallied, BOUNDS)
    for sizes in between_flushes:
        for size in sizes:
            tally.observe(size)
            plain.observe(size)
        tally.flush()
        assert shown(tallied) == shown(plain)


def test_a_size_on_a_bound_counts_below_it_and_one_past_all_counts_in_the_last():
    series = histogram()
    tally = HistogramTally(series, BOUNDS)
    for size in (0.5, 1.0, 1.001, 2.5, 2.501):
        tally.observe(size)
    tally.flush()
    assert shown(series) == {
        ("size_bucket", "0.5"): 1,
        ("size_bucket", "1.0"): 2,
        ("size_bucket", "2.5"): 4,
        ("size_bucket", "+Inf"): 5,
        ("size_count",): 5,
        ("size_sum",): pytest.approx(7.502),
    }


@given(st.lists(st.lists(st.integers(0, 1000), max_size=5), min_size=1, max_size=4))
def test_a_counter_shows_what_it_would_have_shown_without_a_tally(between_flushes):
    tallied, plain = (Counter("rows", "Counted.", registry=None) for _ in range(2))
    tally = CounterTally(tallied)
    for amounts in between_flushes:
        tally.inc()
        plain.inc()
        for amount in amounts:
            tally.inc(amount)
            plain.inc(amount)
        tally.flush()
        assert shown(tallied) == shown(plain)


def test_a_gauge_shows_its_last_value_even_if_that_is_0():
    series = Gauge("busy", "Contexts.", registry=None)
    tally = GaugeTally(series)
    for values in ((3, 2), (5, 0)):
        for value in values:
            tally.set(value)
        tally.flush()
        assert shown(series) == {("busy",): values[-1]}


def test_nothing_is_told_before_a_flush_and_nothing_twice():
    rows, busy, size = (
        Counter("rows", "Counted.", registry=None),
        Gauge("busy", "Contexts.", registry=None),
        histogram(),
    )
    series = (rows, busy, size)
    tallies = (CounterTally(rows), GaugeTally(busy), HistogramTally(size, BOUNDS))
    at_first = [shown(one) for one in series]
    for tally in tallies:
        tally.flush()
    assert [shown(one) for one in series] == at_first
    tallies[0].inc(3)
    tallies[1].set(3)
    tallies[2].observe(0.75)
    assert [shown(one) for one in series] == at_first
    for tally in tallies:
        tally.flush()
    busy.set(7)  # by somebody else, since
    told = [shown(one) for one in series]
    assert told[0] == {("rows_total",): 3}
    assert told[2]["size_count",] == 1
    for tally in tallies:
        tally.flush()
    assert [shown(one) for one in series] == told
