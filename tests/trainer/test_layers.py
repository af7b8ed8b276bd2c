import numpy as np

from lenet.blocks import RELU, ConvBlock, Pool
from trainer.layers import RUNNING_SHARE, Activate, BatchNorm, Convolution, Dense, Dropout, Pooling
from trainer.ops_cpu import CpuOps

OPS = CpuOps()


def random():
    return np.random.default_rng(0)


def test_a_layer_leaves_a_gradient_under_the_name_of_each_parameter():
    conv = Convolution(
        "conv1", OPS, np.ones((2, 1, 3, 3)), np.zeros(2), False, ConvBlock(2, (3, 3))
    )
    dense = Dense("dense1", OPS, np.ones((3, 2)), None, False)
    norm = BatchNorm("dense1", OPS, *(np.ones(3) for _ in range(4)))
    x = random().standard_normal((1, 3, 3, 4))
    y = norm.forward(dense.forward(conv.forward(x, random()), random()), random())
    assert conv.backward(dense.backward(norm.backward(y))).shape == x.shape
    for layer in (conv, dense, norm):
        assert layer.gradients.keys() == layer.parameters.keys()
    assert [*conv.parameters, *dense.parameters, *norm.parameters] == [
        "conv1.weight",
        "conv1.bias",
        "dense1.weight",
        "dense1.gamma",
        "dense1.beta",
    ]


def test_the_first_layer_makes_no_gradient_of_its_input():
    dense = Dense("dense1", OPS, np.ones((3, 2)), np.zeros(3), True)
    dense.forward(np.ones((2, 4)), random())
    assert dense.backward(np.ones((3, 4))) is None


def test_batch_norm_moves_its_running_values_in_training_only():
    mean, variance = np.zeros(2), np.ones(2)
    norm = BatchNorm("conv1", OPS, np.ones(2), np.zeros(2), mean, variance)
    x = random().standard_normal((2, 3, 3, 5)) * 3 + 2
    norm.forward(x, None)
    assert mean.tolist() == [0, 0]
    norm.forward(x, random())
    flat = x.reshape(2, -1)
    np.testing.assert_allclose(mean, RUNNING_SHARE * flat.mean(axis=1))
    np.testing.assert_allclose(
        variance, 1 - RUNNING_SHARE + RUNNING_SHARE * flat.var(axis=1, ddof=1)
    )


def test_batch_norm_uses_the_running_values_outside_training():
    norm = BatchNorm("conv1", OPS, *(np.array([value]) for value in (2.0, 1.0, 3.0, 4.0 - 1e-5)))
    y = norm.forward(np.array([[3.0, 5.0]]), None)
    np.testing.assert_allclose(y, [[1, 3]])


def test_batch_norm_of_a_single_value_keeps_the_running_variance_finite():
    variance = np.ones(2)
    norm = BatchNorm("dense1", OPS, np.ones(2), np.zeros(2), np.zeros(2), variance)
    norm.forward(np.ones((2, 1)), random())
    assert np.isfinite(variance).all()


def test_dropout_does_nothing_outside_training():
    dropout = Dropout("dense1", OPS, 0.5)
    x = np.ones((4, 4))
    assert dropout.forward(x, None) is x
    y = dropout.forward(x, random())
    assert 0 < np.count_nonzero(y) < 16
    np.testing.assert_array_equal(dropout.backward(x), y)


def test_activation_and_pooling_send_the_gradient_back_where_the_value_came_from():
    activate, pooling = Activate("conv1", OPS, RELU), Pooling("conv1", OPS, Pool("max"))
    x = np.array([[-1.0, 2.0], [3.0, -4.0]]).reshape(1, 2, 2, 1)
    y = pooling.forward(activate.forward(x, random()), random())
    assert y.item() == 3
    dx = activate.backward(pooling.backward(np.ones_like(y)))
    assert dx.ravel().tolist() == [0, 0, 1, 0]
    assert (activate.name, pooling.name) == ("conv1.relu", "conv1.pool")
