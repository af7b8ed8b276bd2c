import itertools

import pytest

from benchmarks.stopwatch import ROUNDS, host_summary, host_us, rounds_us, summary


class Device:
    """Runs calls and says that each took `call_us`."""

    def __init__(self, call_us):
        self.call_us = call_us
        self.counts = []

    def __call__(self, call, count):
        self.counts.append(count)
        for _ in range(count):
            call()
        return self.call_us * count


@pytest.mark.parametrize(("call_us", "count"), [(1, 2000), (100, 200), (40_000, 10), (0, 2000)])
def test_a_round_takes_about_20_ms_unless_that_is_too_few_or_too_many_calls(call_us, count):
    device = Device(call_us)
    assert rounds_us(lambda: None, device) == [call_us] * ROUNDS
    assert device.counts[-ROUNDS:] == [count] * ROUNDS


def test_every_call_of_a_third_of_a_second_is_timed_on_the_host_after_a_warm_up():
    calls = itertools.count()
    clock = itertools.count(step=0.125)  # exact in binary
    times_us = host_us(lambda: next(calls), lambda: next(clock))
    assert times_us == [125_000] * 2
    assert next(calls) == 10 + 2


def test_rounds_are_told_by_their_median_and_range():
    assert summary("device", [3.0, 1.0, 9.0]) == {
        "device_us": 3.0,
        "device_spread_us": [1.0, 9.0],
    }


def test_single_calls_are_told_by_times_that_were_measured():
    assert host_summary(range(1, 201)) == {"host_us": 100, "host_p99_us": 198}
