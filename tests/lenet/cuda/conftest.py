"""The layout of tensor core operands, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest


class Mma:
    """The weight of a lane at a place, see `ptx.cuh`."""

    @staticmethod
    def normal(*shape):
        return np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)

    @staticmethod
    def picked(tensor, *place):
        """The elements of `tensor` at `place`, and 0 outside of it."""
        place = np.broadcast_arrays(*place)
        sizes = zip(place, tensor.shape, strict=True)
        inside = np.all([(at >= 0) & (at < size) for at, size in sizes], axis=0)
        return np.where(inside, tensor[tuple(np.where(inside, at, 0) for at in place)], 0)

    @staticmethod
    def b(lane, place):
        """(k within a step, column) of the right operand."""
        return 8 * (place // 2) + 2 * (lane % 4) + place % 2, lane // 4

    @classmethod
    def first_filter(cls, weight, k, channel):
        """The weight of tap `k` of a filter whose rows have an even number of taps."""
        r, s = np.divmod(k, -(-weight.shape[3] // 2) * 2)
        return cls.picked(weight * np.float32(256 / 255), channel, 0, r, s)


@pytest.fixture
def mma():
    return Mma
