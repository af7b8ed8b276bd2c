import pytest

from benchmarks.timing import ROUNDS, host_summary, percentile, rounds_us, summary


def test_the_times_of_calls_are_summarised():
    assert rounds_us(lambda: None, lambda call, count: 100.0 * count) == [100.0] * ROUNDS
    assert summary("us", [3.0, 1.0, 9.0]) == {"us_us": 3.0, "us_spread_us": [1.0, 9.0]}
    assert host_summary(range(1, 201)) == {"host_us": 100, "host_p99_us": 198}


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (1.01, 2), (50, 50), (99.9, 100)])
def test_a_percentile_is_a_value_that_occurred(percent, expected):
    assert percentile(list(range(100, 0, -1)), percent) == expected
