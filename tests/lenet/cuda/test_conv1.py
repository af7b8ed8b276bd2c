from __future__ import annotations

import numpy as np
import pytest

from lenet.cuda.conv1 import fragments, is_supported
from lenet.model import ConvBlock, DenseBlock, Pool

HALVED = Pool("max")


@pytest.mark.parametrize(
    ("block", "in_half", "in_float"),
    [
        (ConvBlock(20, (5, 5), pool=HALVED), True, True),
        (ConvBlock(32, (3, 3), padding=(1, 1), pool=Pool("average")), True, True),
        (ConvBlock(9, (5, 5)), True, True),
        # A weight in float is two halves, and twice as many do not fit into the registers.
        (ConvBlock(9, (10, 9), pool=HALVED), True, False),
        (ConvBlock(9, (15, 9), pool=HALVED), False, False),
        (ConvBlock(9, (5, 5), stride=(2, 1), pool=HALVED), False, False),
        (ConvBlock(9, (5, 5), dilation=(1, 2), pool=HALVED), False, False),
        (ConvBlock(9, (5, 5), pool=Pool("max", (3, 3), (2, 2))), False, False),
        (ConvBlock(9, (5, 5), pool=Pool("max", (2, 2), (2, 2), (1, 0))), False, False),
        (ConvBlock(9, (5, 5), pool=Pool("global_average")), False, False),
        (ConvBlock(9, (28, 1)), False, False),
        (DenseBlock(9), False, False),
    ],
)
def test_the_kernel_supports_plain_convolutions_that_fit_into_registers(block, in_half, in_float):
    assert is_supported(block, "fp16") == in_half
    assert is_supported(block, "tf32") == is_supported(block, "fp32") == in_float


@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        ((20, 1, 5, 5), (1, 2, 32, 4, 4)),
        ((6, 1, 5, 5), (1, 2, 32, 1, 4)),
        ((9, 1, 3, 4), (1, 1, 32, 2, 4)),
        ((40, 1, 3, 3), (2, 1, 32, 4, 4)),
        ((8, 1, 7, 7), (1, 4, 32, 1, 4)),
        ((1, 1, 1, 1), (1, 1, 32, 1, 4)),
    ],
)
def test_a_lane_finds_the_filters_of_its_channels(mma, shape, packed):
    weight = mma.normal(*shape)
    found = fragments(weight, 1)
    chunks, steps, lanes, tiles, places = packed
    assert found.shape == (chunks, 1, steps, lanes, tiles, places)
    chunk, _, step, lane, tile, place = np.indices(found.shape)
    k, column = mma.b(lane, place)
    # Two columns of each tile belong to a lane; its channels follow each other tile by tile.
    channel = (chunk * 4 + column // 2) * tiles * 2 + tile * 2 + column % 2
    expected = mma.first_filter(weight, 16 * step + k, channel)
    np.testing.assert_array_equal(found, expected.astype(np.float16), strict=True)
    assert found.flags.c_contiguous


def test_two_halves_make_a_float_when_a_weight_has_two_parts(mma):
    weight = mma.normal(20, 1, 5, 5)
    high, low = fragments(weight, 2)[0].astype(np.float64)
    assert np.any(low)
    np.testing.assert_array_equal(high, fragments(weight, 1)[0, 0])
    step, lane, tile, place = np.indices(high.shape)
    k, column = mma.b(lane, place)
    channel = column // 2 * 8 + tile * 2 + column % 2
    true = mma.first_filter(weight, 16 * step + k, channel)
    # 11 bits each; below 2^-14 a half has a fixed step of 2^-24, and so an error of half of it.
    np.testing.assert_allclose(high + low, true, rtol=2.0**-22, atol=2.0**-25)
