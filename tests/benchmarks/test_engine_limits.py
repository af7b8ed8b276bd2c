import pytest

from benchmarks.engine_limits import operations, rates
from lenet.model import named


def test_operations_are_those_of_convolutions_and_products():
    # 2 (20 x 24 x 24 x 25 + 50 x 8 x 8 x 500 + 500 x 800 + 10 x 500)
    assert operations(named("lenet")) == 4_586_000


def test_rates_follow_from_times():
    found = rates(named("lenet"), copy_us=2**28 / 50e3, product_us=2 * 8192**3 / 700e6)
    assert found["copy_gb_s"] == pytest.approx(50)
    assert found["matmul_tflops"] == pytest.approx(700)
    assert found["copy_images_per_s"] == pytest.approx(50e9 / 784)
    assert found["matmul_images_per_s"] == pytest.approx(700e12 / 4_586_000)
