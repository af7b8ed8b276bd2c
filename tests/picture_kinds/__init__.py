"""Kinds of pictures that people send, each made from a digit of MNIST and a random generator."""

from tests.picture_kinds.exam import numbers, of_kind, outcome
from tests.picture_kinds.kinds import ASIDE, BEFORE, FAMILIES, KINDS, OPEN
from tests.picture_kinds.others import NO_DIGITS, NUMBERS

__all__ = [
    "ASIDE",
    "BEFORE",
    "FAMILIES",
    "KINDS",
    "NO_DIGITS",
    "NUMBERS",
    "OPEN",
    "numbers",
    "of_kind",
    "outcome",
]
