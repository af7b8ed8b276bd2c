"""The arithmetic of the engine benchmark, and the table of its results."""

import json
from pathlib import Path

import pytest

from benchmarks.engine import (
    ROWS,
    operations,
    rates,
)
from benchmarks.engine_libraries import OWN_NETWORKS, table
from lenet.model import ARCHITECTURES, named

ROOT = Path(__file__).parents[2]


def test_limits_follow_from_operations_and_the_times_of_a_copy_and_a_product():
    # 2 (20 x 24 x 24 x 25 + 50 x 8 x 8 x 500 + 500 x 800 + 10 x 500)
    assert operations(named("lenet")) == 4_586_000
    found = rates(named("lenet"), copy_us=2**28 / 50e3, product_us=2 * 8192**3 / 700e6)
    assert found["copy_gb_s"] == pytest.approx(50)
    assert found["matmul_tflops"] == pytest.approx(700)
    assert found["copy_images_per_s"] == pytest.approx(50e9 / 784)
    assert found["matmul_images_per_s"] == pytest.approx(700e12 / 4_586_000)


def test_the_documented_table_is_that_of_the_measurement():
    content = json.loads((ROOT / "docs" / "benchmarks" / "libraries.json").read_text())
    names = [*ARCHITECTURES, *(model.name for model in OWN_NETWORKS)]
    assert list(content["libraries"]) == [
        f"{name}, {precision}" for name in names for precision in ("fp16", "tf32", "fp32")
    ]
    assert all(tuple(columns["rows"]) == ROWS for columns in content["libraries"].values())
    assert table(content) in (ROOT / "docs" / "benchmarks.md").read_text()
