"""Random numbers without a state: each is a function of the seed, the place and the purpose.

A counter-based generator has nothing to carry from step to step, so a batch, a row or a GPU can
draw its own numbers without asking what was drawn before, and a resumed run draws what the
uninterrupted one would have. All of it is integer arithmetic that a GPU repeats bit by bit. It
refuses to be used for secrets.

Sources: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3" (Philox4x32-10);
Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (the permutation).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_FEISTEL_ROUNDS = 6


class Purpose(IntEnum):
    """The third word of every counter: what is drawn for one purpose says nothing of another."""

    ORDER = 0
    AUGMENTATION = 1
    DROPOUT = 2


def philox(
    seed: int, c0: ArrayLike, c1: ArrayLike, c2: ArrayLike, c3: ArrayLike
) -> NDArray[np.uint32]:
    """Philox4x32-10: four words for each counter (c0, c1, c2, c3).

    0 <= seed < 2^64 is the key, low word first; the counter's words, from 0 to 2^32 - 1, broadcast.

    Returns: uint32 (..., 4).
    """
    # Words in 64 bits: the product of two is whole, and its halves are a shift and a mask away.
    x0, x1, x2, x3 = (np.asarray(word, np.uint64) for word in (c0, c1, c2, c3))
    k0, k1 = seed & _LOW, seed >> 32
    for _ in range(_ROUNDS):
        p0, p1 = x0 * np.uint64(_MULTIPLIERS[0]), x2 * np.uint64(_MULTIPLIERS[1])
        x0, x1, x2, x3 = (
            (p1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0),
            p1 & np.uint64(_LOW),
            (p0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1),
            p0 & np.uint64(_LOW),
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack(np.broadcast_arrays(x0, x1, x2, x3), axis=-1).astype(np.uint32)


def uniform(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """From 0 inclusive to 1 exclusive: multiples of 2^-24, which float32 holds exactly."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def symmetric(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """From -1 inclusive to 1 exclusive: multiples of 2^-23, which float32 holds exactly."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)


def permutation(seed: int, epoch: int, size: int, positions: ArrayLike) -> NDArray[np.int64]:
    """Which of `size` things comes at each of `positions`, 0 <= position < size < 2^32, in `epoch`.

    Each of them comes at exactly one position. A balanced Feistel network shuffles the 2^(2 b)
    places of the smallest such square that holds them all; what falls outside is shuffled again
    until it does not: fewer than four passes on average.

    Returns: int64, as `positions` is shaped.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint32((1 << half) - 1)
    keys = philox(seed, epoch, [0, 1], Purpose.ORDER, 0).ravel()[:_FEISTEL_ROUNDS]
    found = np.array(positions, np.int64)
    places = found.reshape(-1)
    outside = np.arange(places.size)
    while outside.size:
        left = (places[outside] >> half).astype(np.uint32)
        right = places[outside].astype(np.uint32) & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        places[outside] = (left.astype(np.int64) << half) | right
        outside = outside[places[outside] >= size]
    return found


def _mix(x: NDArray[np.uint32], key: np.uint32) -> NDArray[np.uint32]:
    """Scatter the bits of x + key: the finaliser of MurmurHash3, by A. Appleby."""
    x = x + key
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x
