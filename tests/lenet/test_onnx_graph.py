from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnxruntime import InferenceSession

from lenet import onnx_graph, reference
from lenet.model import ARCHITECTURES, IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool
from lenet.onnx_graph import IMAGES, LOGITS, PROBABILITIES

LAST = DenseBlock(10, activation=IDENTITY)


def onnx_model(*arguments, **options):
    """The graph as the reference library reads it."""
    return onnx.load_from_string(onnx_graph.onnx_model(*arguments, **options).SerializeToString())


def logits(model, images):
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run([LOGITS], {IMAGES: images})[0]


def operations(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_graph_is_valid_onnx_when_the_architecture_is_named(random_weights, name):
    model = onnx_model(random_weights(name))
    onnx.checker.check_model(model, full_check=True)
    (image,), (logits, probabilities) = model.graph.input, model.graph.output
    assert (image.name, image.type.tensor_type.elem_type) == (IMAGES, TensorProto.UINT8)
    assert [output.name for output in (logits, probabilities)] == [LOGITS, PROBABILITIES]
    shape = [part.dim_param or part.dim_value for part in image.type.tensor_type.shape.dim]
    assert shape == ["n", 28, 28]


@pytest.mark.parametrize("multiple", [3, 16])
def test_padded_channels_change_no_logit(random_weights, multiple):
    sigmoid = Activation("sigmoid")  # of 0 it is 0.5, which the next layer must not read
    blocks = ConvBlock(17, (3, 3), activation=sigmoid, pool=Pool("max")), ConvBlock(21, (3, 3))
    for model in (
        "lenet-6-16",
        "mlp",
        Model("m", (*blocks, LAST)),
        Model("n", (*blocks[:1], LAST)),
    ):
        weights = random_weights(model)
        images = weights.golden.images
        found = [logits(onnx_model(weights, given), images) for given in (1, multiple)]
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
        tensors = onnx_model(weights, multiple).graph.initializer
        channels = [item.dims[0] for item in tensors if item.name.startswith("conv")]
        assert all(count % multiple == 0 or count < multiple for count in channels)


POOLED = {"pool": Pool("max")}
SUITABLE = {
    "lenet": ARCHITECTURES["lenet"],
    "two after another": (
        ConvBlock(15, (1, 1)),
        ConvBlock(18, (5, 5), activation=Activation("tanh"), **POOLED),  # 6 x 3 tiles
        ConvBlock(17, (5, 5), activation=Activation("clipped_relu", 0.5), **POOLED),
    ),
    "narrow tiles": (ConvBlock(16, (1, 1), **POOLED), ConvBlock(16, (3, 3), **POOLED)),
    "not square": (ConvBlock(16, (5, 1)), ConvBlock(20, (5, 5), **POOLED)),
    "an even filter": (
        ConvBlock(20, (2, 2), activation=IDENTITY),
        ConvBlock(13, (4, 4), activation=Activation("elu", 0.3), **POOLED),
    ),
}


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("name", SUITABLE)
def test_winograds_algorithm_gives_the_logits_of_the_reference(random_weights, name, multiple):
    model = SUITABLE[name]
    if isinstance(model, tuple):
        model = Model("m", (*model, LAST))
    weights = random_weights(model)
    graph = onnx_model(weights, multiple, use_winograd=True)
    onnx.checker.check_model(graph, full_check=True)
    suitable = list(map(onnx_graph.suits_winograd, weights.model.blocks, weights.model.shapes()))
    assert operations(graph).count("MatMul") == 5 * sum(suitable) > 0
    exact = {key: value.astype(np.float64) for key, value in weights.tensors.items()}
    images = np.random.default_rng(3).integers(0, 256, (9, 28, 28), np.uint8)
    expected = reference.logits(weights.model, exact, images)
    found = logits(graph, images)
    assert np.linalg.norm(found - expected) < 2e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"kernel": (5, 3)},
        {"kernel": (9, 9)},
        {"stride": (2, 2)},
        {"dilation": (2, 2), "kernel": (3, 3)},
        {"padding": (2, 2)},
        {"kernel": (3, 3)},  # 10 x 10 outputs
        {"inputs": 15},
        {"pool": None},
        {"pool": Pool("average")},
        {"pool": Pool("max", (3, 3), (1, 1))},
    ],
    ids=str,
)
def test_other_convolutions_stay_as_they_are_beside_winograds_algorithm(random_weights, changed):
    first = ConvBlock(changed.get("inputs", 16), (5, 5), **POOLED)
    changed = {name: value for name, value in changed.items() if name != "inputs"}
    block = replace(ConvBlock(13, (5, 5), **POOLED), **changed)
    weights = random_weights(Model("m", (first, block, LAST)))
    assert onnx_model(weights, use_winograd=True) == onnx_model(weights)
