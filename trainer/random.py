"""Random numbers without state: each is a function of the seed, a counter and its purpose.

So a batch, a row or a GPU draws its numbers independently of all others, and a resumed run draws
the same ones as an uninterrupted run. Everything is integer arithmetic that a GPU reproduces bit by
bit. Not for cryptography.

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
    """The third word of every counter, so that purposes have independent numbers."""

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
    # Words in 64 bits hold the whole product of two; shift and mask give its halves.
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
    """Uniform from 0 inclusive to 1 exclusive: multiples of 2^-24, which float32 holds exactly."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def symmetric(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Uniform from -1 inclusive to 1 exclusive: multiples of 2^-23, which float32 holds exactly."""
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)


def permutation(seed: int, epoch: int, size: int, positions: ArrayLike) -> NDArray[np.int64]:
    """The items, of `size`, at `positions` of the order of `epoch`; 0 <= position < size < 2^32.

    A balanced Feistel network permutes the smallest 2^(2 b) >= size indices; those outside the
    range are permuted again until they are inside: fewer than four passes on average.

    Returns: int64, in the shape of `positions`.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint32((1 << half) - 1)
    keys = philox(seed, epoch, [0, 1], Purpose.ORDER, 0).ravel()[:_FEISTEL_ROUNDS]
    found = np.array(positions, np.int64)
    indices = found.reshape(-1)
    outside = np.arange(indices.size)
    while outside.size:
        left = (indices[outside] >> half).astype(np.uint32)
        right = indices[outside].astype(np.uint32) & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        indices[outside] = (left.astype(np.int64) << half) | right
        outside = outside[indices[outside] >= size]
    return found


def _mix(x: NDArray[np.uint32], key: np.uint32) -> NDArray[np.uint32]:
    """Mix the bits of x + key: the finalizer of MurmurHash3, by A. Appleby."""
    x = x + key
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x
