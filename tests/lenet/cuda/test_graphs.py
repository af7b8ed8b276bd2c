from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lenet.cuda.graphs import Convolution, Uid
from lenet.model import ConvBlock
from trainer.ops_cpu import CpuOps

PRECISIONS = ["fp32", "tf32", "fp16"]


def pairs(least, most):
    return st.tuples(st.integers(least, most), st.integers(least, most))


@st.composite
def geometries(draw):
    """(image (n, h, w, c), filters (k, r, s, c), options) of a convolution that fits."""
    kernel, dilation, padding = draw(pairs(1, 4)), draw(pairs(1, 3)), draw(pairs(0, 3))
    axes = zip(kernel, dilation, padding, strict=True)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in axes]
    h, w = (size + draw(st.integers(0, 3)) for size in least)
    n, c, k = (draw(st.integers(1, 3)) for _ in range(3))
    options = {"stride": draw(pairs(1, 3)), "padding": padding, "dilation": dilation}
    return (n, h, w, c), (k, *kernel, c), options


@given(geometry=geometries())
def test_tensors_are_as_large_as_those_of_numpy_when_convolved(geometry):
    (n, h, w, c), (k, r, s, _), options = geometry
    image, filters = geometry[:2]
    x, weight = np.zeros((c, h, w, n), np.float32), np.zeros((k, c, r, s), np.float32)
    block = ConvBlock(k, (r, s), **options)
    ops = CpuOps()
    y, saved = ops.convolution(x, weight, block)
    dx = ops.convolution_input_gradient(y, saved)
    dweight = ops.convolution_weight_gradient(y, saved)
    expected = {
        "forward": {Uid.INPUT: x, Uid.WEIGHT: weight, Uid.OUTPUT: y},
        "data": {Uid.INPUT: y, Uid.WEIGHT: weight, Uid.OUTPUT: dx},
        "filter": {Uid.INPUT: x, Uid.WEIGHT: y, Uid.OUTPUT: dweight},
    }
    for direction, arrays in expected.items():
        for precision in PRECISIONS:
            width = 2 if precision == "fp16" else 4
            operation = Convolution(direction, precision, image, filters, **options)
            assert operation.tensor_bytes() == {uid: width * a.size for uid, a in arrays.items()}
            assert operation.output == (n, *y.shape[1:3], k)


OPTIONS = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
IMAGE, FILTERS = (7, 9, 11, 8), (16, 3, 5, 8)


def test_operations_that_differ_have_different_cache_keys():
    base = {"direction": "forward", "precision": "fp16", "image": IMAGE, "filters": FILTERS}
    changes = [{}, {"direction": "data"}, {"precision": "tf32"}, {"relu": True}, {"bias": True}]
    changes += [{option: (2, 2)} for option in OPTIONS] + [{"pitch": 16}]
    operations = [Convolution(**{**base, **change}) for change in changes]
    assert len(set(operations)) == len({str(operation) for operation in operations}) == len(changes)
    assert hash(Convolution(**base)) == hash(operations[0])


def test_an_image_with_further_channels_in_memory_is_as_large_as_with_them():
    sizes = Convolution("forward", "fp32", IMAGE, FILTERS, pitch=32).tensor_bytes()
    assert sizes[Uid.INPUT] == 4 * 7 * 9 * 11 * 32
    assert sizes[Uid.WEIGHT] == 4 * 16 * 3 * 5 * 8
