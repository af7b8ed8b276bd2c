import numpy as np
import pytest

from lenet.model import IDENTITY, RELU, ConvBlock, Pool
from trainer.layers import BlockEpilogue, Convolution, Dense, Dropout, SoftmaxCrossEntropy
from trainer.ops import Epilogue, Norm
from trainer.ops_cpu import CpuOps

OPS = CpuOps(np.float64)


def random():
    return np.random.default_rng(0)


@pytest.fixture
def state(digits, run_of):
    """The first step of a run of four images."""
    return OPS.start(run_of(digits(4, 0), 4, [0.1, 0.1]))


def norm_of(k):
    return Norm(*(np.ones(k) for _ in Norm._fields))


def test_a_layer_leaves_a_gradient_under_the_name_of_each_parameter(state):
    layers = [
        Convolution("conv1", OPS, np.ones((2, 1, 3, 3)), False, ConvBlock(2, (3, 3))),
        BlockEpilogue("conv1", OPS, Epilogue(None, np.zeros(2), RELU, None)),
        Dense("dense1", OPS, np.ones((3, 2)), False),
        BlockEpilogue("dense1", OPS, Epilogue(norm_of(3), None, RELU, None)),
    ]
    x = y = random().standard_normal((1, 3, 3, 4))
    for layer in layers:
        y = layer.forward(y, state)
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


def test_gamma_and_beta_each_get_their_own_gradient(state):
    epilogue = BlockEpilogue("dense1", OPS, Epilogue(norm_of(2), None, IDENTITY, None))
    y = epilogue.forward(random().standard_normal((2, 4)), state)
    epilogue.backward(np.ones_like(y))
    assert epilogue.gradients["dense1.beta"] == pytest.approx([4, 4])
    assert epilogue.gradients["dense1.gamma"] == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("epilogue", "name"),
    [
        (Epilogue(norm_of(2), None, RELU, Pool("max")), "conv1.batch_norm+relu+max"),
        (Epilogue(norm_of(2), None, IDENTITY, Pool("average")), "conv1.batch_norm+average"),
        (Epilogue(None, np.ones(2), RELU, None), "conv1.bias+relu"),
        (Epilogue(None, np.ones(2), IDENTITY, None), "conv1.bias"),
    ],
)
def test_an_epilogue_is_named_after_what_it_holds(epilogue, name):
    assert BlockEpilogue("conv1", OPS, epilogue).name == name


def test_the_first_layer_makes_no_gradient_of_its_input(state):
    dense = Dense("dense1", OPS, np.ones((3, 2)), True)
    dense.forward(np.ones((2, 4)), state)
    assert dense.backward(np.ones((3, 4))) is None
    conv = Convolution("conv1", OPS, np.ones((2, 1, 3, 3)), True, ConvBlock(2, (3, 3)))
    y = conv.forward(np.ones((1, 3, 3, 4)), state)
    assert conv.backward(y) is None


def test_batch_norm_uses_the_running_values_outside_training(state):
    norm = Norm(*(np.array([value]) for value in (2.0, 1.0, 3.0, 4.0 - 1e-5)))
    epilogue = BlockEpilogue("conv1", OPS, Epilogue(norm, None, IDENTITY, None))
    x = np.array([[3.0, 5.0]])
    np.testing.assert_allclose(epilogue.forward(x, None), [[1, 3]])
    np.testing.assert_allclose(epilogue.forward(x, state), [[-1, 3]], rtol=1e-4)


def test_dropout_does_nothing_outside_training(state):
    dropout = Dropout("dense1", OPS, 8, 0.5, 2)
    x = np.ones((8, 4))
    assert dropout.forward(x, None) is x
    y = dropout.forward(x, state)
    assert 0 < np.count_nonzero(y) < 32
    np.testing.assert_array_equal(dropout.backward(x), y)
    assert (Dropout("dense2", OPS, 8, 0.5, 3).forward(x, state) != y).any()


def test_an_epilogue_sends_the_gradient_back_where_the_value_came_from(state):
    epilogue = BlockEpilogue("conv1", OPS, Epilogue(None, np.zeros(1), RELU, Pool("max")))
    x = np.array([[-1.0, 2.0], [3.0, -4.0]]).reshape(1, 2, 2, 1)
    y = epilogue.forward(x, state)
    assert y.item() == 3
    assert epilogue.backward(np.ones_like(y)).ravel().tolist() == [0, 0, 1, 0]


def test_the_loss_of_equal_logits_is_the_logarithm_of_the_classes(digits, run_of):
    ops = CpuOps(np.float64)
    state = ops.start(run_of(digits(2, 0), 2, [0.1]))
    loss = SoftmaxCrossEntropy(ops)
    loss.forward(np.zeros((10, 2)), np.array([0, 9], np.uint8), state)
    losses, correct = ops.losses(state, 0, 1)
    assert losses.item() == pytest.approx(np.log(10))
    assert correct.item() == 1
    dlogits = loss.backward()
    expected = np.full((10, 2), 0.05)
    expected[[0, 9], [0, 1]] -= 0.5
    np.testing.assert_allclose(dlogits, expected)
