from __future__ import annotations

import pytest

from lenet.cuda.conv1 import is_supported
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
        (ConvBlock(9, (12, 9), pool=HALVED), True, False),  # all eight steps
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
