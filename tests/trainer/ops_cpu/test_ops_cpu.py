"""Operations whose gradients `test_network.py` does not compare with differences."""

from dataclasses import replace

import numpy as np
import pytest

from lenet import reference
from trainer.augment import WarpLimits, warp
from trainer.mnist import Digits
from trainer.ops import Run, Update
from trainer.ops_cpu import CpuOps
from trainer.random import permutation, philox, uniform

OPS = CpuOps(np.float64)


def one_batch(count=6, seed=0, steps=9, **limits):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    rates = np.full(steps, 0.1, np.float32)
    return Run(Digits(images, labels), 3, WarpLimits(**limits), seed, rates)


def test_dropout_follows_its_definition():
    run, x = one_batch(seed=8), np.ones((7, 3))
    y, _ = OPS.dropout(x, len(x), 0.4, 2, OPS.start(run, 5))
    for unit, row in np.ndindex(7, 3):
        e = row * 7 + unit
        kept = uniform(philox(8, e // 4, 5, 2, 2)[e % 4 : e % 4 + 1])[0] >= 0.4
        assert y[unit, row] == (1 / 0.6 if kept else 0)


def test_a_batch_is_the_next_part_of_the_order_augmented_by_its_step():
    run = one_batch(7, seed=3, rotation=20, shift=2)
    state = OPS.start(run, 2)
    for step in (2, 3):
        epoch, part = divmod(step, 2)
        chosen = permutation(3, epoch, 7, np.arange(3) + 3 * part)
        x, labels = OPS.batch(state)
        np.testing.assert_array_equal(labels, run.digits.labels[chosen])
        images = warp(run.digits.images[chosen], run.limits, 3, step)
        np.testing.assert_array_equal(x, OPS.input_from_images(images))
        OPS.end_step(state)


@pytest.mark.parametrize("weights", [None, np.arange(7, dtype=np.float32)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_softmax_cross_entropy_agrees_with_differences(assert_slope, smoothing, weights):
    random = np.random.default_rng(8)
    logits, labels = random.standard_normal((7, 5)), np.array([0, 6, 3, 3, 1], np.uint8)
    run = replace(one_batch(), smoothing=smoothing, class_weights=weights)
    state = OPS.start(run, 1)

    def loss():
        OPS.softmax_cross_entropy(logits, labels, state)
        return OPS.losses(state, 1, 2)[0].item()

    probabilities = reference.softmax(logits.T)
    targets = (1 - smoothing) * np.eye(7)[labels] + smoothing / 7
    if weights is not None:
        targets *= weights[labels][:, np.newaxis]
    assert loss() == pytest.approx(-(targets * np.log(probabilities)).sum(axis=1).mean())
    dlogits = OPS.softmax_cross_entropy_backward(OPS.softmax_cross_entropy(logits, labels, state))
    assert_slope(dlogits, loss, logits)


def test_losses_and_correct_answers_are_those_of_the_steps_asked_for():
    state = OPS.start(one_batch(), 2)
    for right in (1, 3):
        logits = np.zeros((10, 3))
        labels = np.array([0] * right + [9] * (3 - right), np.uint8)
        OPS.softmax_cross_entropy(logits, labels, state)
        OPS.end_step(state)
    losses, correct = OPS.losses(state, 2, 4)
    # The first of equal logits is the answer.
    assert correct.tolist() == [1, 3]
    assert losses == pytest.approx([np.log(10)] * 2)
    assert OPS.losses(state, 3, 4)[1].tolist() == [3]


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_follows_its_formula_over_several_steps(nesterov):
    weight, bias = np.array([1.0, -2.0]), np.array([3.0])
    parameters = {"a.weight": weight, "a.bias": bias}
    velocities = {"a.weight": np.zeros(2), "a.bias": np.zeros(1)}
    expected = {name: value.copy() for name, value in parameters.items()}
    velocity = {name: value.copy() for name, value in velocities.items()}
    rates = np.array([9, 0.01, 0.02, 0.04])
    state = OPS.start(Run(one_batch().digits, 3, WarpLimits(), 0, rates), 1)
    for step in range(3):
        gradients = {"a.weight": np.array([0.5, step]), "a.bias": np.array([-1.0])}
        updates = [
            Update(name, value, gradients[name], velocities[name])
            for name, value in parameters.items()
        ]
        OPS.sgd_step(updates, state, 0.8, 0.1, nesterov)
        OPS.end_step(state)
        assert gradients["a.weight"].tolist() == [0.5, step]
        for name, value in expected.items():
            decay = 0.1 if name == "a.weight" else 0.0
            gradient = gradients[name] + decay * value
            velocity[name] = 0.8 * velocity[name] + gradient
            move = gradient + 0.8 * velocity[name] if nesterov else velocity[name]
            expected[name] = value - rates[1 + step] * move
    np.testing.assert_allclose(weight, expected["a.weight"])
    np.testing.assert_allclose(bias, expected["a.bias"])
    np.testing.assert_allclose(velocities["a.weight"], velocity["a.weight"])
