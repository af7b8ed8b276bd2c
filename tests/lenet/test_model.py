from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenet.errors import InvalidModel
from lenet.model import (
    ARCHITECTURES,
    IDENTITY,
    Activation,
    ConvBlock,
    DenseBlock,
    Model,
    Pool,
    named,
)

LOGITS = DenseBlock(10, activation=IDENTITY)


@pytest.mark.parametrize(
    ("name", "outputs", "batch_norms", "parameters"),
    [
        ("lenet", [(20, 12, 12), (50, 4, 4), (500,), (10,)], 3, 432_790),
        ("lenet-classic", [(20, 12, 12), (50, 4, 4), (500,), (10,)], 0, 431_080),
        ("lenet-6-16", [(6, 12, 12), (16, 4, 4), (120,), (10,)], 0, 34_622),
        ("cnn-32-64", [(32, 14, 14), (64, 7, 7), (128,), (10,)], 0, 421_642),
        ("mlp", [(500,), (10,)], 0, 397_510),
    ],
)
def test_an_architecture_is_what_its_source_says_when_it_is_named(
    name, outputs, batch_norms, parameters
):
    model = named(name)
    assert [shape.output for shape in model.shapes()] == outputs
    assert sum(block.batch_norm for block in model.blocks) == batch_norms
    assert sum(map(math.prod, model.parameters().values())) == parameters
    assert model.classes == 10


def test_parameters_have_the_shapes_of_the_blocks_when_batch_norm_is_there():
    model = Model("m", (ConvBlock(6, (5, 3), batch_norm=True), DenseBlock(7), LOGITS))
    assert model.parameters() == {
        "conv1.weight": (6, 1, 5, 3),
        "conv1.gamma": (6,),
        "conv1.beta": (6,),
        "conv1.mean": (6,),
        "conv1.variance": (6,),
        "dense1.weight": (7, 6 * 24 * 26),
        "dense1.bias": (7,),
        "dense2.weight": (10, 7),
        "dense2.bias": (10,),
    }
    assert list(model.folded.parameters())[:2] == ["conv1.weight", "conv1.bias"]


@given(data=st.data())
def test_a_description_is_read_back_alike_when_it_was_written(networks, data):
    model = data.draw(networks)
    assert Model.from_json(model.to_json()) == model
    assert Model.from_json(model.to_json()).to_json() == model.to_json()


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ((), "it has no blocks"),
        ((ConvBlock(6, (5, 5)),), "the last block must be dense"),
        ((DenseBlock(10, True, IDENTITY),), "the last block must be dense"),
        (
            (DenseBlock(5), ConvBlock(6, (5, 5)), LOGITS),
            "model 'm', conv1: a convolution cannot follow a dense block",
        ),
        (
            (ConvBlock(6, (5, 5)), ConvBlock(6, (13, 3), dilation=(2, 1)), LOGITS),
            r"conv2: a kernel of \(13, 3\) with dilation \(2, 1\) does not fit an image of \(24, ",
        ),
        (
            (ConvBlock(6, (27, 27), pool=Pool("max", (3, 3))), LOGITS),
            r"conv1: a pooling window of \(3, 3\) with padding \(0, 0\) does not fit an image of",
        ),
        (
            (ConvBlock(1, (1, 1), padding=(5000, 5000)), LOGITS),
            r"conv1: its output for one image has shape \(1, 10028, 10028\), expected at most",
        ),
    ],
)
def test_a_network_is_rejected_in_a_sentence_when_it_is_impossible(blocks, sentence):
    with pytest.raises(InvalidModel, match=sentence):
        Model("m", blocks)


def test_a_person_may_leave_out_what_has_a_default():
    text = """{"name": "mine", "blocks": [
        {"type": "conv", "channels": 8, "kernel": [3, 3], "pool": "max"},
        {"type": "dense", "units": 30, "batch_norm": true, "activation": "tanh"},
        {"type": "dense", "units": 10}]}"""
    assert Model.from_json(text) == Model(
        "mine",
        (
            ConvBlock(8, (3, 3), pool=Pool("max")),
            DenseBlock(30, True, Activation("tanh")),
            LOGITS,
        ),
    )


@pytest.mark.parametrize(
    ("description", "sentence"),
    [
        ([], "model: got [], expected an object"),
        ({"blocks": []}, "model: name is missing"),
        ({"name": "m", "blocks": [7]}, "block 1: got 7, expected an object"),
        (
            {"name": "m", "blocks": [{"type": "conv", "channels": 8}]},
            "block 1: kernel is missing",
        ),
        (
            {"name": "m", "blocks": [{"type": "dense", "units": 8, "bias": 0}]},
            'block 1: "bias" is unknown, expected some of activation, batch_norm, type, units',
        ),
        (
            {"name": "m", "blocks": [{"type": "conv", "channels": 8, "kernel": [0, 5]}]},
            "block 1, conv: kernel is [0, 5], expected two integers from 1 to 65536",
        ),
        (
            {
                "name": "m",
                "blocks": [
                    {"type": "conv", "channels": 8, "kernel": [27, 27], "stride": [2, 2]},
                    {"type": "conv", "channels": 8, "kernel": [5, 1]},
                    {"type": "dense", "units": 10},
                ],
            },
            "model 'm', conv2: a kernel of (5, 1) with dilation (1, 1) does not fit an image of "
            "(1, 1) with padding (0, 0): it has floor((1 + 2*0 - 1*(5 - 1) - 1) / 1) + 1 = -3 "
            "positions, expected at least 1",
        ),
    ],
)
def test_a_wrong_description_is_rejected_with_its_block_and_the_arithmetic(description, sentence):
    with pytest.raises(InvalidModel) as caught:
        Model.from_json(json.dumps(description))
    assert str(caught.value) == sentence


def test_a_fingerprint_tells_networks_apart_and_nothing_else_when_served():
    lenet = named("lenet")
    assert lenet.fingerprint() == lenet.folded.fingerprint()
    assert lenet.fingerprint() == Model("other", lenet.blocks).fingerprint()
    prints = {model.fingerprint() for model in ARCHITECTURES.values()}
    assert len(prints) == len(ARCHITECTURES)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@given(data=st.data())
def test_a_description_is_read_or_rejected_when_any_value_in_it_is_replaced(networks, data):
    description = json.loads(data.draw(networks).to_json())
    description["blocks"][0].setdefault("pool", None)
    spot = data.draw(st.sampled_from(["name", "input", "blocks", *description["blocks"][0]]))
    owner = description if spot in description else description["blocks"][0]
    owner[spot] = data.draw(ANYTHING)
    try:
        model = Model.from_json(json.dumps(description))
    except InvalidModel:
        return
    assert Model.from_json(model.to_json()) == model


def test_a_pool_is_rejected_when_a_window_could_lie_outside_the_image():
    assert Pool("max", (3, 2), padding=(1, 1)).padding == (1, 1)
    with pytest.raises(InvalidModel, match="at most half of size"):
        Pool("average", (2, 3), padding=(0, 2))


@pytest.mark.parametrize("parameter", [0, -1.0, float("nan"), float("inf"), 10**400, True, "1"])
def test_an_activation_is_rejected_when_its_parameter_is_no_positive_number(parameter):
    with pytest.raises(InvalidModel, match=r"activation elu: parameter is .*, expected a number"):
        Activation("elu", parameter)


@pytest.mark.parametrize("kind", ["median", {}])
def test_a_pool_is_rejected_when_its_kind_is_unknown(kind):
    with pytest.raises(InvalidModel, match=r"pool: kind is .* expected one of max, average"):
        Pool(kind)
