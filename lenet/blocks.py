"""The blocks that a network is made of: what a backend may fuse, as frozen data.

They check themselves one by one; whether they fit together is `lenet.model`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lenet.errors import InvalidModel

Pair: TypeAlias = tuple[int, int]
"""(vertical, horizontal)."""

MAX_FIELD = 1 << 16
"""The largest size, count or step that a block may state; far above sense, far below overflow."""

MAX_PARAMETER = 1e30
"""The largest activation parameter; float32 holds it."""

ActivationKind = Literal["identity", "relu", "clipped_relu", "elu", "sigmoid", "tanh"]
PoolKind = Literal["max", "average", "global_average"]


def _integers(owner: str, field: str, value: object, least: int) -> Pair:
    if (
        not isinstance(value, (tuple, list))
        or len(value) != 2
        or any(type(item) is not int or not least <= item <= MAX_FIELD for item in value)
    ):
        raise InvalidModel(
            f"{owner}: {field} is {value!r}, expected two integers from {least} to {MAX_FIELD}"
        )
    return value[0], value[1]


def _integer(owner: str, field: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_FIELD:
        raise InvalidModel(
            f"{owner}: {field} is {value!r}, expected an integer from 1 to {MAX_FIELD}"
        )


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function.

    `parameter` is the ceiling of `clipped_relu`, min(max(x, 0), ceiling), and the alpha of `elu`,
    alpha (exp(x) - 1) below zero; the others ignore it.
    """

    kind: ActivationKind
    parameter: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ActivationKind):
            raise InvalidModel(
                f"activation: kind is {self.kind!r}, expected one of "
                f"{', '.join(get_args(ActivationKind))}"
            )
        # Compared, not converted: an integer too long for a float must end here too.
        if type(self.parameter) not in (int, float) or not 0 < self.parameter <= MAX_PARAMETER:
            raise InvalidModel(
                f"activation {self.kind}: parameter is {self.parameter!r}, "
                f"expected a number > 0 and <= {MAX_PARAMETER:.0e}"
            )
        object.__setattr__(self, "parameter", float(self.parameter))


IDENTITY = Activation("identity")
RELU = Activation("relu")


@dataclass(frozen=True, slots=True)
class Pool:
    """A pooling window. `global_average` covers the whole image and ignores the other fields.

    Padding of `max` is never the largest; padding of `average` counts as zeros.
    """

    kind: PoolKind
    size: Pair = (2, 2)
    stride: Pair = (2, 2)
    padding: Pair = (0, 0)

    def __post_init__(self) -> None:
        if self.kind not in get_args(PoolKind):
            raise InvalidModel(
                f"pool: kind is {self.kind!r}, expected one of {', '.join(get_args(PoolKind))}"
            )
        object.__setattr__(self, "size", _integers("pool", "size", self.size, 1))
        object.__setattr__(self, "stride", _integers("pool", "stride", self.stride, 1))
        object.__setattr__(self, "padding", _integers("pool", "padding", self.padding, 0))
        if any(2 * p > size for p, size in zip(self.padding, self.size, strict=True)):
            raise InvalidModel(
                f"pool: padding is {self.padding}, expected at most half of size {self.size}, "
                "else a window could lie wholly outside the image"
            )


@dataclass(frozen=True, slots=True)
class ConvBlock:
    """Convolution (cross-correlation), batch norm if asked for, activation, pooling if given."""

    channels: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    batch_norm: bool = False
    activation: Activation = RELU
    pool: Pool | None = None

    def __post_init__(self) -> None:
        _integer("conv", "channels", self.channels)
        for field, least in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            object.__setattr__(self, field, _integers("conv", field, getattr(self, field), least))


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """Matrix product, batch norm if asked for, activation. Flattens (c, h, w) in that order."""

    units: int
    batch_norm: bool = False
    activation: Activation = RELU

    def __post_init__(self) -> None:
        _integer("dense", "units", self.units)


Block: TypeAlias = ConvBlock | DenseBlock
