from __future__ import annotations

import pytest

from lenet.footprint import context_bytes
from lenet.model import ARCHITECTURES

SLAB = 64 << 20


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
def test_large_batches_take_memory_by_the_row_and_small_ones_a_slab(name, precision):
    model = ARCHITECTURES[name]
    rows = 1 << 18
    small, large, larger = (context_bytes(model, n, precision) for n in (1, rows, 2 * rows))
    assert SLAB < small == context_bytes(model, 64, precision) < 1.5 * SLAB
    of_row = (larger - large) / rows
    assert of_row * rows == pytest.approx(large - (small - SLAB))
    assert 784 < of_row < 400_000


def test_a_row_of_lenet_in_fp16_takes_what_its_layers_give():
    # 784 pixels and 2 x 10 answers in float32; 12x12x32 after the first convolution, 8x8x64 and
    # 4x4x64 for the second, 500 and 10 units before and after their activation, in halves.
    expected = 784 + 80 + 2 * (12 * 12 * 32 + 8 * 8 * 64 + 4 * 4 * 64 + 2 * 500 + 2 * 10)
    few, many = (context_bytes(ARCHITECTURES["lenet"], n, "fp16") for n in (1 << 18, 1 << 19))
    assert (many - few) / (1 << 18) == expected
