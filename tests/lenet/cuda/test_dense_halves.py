from __future__ import annotations

import numpy as np
import pytest

from lenet import reference
from lenet.cuda.dense_halves import factors, is_supported, pack, shared_bytes, side
from lenet.cuda.device import Limits
from lenet.cuda.halves import largest_input
from lenet.cuda.layers import pack as pack_all
from lenet.cuda.layers import takes_halves
from lenet.model import IDENTITY, Activation, ConvBlock, DenseBlock, Model, Pool

HOPPER, GEFORCE, TURING = Limits(90, 232_448, 132), Limits(89, 101_376, 128), Limits(75, 65_536, 40)
LAST = DenseBlock(10, activation=IDENTITY)


def test_float32_on_ampere_and_later_behind_at_most_three_layers_is_supported():
    assert is_supported("fp32", HOPPER, 3)
    assert is_supported("fp32", GEFORCE, 0)
    assert not is_supported("fp32", HOPPER, 4)
    assert not is_supported("fp32", TURING, 0)
    assert not is_supported("fp16", HOPPER, 0)
    assert not is_supported("tf32", HOPPER, 0)


def test_hidden_dense_layers_alone_are_computed_so(random_weights):
    model = Model("m", (ConvBlock(8, (5, 5)), DenseBlock(30), DenseBlock(20), LAST))
    names = ("conv1", "dense1", "dense2", "dense3")
    assert [takes_halves(model, name, "fp32", HOPPER) for name in names] == [
        *(False, True, True, False)
    ]
    packed = pack_all(random_weights("mlp"), "fp32", HOPPER)
    assert {"dense1.halves", "dense1.factors"} <= packed.keys()
    assert "dense2.halves" not in packed
    for other in (
        pack_all(random_weights("mlp"), "fp32", HOPPER, own=False),
        pack_all(random_weights("mlp"), "fp16", HOPPER),
    ):
        assert "dense1.halves" not in other


@pytest.mark.parametrize(
    ("rows", "units", "limits", "expected"),
    [
        (8192, 512, HOPPER, 128),
        (4096, 512, HOPPER, 128),  # 128 blocks for 132 multiprocessors
        (2048, 512, HOPPER, 64),
        (8192, 32, HOPPER, 64),
        (8192, 512, GEFORCE, 64),  # 136 KiB do not fit
    ],
)
def test_blocks_are_large_where_most_multiprocessors_get_one(rows, units, limits, expected):
    assert side(rows, units, limits) == expected
    assert shared_bytes(expected) <= limits.shared_bytes


def test_both_halves_are_nearly_the_weights_and_lie_as_a_warp_multiplies_them():
    weight = np.random.default_rng(5).standard_normal((24, 100)).astype(np.float32)
    weight[3] *= np.float32(1e-20)
    packed = pack(weight)
    assert packed.shape == (3, 8, 32, 2, 4)
    of_units = factors(weight, 1.0)[1:].astype(float).prod(1)
    both = packed.astype(float).sum(3).reshape(3, 8, 8, 4, 2, 2)  # tile, step, g, t, half, e
    matrix = both.transpose(0, 2, 1, 4, 3, 5).reshape(24, 128)
    undone = matrix * (of_units * 2.0**14)[:, None]  # 2^14 is the factor of inputs up to 1
    np.testing.assert_allclose(undone[:, :100], weight, rtol=1e-6, atol=2.0**-30)
    np.testing.assert_allclose(undone[3, :100], weight[3], rtol=1e-6, atol=1e-28)
    assert not undone[:, 100:].any()


@pytest.mark.parametrize("kind", ["relu", "sigmoid", "tanh", "elu"])
def test_no_image_brings_an_input_beyond_its_bound(kind, random_weights):
    activation = Activation(kind, 2.0) if kind == "elu" else Activation(kind)
    model = Model(
        "m",
        (
            ConvBlock(8, (5, 5), activation=activation, pool=Pool("max")),
            DenseBlock(30, activation=activation),
            LAST,
        ),
    )
    file = random_weights(model)
    noise = np.random.default_rng(5).integers(0, 256, (64, 28, 28), np.uint8)
    images = np.concatenate([noise, np.zeros_like(noise[:1]), np.full_like(noise[:1], 255)])
    exact = {name: tensor.astype(float) for name, tensor in file.tensors.items()}
    outputs: dict[str, float] = {}
    for step in reference.steps(model, exact, images):
        outputs[step.name] = float(abs(step.values).max())
    bounds = [largest_input(file, name) for name in ("conv1", "dense1", "dense2")]
    assert bounds[0] == 1
    for bound, found in zip(bounds[1:], list(outputs.values())[:2], strict=True):
        assert found <= bound
        assert bound <= max(1.0, 1000 * found)
