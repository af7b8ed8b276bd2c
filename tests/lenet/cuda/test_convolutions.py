from __future__ import annotations

import re
from pathlib import Path

import pytest

from lenet.cuda import conv1
from lenet.cuda.convolutions import Convolutions, Split
from lenet.cuda.device import Limits
from lenet.cuda.fused_network import MAX_ROWS, is_supported
from lenet.model import (
    ARCHITECTURES,
    IDENTITY,
    Activation,
    ConvBlock,
    DenseBlock,
    Model,
    Pool,
    named,
)

H100 = Limits(90, 232_448, 132)
HALVED = Pool("max")
FIRST, SECOND = ConvBlock(20, (5, 5), pool=HALVED), ConvBlock(50, (5, 5), pool=HALVED)
LAST = DenseBlock(10, activation=IDENTITY)
ELU, CLIPPED = Activation("elu", 0.5), Activation("clipped_relu", 6.0)


@pytest.mark.parametrize(
    ("blocks", "is_supported"),
    [
        ((FIRST, SECOND), True),
        ((FIRST, SECOND, DenseBlock(30)), True),
        ((FIRST, ConvBlock(50, (3, 3), padding=(1, 1), pool=Pool("average"))), True),
        ((FIRST, ConvBlock(50, (5, 5), activation=ELU, pool=HALVED)), True),
        # Both have the one parameter.
        (
            (
                ConvBlock(20, (5, 5), activation=CLIPPED, pool=HALVED),
                ConvBlock(50, (5, 5), activation=ELU, pool=HALVED),
            ),
            False,
        ),
        ((FIRST,), False),
        ((FIRST, DenseBlock(30)), False),
        ((ConvBlock(20, (5, 5)), SECOND), False),
        ((FIRST, ConvBlock(50, (5, 5))), False),
        ((FIRST, ConvBlock(50, (5, 5), stride=(2, 2), pool=HALVED)), False),
        ((FIRST, ConvBlock(8, (5, 5), pool=HALVED)), False),  # channels come in pairs of tiles
        ((FIRST, ConvBlock(600, (5, 5), pool=HALVED)), False),  # too large for a multiprocessor
    ],
)
def test_two_plain_pooled_convolutions_that_fit_are_supported(blocks, is_supported):
    model = Model("m", (*blocks, LAST))
    for precision in ("fp16", "tf32", "fp32"):
        assert (Convolutions.of(model, precision, H100) is not None) == is_supported
        assert Convolutions.of(model, precision, Limits(75, 65_536, 40)) is None


def convolutions(name, precision):
    found = Convolutions.of(named(name).folded, precision, H100)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "precision", "rows", "expected"),
    [
        ("lenet", "fp16", 1, Split(1, 8, slices=4, depths=4)),
        ("lenet", "fp16", 44, Split(1, 8, slices=2, parts=2, depths=2)),
        ("lenet", "fp16", 132, Split(1, 8, parts=4)),
        ("lenet", "fp16", 133, Split(2, 4, parts=2)),
        ("lenet", "fp16", 512, Split(4, 2)),
        ("lenet", "fp16", 8192, Split(8, 2)),
        ("lenet", "tf32", 8192, Split(4, 2)),
        ("lenet", "fp32", 1, Split(1, 8, slices=4, depths=4)),
        ("lenet", "tf32", 1, Split(1, 16, slices=4, depths=8)),
        ("lenet", "fp32", 8192, Split(4, 2)),
        ("cnn-32-64", "fp32", 8192, Split(2, 7, parts=2)),
    ],
)
def test_few_images_are_shared_by_blocks_and_many_share_a_block(name, precision, rows, expected):
    both = convolutions(name, precision)
    assert both.split(rows, H100) == expected
    assert both.shared_bytes(expected) <= H100.shared_bytes


@pytest.mark.parametrize("rows", [1, 64, 8192])
@pytest.mark.parametrize(("precision", "largest"), [("fp16", 4), ("tf32", 4), ("fp32", 2)])
def test_a_warp_has_as_few_channels_as_its_registers_hold(precision, largest, rows):
    block = ConvBlock(256, (3, 3), padding=(1, 1), pool=HALVED)
    both = Convolutions.of(
        Model("m", (ConvBlock(6, (5, 5), pool=HALVED), block, LAST)), precision, H100
    )
    split = both.split(rows, H100)
    assert -(-256 // (16 * split.slices * split.parts)) <= largest


SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""The most shared memory of a block. Source: CUDA C++ programming guide, compute capabilities."""


def takers(precision, limits):
    """Who computes the convolutions of the named networks, as docs/operations.md says it."""
    networks = [model for model in ARCHITECTURES.values() if isinstance(model.blocks[0], ConvBlock)]
    ours = [one.name for one in networks if Convolutions.of(one.folded, precision, limits)]
    assert all(conv1.is_supported(one.folded.blocks[0], precision) for one in networks)
    if len(ours) == len(networks):
        return "`convolutions.cu`"
    named_ = ", ".join(f"`{name}`" for name in ours)
    others = "`conv1.cu`, then cuDNN"
    return f"{named_}: `convolutions.cu`; others: {others}" if ours else others


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_the_documented_kernels_are_those_that_such_a_gpu_gets(capability):
    limits = Limits(capability, SHARED_KIB[capability] << 10, 100)
    text = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    major, minor = divmod(capability, 10)
    (row,) = re.findall(
        rf"^\| {major}\.{minor} \([^|]*\| ([^|]*) \| ([^|]*) \| ", text, re.MULTILINE
    )
    fused = all(is_supported(one.folded, "fp16", capability) for one in ARCHITECTURES.values())
    first = "up to 8 images `fused_network.cu`, then " if fused else ""
    assert MAX_ROWS == 8
    assert row == (first + takers("fp16", limits), takers("tf32", limits))
    assert takers("fp32", limits) == takers("tf32", limits)
