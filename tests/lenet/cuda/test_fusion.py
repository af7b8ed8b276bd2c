from __future__ import annotations

import numpy as np
import pytest

from lenet.cuda.fusion import (
    MAX_CLASSES,
    check,
    is_first,
    is_fused,
    is_whole,
    pack_layers,
    pack_whole,
    whole_macros,
)
from lenet.cuda.packing import PIXEL_SCALE, layout
from lenet.errors import BackendUnavailable
from lenet.model import (
    ARCHITECTURES,
    IDENTITY,
    RELU,
    Activation,
    ConvBlock,
    DenseBlock,
    Model,
    Pool,
)

HALVED = Pool("max")
LOGITS = DenseBlock(10, activation=IDENTITY)


@pytest.mark.parametrize(
    ("block", "in_half", "in_float"),
    [
        (ConvBlock(20, (5, 5), pool=HALVED), True, True),
        (ConvBlock(32, (3, 3), padding=(1, 1), pool=Pool("average")), True, True),
        (ConvBlock(9, (5, 5)), True, True),
        # A weight in float is two halves, and twice as many do not fit into the registers.
        (ConvBlock(9, (10, 9), pool=HALVED), True, False),
        (ConvBlock(9, (15, 9), pool=HALVED), False, False),
        (ConvBlock(9, (5, 5), stride=(2, 1), pool=HALVED), False, False),
        (ConvBlock(9, (5, 5), dilation=(1, 2), pool=HALVED), False, False),
        (ConvBlock(9, (5, 5), pool=Pool("max", (3, 3), (2, 2))), False, False),
        (ConvBlock(9, (5, 5), pool=Pool("max", (2, 2), (2, 2), (1, 0))), False, False),
        (ConvBlock(9, (5, 5), pool=Pool("global_average")), False, False),
        (ConvBlock(9, (28, 1)), False, False),
        (DenseBlock(9), False, False),
    ],
)
def test_the_first_kernel_takes_what_it_was_written_for(block, in_half, in_float):
    assert is_first(block, "fp16") == in_half
    assert is_first(block, "tf32") == is_first(block, "fp32") == in_float


def test_a_network_with_more_classes_than_a_warp_has_lanes_is_refused_by_name():
    check(Model("digits", (DenseBlock(MAX_CLASSES, activation=IDENTITY),)))
    letters = Model("letters", (DenseBlock(MAX_CLASSES + 1, activation=IDENTITY),))
    with pytest.raises(BackendUnavailable, match="model 'letters' has 33 classes, expected at"):
        check(letters)


def test_cudnn_leaves_nothing_to_do_without_pooling_and_with_a_relu():
    assert is_fused(ConvBlock(9, (5, 5)), "fp32")
    assert not is_fused(ConvBlock(9, (5, 5), pool=HALVED), "fp32")
    assert not is_fused(ConvBlock(9, (5, 5), activation=Activation("tanh")), "fp16")
    assert is_fused(DenseBlock(9, activation=RELU), "tf32")
    assert not is_fused(DenseBlock(9, activation=RELU), "fp32")


@pytest.mark.parametrize("model", ARCHITECTURES.values(), ids=lambda model: model.name)
def test_every_named_network_is_one_kernel_where_there_are_clusters(model):
    plain = Model(model.name, tuple(without_norm(block) for block in model.blocks))
    assert is_whole(plain, 90)
    assert not is_whole(plain, 89)


def without_norm(block):
    fields = {name: getattr(block, name) for name in block.__slots__}
    return type(block)(**{**fields, "batch_norm": False})


@pytest.mark.parametrize(
    "blocks",
    [
        (LOGITS,),
        (ConvBlock(8, (5, 5), pool=HALVED), DenseBlock(30), LOGITS),
        (DenseBlock(30), DenseBlock(30), LOGITS),
        (ConvBlock(8, (5, 5), pool=HALVED), ConvBlock(8, (3, 3)), DenseBlock(30), LOGITS),
        (
            ConvBlock(8, (5, 5), activation=Activation("elu", 2.0), pool=HALVED),
            ConvBlock(8, (3, 3), activation=Activation("elu", 1.0), pool=HALVED),
            DenseBlock(30),
            LOGITS,
        ),
    ],
)
def test_other_networks_go_layer_by_layer(blocks):
    assert not is_whole(Model("drawn", blocks), 90)


def test_the_one_kernel_is_told_the_one_parameter_of_its_activations():
    pooled = {"pool": HALVED, "activation": Activation("clipped_relu", 6.0)}
    blocks = (ConvBlock(8, (5, 5), **pooled), ConvBlock(8, (3, 3), pool=HALVED))
    model = Model("drawn", (*blocks, DenseBlock(30), LOGITS))
    assert is_whole(model, 90)
    assert whole_macros(model)["PARAMETER"] == 6.0


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_weights_have_the_networks_type_and_biases_that_of_whoever_adds_them(
    name, precision, random_weights
):
    file = random_weights(name)
    packed = pack_layers(file, precision)
    assert set(packed) == set(file.model.parameters())
    half = precision == "fp16"
    last = f"dense{sum(isinstance(block, DenseBlock) for block in file.model.blocks)}"
    assert packed[f"{last}.weight"].dtype == (np.float16 if half else np.float32)
    assert packed[f"{last}.bias"].dtype == np.float32
    assert packed["dense1.bias"].dtype == (np.float16 if half else np.float32)
    if name == "lenet":
        assert packed["conv1.weight"].dtype == np.float16
        assert packed["conv1.bias"].dtype == packed["conv2.bias"].dtype == np.float32


def test_a_first_layer_that_takes_unpacked_pixels_has_their_scale_in_its_weights(random_weights):
    file = random_weights("mlp")
    packed = pack_layers(file, "fp32")["dense1.weight"]
    canonical = layout(file.model)["dense1.weight"].unpack(packed)
    np.testing.assert_allclose(canonical, file.tensors["dense1.weight"] * PIXEL_SCALE, rtol=1e-6)


def test_the_one_kernel_gets_every_tensor_of_the_network(random_weights):
    packed = pack_whole(random_weights("lenet"))
    assert list(packed) == [
        *("first", "first_bias", "second", "second_bias"),
        *("hidden", "hidden_bias", "last", "last_bias"),
    ]
