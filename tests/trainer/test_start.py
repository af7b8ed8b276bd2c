from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lenet import reference
from lenet.model import ARCHITECTURES, named
from lenet.weightfile import WeightFile
from trainer.augment import WarpLimits
from trainer.export import fold
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors
from trainer.ops import Run
from trainer.ops_cpu import CpuOps
from trainer.start import taken, with_moments

ROOT = Path(__file__).parents[2]
ROWS = 200


def in_training(network, digits):
    """(loss, accuracy) of one batch in training mode, whose step moves nothing."""
    ops = network.ops
    state = ops.start(Run(digits, ROWS, WarpLimits(), 1, np.zeros(1, np.float32)))
    x, labels = ops.batch(state)
    network.forward(x, labels, state)
    (loss,), (correct,) = ops.losses(state, 0, 1)
    return float(loss), correct / ROWS


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_network_with_batch_norm_begins_as_the_file_computes_in_training_and_outside(
    random_weights, frozen
):
    model = named("lenet")
    file = random_weights(model.folded)
    images = np.random.default_rng(4).integers(0, 256, (ROWS, 28, 28), np.uint8)
    logits = reference.logits(file.model, file.tensors, images)
    digits = Digits(images, logits.argmax(axis=1).astype(np.uint8))
    found, _ = taken(file, model)
    tensors = initial_tensors(model, np.random.default_rng(1)) | found
    first = with_moments(model, tensors, found, images, frozen)
    network = Network(model, first, CpuOps(), frozen=frozen)
    largest = np.abs(logits).max()
    np.testing.assert_allclose(network.logits(images), logits, atol=1e-4 * largest)
    loss, accuracy = in_training(network, digits)
    wanted = -np.log(reference.softmax(logits).max(axis=1)).mean()
    assert loss == pytest.approx(wanted, rel=1e-2)
    assert accuracy > 0.99
    # The running moments moved towards those of the same images.
    np.testing.assert_allclose(network.logits(images), logits, atol=1e-2 * largest)
    for name, tensor in first.items():
        if frozen and name.startswith("conv1."):
            np.testing.assert_array_equal(tensor, tensors[name])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_run_of_no_steps_writes_a_file_with_the_same_answers(name, digits):
    file = WeightFile.read(max((ROOT / "weights" / name).glob("*.safetensors")))
    model, images = named(name), digits(ROWS, 3).images
    found, _ = taken(file, model)
    first = initial_tensors(model, np.random.default_rng(1)) | found
    written = fold(model, with_moments(model, first, found, images, 0))
    answers, expected = (reference.logits(file.model, w, images) for w in (written, file.tensors))
    np.testing.assert_allclose(answers, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(answers.argmax(axis=1), expected.argmax(axis=1))


def test_a_batch_norm_that_is_new_expects_the_moments_of_its_inputs(random_weights):
    model = named("lenet")
    file = random_weights(model.folded)
    found = {name: one for name, one in taken(file, model)[0].items() if "dense1" not in name}
    tensors = initial_tensors(model, np.random.default_rng(1)) | found
    images = np.random.default_rng(4).integers(0, 256, (ROWS, 28, 28), np.uint8)
    first = with_moments(model, tensors, found, images, 0)
    assert (first["dense1.gamma"] == 1).all()
    assert (first["dense1.beta"] == 0).all()
    network = Network(model, first, CpuOps())
    outside = network.logits(images)
    digits = Digits(images, outside.argmax(axis=1).astype(np.uint8))
    assert in_training(network, digits)[1] > 0.99
