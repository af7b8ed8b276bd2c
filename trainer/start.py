"""The start of a training run: its network, and the weights of a file where they fit."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from lenet.errors import InvalidModel, InvalidSettings
from lenet.model import ARCHITECTURES, Model, named
from lenet.pixels import Images
from lenet.weightfile import WeightFile
from trainer.errors import InvalidImport
from trainer.importing import Source, read_source
from trainer.layers import BlockEpilogue
from trainer.network import Network
from trainer.ops import EPSILON, Norm, Tensor
from trainer.ops_cpu import CpuOps

Described = TypeVar("Described", Model, Source)

MAX_DESCRIPTION_BYTES = 1 << 20
MOMENT_IMAGES = 500
"""About the training images over which a batch norm's first moments are taken."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def read_model(name: str, classes: int) -> Model:
    """The architecture called `name`, with so many classes, or the network in the file NAME.json.

    Raises:
        InvalidModel: the name is unknown, or the file does not describe a network for images of
            28 x 28 pixels and so many classes.
    """
    if not name.endswith(".json"):
        return _architecture(name).with_classes(classes)
    return _described(name, classes, Model.from_json, lambda model: model)


def read_described(name: str, classes: int) -> Source:
    """`read_model` for weights made elsewhere: padding may also be "same" or "valid".

    Raises:
        InvalidModel: see `read_model`.
        InvalidImport: the padding has no symmetric equivalent.
    """
    if not name.endswith(".json"):
        return Source(_architecture(name).with_classes(classes), {})
    return _described(name, classes, read_source, lambda source: source.model)


def _architecture(name: str) -> Model:
    if name not in ARCHITECTURES:
        raise InvalidModel(
            f"--model is {name!r}, expected {', '.join(ARCHITECTURES)}, or FILE.json that "
            "describes another"
        )
    return ARCHITECTURES[name]


def _described(
    name: str,
    classes: int,
    read: Callable[[str], Described],
    model_of: Callable[[Described], Model],
) -> Described:
    try:
        with Path(name).open("rb") as file:
            content = file.read(MAX_DESCRIPTION_BYTES + 1)
        if len(content) > MAX_DESCRIPTION_BYTES:
            raise InvalidModel(f"has more than {MAX_DESCRIPTION_BYTES} bytes")
        found = read(content.decode("utf-8"))
        _check_described(model_of(found), classes)
    except OSError as exc:
        raise InvalidModel(f"{name}: cannot be read ({exc.strerror})") from exc
    except (InvalidModel, UnicodeDecodeError) as exc:
        raise InvalidModel(f"{name}: {exc}") from exc
    except InvalidImport as exc:
        raise InvalidImport(f"{name}: {exc}") from exc
    return found


def _check_described(model: Model, classes: int) -> None:
    if not _NAME.fullmatch(model.name):
        raise InvalidModel(
            f"name is {model.name[:80]!r}, expected 1 to 64 of a-z, 0-9, '.', '_' and '-': it "
            "becomes the name of a folder"
        )
    if model.name in ARCHITECTURES:
        raise InvalidModel(
            f"name is {model.name!r}, as a named architecture is called; choose another"
        )
    if model.input != named("lenet").input:
        raise InvalidModel(
            f"input is {model.input}, expected {named('lenet').input}, one image of a dataset"
        )
    if model.classes != classes:
        raise InvalidModel(
            f"block {len(model.blocks)}: has {model.classes} units, expected {classes}, one for "
            "each class; --labels FILE names other classes"
        )


def taken(weights: WeightFile, model: Model) -> tuple[dict[str, Tensor], str]:
    """The tensors of `model` that a weight file has, by the names of its layers, and a table.

    A layer is taken if its weight has the same shape. Of a layer with batch norm the file has
    folded weights: they are taken with a batch norm that outside training changes nothing but adds
    the bias; `with_moments` makes it so in training.

    Raises:
        InvalidModel: no layer fits.
    """
    found: dict[str, Tensor] = {}
    lines = []
    shapes = model.parameters()
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        name = shape.name
        weight = weights.tensors.get(f"{name}.weight")
        expected = shapes[f"{name}.weight"]
        if weight is None:
            lines.append(f"{name:8} new: the file has no {name}")
        elif weight.shape != expected:
            lines.append(f"{name:8} new: {weight.shape} in the file, expected {expected}")
        else:
            bias = weights.tensors[f"{name}.bias"]
            found[f"{name}.weight"] = weight.copy()
            if block.batch_norm:
                ones = np.ones_like(bias)
                found[f"{name}.gamma"] = ones * np.float32(math.sqrt(1 + EPSILON))
                found[f"{name}.beta"] = bias.copy()
                found[f"{name}.mean"], found[f"{name}.variance"] = np.zeros_like(bias), ones
            else:
                found[f"{name}.bias"] = bias.copy()
            lines.append(f"{name:8} taken: {weight.shape}")
    others = {one.partition(".")[0] for one in weights.tensors.keys() - shapes.keys()}
    lines += [
        f"{name:8} not taken: the network has no {name}"
        for name in sorted(others)
        if f"{name}.weight" not in shapes
    ]
    table = "\n".join(lines)
    if not found:
        raise InvalidModel(f"no layer of the file fits model {model.name!r}:\n{table}")
    return found, table


def with_moments(
    model: Model,
    tensors: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    images: Images,
    frozen: int,
) -> dict[str, Tensor]:
    """`tensors`, in which batch norms expect the moments that `images` have in their place.

    `found` are those that `taken` has from a file. In training batch norm uses the moments of the
    batch, and a layer of the file would lose its mean and its deviation. So gamma is the deviation
    of w x over `images` and beta its mean, plus the bias: the layer computes w x + bias, in
    training and outside. The first `frozen` blocks compute as outside training and stay as they
    are.
    """
    network = Network(model, tensors, CpuOps())
    x = network.ops.input_from_images(images)
    for index, layer in enumerate(network.layers):
        norm = f"{layer.name.partition('.')[0]}.gamma"
        if isinstance(layer, BlockEpilogue) and norm in layer.parameters and index >= 2 * frozen:
            _expect(network.arrays, layer.name.partition(".")[0], x, taken=norm in found)
        x = layer.forward(x, None)
    return network.tensors


def _expect(arrays: Mapping[str, Tensor], name: str, x: Tensor, taken: bool) -> None:
    """Set the moments of the batch norm of `name` to those of x (c, ..., n)."""
    gamma, beta, mean, variance = (arrays[f"{name}.{part}"] for part in Norm._fields)
    values = x.reshape(len(x), -1).astype(np.float64)
    mean[...], variance[...] = values.mean(axis=1), values.var(axis=1)
    if taken:
        gamma[...] = np.sqrt(variance.astype(np.float64) + EPSILON)
        beta[...] += mean


def check_frozen(freeze: Sequence[str], model: Model) -> None:
    """Check that `freeze` names the first layers of `model`, and not all.

    Raises:
        InvalidSettings: it does not.
    """
    names = [shape.name for shape in model.shapes()]
    if list(freeze) != names[: len(freeze)] or len(freeze) == len(names):
        raise InvalidSettings(
            f"--freeze is {','.join(freeze)}, expected the first of {','.join(names)}, not all of "
            "them: a layer behind one that is trained would get other inputs in every step"
        )


def origin(model: Model, found: Mapping[str, Tensor]) -> str:
    """Identifies the network and the tensors that a run starts from; "" for those of its seed."""
    if not found and model == ARCHITECTURES.get(model.name):
        return ""
    digest = hashlib.sha256(model.to_json().encode())
    for name in sorted(found):
        digest.update(name.encode() + found[name].tobytes())
    return digest.hexdigest()
