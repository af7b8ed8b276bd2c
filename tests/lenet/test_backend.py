"""The guarantees of a backend, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lenet import reference
from lenet.model import ARCHITECTURES, IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool

# float32 sums of a few hundred products against float64: 1e-5 of the norm is some 100 roundings.
TOLERANCE = 1e-5


def exact_logits(weights, images):
    tensors = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    return reference.logits(weights.model, tensors, images)


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def assert_agrees(backend, weights, images):
    plan = backend.plan(weights, len(images))
    expected = exact_logits(weights, images)
    logits = plan.logits(images)
    probabilities = plan.run(images).probabilities
    assert logits.dtype == probabilities.dtype == np.float32
    assert logits.shape == probabilities.shape == (len(images), weights.model.classes)
    assert distance(logits, expected) <= TOLERANCE
    assert distance(probabilities, reference.softmax(expected)) <= TOLERANCE
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_backend_equals_the_float64_reference_when_the_architecture_is_named(
    backend, random_weights, name
):
    weights = random_weights(name)
    assert_agrees(backend, weights, weights.golden.images)


@pytest.mark.parametrize("kind", ["identity", "relu", "clipped_relu", "elu", "sigmoid", "tanh"])
@pytest.mark.parametrize("pool", [None, "max", "average", "global_average"])
def test_a_backend_equals_the_float64_reference_when_activation_and_pooling_vary(
    backend, random_weights, kind, pool
):
    activation = Activation(kind, 0.5)
    window = None if pool is None else Pool(pool, (3, 2), (2, 3), (1, 1))
    block = ConvBlock(4, (3, 4), (2, 1), (2, 0), (1, 2), activation=activation, pool=window)
    dense = DenseBlock(9, activation=activation)
    model = Model("m", (block, dense, DenseBlock(7, activation=IDENTITY)))
    weights = random_weights(model)
    assert_agrees(backend, weights, weights.golden.images)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99), data=st.data())
def test_a_backend_equals_the_float64_reference_when_the_network_is_drawn(
    backend, random_weights, networks, seed, data
):
    weights = random_weights(data.draw(networks), seed)
    assert_agrees(backend, weights, weights.golden.images[:3])


def test_all_plans_compute_with_the_weights_that_were_loaded_last(backend, random_weights, tiny):
    files = [random_weights(tiny, seed) for seed in (1, 2, 3)]
    plans, images = [backend.plan(files[0], rows) for rows in (10, 12)], files[0].golden.images
    for turn in (1, 0, 2, 2, 0, 1):
        backend.load(files[turn])
        exact = exact_logits(files[turn], images)
        for plan in plans:
            assert distance(plan.logits(images), exact) <= TOLERANCE
            assert distance(plan.run(images).probabilities, reference.softmax(exact)) <= TOLERANCE
