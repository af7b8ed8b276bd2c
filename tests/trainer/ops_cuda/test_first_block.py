from __future__ import annotations

import pytest

from lenet.cuda.graphs import Convolution
from lenet.model import IDENTITY, ConvBlock, Pool
from trainer.ops_cuda.first_block import fits

HALVED = {"batch_norm": True, "pool": Pool("max")}
LENET = (2, 28, 28, 1), (32, 5, 5, 1)


@pytest.mark.parametrize(
    ("shapes", "geometry", "block", "expected"),
    [
        (LENET, {}, HALVED, True),
        (LENET, {"padding": (2, 0)}, HALVED, True),
        (LENET, {"padding": (0, 1)}, HALVED, True),
        (LENET, {"stride": (2, 1)}, HALVED, False),
        (LENET, {"dilation": (1, 2)}, HALVED, False),
        (LENET, {"precision": "fp32"}, HALVED, False),
        (((2, 28, 28, 1), (32, 4, 5, 1)), {}, HALVED, False),  # a last row without a window
        (((2, 28, 28, 1), (64, 5, 5, 1)), {}, HALVED, False),
        (((2, 28, 28, 1), (32, 5, 7, 1)), {}, HALVED, False),  # 35 taps
        (((2, 28, 28, 8), (32, 5, 5, 8)), {}, HALVED, False),
        (((2, 80, 80, 1), (32, 5, 5, 1)), {}, HALVED, False),  # too large for shared memory
        (LENET, {}, HALVED | {"batch_norm": False}, False),
        (LENET, {}, HALVED | {"activation": IDENTITY}, False),
        (LENET, {}, HALVED | {"pool": Pool("average")}, False),
        (LENET, {}, HALVED | {"pool": None}, False),
    ],
)
def test_the_kernels_need_one_channel_and_batch_norm_relu_and_pooling(
    shapes, geometry, block, expected
):
    forward = Convolution(
        **({"direction": "forward", "precision": "fp16"} | geometry),
        image=shapes[0],
        filters=shapes[1],
    )
    assert fits(forward, ConvBlock(20, (5, 5), **block)) == expected
