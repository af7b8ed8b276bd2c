from __future__ import annotations

import numpy as np
import pytest

from lenet.cuda.fused_network import CLUSTER, is_supported, pack
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

HALVED = Pool("max")
LOGITS = DenseBlock(10, activation=IDENTITY)


@pytest.mark.parametrize("model", ARCHITECTURES.values(), ids=lambda model: model.name)
def test_every_named_network_is_supported_where_there_are_clusters(model):
    assert is_supported(model.folded, "fp16", 90)
    assert not is_supported(model.folded, "fp16", 89)
    assert not is_supported(model.folded, "tf32", 90)


@pytest.mark.parametrize(
    "blocks",
    [
        (LOGITS,),
        (DenseBlock(2049), LOGITS),  # more than the warps have tiles
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
def test_other_networks_are_not_supported(blocks):
    assert not is_supported(Model("drawn", blocks), "fp16", 90)


def picked(tensor, *place):
    """The elements of `tensor` at `place`, and 0 outside of it."""
    place = np.broadcast_arrays(*place)
    inside = np.all([(at >= 0) & (at < n) for at, n in zip(place, tensor.shape, strict=True)], 0)
    return np.where(inside, tensor[tuple(np.where(inside, at, 0) for at in place)], 0)


def tensors_of(model):
    random = np.random.default_rng(3)
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in model.parameters().items()
    }


ODD = Model(
    "odd",
    (
        ConvBlock(9, (4, 3), padding=(1, 2), pool=Pool("max")),
        ConvBlock(33, (3, 4), padding=(2, 1), pool=Pool("max")),
        DenseBlock(300),
        DenseBlock(7, activation=IDENTITY),
    ),
    (1, 21, 20),
)
NETWORKS = [*(named(name).folded for name in ARCHITECTURES), ODD]


@pytest.mark.parametrize("model", NETWORKS, ids=lambda model: model.name)
def test_a_warp_finds_its_units_and_inputs(model):
    tensors = tensors_of(model)
    found = pack(model, tensors)
    dense, logits = (shape.name for shape in model.shapes()[-2:])
    hidden = found["hidden"]
    blocks, warps, steps, lanes, places = hidden.shape
    share = found["last"].shape[2]
    units, inputs = tensors[f"{dense}.weight"].shape
    assert (blocks, lanes, places) == (CLUSTER, 32, 8)
    assert share % 16 == 0
    assert (share - 16) * blocks < units <= share * blocks
    assert warps <= 16
    block, warp, step, lane, place = np.indices(hidden.shape)
    tile, split = warp % (share // 16), warp // (share // 16)
    unit = block * share + tile * 16 + place // 2 % 2 * 8 + lane // 4
    # The order of 16 inputs is our own: four in a row are one lane's.
    at = 16 * (split * steps + step) + lane % 4 * 4 + place // 4 * 2 + place % 2
    weight = tensors[f"{dense}.weight"]
    if len(model.blocks) == 4:
        c, h, w = model.shapes()[1].output
        pixel, channel = np.divmod(at, -(-c // 8) * 8)
        i, j = np.divmod(pixel, w)
        expected = picked(weight.reshape(units, c, h, w), unit, channel, i, j)
    else:
        expected = picked(weight * np.float32(256 / 255), unit, at)
    np.testing.assert_array_equal(hidden, expected.astype(np.float16), strict=True)
    assert np.count_nonzero(expected) == units * inputs

    block, label, unit = np.indices(found["last"].shape)
    expected = picked(tensors[f"{logits}.weight"], label, block * share + unit)
    np.testing.assert_array_equal(found["last"], expected.astype(np.float16), strict=True)
    np.testing.assert_array_equal(found["hidden_bias"][:units], tensors[f"{dense}.bias"])
    assert found["hidden_bias"].shape == (share * blocks,)
    assert not found["hidden_bias"][units:].any()
    np.testing.assert_array_equal(found["last_bias"], tensors[f"{logits}.bias"], strict=True)
    assert all(tensor.flags.c_contiguous for tensor in found.values())


@pytest.mark.parametrize(
    "model", [m for m in NETWORKS if len(m.blocks) == 4], ids=lambda model: model.name
)
def test_a_block_finds_its_filters(model):
    tensors = tensors_of(model)
    found = pack(model, tensors)
    for name, of in (("first", "conv1"), ("second", "conv2")):
        weight = tensors[f"{of}.weight"]
        tile, step, lane, place = np.indices(found[name].shape)
        k, column = 16 * step + 8 * (place // 2) + 2 * (lane % 4) + place % 2, 8 * tile + lane // 4
        # The first filters have an even number of taps in a row, the second whole tiles of inputs.
        width, c = -(-weight.shape[3] // 2) * 2, -(-weight.shape[1] // 8) * 8
        if name == "first":
            place, scale = (column, 0, *np.divmod(k, width)), np.float32(256 / 255)
        else:
            tap, channel = np.divmod(k, c)
            place, scale = (column, channel, *np.divmod(tap, weight.shape[3])), 1
        expected = picked(weight * scale, *place)
        np.testing.assert_array_equal(found[name], expected.astype(np.float16), strict=True)
        assert np.count_nonzero(expected) == weight.size
        bias = found[f"{name}_bias"]
        assert bias.shape == (8 * len(found[name]),)
        np.testing.assert_array_equal(bias[: len(weight)], tensors[f"{of}.bias"])
        assert not bias[len(weight) :].any()
