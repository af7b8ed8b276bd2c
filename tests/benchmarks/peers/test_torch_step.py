import math

import numpy as np
import pytest

from benchmarks.peers.torch_step import WAYS, Variant, network, settings, training_step, variants
from lenet import reference
from lenet.model import ARCHITECTURES, named


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is a peer, not a dependency: absent here")


def test_every_way_is_tried_in_both_layouts_where_there_are_images():
    for tried in variants(named("lenet"), "tf32").values():
        assert {variant.layout for variant in tried} == {"contiguous", "channels_last"}
    for tried in variants(named("mlp"), "tf32").values():
        assert {variant.layout for variant in tried} == {"contiguous"}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
def test_the_names_of_a_ways_variants_differ(precision):
    found = variants(named("lenet"), precision)
    assert tuple(found) == WAYS
    for tried in found.values():
        assert len({str(variant) for variant in tried}) == len(tried) > 0


def test_a_loss_scale_is_met_by_the_fused_optimizer_alone_in_a_capture():
    tried = [one for way in variants(named("lenet"), "mixed").values() for one in way]
    assert {one.optimizer for one in tried if one.captured} == {"fused"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_network_computes_what_the_reference_computes(name, torch, random_weights):
    weights = random_weights(name)
    net = network(weights.model).eval()
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), weights.tensors.values(), strict=True):
            parameter.copy_(torch.from_numpy(value))
        images = torch.from_numpy(weights.golden.images).float().unsqueeze(1) / 255
        logits = net(images).numpy()
    exact = reference.logits(weights.model, weights.tensors, weights.golden.images)
    # float32 sums of at most 3,136 terms of order one
    np.testing.assert_allclose(logits, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_network_has_the_parameters_that_are_trained(name, torch):
    model = named(name)
    trained = [
        shape
        for parameter, shape in model.parameters().items()
        if not parameter.endswith((".mean", ".variance"))
    ]
    assert [tuple(parameter.shape) for parameter in network(model).parameters()] == trained


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize(
    "variant", [Variant("contiguous", "foreach"), Variant("channels_last", "fused")], ids=str
)
def test_steps_train_on_the_processor_too(name, precision, variant, torch):
    with settings(precision):
        step = training_step(named(name), 32, precision, variant, "cpu")
        losses = [float(step()) for _ in range(40)]
    # Noise with random labels can only be learnt by heart, and the smallest network is slow at it.
    assert losses[-1] < min(losses[0], math.log(10)) - 0.02


def test_variants_of_a_step_take_the_same_steps(torch):
    tried = variants(named("lenet"), "fp32")["eager"]
    with settings("fp32"):
        steps = [training_step(named("lenet"), 16, "fp32", one, "cpu") for one in tried]
        losses = np.array([[float(step()) for _ in range(5)] for step in steps])
    # float32 sums in another order, five steps long
    np.testing.assert_allclose(losses, np.broadcast_to(losses[0], losses.shape), rtol=1e-3)


def test_the_switches_of_a_precision_are_set_back(torch):
    cudnn = torch.backends.cudnn

    def switches():
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark

    before = switches()
    with settings("fp32"):
        assert switches() == ("highest", False, True)
    with settings("tf32"):
        assert switches() == ("high", True, True)
    assert switches() == before
