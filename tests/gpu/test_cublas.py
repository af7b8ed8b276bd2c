"""A dense layer by cublasLt, with its bias and ReLU or alone, against float64."""

from __future__ import annotations

from functools import partial

import cupy
import numpy as np
import pytest

from lenet.cuda.capture import captured
from lenet.cuda.cublas import WORKSPACE_BYTES
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
        product = handle.cublas_lt.product(x, weight, bias, y, precision, relu)
        assert product.workspace_bytes <= WORKSPACE_BYTES
        workspace = cupy.empty(max(product.workspace_bytes, 1), np.uint8)
        run = partial(product.run, handle.stream, workspace.data.ptr)
        run()
        handle.synchronize()
        first = y.get()
        y.fill(np.nan)
        captured(run, handle.stream)()
        handle.synchronize()
        got = y.get()
    assert np.linalg.norm(got - want) <= TOLERANCE[precision] * np.linalg.norm(want)
    assert got.tobytes() == first.tobytes()


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_product_alone_is_written_as_float32(precision):
    dtype = np.float16 if precision == "fp16" else np.float32
    random = np.random.default_rng(1)
    host = [random.standard_normal(shape).astype(dtype) for shape in ((37, 512), (16, 512))]
    a, b = (array.astype(np.float64) for array in host)
    with Handle() as handle:
        x, weight = map(cupy.asarray, host)
        y = cupy.empty((37, 16), np.float32)
        product = handle.cublas_lt.product(x, weight, None, y, precision)
        workspace = cupy.empty(max(product.workspace_bytes, 1), np.uint8)
        product.run(handle.stream, workspace.data.ptr)
        handle.synchronize()
        got = y.get()
    exact = TOLERANCE["tf32" if precision == "tf32" else "fp32"]
    assert np.linalg.norm(got - a @ b.T) <= exact * np.linalg.norm(a @ b.T)
