from __future__ import annotations

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


@given(model=models(), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_packed_weights_give_the_same_sums_of_channels_last_inputs(model, seed):
    random = np.random.default_rng(seed)
    layouts, first = layout(model), model.shapes()[0].name
    assert list(layouts) == list(model.parameters())
    for name, shape in model.parameters().items():
        tensor = random.normal(size=shape)
        packed = layouts[name].pack(tensor)
        np.testing.assert_array_equal(layouts[name].unpack(packed), tensor, strict=True)
        assert packed.shape == layouts[name].shape
        assert packed.flags.c_contiguous
        owner = next(one for one in model.shapes() if name.startswith(f"{one.name}."))
        if len(shape) == 1:
            found, expected = packed, tensor
        else:
            c, *sides = shape[1:] if len(shape) == 4 else owner.input
            x = random.normal(size=(c, *sides))
            wide = np.zeros((*sides, c if owner.name == first else padded(c)))
            wide[..., :c] = np.moveaxis(x, 0, -1)
            found, expected = (
                packed.reshape(len(packed), -1) @ wide.ravel(),
                (tensor.reshape(len(tensor), -1) @ x.ravel()),
            )
        np.testing.assert_allclose(found[: len(tensor)], expected, rtol=1e-9, atol=1e-9)
        assert len(found) == padded(len(tensor))
        assert not found[len(tensor) :].any()
