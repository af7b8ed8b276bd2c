import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from lenet import reference
from lenet.blocks import IDENTITY, Activation, ConvBlock, DenseBlock, Pool
from lenet.model import ARCHITECTURES, Model, named
from trainer.errors import NotTrainable
from trainer.network import EVALUATION_BATCH, Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd

GOLDEN = Path(__file__).parent / "golden"


def new_network(model, dtype=np.float32, seed=0, dropout=0.0):
    tensors = initial_tensors(model, np.random.default_rng(seed), dtype)
    return Network(model, tensors, CpuOps(), dropout)


def some_images(count, seed=0):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
    return images, random.integers(0, 10, count).astype(np.uint8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_one_training_step_agrees_with_pytorch(name, dtype):
    inputs = runpy.run_path(str(GOLDEN / "inputs.py"))
    model = named(name)
    tensors = {key: value.astype(dtype) for key, value in inputs["initial"](model).items()}
    network = Network(model, tensors, CpuOps())
    images, labels = inputs["batch"]()
    loss, _ = network.forward(images, labels, np.random.default_rng(0))
    network.backward()
    gradients = network.gradients
    Sgd(network.parameters, inputs["MOMENTUM"], inputs["WEIGHT_DECAY"]).step(
        gradients, inputs["RATE"]
    )
    found = {f"gradient.{key}": value for key, value in gradients.items()}
    found |= {f"after.{key}": value for key, value in network.tensors.items()}
    found["loss"] = np.asarray(loss)
    with np.load(GOLDEN / f"{name}.npz") as golden:
        assert found.keys() == set(golden.files)
        for key in golden.files:
            # Golden values are float64 results stored in float32; float32 sums lose a little more.
            difference = np.abs(found[key] - golden[key]).max() / np.abs(golden[key]).max()
            assert difference <= 1e-5, key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_named_architecture_learns_a_batch_by_heart(name, digits):
    network = new_network(named(name))
    batch, random = digits(20, 0), np.random.default_rng(0)
    sgd = Sgd(network.parameters)
    losses = []
    for _ in range(12):
        losses.append(network.forward(batch.images, batch.labels, random)[0])
        network.backward()
        sgd.step(network.gradients, 0.01)
    assert losses[-1] < losses[0] / 2


def test_the_whole_gradient_agrees_with_differences_through_batch_norm_and_pooling():
    model = Model(
        "small",
        (
            ConvBlock(2, (5, 5), stride=(2, 3), dilation=(2, 1), batch_norm=True, pool=Pool("max")),
            DenseBlock(4, batch_norm=True),
            DenseBlock(3, activation=IDENTITY),
        ),
    )
    network = new_network(model, np.float64)
    images, labels = some_images(6)
    labels %= 3
    network.forward(images, labels, np.random.default_rng(0))
    network.backward()
    gradients = {name: value.copy() for name, value in network.gradients.items()}
    random = np.random.default_rng(1)
    for name, parameter in network.parameters.items():
        direction = random.standard_normal(parameter.shape)
        around = []
        for step in (1e-6, -1e-6):
            parameter += step * direction
            around.append(network.forward(images, labels, np.random.default_rng(0))[0])
            parameter -= step * direction
        expected = (around[0] - around[1]) / 2e-6
        computed = float((gradients[name] * direction).sum())
        assert computed == pytest.approx(expected, rel=1e-5, abs=1e-8), name


def test_initial_weights_have_the_variance_of_he_and_batch_norm_does_nothing():
    tensors = initial_tensors(named("lenet"), np.random.default_rng(0))
    assert tensors["dense1.weight"].std() == pytest.approx(math.sqrt(2 / 800), rel=0.01)
    assert (tensors["conv1.gamma"] == 1).all()
    assert (tensors["conv1.variance"] == 1).all()
    assert not tensors["conv1.beta"].any()
    assert not tensors["conv1.mean"].any()
    assert not tensors["dense2.bias"].any()


@pytest.mark.parametrize("name", ["lenet-classic", "lenet-6-16", "cnn-32-64", "mlp"])
def test_the_forward_pass_agrees_with_the_reference(name):
    network = new_network(named(name), np.float64)
    images, _ = some_images(3)
    expected = reference.logits(named(name), network.tensors, images)
    np.testing.assert_allclose(network.logits(images), expected, rtol=1e-10, atol=1e-12)


def test_logits_come_in_order_when_there_are_more_images_than_one_batch():
    network = new_network(named("mlp"))
    images, _ = some_images(EVALUATION_BATCH + 3)
    logits = network.logits(images)
    assert logits.shape == (len(images), 10)
    np.testing.assert_allclose(logits[-3:], network.logits(images[-3:]), rtol=1e-5, atol=1e-6)


def test_dropout_follows_each_hidden_dense_block_and_never_the_logits():
    network = new_network(named("lenet"), dropout=0.5)
    names = [layer.name for layer in network.layers]
    assert [name for name in names if "dropout" in name] == ["dense1.dropout"]
    images, labels = some_images(4)
    same = [network.forward(images, labels, np.random.default_rng(3))[0] for _ in range(2)]
    assert same[0] == same[1]
    assert network.forward(images, labels, np.random.default_rng(4))[0] != same[0]


def test_a_network_that_cannot_be_trained_is_refused_with_a_sentence():
    model = Model("odd", (DenseBlock(4, activation=Activation("elu")), named("mlp").blocks[-1]))
    images, labels = some_images(2)
    with pytest.raises(NotTrainable, match="elu"):
        new_network(model).forward(images, labels, np.random.default_rng(0))
