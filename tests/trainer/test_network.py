import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenet import reference
from lenet.blocks import IDENTITY, Activation, ConvBlock, DenseBlock, Pool
from lenet.model import ARCHITECTURES, Model, named
from trainer.fold import fold
from trainer.network import EVALUATION_BATCH, Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd

GOLDEN = Path(__file__).parent / "golden"
INPUTS = runpy.run_path(str(GOLDEN / "inputs.py"))


def new_network(model, dtype=np.float32, seed=0, dropout=0.0):
    tensors = initial_tensors(model, np.random.default_rng(seed), dtype)
    return Network(model, tensors, CpuOps(), dropout)


def some_images(count, seed=0):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
    return images, random.integers(0, 10, count).astype(np.uint8)


# Golden values are float64; sums in float32 lose up to 4e-6 of them, most of it in batch norm.
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("name", INPUTS["MODELS"])
def test_logits_and_one_training_step_agree_with_pytorch(name, dtype, tolerance):
    model = INPUTS["MODELS"][name]
    tensors = {key: value.astype(dtype) for key, value in INPUTS["initial"](model).items()}
    network = Network(model, tensors, CpuOps())
    images, labels = INPUTS["batch"]()
    found = {"logits": network.logits(images)}
    found["loss"], _ = network.forward(images, labels, np.random.default_rng(0))
    network.backward()
    gradients = network.gradients
    found |= {f"gradient.{key}": value for key, value in gradients.items()}
    Sgd(network.parameters, INPUTS["MOMENTUM"], INPUTS["WEIGHT_DECAY"]).step(
        gradients, INPUTS["RATE"]
    )
    found |= {f"after.{key}": value for key, value in network.tensors.items()}
    with np.load(GOLDEN / f"{name}.npz") as golden:
        parts = {f"{part}{key}" for key in found for part in ("", "sums.", "norm.")}
        assert parts == set(golden.files)
        for key, value in found.items():
            values, sums = INPUTS["digest"](value)
            scale = np.abs(golden[key]).max()
            assert np.abs(values - golden[key]).max() <= tolerance * scale, key
            error = np.abs(sums - golden[f"sums.{key}"]).max()
            assert error <= tolerance * golden[f"norm.{key}"], key


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


def assert_gradients_agree(model, tolerance, step):
    """The slope along a random direction of each parameter, against a central difference."""
    network = new_network(model, np.float64)
    images, labels = some_images(5)
    labels %= model.classes
    network.forward(images, labels, np.random.default_rng(0))
    network.backward()
    gradients = {name: value.copy() for name, value in network.gradients.items()}
    random = np.random.default_rng(1)
    for name, parameter in network.parameters.items():
        direction = random.standard_normal(parameter.shape)
        direction /= np.linalg.norm(direction)
        around = []
        kept = parameter.copy()
        for sign in (1, -1):
            parameter[...] = kept + sign * step * direction
            around.append(network.forward(images, labels, np.random.default_rng(0))[0])
        parameter[...] = kept
        expected = (around[0] - around[1]) / (2 * step)
        computed = float((gradients[name] * direction).sum())
        # The rounding of a loss of 2, 4e-16, divided by the step of 1e-6: 1e-3 is the floor.
        scale = max(np.linalg.norm(gradients[name]), 1e-3)
        assert abs(computed - expected) <= tolerance * scale, name


def test_the_whole_gradient_agrees_with_differences_through_batch_norm_and_pooling():
    model = Model(
        "small",
        (
            ConvBlock(2, (5, 5), stride=(2, 3), dilation=(2, 1), batch_norm=True, pool=Pool("max")),
            DenseBlock(4, batch_norm=True),
            DenseBlock(3, activation=IDENTITY),
        ),
    )
    assert_gradients_agree(model, 1e-6, 1e-6)


def without_kinks(model):
    """The same network with sigmoid for what has a kink, and average for max."""

    def smooth(block):
        kind = block.activation.kind
        if kind not in ("identity", "sigmoid", "tanh"):
            block = replace(block, activation=Activation("sigmoid"))
        if isinstance(block, ConvBlock) and block.pool and block.pool.kind == "max":
            block = replace(block, pool=replace(block.pool, kind="average"))
        return block

    return Model(model.name, tuple(smooth(block) for block in model.blocks))


@settings(max_examples=40)
@given(st.data())
def test_the_whole_gradient_of_any_network_without_kinks_agrees_with_differences(networks, data):
    assert_gradients_agree(without_kinks(data.draw(networks)), 1e-6, 1e-5)


@settings(max_examples=60)
@given(st.data())
def test_the_forward_pass_of_any_network_agrees_with_the_reference(networks, data):
    network = new_network(data.draw(networks), np.float64)
    images, labels = some_images(3)
    network.forward(images, labels % network.model.classes, np.random.default_rng(0))
    expected = reference.logits(network.model.folded, fold(network.model, network.tensors), images)
    np.testing.assert_allclose(network.logits(images), expected, rtol=1e-9, atol=1e-9)


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
