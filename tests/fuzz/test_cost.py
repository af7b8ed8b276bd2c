"""The search for costly inputs, with counted steps in place of CPU time."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from tests.fuzz.cost import FLOOR_BYTES, Search, parsers, seeds
from tests.fuzz.target import Target


def times(count):
    """True so many times."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def steps_of(parse, data):
    return parse(data) / 1e6


@pytest.mark.parametrize(("parse", "is_above"), [(lambda data: len(data) ** 2, True), (len, False)])
def test_what_is_quadratic_is_found(parse, is_above):
    search = Search(Target(), parse, limit_us=200)
    search.go([b"x", b"yy"], times(300), steps_of)
    cost_us, data = search.worst[0]
    assert cost_us == parse(data) / (len(data) + FLOOR_BYTES)
    assert (cost_us > search.limit_us) == is_above


def test_an_input_that_was_slow_for_a_while_is_measured_again():
    search = Search(Target(), len, limit_us=2)
    slow = times(3)  # the times of one input

    def measure(parse, data):
        return (100 if slow() else 1) * steps_of(parse, data)

    search.go([b"x" * 1024], times(0), measure)
    assert search.worst == [(0.5, b"x" * 1024)]


def test_every_parser_takes_its_seeds():
    with ExitStack() as stack:
        for name, search in parsers(stack).items():
            found = seeds(name)
            outcomes = []
            for data in found:
                with suppress(Exception):
                    outcomes.append(search.parse(data))
            assert outcomes, name
