"""Weights that were made elsewhere: from a state dict or Keras-style arrays to a weight file.

Files are safetensors or npz (without pickled objects). Two layouts are known:

    torch   weight (k, c, r, s), (units, inputs); an image is flattened (c, h, w)
    keras   kernel (r, s, c, k), (inputs, units); an image is flattened (h, w, c)

Batch norm is folded in float64, with the maker's epsilon; a layer may have a bias before it. Keras'
padding "same" may need one row more below an image than above. Then the kernel gets a row of zeros
above, which shifts its window, and the padding is the larger of the two on both sides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lenet.model import ConvBlock, DenseBlock, Model, Pair, read_block
from trainer.errors import InvalidImport
from trainer.ops import Tensor
from trainer.tensor_files import by_number

MAX_MAPPING_BYTES = 1 << 20

Layout: TypeAlias = Literal["torch", "keras"]

EPSILONS: dict[Layout, float] = {"torch": 1e-5, "keras": 1e-3}
"""The defaults of batch norm in either library."""

_PARTS: dict[str, str] = {
    **{name: name for name in ("weight", "bias", "gamma", "beta", "mean", "variance")},
    "kernel": "weight",
    "running_mean": "mean",
    "running_var": "variance",
    "moving_mean": "mean",
    "moving_variance": "variance",
}
_NORM = ("gamma", "beta", "mean", "variance")
_PREFIXES = ("module.", "_orig_mod.", "model.", "state_dict.")


# Naming


@dataclass(frozen=True, slots=True)
class Source:
    """The network that a file holds.

    `model` computes the same with symmetric padding. `shifts`: rows and columns of zeros that the
    kernels of some layers get for that, above and on the left.
    """

    model: Model
    shifts: Mapping[str, Pair]

    def weights(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """For each layer: name, shape of the maker's weight in torch, whether it has batch norm."""
        shapes = self.model.parameters()
        for block, shape in zip(self.model.blocks, self.model.shapes(), strict=True):
            weight = shapes[f"{shape.name}.weight"]
            if len(weight) == 4:
                down, right = self.shifts.get(shape.name, (0, 0))
                weight = (*weight[:2], weight[2] - down, weight[3] - right)
            yield shape.name, weight, block.batch_norm


def read_source(text: str) -> Source:
    """The network of a description whose padding may also be "same" or "valid".

    Raises:
        InvalidModel: as `Model.from_json`.
        InvalidImport: a padding cannot be computed.
    """
    try:
        description = json.loads(text)
        blocks = description["blocks"]
        wanted = [block.get("padding") for block in blocks]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return Source(Model.from_json(text), {})
    shifts: dict[str, Pair] = {}
    convolutions = 0
    for number, (block, padding) in enumerate(zip(blocks, wanted, strict=True)):
        convolutions += block.get("type") == "conv"
        if padding == "valid":
            block["padding"] = [0, 0]
        elif padding == "same":
            block["padding"] = [0, 0]
            so_far = {**description, "blocks": [*blocks[:number], {"type": "dense", "units": 1}]}
            size = Model.from_json(json.dumps(so_far)).shapes()[-1].input[1:]
            one = read_block(block, f"block {number + 1}", last=False)
            if not isinstance(one, ConvBlock) or len(size) != 2:
                raise InvalidImport(f"block {number + 1}: only a convolution has a padding")
            padded, shift = _same(one, size, f"block {number + 1}")
            block["padding"] = list(padded)
            block["kernel"] = [k + more for k, more in zip(one.kernel, shift, strict=True)]
            if any(shift):
                shifts[f"conv{convolutions}"] = shift
    return Source(Model.from_json(json.dumps(description)), shifts)


def _same(block: ConvBlock, size: Sequence[int], owner: str) -> tuple[Pair, Pair]:
    """Padding, and rows of zeros before the kernel's, for an output of ceil(size / stride).

    The total is max((ceil(size / stride) - 1) stride + d (k - 1) + 1 - size, 0); the odd row of it
    is below, on the right. Source: TensorFlow's documentation of `tf.nn`.
    """
    padding, shift = [], []
    for h, k, stride, d in zip(size, block.kernel, block.stride, block.dilation, strict=True):
        total = max((math.ceil(h / stride) - 1) * stride + d * (k - 1) + 1 - h, 0)
        odd = total % 2
        if odd and d > 1:
            raise InvalidImport(
                f'{owner}: "same" pads {total // 2} and {total - total // 2} rows, and with a '
                f"dilation of {d} no kernel with padding on both sides does the same"
            )
        padding.append(total - total // 2)
        shift.append(odd)
    return (padding[0], padding[1]), (shift[0], shift[1])


def without_prefix(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """`tensors` without what a wrapper put before all their names, and this prefix, "" for none.

    DataParallel, torch.compile and Lightning put such; a checkpoint may be a dictionary of more.
    """
    names, prefix = list(tensors), ""
    while names and (
        found := [one for one in _PREFIXES if all(name.startswith(one) for name in names)]
    ):
        names = [name.removeprefix(found[0]) for name in names]
        prefix += found[0]
    return dict(zip(names, tensors.values(), strict=True)), prefix


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Keras if a tensor is called `kernel`, else torch."""
    return "keras" if any(_part_of(name)[1] == "kernel" for name in tensors) else "torch"


def mapped(
    tensors: Mapping[str, Tensor], source: Source, layout: Layout, mapping: Mapping[str, str]
) -> dict[str, str]:
    """`mapping`, from names as `conv1.weight` to those of the file, checked.

    Raises:
        InvalidImport: a name is unknown or missing.
    """
    known = {
        f"{layer}.{part}"
        for layer, _, norm in source.weights()
        for part in ("weight", "bias", *(_NORM if norm else ()))
    }
    for name, taken in mapping.items():
        if name not in known:
            raise InvalidImport(
                f"the mapping names {name}, expected some of {', '.join(sorted(known))}"
            )
        if taken not in tensors:
            raise InvalidImport(
                f"the mapping takes {name} from {taken}, which the file does not hold: it holds "
                f"{_listed(tensors)}"
            )
    for layer, _, norm in source.weights():
        for part in ("weight", "mean", "variance") if norm else ("weight",):
            if f"{layer}.{part}" not in mapping:
                raise InvalidImport(f"the mapping lacks {layer}.{part}")
    _check_shapes(tensors, mapping, source, layout)
    return dict(mapping)


def matched(tensors: Mapping[str, Tensor], source: Source, layout: Layout) -> dict[str, str]:
    """Match the file's tensors to the network's: {"conv1.weight": its name there, ...}.

    The shape of a tensor shows whether it belongs to a convolution, a dense layer or a batch norm.
    Layers of one kind are matched in order. Three orders are tried: that of the file, that of the
    names (numbers by value), and that of the names with convolutions first.

    Raises:
        InvalidImport: no order fits; the message names the first tensor that does not fit in the
            order of the file.
    """
    layers: dict[str, dict[str, str]] = {}
    for name in tensors:
        owner, part = _part_of(name)
        if part not in _PARTS:
            raise InvalidImport(
                f"{name} is no part of a layer that is known: {', '.join(_PARTS)}; a mapping file "
                "can name the tensors to import"
            )
        layers.setdefault(owner, {})[_PARTS[part]] = name
    convolutions = {
        owner.partition(".")[0] for owner, parts in layers.items() if _rank(tensors, parts) == 4
    }
    orders = (
        list(layers),
        sorted(layers, key=by_number),
        sorted(
            layers,
            key=lambda owner: (owner.partition(".")[0] not in convolutions, by_number(owner)),
        ),
    )
    failure: InvalidImport | None = None
    for order in orders:
        try:
            return _in_order(tensors, {owner: layers[owner] for owner in order}, source, layout)
        except InvalidImport as exc:
            failure = failure or exc
    assert failure is not None, "bug: no order was tried"
    raise failure


def _in_order(
    tensors: Mapping[str, Tensor],
    layers: Mapping[str, Mapping[str, str]],
    source: Source,
    layout: Layout,
) -> dict[str, str]:
    linear: dict[int, list[Mapping[str, str]]] = {2: [], 4: []}
    norms: list[Mapping[str, str]] = []
    for owner, parts in layers.items():
        rank = _rank(tensors, parts)
        if rank in linear:
            linear[rank].append(parts)
        elif "mean" in parts and "variance" in parts:
            norms.append(parts)
        else:
            raise InvalidImport(
                f"{owner} is neither a convolution, a dense layer nor a batch norm: "
                f"{_listed({name: tensors[name] for name in parts.values()})}"
            )
    wanted = list(source.weights())
    for rank, kind in ((4, "convolutions"), (2, "dense layers")):
        expected = sum(len(weight) == rank for _, weight, _ in wanted)
        if len(linear[rank]) != expected:
            raise InvalidImport(
                f"the file has {len(linear[rank])} {kind}, expected {expected}, as "
                f"{source.model.name} has; --model names another: {_listed(tensors)}"
            )
    expected = sum(norm for _, _, norm in wanted)
    if len(norms) != expected:
        raise InvalidImport(
            f"the file has {len(norms)} batch norms, expected {expected}, as {source.model.name} "
            f"has; --model names another: {_listed(tensors)}"
        )
    found: dict[str, str] = {}
    for layer, weight, norm in wanted:
        parts = dict(linear[len(weight)].pop(0))
        if norm:
            # Torch calls gamma and beta weight and bias.
            named = {"weight": "gamma", "bias": "beta"}
            parts |= {named.get(part, part): name for part, name in norms.pop(0).items()}
        found |= {f"{layer}.{part}": name for part, name in parts.items()}
    _check_shapes(tensors, found, source, layout)
    return found


def _check_shapes(
    tensors: Mapping[str, Tensor], found: Mapping[str, str], source: Source, layout: Layout
) -> None:
    for layer, weight, _ in source.weights():
        for part in ("weight", "bias", *_NORM):
            name = found.get(f"{layer}.{part}")
            if name is None:
                continue
            expected = _stored(weight, layout) if part == "weight" else weight[:1]
            shape = tensors[name].shape
            if shape != expected:
                raise InvalidImport(
                    f"{layer}.{part}: {name} has shape {shape}, expected {expected}"
                    f"{_advice(shape, expected, layout)}"
                )


def _advice(shape: tuple[int, ...], expected: tuple[int, ...], layout: Layout) -> str:
    """Advice on a shape that does not fit."""
    other: Layout = "torch" if layout == "keras" else "keras"
    for axes in permutations(range(len(expected))):
        if len(shape) == len(expected) and tuple(shape[axis] for axis in axes) == expected:
            advice = f"; transposed by {axes} it would fit"
            if axes in _OTHER_LAYOUT:
                advice += f": is the layout {other} instead of {layout}?"
            return advice
    return ""


_OTHER_LAYOUT = ((1, 0), (3, 2, 0, 1), (2, 3, 1, 0))
"""The transpositions between the layouts."""


def _stored(weight: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape in the file of a weight that torch would store as `weight`."""
    if layout == "torch":
        return weight
    return (*weight[2:], weight[1], weight[0]) if len(weight) == 4 else weight[::-1]


def _part_of(name: str) -> tuple[str, str]:
    """Owner and part: `features.0`, `weight`; Keras' names end in `:0`."""
    name = name.removesuffix(":0").replace("/", ".")
    owner, _, part = name.rpartition(".")
    return owner, part


def _rank(tensors: Mapping[str, Tensor], parts: Mapping[str, str]) -> int:
    return tensors[parts["weight"]].ndim if "weight" in parts else 0


def _listed(tensors: Mapping[str, Tensor]) -> str:
    shown = [f"{name} {value.shape}" for name, value in list(tensors.items())[:20]]
    return ", ".join(shown) + (", ..." if len(tensors) > 20 else "")


def read_mapping(path: Path) -> dict[str, str]:
    """The object of names in a JSON file.

    Raises:
        InvalidImport: it cannot be read, or is something else.
    """
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_MAPPING_BYTES + 1))
    except OSError as exc:
        raise InvalidImport(f"{path}: cannot be read ({exc.strerror})") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidImport(
            f"{path}: is not JSON of at most {MAX_MAPPING_BYTES} bytes ({exc})"
        ) from exc
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise InvalidImport(
            f'{path}: expected an object as {{"conv1.weight": "features.0.weight"}}'
        )
    return found


# Converting


def converted(
    tensors: Mapping[str, Tensor],
    found: Mapping[str, str],
    source: Source,
    layout: Layout,
    epsilon: float,
    input_mean: float = 0.0,
    input_deviation: float = 1.0,
) -> dict[str, NDArray[np.float32]]:
    """The tensors of `source.model.folded`, computed in float64 and rounded once.

    The maker's input was (x - `input_mean`) / `input_deviation` for pixels x from 0 to 1; this goes
    into the first layer.

    Raises:
        InvalidImport: a variance is negative, or a weight too large for float32; the first layer
            pads its input, and `input_mean` is not 0: the zeros that it pads would be other pixels.
    """
    model, result = source.model, dict[str, NDArray[np.float32]]()
    for number, (block, shape) in enumerate(zip(model.blocks, model.shapes(), strict=True)):
        name = shape.name
        part = {
            one: tensors[found[f"{name}.{one}"]].astype(np.float64)
            for one in ("weight", "bias", *_NORM)
            if f"{name}.{one}" in found
        }
        weight = part["weight"]
        if layout == "keras":
            weight = weight.transpose(3, 2, 0, 1) if weight.ndim == 4 else weight.T
            if isinstance(block, DenseBlock) and len(shape.input) == 3:
                c, h, w = shape.input
                weight = weight.reshape(-1, h, w, c).transpose(0, 3, 1, 2).reshape(len(weight), -1)
        if name in source.shifts:
            down, right = source.shifts[name]
            weight = np.pad(weight, ((0, 0), (0, 0), (down, 0), (right, 0)))
        bias = part.get("bias", np.zeros(len(weight)))
        if block.batch_norm:
            if (least := part["variance"].min()) < 0:
                raise InvalidImport(
                    f"{name}.variance: {found[f'{name}.variance']} holds {least}, expected >= 0"
                )
            scale = part.get("gamma", np.ones(len(weight))) / np.sqrt(part["variance"] + epsilon)
            weight = weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
            bias = part.get("beta", np.zeros(len(weight))) + (bias - part["mean"]) * scale
        if number == 0:
            padded = isinstance(block, ConvBlock) and any(block.padding)
            if input_mean and padded:
                raise InvalidImport(
                    f"--input-mean is {input_mean} and {name} pads its input with zeros, which "
                    "would be other pixels; expected 0, or a first layer without padding"
                )
            weight = weight / input_deviation
            bias = bias - input_mean * weight.reshape(len(weight), -1).sum(axis=1)
        for one, value in (("weight", weight), ("bias", bias)):
            with np.errstate(over="ignore"):
                rounded = np.ascontiguousarray(value, np.float32)
            if not np.isfinite(rounded).all():
                raise InvalidImport(
                    f"{name}.{one}: {value[~np.isfinite(rounded)][0]} with batch norm folded in, "
                    "expected numbers that float32 holds"
                )
            result[f"{name}.{one}"] = rounded
    return result


def table(
    tensors: Mapping[str, Tensor], found: Mapping[str, str], source: Source, layout: Layout
) -> str:
    """A line for each tensor: what it becomes, its name and shape in the file, how it is turned.

    Further lines name what the file lacks and what is taken instead, and what is not used.
    """
    lines = []
    for name, taken in found.items():
        shape = tensors[taken].shape
        turn = ""
        if layout == "keras" and name.endswith(".weight"):
            turn = "transposed (3, 2, 0, 1)" if len(shape) == 4 else "transposed"
        lines.append(f"{name:16} <- {taken:32} {shape!s:18} {turn}".rstrip())
    for layer, _, norm in source.weights():
        for part, value in (("gamma", "ones"), ("beta", "zeros")) if norm else (("bias", "zeros"),):
            if (name := f"{layer}.{part}") not in found:
                lines.append(f"{name:16} <- {value}: the file has none")
    unused = sorted(tensors.keys() - set(found.values()))
    lines += [f"{'(not used)':16} <- {name}" for name in unused]
    return "\n".join(lines)
