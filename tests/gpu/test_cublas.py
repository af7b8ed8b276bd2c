"""A hidden dense layer by cuBLAS, with its bias and ReLU, against float64."""

from __future__ import annotations

import cupy
import numpy as np
import pytest

from lenet.cuda.capture import captured
from lenet.cuda.device import Handle

TOLERANCE = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 1e-3}


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(("m", "n", "k"), [(37, 96, 800), (64, 512, 1024), (1024, 128, 3136)])
def test_a_product_with_bias_agrees_with_float64_when_captured(precision, relu, m, n, k):
    dtype = np.float16 if precision == "fp16" else np.float32
    random = np.random.default_rng()
    host = [random.standard_normal(shape).astype(dtype) for shape in ((m, k), (n, k), (n,))]
    a, b, c = (array.astype(np.float64) for array in host)
    want = a @ b.T + c
    if relu:
        want = np.maximum(want, 0)
    with Handle() as handle:
        x, weight, bias = map(cupy.asarray, host)
        y = cupy.full((m, n), np.nan, dtype)
        cublas = handle.cublas
        cublas.dense(x, weight, bias, y, precision, relu)
        handle.synchronize()
        first = y.get()
        y.fill(np.nan)
        captured(lambda: cublas.dense(x, weight, bias, y, precision, relu), handle.stream)()
        handle.synchronize()
        got = y.get()
    assert np.linalg.norm(got - want) <= TOLERANCE[precision] * np.linalg.norm(want)
    assert got.tobytes() == first.tobytes()
