"""The weight files in the weights folder: which there are, found, read and doubted.

A model is a folder under the weights folder, a version a file in it: MODEL/VERSION.safetensors,
VERSION a positive integer. The highest version of each model is the one to serve. It refuses files
that leave the weights folder through a symlink, and models whose folder bears another name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lenet.errors import InvalidWeightFile
from lenet.weightfile import WeightFile


@dataclass(frozen=True, slots=True, eq=False)
class ModelFile:
    """A weight file found and read; `sha256` in hex is over its bytes."""

    name: str
    version: str
    path: Path
    weights: WeightFile
    sha256: str


def read_models(folder: Path, wanted: Sequence[str], default_model: str) -> tuple[ModelFile, ...]:
    """Read the highest version of each model in `wanted`, or of every model in `folder`.

    Raises:
        InvalidWeightFile: one of them or the default model is missing or must not be served.
    """
    if not folder.is_dir():
        raise InvalidWeightFile(
            f"{folder}: is not a folder, expected one with MODEL/VERSION.safetensors in it"
        )
    names = wanted or sorted(entry.parent.name for entry in folder.glob("*/*.safetensors"))
    if default_model not in names:
        raise InvalidWeightFile(
            f"{folder}: the default model {default_model!r} is not among the models "
            f"[{', '.join(names)}]; expected {folder / default_model}/VERSION.safetensors"
        )
    return tuple(read_model(folder, name) for name in dict.fromkeys(names))


def read_model(folder: Path, name: str) -> ModelFile:
    """Read the highest version of the model `name` in `folder`.

    Raises:
        InvalidWeightFile: there is none or it must not be served.
    """
    versions = {
        int(path.stem): path
        for path in (folder / name).glob("*.safetensors")
        if path.stem.isascii() and path.stem.isdigit() and not path.stem.startswith("0")
    }
    if not versions:
        raise InvalidWeightFile(
            f"{folder / name}: holds no VERSION.safetensors with VERSION a positive integer"
        )
    version, path = max(versions.items())
    # Not Path.resolve: before Python 3.13 it raises RuntimeError on a loop of links.
    if not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
        raise InvalidWeightFile(f"{path}: leads out of {folder} through a symlink")
    weights = WeightFile.read(path)
    if weights.model.name != name:
        raise InvalidWeightFile(
            f"{path}: metadata model is {weights.model.name!r}, expected {name!r} as its folder"
        )
    return ModelFile(name, str(version), path, weights, weights.digest())
