import numpy as np
import pytest

from lenet.model import IDENTITY, RELU, ConvBlock, Pool
from trainer.layers import BlockTail, Convolution, Dense, Dropout
from trainer.ops import Norm, Tail
from trainer.ops_cpu import CpuOps

OPS = CpuOps(np.float64)


def random():
    return np.random.default_rng(0)


@pytest.fixture
def progress(digits, run_of):
    """The first step of a run of four images."""
    return OPS.start(run_of(digits(4, 0), 4, [0.1, 0.1]))


def norm_of(k):
    return Norm(*(np.ones(k) for _ in Norm._fields))


def test_a_layer_leaves_a_gradient_under_the_name_of_each_parameter(progress):
    layers = [
        Convolution("conv1", OPS, np.ones((2, 1, 3, 3)), False, ConvBlock(2, (3, 3))),
        BlockTail("conv1", OPS, Tail(None, np.zeros(2), RELU, None)),
        Dense("dense1", OPS, np.ones((3, 2)), False),
        BlockTail("dense1", OPS, Tail(norm_of(3), None, RELU, None)),
    ]
    x = y = random().standard_normal((1, 3, 3, 4))
    for layer in layers:
        y = layer.forward(y, progress)
    for layer in reversed(layers):
        y = layer.backward(y)
    assert y.shape == x.shape
    for layer in layers:
        assert layer.gradients.keys() == layer.parameters.keys()
        for name, gradient in layer.gradients.items():
            assert gradient.shape == layer.parameters[name].shape
    assert [name for layer in layers for name in layer.parameters] == [
        "conv1.weight",
        "conv1.bias",
        "dense1.weight",
        "dense1.gamma",
        "dense1.beta",
    ]


def test_gamma_and_beta_each_get_their_own_gradient(progress):
    tail = BlockTail("dense1", OPS, Tail(norm_of(2), None, IDENTITY, None))
    y = tail.forward(random().standard_normal((2, 4)), progress)
    tail.backward(np.ones_like(y))
    assert tail.gradients["dense1.beta"] == pytest.approx([4, 4])
    assert tail.gradients["dense1.gamma"] == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("tail", "name"),
    [
        (Tail(norm_of(2), None, RELU, Pool("max")), "conv1.batch_norm+relu+max"),
        (Tail(norm_of(2), None, IDENTITY, Pool("average")), "conv1.batch_norm+average"),
        (Tail(None, np.ones(2), RELU, None), "conv1.bias+relu"),
        (Tail(None, np.ones(2), IDENTITY, None), "conv1.bias"),
    ],
)
def test_a_tail_is_named_after_what_it_holds(tail, name):
    assert BlockTail("conv1", OPS, tail).name == name


def test_the_first_layer_makes_no_gradient_of_its_input(progress):
    dense = Dense("dense1", OPS, np.ones((3, 2)), True)
    dense.forward(np.ones((2, 4)), progress)
    assert dense.backward(np.ones((3, 4))) is None
    conv = Convolution("conv1", OPS, np.ones((2, 1, 3, 3)), True, ConvBlock(2, (3, 3)))
    y = conv.forward(np.ones((1, 3, 3, 4)), progress)
    assert conv.backward(y) is None


def test_batch_norm_uses_the_running_values_outside_training(progress):
    norm = Norm(*(np.array([value]) for value in (2.0, 1.0, 3.0, 4.0 - 1e-5)))
    tail = BlockTail("conv1", OPS, Tail(norm, None, IDENTITY, None))
    x = np.array([[3.0, 5.0]])
    np.testing.assert_allclose(tail.forward(x, None), [[1, 3]])
    np.testing.assert_allclose(tail.forward(x, progress), [[-1, 3]], rtol=1e-4)


def test_nothing_is_kept_outside_training(progress):
    dense = Dense("dense1", OPS, np.ones((3, 2)), False)
    dense.forward(np.ones((2, 4)), progress)
    dense.forward(np.ones((2, 4)), None)
    assert dense._saved is None


def test_dropout_does_nothing_outside_training(progress):
    dropout = Dropout("dense1", OPS, 8, 0.5, 2)
    x = np.ones((8, 4))
    assert dropout.forward(x, None) is x
    y = dropout.forward(x, progress)
    assert 0 < np.count_nonzero(y) < 32
    np.testing.assert_array_equal(dropout.backward(x), y)
    assert (Dropout("dense2", OPS, 8, 0.5, 3).forward(x, progress) != y).any()


def test_a_tail_sends_the_gradient_back_where_the_value_came_from(progress):
    tail = BlockTail("conv1", OPS, Tail(None, np.zeros(1), RELU, Pool("max")))
    x = np.array([[-1.0, 2.0], [3.0, -4.0]]).reshape(1, 2, 2, 1)
    y = tail.forward(x, progress)
    assert y.item() == 3
    assert tail.backward(np.ones_like(y)).ravel().tolist() == [0, 0, 1, 0]
