import pytest

from benchmarks.timing import ROUNDS, host_summary, percentile, rounds_us, summary


class Device:
    """A timer on which every call takes `call_us`."""

    def __init__(self, call_us):
        self.call_us = call_us
        self.counts = []

    def __call__(self, call, count):
        self.counts.append(count)
        for _ in range(count):
            call()
        return self.call_us * count


@pytest.mark.parametrize(("call_us", "count"), [(1, 2000), (100, 200), (40_000, 10), (0, 2000)])
def test_a_round_takes_about_20_ms_within_bounds_on_its_calls(call_us, count):
    device = Device(call_us)
    assert rounds_us(lambda: None, device) == [call_us] * ROUNDS
    assert device.counts[-ROUNDS:] == [count] * ROUNDS


def test_summaries_are_medians_with_a_spread_or_a_percentile():
    assert summary("device", [3.0, 1.0, 9.0]) == {
        "device_us": 3.0,
        "device_spread_us": [1.0, 9.0],
    }
    assert host_summary(range(1, 201)) == {"host_us": 100, "host_p99_us": 198}


@pytest.mark.parametrize(
    ("percent", "expected"), [(0.5, 1), (1, 1), (1.01, 2), (50, 50), (99, 99), (99.9, 100)]
)
def test_a_percentile_is_a_value_that_occurred(percent, expected):
    assert percentile(list(range(100, 0, -1)), percent) == expected
    assert percentile([7.0], percent) == 7.0
