"""Pictures as people send them. `python -m tests.picture_kinds` prints the rates of 300 each."""

import numpy as np
import pytest

from tests.picture_kinds import ADDED, KINDS, NO_DIGITS, numbers, of_kind, outcome

SEED = 7
COUNT = 12


@pytest.mark.parametrize("name", KINDS)
def test_a_digit_is_read_and_not_warned_of_on_every_kind_of_picture(mnist, name):
    found = outcome(of_kind(KINDS[name], *mnist, COUNT, SEED))
    # The draw is the same each time. One in a hundred is wrong, as of MNIST's own images.
    assert found.right >= COUNT - 1
    assert found.warned.total() <= 1


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_97_of_100_are_read_on_every_kind_of_picture(mnist, name):
    found = outcome(of_kind(KINDS[name], *mnist, 300, SEED + 1))
    assert found.right >= (291 if KINDS[name] in ADDED else 294)
    assert found.warned.total() <= 6


def test_numbers_are_read_digit_by_digit_in_reading_order(mnist):
    assert outcome(numbers(*mnist, 20, SEED), "several").right >= 19


def test_numbers_are_warned_of_where_one_digit_was_expected(mnist):
    assert outcome(numbers(*mnist, 20, SEED)).warned["several_shapes"] == 20


@pytest.mark.parametrize("name", ["scribble", "blot"])
def test_shapes_unlike_any_digit_are_warned_of(name):
    pictures = [(NO_DIGITS[name](np.random.default_rng((SEED, i))), [-1]) for i in range(20)]
    assert outcome(pictures).warned["not_a_digit"] >= 19


def test_noise_is_refused():
    pictures = [(NO_DIGITS["noise"](np.random.default_rng((SEED, i))), [-1]) for i in range(5)]
    assert outcome(pictures).refused == 5
