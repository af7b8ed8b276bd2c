from __future__ import annotations

import pytest

from lenet.errors import InvalidModel
from lenet.model import MAX_FIELD, Activation, ConvBlock, DenseBlock, Pool


def test_blocks_are_values_when_they_are_described_alike():
    assert ConvBlock(6, [5, 5], pool=Pool("max", [2, 2])) == ConvBlock(6, (5, 5), pool=Pool("max"))
    assert hash(ConvBlock(6, [5, 5])) == hash(ConvBlock(6, (5, 5)))
    assert repr(Activation("elu", 1)) == repr(Activation("elu", 1.0))


@pytest.mark.parametrize("parameter", [0, -1.0, float("nan"), float("inf"), 10**400, True, "1"])
def test_an_activation_is_refused_when_its_parameter_is_no_positive_number(parameter):
    with pytest.raises(InvalidModel, match=r"activation elu: parameter is .*, expected a number"):
        Activation("elu", parameter)


@pytest.mark.parametrize("kind", ["softplus", "", None, ["relu"]])
def test_an_activation_is_refused_when_its_kind_is_unknown(kind):
    with pytest.raises(
        InvalidModel, match=r"activation: kind is .* expected one of identity, relu"
    ):
        Activation(kind)


@pytest.mark.parametrize("kind", ["median", {}])
def test_a_pool_is_refused_when_its_kind_is_unknown(kind):
    with pytest.raises(InvalidModel, match=r"pool: kind is .* expected one of max, average"):
        Pool(kind)


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("kernel", (0, 5), 1),
        ("kernel", (5,), 1),
        ("kernel", 5, 1),
        ("kernel", (5, 5.0), 1),
        ("kernel", (MAX_FIELD + 1, 1), 1),
        ("stride", (1, 0), 1),
        ("stride", "11", 1),
        ("padding", (-1, 0), 0),
        ("padding", (True, 0), 0),
        ("dilation", (0, 1), 1),
        ("dilation", (2**70, 1), 1),
    ],
)
def test_a_convolution_is_refused_when_a_field_is_no_pair_in_range(field, value, least):
    fields = {"channels": 6, "kernel": (5, 5), field: value}
    with pytest.raises(
        InvalidModel, match=f"conv: {field} is .*, expected two integers from {least} to 65536"
    ):
        ConvBlock(**fields)


@pytest.mark.parametrize("value", [0, -3, 1.0, True, None, MAX_FIELD + 1])
def test_a_block_is_refused_when_its_width_is_no_count(value):
    with pytest.raises(InvalidModel, match=r"conv: channels is .*, expected an integer from 1"):
        ConvBlock(value, (5, 5))
    with pytest.raises(InvalidModel, match=r"dense: units is .*, expected an integer from 1"):
        DenseBlock(value)


@pytest.mark.parametrize("field", ["size", "stride"])
def test_a_pool_is_refused_when_a_field_is_no_pair_in_range(field):
    with pytest.raises(InvalidModel, match=f"pool: {field} is"):
        Pool("max", **{field: (2, 0)})


def test_a_pool_is_refused_when_a_window_could_lie_outside_the_image():
    assert Pool("max", (3, 2), padding=(1, 1)).padding == (1, 1)
    with pytest.raises(InvalidModel, match="at most half of size"):
        Pool("max", (3, 2), padding=(2, 1))
    with pytest.raises(InvalidModel, match="at most half of size"):
        Pool("average", (2, 3), padding=(0, 2))
