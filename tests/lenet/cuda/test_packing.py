from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenet.cuda.packing import CLUSTER, first_fragments, layout, padded, whole_fragments
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model, Pool, named


@st.composite
def models(draw):
    """Networks on small images of one to three channels, with counts on both sides of a padding."""
    counts = st.sampled_from([1, 3, 8, 9, 16, 17, 20, 32, 33, 50])
    size = st.integers(1, 3)
    convolution = st.builds(
        ConvBlock,
        channels=counts,
        kernel=st.tuples(size, size),
        padding=st.just((1, 1)),
        batch_norm=st.booleans(),
        pool=st.none() | st.just(Pool("max")),
    )
    dense = st.builds(DenseBlock, counts, st.booleans())
    image = (draw(size), draw(st.integers(6, 9)), draw(st.integers(6, 9)))
    blocks = [
        *draw(st.lists(convolution, max_size=2)),
        *draw(st.lists(dense, max_size=2)),
        DenseBlock(draw(counts), activation=IDENTITY),
    ]
    return Model("drawn", tuple(blocks), image)


def numbered(shape, dtype=np.float64):
    """1, 2, 3, ...: no element is zero, and each is told from the others."""
    return np.arange(1, math.prod(shape) + 1, dtype=dtype).reshape(shape)


def expected(model, name, tensor):
    """The packed tensor as the table in the module's docstring has it, element by element."""
    shapes = {shape.name: shape for shape in model.shapes()}
    owner = name.partition(".")[0]
    source = shapes[owner].input
    first = owner == model.shapes()[0].name
    channels = source[0] if first else padded(source[0])
    k, *rest = np.indices(tensor.shape)
    if tensor.ndim == 1:
        shape, place = (padded(len(tensor)),), (k,)
    elif tensor.ndim == 4:
        c, r, s = rest
        shape = (padded(len(tensor)), *tensor.shape[2:], channels)
        place = (k, r, s, c)
    elif len(source) == 1:
        shape, place = (padded(len(tensor)), channels), (k, *rest)
    else:
        _, height, width = source
        c, inside = np.divmod(rest[0], height * width)
        row, column = np.divmod(inside, width)
        shape = (padded(len(tensor)), height * width * channels)
        place = (k, (row * width + column) * channels + c)
    packed = np.zeros(shape, tensor.dtype)
    packed[place] = tensor
    return packed


@pytest.mark.parametrize(
    ("channels", "wide"),
    [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (50, 64), (500, 512)],
)
def test_channels_are_rounded_up_when_they_are_padded(channels, wide):
    assert padded(channels) == wide


@given(model=models())
@settings(max_examples=60)
def test_every_element_has_its_place_and_the_rest_is_zero_when_packed(model):
    layouts = layout(model)
    assert list(layouts) == list(model.parameters())
    for name, shape in model.parameters().items():
        tensor = numbered(shape)
        packed = layouts[name].pack(tensor)
        np.testing.assert_array_equal(packed, expected(model, name, tensor), strict=True)
        assert packed.shape == layouts[name].shape
        assert packed.flags.c_contiguous


@given(model=models(), dtype=st.sampled_from([np.float16, np.float32, np.float64, np.int64]))
@settings(max_examples=60)
def test_a_tensor_comes_back_without_its_padding_when_it_is_unpacked(model, dtype):
    for name, packed in layout(model).items():
        tensor = numbered(model.parameters()[name], dtype)
        wide = packed.pack(tensor)
        wide[packed.pack(np.ones_like(tensor)) == 0] = 7
        np.testing.assert_array_equal(packed.unpack(wide), tensor, strict=True)


@given(model=models())
@settings(max_examples=30)
def test_what_comes_back_is_a_copy_when_it_is_unpacked(model):
    for name, packed in layout(model).items():
        wide = packed.pack(numbered(model.parameters()[name]))
        back = packed.unpack(wide)
        assert back.flags.c_contiguous
        assert not np.shares_memory(back, wide)


LENET = {
    "conv1.weight": (32, 5, 5, 1),
    "conv1": (32,),
    "conv2.weight": (64, 5, 5, 32),
    "conv2": (64,),
    "dense1.weight": (512, 4 * 4 * 64),
    "dense1": (512,),
    "dense2.weight": (16, 512),
    "dense2": (16,),
}
PACKED = {
    "lenet": LENET,
    "lenet-classic": LENET,
    "lenet-6-16": {
        "conv1.weight": (8, 5, 5, 1),
        "conv1": (8,),
        "conv2.weight": (16, 5, 5, 8),
        "conv2": (16,),
        "dense1.weight": (128, 4 * 4 * 16),
        "dense1": (128,),
        "dense2.weight": (16, 128),
        "dense2": (16,),
    },
    "cnn-32-64": {
        "conv1.weight": (32, 3, 3, 1),
        "conv1": (32,),
        "conv2.weight": (64, 3, 3, 32),
        "conv2": (64,),
        "dense1.weight": (128, 7 * 7 * 64),
        "dense1": (128,),
        "dense2.weight": (16, 128),
        "dense2": (16,),
    },
    "mlp": {
        "dense1.weight": (512, 28 * 28),
        "dense1": (512,),
        "dense2.weight": (16, 512),
        "dense2": (16,),
    },
}
"""By architecture: the weights, and under a block's name all of its vectors."""


@pytest.mark.parametrize("name", PACKED)
def test_the_named_architectures_have_these_shapes_when_packed(name):
    for tensor, packed in layout(named(name)).items():
        block = tensor.partition(".")[0]
        assert packed.shape == PACKED[name][tensor if tensor in PACKED[name] else block], tensor


def test_an_image_of_several_channels_is_not_padded_when_it_is_the_networks_own():
    convolutional = Model(
        "m", (ConvBlock(9, (3, 3)), DenseBlock(10, activation=IDENTITY)), (3, 6, 5)
    )
    assert layout(convolutional)["conv1.weight"].shape == (16, 3, 3, 3)
    assert layout(convolutional)["dense1.weight"].shape == (16, 4 * 3 * 16)
    flat = Model("m", (DenseBlock(10, activation=IDENTITY),), (3, 6, 5))
    assert layout(flat)["dense1.weight"].shape == (16, 6 * 5 * 3)


def picked(tensor, *place):
    """The elements of `tensor` at `place`, and 0 where there is none."""
    place = np.broadcast_arrays(*place)
    sizes = zip(place, tensor.shape, strict=True)
    inside = np.all([(at >= 0) & (at < size) for at, size in sizes], axis=0)
    return np.where(inside, tensor[tuple(np.where(inside, at, 0) for at in place)], 0)


def normal(*shape):
    return np.random.default_rng(math.prod(shape)).normal(size=shape).astype(np.float32)


def right(lane, place):
    """(k within a step, column) of the weight that a lane has at a place: see ptx.cuh."""
    return 8 * (place // 2) + 2 * (lane % 4) + place % 2, lane // 4


def first_filter(weight, k, channel):
    """The weight of tap `k` of the first convolution, whose rows have an even number of taps."""
    r, s = np.divmod(k, -(-weight.shape[3] // 2) * 2)
    return picked(weight * np.float32(256 / 255), channel, 0, r, s)


@pytest.mark.parametrize(
    ("shape", "packed"),
    [
        ((20, 1, 5, 5), (1, 2, 32, 4, 4)),
        ((6, 1, 5, 5), (1, 2, 32, 1, 4)),
        ((9, 1, 3, 4), (1, 1, 32, 2, 4)),
        ((40, 1, 3, 3), (2, 1, 32, 4, 4)),
        ((8, 1, 7, 7), (1, 4, 32, 1, 4)),
        ((1, 1, 1, 1), (1, 1, 32, 1, 4)),
    ],
)
def test_a_lane_finds_the_filters_of_its_channels_when_the_first_are_packed(shape, packed):
    weight = normal(*shape)
    found = first_fragments(weight, 1)
    chunks, steps, lanes, tiles, places = packed
    assert found.shape == (chunks, 1, steps, lanes, tiles, places)
    chunk, _, step, lane, tile, place = np.indices(found.shape)
    k, column = right(lane, place)
    # Two columns of each tile belong to a lane; its channels follow each other tile by tile.
    channel = (chunk * 4 + column // 2) * tiles * 2 + tile * 2 + column % 2
    expected = first_filter(weight, 16 * step + k, channel)
    np.testing.assert_array_equal(found, expected.astype(np.float16), strict=True)
    assert found.flags.c_contiguous


def test_two_halves_make_a_float_when_the_first_filters_are_packed_in_two_parts():
    weight = normal(20, 1, 5, 5)
    high, low = first_fragments(weight, 2)[0].astype(np.float64)
    assert np.any(low)
    np.testing.assert_array_equal(high, first_fragments(weight, 1)[0, 0])
    step, lane, tile, place = np.indices(high.shape)
    k, column = right(lane, place)
    channel = column // 2 * 8 + tile * 2 + column % 2
    true = first_filter(weight, 16 * step + k, channel)
    # 11 bits each; below 2^-14 a half has a fixed step of 2^-24, and so an error of half of it.
    np.testing.assert_allclose(high + low, true, rtol=2.0**-22, atol=2.0**-25)


def tensors_of(model):
    return {name: normal(*shape) for name, shape in model.parameters().items()}


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
WHOLE = [*(named(name).folded for name in PACKED), ODD]


@pytest.mark.parametrize("model", WHOLE, ids=lambda model: model.name)
def test_a_warp_finds_its_units_and_inputs_when_a_whole_network_is_packed(model):
    tensors = tensors_of(model)
    found = whole_fragments(model, tensors)
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
    "model", [m for m in WHOLE if len(m.blocks) == 4], ids=lambda model: model.name
)
def test_a_block_finds_its_filters_when_a_whole_network_is_packed(model):
    tensors = tensors_of(model)
    found = whole_fragments(model, tensors)
    for name, of in (("first", "conv1"), ("second", "conv2")):
        weight = tensors[f"{of}.weight"]
        tile, step, lane, place = np.indices(found[name].shape)
        k, column = right(lane, place)
        if name == "first":
            expected = first_filter(weight, 16 * step + k, 8 * tile + column)
        else:
            c, s = -(-weight.shape[1] // 8) * 8, weight.shape[3]
            tap, channel = np.divmod(16 * step + k, c)
            expected = picked(weight, 8 * tile + column, channel, tap // s, tap % s)
        np.testing.assert_array_equal(found[name], expected.astype(np.float16), strict=True)
        assert np.count_nonzero(expected) == weight.size
        bias = found[f"{name}_bias"]
        assert bias.shape == (8 * len(found[name]),)
        np.testing.assert_array_equal(bias[: len(weight)], tensors[f"{of}.bias"])
        assert not bias[len(weight) :].any()


def test_the_arguments_of_the_kernel_come_in_their_order_when_a_whole_network_is_packed():
    convolutions = ["first", "first_bias", "second", "second_bias"]
    dense = ["hidden", "hidden_bias", "last", "last_bias"]
    for model in (named("lenet").folded, named("mlp").folded):
        names = list(whole_fragments(model, tensors_of(model)))
        assert names == (convolutions if len(model.blocks) == 4 else []) + dense
