from __future__ import annotations

import math

import numpy as np
import pytest

from lenet import reference
from lenet.explanation import Change, explain, operations
from lenet.model import ARCHITECTURES, IDENTITY, ConvBlock, DenseBlock, Model, Pool
from tests.documented import documented

PLAIN = Change()


@pytest.fixture
def image():
    return np.random.default_rng(5).integers(0, 256, (1, 28, 28), np.uint8)


def values(layer):
    """The values that the bytes of a layer encode."""
    steps = np.frombuffer(layer.data, np.uint8).reshape(layer.shape)
    return layer.low + steps * (layer.high - layer.low) / 255


def logits(weights, image, change=PLAIN):
    *_, last = explain(weights, image, change)
    return last.logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layer_is_that_of_the_float64_reference(random_weights, image, architecture):
    weights = random_weights(architecture)
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    expected = [(*one[:2], one.values[0]) for one in reference.steps(weights.model, tensors, image)]
    if architecture != "mlp":
        expected.insert(0, ("conv1", "filters", tensors["conv1.weight"]))
    layers = list(explain(weights, image, PLAIN))
    assert [(layer.name, layer.kind) for layer in layers] == [one[:2] for one in expected]
    for layer, (_, _, exact) in zip(layers, expected, strict=True):
        assert layer.shape == exact.shape
        # float32 beside float64
        assert (layer.low, layer.high) == pytest.approx((exact.min(), exact.max()), abs=1e-4)
        if layer.kind != "logits":
            half_a_step = (layer.high - layer.low) / 510
            np.testing.assert_allclose(values(layer), exact, rtol=0, atol=half_a_step + 1e-4)
    last = layers[-1]
    np.testing.assert_allclose(last.logits, expected[-1][2], atol=1e-4)
    np.testing.assert_allclose(last.probabilities, reference.softmax(last.logits), atol=1e-6)
    assert last.data is None


def test_noise_is_normal_and_the_same_each_time(random_weights, image):
    weights = random_weights("lenet")
    change = Change(noisy="conv1", noise=0.5)
    (plain, *_), (noisy, *_) = (list(explain(weights, image, one)) for one in (PLAIN, change))
    noise = (values(noisy) - values(plain)) / weights.tensors["conv1.weight"].std()
    count = math.prod(plain.shape)
    assert abs(noise.mean()) < 4 * 0.5 / math.sqrt(count)  # four standard errors
    assert abs(noise.std() - 0.5) < 4 * 0.5 / math.sqrt(2 * count)
    np.testing.assert_array_equal(logits(weights, image, change), logits(weights, image, change))
    assert not np.array_equal(logits(weights, image, change), logits(weights, image))
    nothing = Change(noisy="conv1", noise=0.0)
    np.testing.assert_array_equal(logits(weights, image, nothing), logits(weights, image))


@pytest.mark.states(
    "limits",
    "values of an explanation's layers",
    found="layers of a few values fewer, and of a few more",
)
def test_layers_beyond_the_limit_have_no_data(random_weights, image):
    (most,) = documented("values of an explanation's layers")
    for channels, has_data in ((333, True), (334, False)):  # 784 values and a filter each
        wide = ConvBlock(channels, (1, 1), pool=Pool("global_average"))
        weights = random_weights(Model("wide", (wide, DenseBlock(10, activation=IDENTITY))))
        filters, convolution, pooling, _ = explain(weights, image, PLAIN)
        assert (785 * channels <= most) == (convolution.data is not None) == has_data
        assert (len(filters.data), len(pooling.data)) == (channels, channels)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((), 0),
        ((DenseBlock(5),), 784 * 5 + 5 * 10 - 7840),
        # 30 x 30 padded values, 784 x 9 multiplications a channel
        ((ConvBlock(2, (3, 3), padding=(1, 1)),), 900 + 784 * 9 * 2 + 2 * 7840 - 7840),
        # 196 windows of 4, and 2 x 784 values to look at
        (
            (ConvBlock(2, (1, 1), pool=Pool("max")),),
            784 + 784 * 2 + 2 * 196 * 4 + 2 * 784 + 2 * 1960 - 7840,
        ),
        # Padding counts, even if strides skip it.
        (
            (ConvBlock(1, (1, 1), (3000, 3000), (3000, 3000)),),
            6028 * 6028 + 3 * 3 * 1 + 9 * 10 - 7840,
        ),
    ],
    ids=["tiny", "dense", "padding", "pool", "stride"],
)
def test_operations_are_those_of_every_block(tiny, blocks, expected):
    assert operations(Model("counted", (*blocks, *tiny.blocks))) == 7840 + expected
