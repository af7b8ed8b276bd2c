from collections import Counter

import pytest

from benchmarks.answers import Verdict
from benchmarks.results import Results, percentile, summarise, table


def results(latencies_s=(), **fields):
    made = Results(**fields)
    for latency_s in latencies_s:
        made.answered(latency_s, Verdict(), (1,), (1,), {"queue": 0.5})
    made.finish(2.0, interrupted=False)
    return made


@pytest.mark.parametrize(
    ("percent", "expected"), [(0.5, 1), (1, 1), (1.01, 2), (50, 50), (99, 99), (99.9, 100)]
)
def test_a_percentile_is_a_value_that_occurred(percent, expected):
    values = list(range(100, 0, -1))
    assert percentile(values, percent) == expected


def test_one_value_is_all_its_percentiles():
    assert percentile([7.0], 0.1) == percentile([7.0], 99.9) == 7.0


def test_rates_are_over_the_time_that_passed():
    summary = summarise(results([0.001] * 10))
    assert summary.requests_per_s == summary.images_per_s == 5.0
    assert summary.latency_ms["p99.9"] == pytest.approx(1.0)
    assert summary.latency_ms["mean"] == pytest.approx(1.0)


def test_merged_results_are_as_if_one_process_had_seen_them():
    merged = Results.merge(
        [
            results([0.001, 0.003], errors=Counter({"429": 1}), wrong_labels=1),
            results([0.002], errors=Counter({"429": 2, "ReadError": 1})),
        ]
    )
    summary = summarise(merged)
    assert summary.requests == 7
    assert summary.requests_per_s == 1.5
    assert summary.errors == {"429": 3, "ReadError": 1}
    assert summary.wrong_labels == 1
    assert summary.latency_ms["p50"] == pytest.approx(2.0)
    assert summary.latency_ms["max"] == pytest.approx(3.0)
    assert summary.server_ms == {"queue": 0.5}


@pytest.mark.parametrize(
    "flaw",
    [
        {"wrong_labels": 1},
        {"errors": Counter({"429": 1})},
        {"mistakes": 1},
        {"own_mistakes": 1},
    ],
    ids=str,
)
def test_one_flaw_is_enough_to_fail(flaw):
    assert summarise(results([0.001])).passed
    assert not summarise(results([0.001], **flaw)).passed


def test_no_answer_is_no_pass_and_still_a_table():
    summary = summarise(results())
    assert not summary.passed
    assert summary.accuracy is None
    assert summary.latency_ms == {}
    assert "no good answer" in table(summary, "nothing")


def test_the_table_fits_a_screen_and_says_all():
    made = results([0.001 * count for count in range(1, 2001)])
    made.errors.update({"429 overloaded": 3, "ReadTimeout": 1})
    made.wrong_labels, made.mistakes, made.own_mistakes = 2, 12, 10
    made.lateness_s.extend([0.0001] * 2000)
    text = table(summarise(made), "title\nsecond line")
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    for expected in (
        *("title", "2,004", "1,000.0", "99.400%", "p99.9", "1,998.00", "2,000.00"),
        *("12 of 2,000 images are wrong", "itself gets 10 wrong", "queue 0.500"),
        *("error: 3 x 429 overloaded", "error: 1 x ReadTimeout", "p99 0.10"),
    ):
        assert expected in text
    assert "fell behind" not in text


def test_a_generator_that_fell_behind_says_so():
    made = results([0.001])
    made.lateness_s.append(0.5)
    assert "The generator fell behind" in table(summarise(made), "")
