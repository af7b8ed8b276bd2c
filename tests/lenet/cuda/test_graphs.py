from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenet.cuda.graphs import Convolution, Product, Uid
from lenet.model import ConvBlock, window_count
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
def test_an_output_has_as_many_places_as_windows_fit_when_convolved(geometry):
    image, filters, options = geometry
    n, oh, ow, k = Convolution("forward", "fp16", image, filters, **options).output
    assert (n, k) == (image[0], filters[0])
    for axis, count in enumerate((oh, ow)):
        window = (option[axis] for option in options.values())
        assert count == window_count(image[1 + axis], filters[1 + axis], *window)


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


@given(geometry=geometries())
def test_operations_are_twice_the_products_summed_when_convolved(geometry):
    (n, h, w, c), (k, r, s, _), options = geometry
    ones = np.ones((c, h + 2 * options["padding"][0], w + 2 * options["padding"][1], n))
    unpadded = ConvBlock(k, (r, s), options["stride"], (0, 0), options["dilation"])
    # Ones times ones, summed over everything: as many as there are products.
    products = CpuOps(np.float64).convolution(ones, np.ones((k, c, r, s)), unpadded)[0].sum()
    for direction in ("forward", "data", "filter"):
        operation = Convolution(direction, "tf32", *geometry[:2], **options)
        assert operation.operations == 2 * products


def test_the_second_convolution_of_lenet_costs_this_much_when_the_batch_is_256():
    operation = Convolution("forward", "fp16", (256, 12, 12, 32), (64, 5, 5, 32), bias=True)
    assert operation.output == (256, 8, 8, 64)
    assert operation.operations == 1_677_721_600
    assert operation.tensor_bytes() == {
        Uid.INPUT: 2_359_296,
        Uid.WEIGHT: 102_400,
        Uid.BIAS: 128,
        Uid.OUTPUT: 2_097_152,
    }


@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 9), bias=st.booleans())
def test_tensors_are_as_large_as_those_of_numpy_when_multiplied(m, n, k, bias):
    x, weight = np.ones((k, m), np.float32), np.ones((n, k), np.float32)
    y, _ = CpuOps().dense(x, weight)
    for precision in ("tf32", "fp16"):
        width = 2 if precision == "fp16" else 4
        product = Product(precision, m, n, k, bias)
        sizes = {Uid.INPUT: x.size, Uid.WEIGHT: weight.size, Uid.OUTPUT: y.size}
        sizes |= {Uid.BIAS: n} if bias else {}
        assert product.tensor_bytes() == {uid: width * size for uid, size in sizes.items()}
        assert product.operations == 2 * y.sum()


def test_a_product_that_cudnn_would_round_to_tf32_behind_ones_back_is_a_bug():
    with pytest.raises(AssertionError, match="a product in fp32"):
        Product("fp32", 1, 8, 8)


class Node(SimpleNamespace):
    """A tensor of a graph: `made` says by what, and the setters fill the rest in."""

    def set_output(self, output):
        self.output = output
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_uid(self, uid):
        self.uid = uid
        return self


class Graph:
    """As the frontend's builder: keeps what it is asked for, in order."""

    def __init__(self, **types):
        self.types = types
        self.tensors = {}
        self.steps = []
        self.last = None
        self.validated = False

    def tensor(self, name, dim, stride, uid):
        self.tensors[uid] = Node(name=name, dim=dim, stride=stride, made="given")
        return self.tensors[uid]

    def _step(self, name, **arguments):
        operands = {key: value for key, value in arguments.items() if isinstance(value, Node)}
        options = {key: value for key, value in arguments.items() if key not in operands}
        self.steps.append((name, {key: node.made for key, node in operands.items()}, options))
        for key, node in operands.items():
            if node.made == "given":
                self.steps[-1][1][key] = node.name
        self.last = Node(made=name)
        return self.last

    def conv_fprop(self, image, weight, **options):
        return self._step("conv_fprop", image=image, weight=weight, **options)

    def conv_dgrad(self, loss, filter, **options):  # noqa: A002  # the frontend's word
        return self._step("conv_dgrad", loss=loss, filter=filter, **options)

    def conv_wgrad(self, image, loss, **options):
        return self._step("conv_wgrad", image=image, loss=loss, **options)

    def matmul(self, A, B):
        return self._step("matmul", A=A, B=B)

    def bias(self, input, bias):  # noqa: A002  # the frontend's word
        return self._step("bias", input=input, bias=bias)

    def relu(self, input):  # noqa: A002  # the frontend's word
        return self._step("relu", input=input)

    def validate(self):
        self.validated = True


@pytest.fixture
def build(monkeypatch):
    """`build(operation)`: its graph, on a builder in the place of cuDNN's."""
    cudnn = ModuleType("cudnn")
    cudnn.pygraph = Graph
    cudnn.data_type = SimpleNamespace(HALF="half", FLOAT="float")
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)

    def build(operation):
        graph = operation.graph("the handle")
        assert graph.validated
        assert graph.last.output
        assert graph.last.uid == Uid.OUTPUT
        graph.tensors[Uid.OUTPUT] = graph.last
        assert {Uid(uid) for uid in graph.tensors} == operation.tensor_bytes().keys()
        width = 2 if operation.precision == "fp16" else 4
        for uid, size in operation.tensor_bytes().items():
            assert width * math.prod(graph.tensors[uid].dim) == size
        return graph

    return build


def lies(node, *axes_in_memory):
    """Whether the strides are those of a C-contiguous array whose axes lie in that order."""
    memory = np.empty([node.dim[axis] for axis in axes_in_memory], np.int8)
    back = np.argsort(axes_in_memory)
    return node.stride == list(memory.transpose(back).strides)


OPTIONS = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
IMAGE, FILTERS = (7, 9, 11, 8), (16, 3, 5, 8)  # and (7, 5, 7, 16) out
DIMENSIONS = {"image": [7, 8, 9, 11], "filters": [16, 8, 3, 5], "output": [7, 16, 5, 7]}


@pytest.mark.parametrize(
    ("direction", "step", "shapes"),
    [
        (
            "forward",
            ("conv_fprop", {"image": "INPUT", "weight": "WEIGHT"}),
            ("image", "filters", "output"),
        ),
        (
            "data",
            ("conv_dgrad", {"loss": "INPUT", "filter": "WEIGHT"}),
            ("output", "filters", "image"),
        ),
        (
            "filter",
            ("conv_wgrad", {"image": "INPUT", "loss": "WEIGHT"}),
            ("image", "output", "filters"),
        ),
    ],
)
def test_each_direction_has_its_operands_channels_last_when_it_is_built(
    build, direction, step, shapes
):
    graph = build(Convolution(direction, "fp32", IMAGE, FILTERS, **OPTIONS))
    options = {"stride": [2, 1], "padding": [1, 2], "dilation": [1, 2]}
    assert graph.steps == [(*step, options)]
    for uid, shape in zip((Uid.INPUT, Uid.WEIGHT, Uid.OUTPUT), shapes, strict=True):
        node = graph.tensors[uid]
        assert node.dim == DIMENSIONS[shape]
        assert lies(node, 0, 2, 3, 1)


def test_bias_and_relu_follow_in_the_same_graph_when_they_are_asked_for(build):
    biased = ("bias", {"input": "conv_fprop", "bias": "BIAS"}, {})
    plain = Convolution("forward", "fp16", IMAGE, FILTERS)
    assert build(plain).steps[1:] == []
    graph = build(Convolution("forward", "fp16", IMAGE, FILTERS, bias=True, relu=True))
    assert graph.steps[1:] == [biased, ("relu", {"input": "bias"}, {})]
    assert graph.tensors[Uid.BIAS].dim == [1, 16, 1, 1]
    assert lies(graph.tensors[Uid.BIAS], 0, 2, 3, 1)
    assert graph.tensors[Uid.OUTPUT].dim == [7, 16, 7, 7]
    only_relu = build(Convolution("forward", "fp16", IMAGE, FILTERS, relu=True))
    assert only_relu.steps[1:] == [("relu", {"input": "conv_fprop"}, {})]


def test_the_weight_is_read_transposed_when_a_product_is_built(build):
    graph = build(Product("tf32", m=7, n=16, k=8))
    assert graph.steps == [("matmul", {"A": "INPUT", "B": "WEIGHT"}, {})]
    dimensions = {uid: node.dim for uid, node in graph.tensors.items()}
    assert dimensions == {Uid.INPUT: [1, 7, 8], Uid.WEIGHT: [1, 8, 16], Uid.OUTPUT: [1, 7, 16]}
    assert lies(graph.tensors[Uid.INPUT], 0, 1, 2)
    assert lies(graph.tensors[Uid.WEIGHT], 0, 2, 1)
    assert lies(graph.tensors[Uid.OUTPUT], 0, 1, 2)
    full = build(Product("tf32", m=7, n=16, k=8, bias=True, relu=True))
    assert full.steps[1:] == [
        ("bias", {"input": "matmul", "bias": "BIAS"}, {}),
        ("relu", {"input": "bias"}, {}),
    ]
    assert full.tensors[Uid.BIAS].dim == [1, 1, 16]
    assert lies(full.tensors[Uid.BIAS], 0, 1, 2)


@pytest.mark.parametrize(
    ("precision", "stored"), [("fp32", "float"), ("tf32", "float"), ("fp16", "half")]
)
def test_sums_are_float32_when_the_operands_are_not(build, precision, stored):
    operations = [Convolution("data", precision, IMAGE, FILTERS)]
    operations += [Product(precision, 7, 16, 8)] if precision != "fp32" else []
    for operation in operations:
        assert build(operation).types == {
            "io_data_type": stored,
            "intermediate_data_type": "float",
            "compute_data_type": "float",
            "handle": "the handle",
        }


def test_operations_are_told_apart_when_plans_are_looked_up_under_them():
    base = {"direction": "forward", "precision": "fp16", "image": IMAGE, "filters": FILTERS}
    changes = [{}, {"direction": "data"}, {"precision": "tf32"}, {"relu": True}, {"bias": True}]
    changes += [{option: (2, 2)} for option in OPTIONS]
    operations = [Convolution(**{**base, **change}) for change in changes]
    assert len(set(operations)) == len({str(operation) for operation in operations}) == len(changes)
    assert hash(Convolution(**base)) == hash(operations[0])
