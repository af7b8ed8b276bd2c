from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lenet.cuda.packing import layout, padded
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model, Pool


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
    """1, 2, 3, ...: no element is zero, and all differ."""
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
        back = packed.unpack(wide)
        np.testing.assert_array_equal(back, tensor, strict=True)
        assert back.flags.c_contiguous
        assert not np.shares_memory(back, wide)
