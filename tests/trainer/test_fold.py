import numpy as np
import pytest

from lenet.model import ARCHITECTURES, IDENTITY, ConvBlock, DenseBlock, Model, Pool, named
from trainer.fold import fold
from trainer.mnist import load
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps

MIXED = Model(
    "mixed",
    (
        ConvBlock(4, (3, 3), stride=(2, 1), padding=(1, 0), batch_norm=True, pool=Pool("max")),
        ConvBlock(3, (3, 3)),
        DenseBlock(8, batch_norm=True, activation=IDENTITY),
        DenseBlock(10, activation=IDENTITY),
    ),
)


def random_tensors(model, dtype):
    """Initial weights and batch norm as training might leave it."""
    random = np.random.default_rng(0)
    tensors = initial_tensors(model, random, dtype)
    for name, value in tensors.items():
        if name.endswith(".variance"):
            value[:] = random.uniform(0.01, 4, value.shape)
        elif not name.endswith(".weight"):
            value[:] = random.standard_normal(value.shape)
    return tensors


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", [named("lenet"), MIXED], ids=["lenet", "mixed"])
def test_the_folded_network_computes_the_same(model, dtype):
    tensors = random_tensors(model, dtype)
    images = np.random.default_rng(1).integers(0, 256, (64, 28, 28)).astype(np.uint8)
    ops = CpuOps(dtype)
    unfolded = Network(model, tensors, ops).logits(images)
    folded = Network(model.folded, fold(model, tensors), ops).logits(images)
    difference = np.abs(folded - unfolded).max(axis=1) / np.abs(unfolded).max(axis=1)
    # float32 sums of 800 products; in float64 only the derivation itself could be wrong.
    assert difference.max() <= (1e-5 if dtype == np.float32 else 1e-13)
    assert folded.dtype == dtype


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folding_leaves_exactly_the_tensors_of_the_folded_model(name):
    model = named(name)
    folded = fold(model, random_tensors(model, np.float32))
    shapes = {tensor: value.shape for tensor, value in folded.items()}
    assert shapes == model.folded.parameters()
    assert not any(part in tensor for tensor in folded for part in ("gamma", "mean", "variance"))


def test_folding_copies_what_it_does_not_change():
    tensors = random_tensors(named("mlp"), np.float32)
    folded = fold(named("mlp"), tensors)
    np.testing.assert_array_equal(folded["dense1.weight"], tensors["dense1.weight"])
    assert not np.shares_memory(folded["dense1.weight"], tensors["dense1.weight"])


def test_folding_changes_no_answer_on_the_10_000_test_images(mnist_folder, practise):
    dataset, model = load(mnist_folder), named("lenet")
    network = Network(model, initial_tensors(model, np.random.default_rng(0)), CpuOps())
    practise(network, dataset.train, 64, 30, 0.01)
    unfolded = network.logits(dataset.test.images)
    assert (unfolded.argmax(axis=1) == dataset.test.labels).mean() > 0.9
    folded = Network(model.folded, fold(model, network.tensors), CpuOps())
    logits = folded.logits(dataset.test.images)
    np.testing.assert_array_equal(logits.argmax(axis=1), unfolded.argmax(axis=1))
    difference = np.abs(logits - unfolded).max(axis=1) / np.abs(unfolded).max(axis=1)
    assert difference.max() <= 1e-5
