"""A network as frozen data: blocks, shape inference and the named architectures.

A block is what a backend may fuse: a linear map with batch norm, activation and pooling. Blocks
check their own fields; `Model` checks that they fit together.

Letters, in all packages:

    n         images in a batch
    c         input channels
    k         output channels; of a dense block, units
    h, w      height and width of an image
    oh, ow    height and width of an output
    r, s      height and width of a filter
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from lenet.errors import InvalidModel
from lenet.pixels import HEIGHT, WIDTH

Pair: TypeAlias = tuple[int, int]
"""(vertical, horizontal)."""

Shape: TypeAlias = tuple[int, ...]
"""(c, h, w) of an image or (units,) of a vector, without n."""

MAX_FIELD = 1 << 16
"""The largest size, count or step of a block."""

_SHOWN_CHARACTERS = 60
"""The longest part of a description that a message repeats."""

MAX_PARAMETER = 1e30
"""The largest activation parameter; float32 holds it."""

MAX_VALUES = 1 << 24
"""The most values of one block for one image, so that a small file cannot exhaust memory."""

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

    `parameter`: the ceiling of `clipped_relu`, min(max(x, 0), ceiling), and the alpha of `elu`,
    alpha (exp(x) - 1) below zero. The other functions ignore it.
    """

    kind: ActivationKind
    parameter: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ActivationKind):
            raise InvalidModel(
                f"activation: kind is {self.kind!r}, expected one of "
                f"{', '.join(get_args(ActivationKind))}"
            )
        # Not converted first: an integer may be too large for a float.
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

    `max` ignores padding; `average` counts it as zeros.
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
    """Cross-correlation, optional batch norm, activation, optional pooling."""

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
    """Matrix product, optional batch norm, activation. Flattens (c, h, w) in this order."""

    units: int
    batch_norm: bool = False
    activation: Activation = RELU

    def __post_init__(self) -> None:
        _integer("dense", "units", self.units)


Block: TypeAlias = ConvBlock | DenseBlock


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shapes in one block: `input`, `linear` (before pooling) and `output`."""

    name: str
    input: Shape
    linear: Shape
    output: Shape


@dataclass(frozen=True, slots=True)
class Model:
    """Blocks in order, from an image of shape `input` to logits, which softmax follows.

    Raises:
        InvalidModel: a block does not fit the one before it; the message names it.
    """

    name: str
    blocks: tuple[Block, ...]
    input: Shape = (1, HEIGHT, WIDTH)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidModel(f"model: name is {self.name!r}, expected a string")
        if not self.blocks:
            raise InvalidModel(f"model {self.name!r}: it has no blocks")
        last = self.blocks[-1]
        if not isinstance(last, DenseBlock) or last.batch_norm or last.activation != IDENTITY:
            raise InvalidModel(
                f"model {self.name!r}: the last block must be dense, without batch norm and with "
                "the identity as activation: it computes the logits"
            )
        self.shapes()

    @property
    def classes(self) -> int:
        """The number of logits."""
        (units,) = self.shapes()[-1].output
        return units

    def with_classes(self, classes: int) -> Model:
        """A copy of the network with `classes` logits."""
        return replace(self, blocks=(*self.blocks[:-1], DenseBlock(classes, activation=IDENTITY)))

    @property
    def folded(self) -> Model:
        """A copy of the network without batch norm, as it is served."""
        return replace(
            self, blocks=tuple(replace(block, batch_norm=False) for block in self.blocks)
        )

    def shapes(self) -> tuple[BlockShape, ...]:
        """A `BlockShape` for each block, named conv1, conv2, ..., dense1, ... in order."""
        return tuple(self._shapes())

    def _shapes(self) -> Iterator[BlockShape]:
        shape = self.input
        counts = {"conv": 0, "dense": 0}
        for block in self.blocks:
            kind = "conv" if isinstance(block, ConvBlock) else "dense"
            counts[kind] += 1
            name = f"{kind}{counts[kind]}"
            if isinstance(block, DenseBlock):
                linear: Shape = (block.units,)
                output = linear
            else:
                linear, output = _conv_shapes(f"model {self.name!r}, {name}", block, shape)
            if math.prod(linear) > MAX_VALUES:
                raise InvalidModel(
                    f"model {self.name!r}, {name}: its output for one image has shape "
                    f"{linear}, expected at most {MAX_VALUES} values"
                )
            yield BlockShape(name, shape, linear, output)
            shape = output

    def parameters(self) -> dict[str, Shape]:
        """Shapes by tensor name, in order.

        `<block>.weight` is (k, c, r, s) or (units, inputs). After it come `gamma`, `beta`, `mean`
        and `variance` of shape (k,) with batch norm, or `bias` of shape (k,) without.
        """
        found: dict[str, Shape] = {}
        for block, shape in zip(self.blocks, self.shapes(), strict=True):
            if isinstance(block, ConvBlock):
                weight: Shape = (block.channels, shape.input[0], *block.kernel)
            else:
                weight = (block.units, math.prod(shape.input))
            found[f"{shape.name}.weight"] = weight
            rest = ("gamma", "beta", "mean", "variance") if block.batch_norm else ("bias",)
            found.update({f"{shape.name}.{part}": weight[:1] for part in rest})
        return found

    def to_json(self) -> str:
        """The canonical JSON description: sorted keys, no spaces."""
        blocks = [
            {"type": "conv" if isinstance(block, ConvBlock) else "dense", **asdict(block)}
            for block in self.blocks
        ]
        description = {"name": self.name, "input": self.input, "blocks": blocks}
        return json.dumps(description, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Model:
        """The model that `to_json` described, or a person, who may leave out what has a default.

        An activation may be its name alone, as may a pool; that of the last block is the identity
        unless another is given. `input` is (1, 28, 28) by default.

        Raises:
            InvalidModel: not JSON, an unknown or missing key, or an impossible network; the message
                names the block.
        """
        try:
            description = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise InvalidModel(f"model: the description is not JSON ({exc})") from exc
        if not isinstance(description, dict):
            raise InvalidModel(f"model: got {_shown(description)}, expected an object")
        _check_keys("model", description, {"name", "blocks"}, {"input"})
        name, entries = description["name"], description["blocks"]
        if not isinstance(entries, list):
            raise InvalidModel(f"model: blocks is {_shown(entries)}, expected a list")
        shape = description.get("input", [1, HEIGHT, WIDTH])
        if (
            not isinstance(shape, list)
            or len(shape) != 3
            or any(type(size) is not int or not 1 <= size <= MAX_FIELD for size in shape)
        ):
            raise InvalidModel(
                f"model: input is {_shown(shape)}, expected three integers from 1 to {MAX_FIELD}"
            )
        blocks = tuple(
            read_block(entry, f"block {number}", last=number == len(entries))
            for number, entry in enumerate(entries, 1)
        )
        return cls(name, blocks, tuple(shape))

    def fingerprint(self) -> str:
        """SHA-256 in hex of the served network; equal in files that can replace each other."""
        return hashlib.sha256(replace(self.folded, name="").to_json().encode()).hexdigest()


def read_block(entry: object, owner: str, *, last: bool) -> Block:
    """A block of a description; `owner` is its name in messages.

    Raises:
        InvalidModel: it describes none.
    """
    if not isinstance(entry, dict):
        raise InvalidModel(f"{owner}: got {_shown(entry)}, expected an object")
    kind = entry.get("type")
    if kind not in ("conv", "dense"):
        raise InvalidModel(f"{owner}: type is {_shown(kind)}, expected conv or dense")
    block = ConvBlock if kind == "conv" else DenseBlock
    required = {field.name for field in fields(block) if field.default is MISSING}
    optional = {field.name for field in fields(block)} - required
    _check_keys(owner, entry, required | {"type"}, optional)
    found = {name: value for name, value in entry.items() if name != "type"}
    norm = found.get("batch_norm", False)
    if type(norm) is not bool:
        raise InvalidModel(f"{owner}: batch_norm is {_shown(norm)}, expected true or false")
    try:
        found["activation"] = _part(
            Activation, found.get("activation", "identity" if last else "relu"), "activation"
        )
        if found.get("pool") is not None:
            found["pool"] = _part(Pool, found["pool"], "pool")
        return block(**found)
    except InvalidModel as exc:
        raise InvalidModel(f"{owner}, {exc}") from exc


def _part(kind: type[Any], value: object, owner: str) -> Any:
    """An activation or a pool, from its name or its fields."""
    if isinstance(value, str):
        return kind(value)
    if not isinstance(value, dict):
        raise InvalidModel(f"{owner}: got {_shown(value)}, expected a name or an object")
    _check_keys(owner, value, {"kind"}, {field.name for field in fields(kind)} - {"kind"})
    return kind(**value)


def _check_keys(owner: str, found: dict[str, Any], required: set[str], optional: set[str]) -> None:
    if unknown := sorted(found.keys() - required - optional):  # first: it may be a misspelt one
        known = ", ".join(sorted(required | optional))
        raise InvalidModel(f"{owner}: {_shown(unknown[0])} is unknown, expected some of {known}")
    if missing := sorted(required - found.keys()):
        raise InvalidModel(f"{owner}: {missing[0]} is missing")


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deep"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def window_count(size: int, window: int, stride: int, padding: int, dilation: int = 1) -> int:
    """How many windows fit: floor((size + 2 p - d (window - 1) - 1) / stride) + 1; < 1 if none."""
    return (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1


def _conv_shapes(owner: str, block: ConvBlock, shape: Shape) -> tuple[Shape, Shape]:
    if len(shape) != 3:
        raise InvalidModel(f"{owner}: a convolution cannot follow a dense block")
    geometry = zip(
        shape[1:], block.kernel, block.stride, block.padding, block.dilation, strict=True
    )
    size = tuple(window_count(*axis) for axis in geometry)
    if min(size) < 1:
        axis = 0 if size[0] < 1 else 1
        h, r, stride, p, d = (
            pair[axis]
            for pair in (shape[1:], block.kernel, block.stride, block.padding, block.dilation)
        )
        raise InvalidModel(
            f"{owner}: a kernel of {block.kernel} with dilation {block.dilation} does not fit an "
            f"image of {shape[1:]} with padding {block.padding}: it has floor(({h} + 2*{p} - {d}*"
            f"({r} - 1) - 1) / {stride}) + 1 = {size[axis]} positions, expected at least 1"
        )
    linear = (block.channels, *size)
    pool = block.pool
    if pool is None:
        return linear, linear
    if pool.kind == "global_average":
        return linear, (block.channels, 1, 1)
    windows = zip(size, pool.size, pool.stride, pool.padding, strict=True)
    pooled = tuple(window_count(*axis) for axis in windows)
    if min(pooled) < 1:
        axis = 0 if pooled[0] < 1 else 1
        h, r, stride, p = (pair[axis] for pair in (size, pool.size, pool.stride, pool.padding))
        raise InvalidModel(
            f"{owner}: a pooling window of {pool.size} with padding {pool.padding} does not fit "
            f"an image of {size}: it has floor(({h} + 2*{p} - {r}) / {stride}) + 1 = "
            f"{pooled[axis]} positions, expected at least 1"
        )
    return linear, (block.channels, *pooled)


def _lenet(c1: int, c2: int, units: int, kernel: int = 5, **options: Any) -> tuple[Block, ...]:
    """Two convolutions with max pooling, then two dense blocks."""
    geometry = {"kernel": (kernel, kernel), "pool": Pool("max"), **options}
    norm = options.get("batch_norm", False)
    return ConvBlock(c1, **geometry), ConvBlock(c2, **geometry), DenseBlock(units, norm), _LOGITS


_LOGITS = DenseBlock(10, activation=IDENTITY)

ARCHITECTURES: Mapping[str, Model] = MappingProxyType(
    {
        name: Model(name, blocks)
        for name, blocks in {
            "lenet": _lenet(20, 50, 500, batch_norm=True),
            "lenet-classic": _lenet(20, 50, 500, activation=IDENTITY),
            "lenet-6-16": _lenet(6, 16, 120),
            "cnn-32-64": _lenet(32, 64, 128, kernel=3, padding=(1, 1)),
            "mlp": (DenseBlock(500), _LOGITS),
        }.items()
    }
)
"""The named architectures. All can be trained and served."""


def named(name: str) -> Model:
    """The architecture called `name`.

    Raises:
        InvalidModel: it is unknown; the message lists the known ones.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(ARCHITECTURES)
        raise InvalidModel(f"model: {name!r} is unknown, expected one of {known}") from None
