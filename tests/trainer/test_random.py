import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.random import permutation, philox, symmetric, uniform


# Random123's kat_vectors for philox4x32-10: counter, key, answer.
@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            0xFFFFFFFF_FFFFFFFF,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, seed, words):
    assert tuple(philox(seed, *counter)) == words


def test_uniform_numbers_are_exact_and_stay_below_one():
    words = np.array([0, 255, 256, 0x80000000, 0xFFFFFFFF], np.uint32)
    assert uniform(words).tolist() == [0, 0, 2**-24, 0.5, 1 - 2**-24]
    assert symmetric(words).tolist() == [-1, -1, -1 + 2**-23, 0, 1 - 2**-23]
    assert uniform(words).dtype == symmetric(words).dtype == np.float32


@given(st.integers(1, 3_000), st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_permutation_meets_each_place_once(size, seed, epoch):
    order = permutation(seed, epoch, size, np.arange(size))
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


def a_feistel_network_one_place_at_a_time(seed, epoch, size, v):
    """The definition in plain integers."""
    words = [int(word) for block in (0, 1) for word in philox(seed, epoch, block, 0, 0)]
    b = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        left, right = v >> b, v & (1 << b) - 1
        for key in words[:6]:
            x = (right + key) & 0xFFFFFFFF
            x ^= x >> 16
            x = x * 0x85EBCA6B & 0xFFFFFFFF
            x ^= x >> 13
            x = x * 0xC2B2AE35 & 0xFFFFFFFF
            x ^= x >> 16
            left, right = right, left ^ (x & (1 << b) - 1)
        v = left << b | right
        if v < size:
            return v


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 100, 60_000, 65_536])
def test_a_permutation_follows_its_definition(size):
    positions = np.unique(np.linspace(0, size - 1, 20).astype(int))
    expected = [a_feistel_network_one_place_at_a_time(9, 3, size, int(v)) for v in positions]
    assert permutation(9, 3, size, positions).tolist() == expected
