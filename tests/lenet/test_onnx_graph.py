from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnxruntime import InferenceSession

from lenet import onnx_graph
from lenet.model import ARCHITECTURES, IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool
from lenet.onnx_graph import IMAGES, LOGITS, PROBABILITIES

LAST = DenseBlock(10, activation=IDENTITY)


def onnx_model(*arguments):
    """The graph as the reference library reads it."""
    return onnx.load_from_string(onnx_graph.onnx_model(*arguments).SerializeToString())


def operations(model):
    return [node.op_type for node in model.graph.node]


def attributes(model, operation):
    (node,) = [node for node in model.graph.node if node.op_type == operation]
    return {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_graph_is_valid_onnx_when_the_architecture_is_named(random_weights, name):
    model = onnx_model(random_weights(name))
    onnx.checker.check_model(model, full_check=True)
    (image,), (logits, probabilities) = model.graph.input, model.graph.output
    assert (image.name, image.type.tensor_type.elem_type) == (IMAGES, TensorProto.UINT8)
    assert [output.name for output in (logits, probabilities)] == [LOGITS, PROBABILITIES]
    shape = [part.dim_param or part.dim_value for part in image.type.tensor_type.shape.dim]
    assert shape == ["n", 28, 28]


def test_pixels_are_scaled_by_the_first_weights_when_the_graph_is_made(random_weights):
    weights = random_weights("mlp")
    constants = {
        item.name: onnx.numpy_helper.to_array(item)
        for item in onnx_model(weights).graph.initializer
    }
    tensors = weights.tensors
    np.testing.assert_allclose(constants["dense1"] * 255, tensors["dense1.weight"], rtol=1e-6)
    np.testing.assert_array_equal(constants["dense2"], tensors["dense2.weight"])
    np.testing.assert_array_equal(constants["dense1.bias"], tensors["dense1.bias"])


def test_every_field_of_a_block_reaches_the_graph_when_it_is_described(random_weights):
    pool = Pool("average", (3, 2), (2, 1), (1, 0))
    block = ConvBlock(3, (5, 4), (2, 1), (1, 2), (1, 3), activation=Activation("elu", 0.5))
    weights = random_weights(
        Model("m", (block, ConvBlock(2, (1, 1), activation=IDENTITY, pool=pool), LAST))
    )
    model = onnx_model(weights)
    kinds = ["Cast", "Reshape", "Conv", "Elu", "Conv", "AveragePool", "Flatten", "Gemm", "Softmax"]
    assert operations(model) == kinds
    first = next(node for node in model.graph.node if node.op_type == "Conv")
    found = {item.name: list(item.ints) for item in first.attribute}
    assert found == {"strides": [2, 1], "pads": [1, 2, 1, 2], "dilations": [1, 3]}
    assert attributes(model, "Elu") == {"alpha": 0.5}
    assert attributes(model, "AveragePool") == {
        "kernel_shape": [3, 2],
        "strides": [2, 1],
        "pads": [1, 0, 1, 0],
        "count_include_pad": 1,
    }


def test_the_same_weights_give_the_same_graph_when_made_twice(random_weights):
    weights = random_weights("lenet-6-16")
    assert onnx_model(weights).SerializeToString() == onnx_model(weights).SerializeToString()


@pytest.mark.parametrize("multiple", [3, 8, 16])
def test_padded_channels_change_no_logit(random_weights, multiple):
    sigmoid = Activation("sigmoid")  # of 0 it is 0.5, which the next layer must not read
    blocks = ConvBlock(5, (3, 3), activation=sigmoid, pool=Pool("max")), ConvBlock(7, (3, 3))
    for model in (
        "lenet-6-16",
        "mlp",
        Model("m", (*blocks, LAST)),
        Model("n", (*blocks[:1], LAST)),
    ):
        weights = random_weights(model)
        images = weights.golden.images
        found = [
            InferenceSession(
                onnx_model(weights, given).SerializeToString(), providers=["CPUExecutionProvider"]
            ).run([LOGITS], {IMAGES: images})[0]
            for given in (1, multiple)
        ]
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
        shapes = {item.name: item.dims for item in onnx_model(weights, multiple).graph.initializer}
        assert all(shapes[name][0] % multiple == 0 for name in shapes if name.startswith("conv"))
