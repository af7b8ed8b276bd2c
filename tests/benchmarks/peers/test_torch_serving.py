import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.peers import torch_serving
from benchmarks.peers.torch_serving import (
    TOLERANCES,
    VARIANTS,
    Variant,
    WrongAnswer,
    check,
    forward_pass,
    measure,
    settings,
)
from benchmarks.peers.torch_step import WAYS
from benchmarks.peers.torch_training import PeerMissing
from lenet import reference
from lenet.model import ARCHITECTURES


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is a peer, not a dependency: absent here")


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def probabilities(weights):
    exact = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    return reference.softmax(reference.logits(weights.model, exact, weights.golden.images))


def test_the_names_of_a_ways_variants_differ():
    assert tuple(VARIANTS) == WAYS
    for tried in VARIANTS.values():
        assert len({str(variant) for variant in tried}) == len(tried) > 1


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_pass_computes_what_the_reference_computes(
    name, precision, layout, torch, random_weights
):
    weights = random_weights(name)
    with settings(precision):
        forward = forward_pass(
            weights, weights.golden.images, precision, Variant(layout), device="cpu"
        )
        found = forward()
        check(forward, probabilities(weights), precision)
    assert found.dtype == torch.float32
    assert found.shape == (len(weights.golden.images), weights.model.classes)


def test_other_weights_are_a_wrong_answer(torch, random_weights):
    weights, others = random_weights("lenet"), random_weights("lenet", 1)
    with settings("fp32"):
        forward = forward_pass(
            others, weights.golden.images, "fp32", Variant("contiguous"), device="cpu"
        )
        with pytest.raises(WrongAnswer, match="from the reference, expected at most 1e-04"):
            check(forward, probabilities(weights), "fp32")


def test_nothing_is_recorded_for_gradients_inside_the_settings(torch):
    with settings("fp16"):
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def test_without_pytorch_one_sentence_says_so(no_torch, random_weights):
    weights = random_weights("mlp")
    with pytest.raises(PeerMissing, match="pip install torch"):
        measure(weights, weights.golden.images, probabilities(weights), "fp16")


def test_a_variant_that_fails_or_is_wrong_is_told_and_has_no_time(monkeypatch, random_weights):
    weights = random_weights("mlp")
    true = probabilities(weights)

    def forward_pass(weights, images, precision, variant):
        if variant.layout == "channels_last":
            raise RuntimeError("no such layout")
        answer = np.zeros_like(true) if variant.captured else true
        tensor = SimpleNamespace(cpu=lambda: SimpleNamespace(numpy=lambda: answer))
        return lambda: tensor

    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: None)
    torch = SimpleNamespace(cuda=cuda, compiler=SimpleNamespace(reset=lambda: None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torch_serving, "settings", lambda precision: nullcontext())
    monkeypatch.setattr(torch_serving, "forward_pass", forward_pass)
    monkeypatch.setattr(torch_serving, "torch_timer", lambda: lambda call, count: 7.0 * count)
    lines = []
    found = measure(weights, weights.golden.images, true, "fp32", ["eager", "graph"], lines.append)
    assert found["eager_us"] == 7
    assert found["eager_variant"] == "contiguous"
    assert found["graph_us"] is found["compile_us"] is None
    assert found["failed"]["eager: channels_last"] == "RuntimeError: no such layout"
    assert "WrongAnswer" in found["failed"]["graph: one CUDA graph, contiguous"]
    assert [line.split(": ")[2].split(",")[0] for line in lines] == [
        *("7.0 us at least", "failed"),
        *("failed", "failed"),
    ]
