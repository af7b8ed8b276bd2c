from __future__ import annotations

import pytest

from lenet.cuda.epilogue import MAX_BLOCKS, EpilogueShape
from lenet.model import RELU, Pool


def a_tail(pool=None, c=32, scalar="__half", size=(8, 6)):
    return EpilogueShape(*size, c, c - 1, pool, RELU, False, scalar)


@pytest.mark.parametrize(
    ("pool", "window", "output", "kind"),
    [
        (None, (1, 1), (8, 6), "NONE"),
        (Pool("max"), (2, 2), (4, 3), "MAX"),
        (Pool("average", (3, 2), (2, 1), (1, 0)), (3, 2), (4, 5), "AVERAGE"),
        (Pool("global_average"), (8, 6), (1, 1), "AVERAGE"),
    ],
)
def test_a_window_is_what_the_pool_says_or_one_pixel_or_all(pool, window, output, kind):
    shape = a_tail(pool)
    macros = shape.macros()
    assert shape.output == (macros["OH"], macros["OW"]) == output
    assert (macros["WINDOW_H"], macros["WINDOW_W"]) == window
    assert macros["POOL"] == kind


def test_the_taps_of_a_maximum_are_counted_in_as_few_bytes_as_do():
    assert a_tail(Pool("max", (16, 16)), size=(32, 32)).index == "uint8"
    assert a_tail(Pool("max", (16, 17)), size=(32, 32)).index == "uint16"
    assert a_tail(Pool("average")).index is None


def test_there_are_blocks_for_all_the_work_and_none_without():
    shape = a_tail()  # four vectors a pixel
    assert shape.blocks(0) == shape.blocks(64) == 1
    assert shape.blocks(65) == 2
    assert shape.blocks(10**9) == MAX_BLOCKS
    assert a_tail(c=64, scalar="float").blocks(10**9) == MAX_BLOCKS // 4
