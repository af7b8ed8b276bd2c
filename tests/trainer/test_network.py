import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenet import reference
from lenet.model import (
    Activation,
    ConvBlock,
    Model,
    named,
)
from trainer.export import fold
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd

GOLDEN = Path(__file__).parent / "golden"
INPUTS = runpy.run_path(str(GOLDEN / "inputs.py"))


def new_network(model, dtype=np.float32, seed=0, dropout=0.0):
    tensors = initial_tensors(model, np.random.default_rng(seed), dtype)
    return Network(model, tensors, CpuOps(dtype), dropout)


def some_images(count, seed=0):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
    return images, random.integers(0, 10, count).astype(np.uint8)


# Golden values are float64; sums in float32 lose up to 4e-6 of them, most of it in batch norm.
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("name", INPUTS["MODELS"])
def test_logits_and_one_training_step_agree_with_pytorch(name, dtype, tolerance, run_of):
    model = INPUTS["MODELS"][name]
    network = Network(model, INPUTS["initial"](model), CpuOps(dtype))
    images, labels = INPUTS["batch"]()
    found = {"logits": network.logits(images)}
    # A batch of all there is, in the order of its first epoch: neither loss nor gradients care.
    state = network.ops.start(run_of(Digits(images, labels), len(images), [INPUTS["RATE"]]))
    x, y = network.ops.batch(state)
    network.forward(x, y, state)
    network.backward()
    gradients = network.gradients
    found["loss"] = network.ops.losses(state, 0, 1)[0].item()
    found |= {f"gradient.{key}": value.copy() for key, value in gradients.items()}
    momentum, decay = INPUTS["MOMENTUM"], INPUTS["WEIGHT_DECAY"]
    sgd = Sgd(model, network.parameters, network.ops, momentum, decay)
    sgd.step(gradients, state)
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


def assert_gradients_agree(run_of, model, tolerance, step):
    """The slope along a random direction of each parameter, against a central difference."""
    network = new_network(model, np.float64)
    images, labels = some_images(5)
    ops = network.ops
    state = ops.start(run_of(Digits(images, labels % model.classes), 5, [0.1]))
    x, y = ops.batch(state)

    def loss():
        network.forward(x, y, state)
        return ops.losses(state, 0, 1)[0].item()

    loss()
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
            around.append(loss())
        parameter[...] = kept
        expected = (around[0] - around[1]) / (2 * step)
        computed = float((gradients[name] * direction).sum())
        # The rounding of a loss of 2, 4e-16, divided by the step of 1e-6: 1e-3 is the floor.
        scale = max(np.linalg.norm(gradients[name]), 1e-3)
        assert abs(computed - expected) <= tolerance * scale, name


def without_kinks(model):
    """A copy of the network with sigmoid for activations with a kink, and average for max."""

    def smooth(block):
        kind = block.activation.kind
        if kind not in ("identity", "sigmoid", "tanh"):
            block = replace(block, activation=Activation("sigmoid"))
        if isinstance(block, ConvBlock) and block.pool and block.pool.kind == "max":
            block = replace(block, pool=replace(block.pool, kind="average"))
        return block

    return Model(model.name, tuple(smooth(block) for block in model.blocks))


@settings(max_examples=40)
@given(data=st.data())
def test_the_whole_gradient_of_any_network_without_kinks_agrees_with_differences(
    networks, run_of, data
):
    assert_gradients_agree(run_of, without_kinks(data.draw(networks)), 1e-6, 1e-5)


@settings(max_examples=60)
@given(data=st.data())
def test_the_forward_pass_of_any_network_agrees_with_the_reference(networks, run_of, data):
    network = new_network(data.draw(networks), np.float64)
    images, labels = some_images(3)
    digits = Digits(images, labels % network.model.classes)
    # One training pass, so that the running values are not the initial ones.
    state = network.ops.start(run_of(digits, 3, [0.1]))
    network.forward(*network.ops.batch(state), state)
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


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_frozen_blocks_stay_and_the_others_learn_as_without_them(name, digits, practise):
    model, part = named(name), digits(64, 3)
    frozen = len(model.blocks) - 1
    tensors = initial_tensors(model, np.random.default_rng(5))
    random = np.random.default_rng(6)
    for key in tensors:
        if key.endswith((".mean", ".beta", ".bias")):
            tensors[key] = random.normal(0, 0.3, tensors[key].shape).astype(np.float32)
        elif key.endswith(".variance"):
            tensors[key] = random.uniform(0.5, 2, tensors[key].shape).astype(np.float32)
    network = Network(model, tensors, CpuOps(), 0.5, frozen=frozen)
    losses = practise(network, part, 16, 20, 0.05)
    assert losses[-4:].mean() < losses[:4].mean()
    last = model.shapes()[-1].name
    assert list(network.parameters) == [f"{last}.weight", f"{last}.bias"]
    for key, value in network.tensors.items():
        assert np.array_equal(value, tensors[key]) is not key.startswith(last), key
