import pytest

from trainer.roofline import Rate, Timed, Times


@pytest.fixture
def times():
    calls = {("a", "forward"): Timed(10.0), ("b", "forward"): Timed(20.0)}
    return Times("a GPU", calls, Rate(1e12, "a copy"), Rate(1e14, "a product"))


def test_the_share_is_that_of_the_bound_which_is_reached_first(times):
    assert times.roofline(("a", "forward"), 10**8, 10**6) == pytest.approx(0.1)  # both 1 us
    assert times.roofline(("a", "forward"), 10**8, 5 * 10**6) == pytest.approx(0.5)
    assert times.roofline(("b", "forward"), 10**9, 5 * 10**6) == pytest.approx(0.5)


def test_what_a_cache_answers_may_exceed_the_roofline(times):
    assert times.roofline(("a", "forward"), 0, 2 * 10**7) == pytest.approx(2)


def test_the_sum_is_that_of_all_calls(times):
    assert times.sum_us == 30
