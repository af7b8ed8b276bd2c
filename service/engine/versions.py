"""The weights folder: finds and reads the weight files to serve.

A model is a folder in it and a version a file there, MODEL/VERSION.safetensors with VERSION a
positive integer. The highest version of each model is served.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lenet.errors import InvalidWeightFile
from lenet.weightfile import WeightFile

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "lenet"
"""Answers requests that name no model, if it is loaded and the settings name no other."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelVersion:
    """A weight file that was read; `sha256` in hex is over its bytes."""

    name: str
    version: str
    path: Path
    weights: WeightFile
    sha256: str


class WeightsFolder:
    """Reads models from `path`; warns once of each file whose name is no version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ignored: set[Path] = set()

    def read_all(
        self, wanted: Sequence[str] = (), default_model: str = ""
    ) -> tuple[ModelVersion, ...]:
        """Read the models `wanted`, or every model there is; the default model comes first.

        Without `default_model` that is `DEFAULT_MODEL`, or the only model.

        Raises:
            InvalidWeightFile: the folder or a model is missing or must not be served.
        """
        if not self._path.is_dir():
            where = "" if self._path.is_absolute() else f" in {Path.cwd()}"
            found = (
                "is a file, expected a folder" if self._path.exists() else f"no such folder{where}"
            )
            raise InvalidWeightFile(
                f"{self._path}: {found}; set --weights to the folder that holds "
                "MODEL/VERSION.safetensors"
            )
        names = list(dict.fromkeys(wanted or self._names()))
        if not names:
            raise InvalidWeightFile(
                f"{self._path}: holds no MODEL/VERSION.safetensors; set --weights to the folder "
                "that does"
            )
        for name in names:
            self._folder_of(name)
        default = default_model or (names[0] if len(names) == 1 else DEFAULT_MODEL)
        if default not in names:
            raise InvalidWeightFile(
                f"{self._path}: the default model {default!r} is not among the models "
                f"{', '.join(names)}; set --default-model to one of them"
            )
        names.sort(key=lambda name: name != default)
        return tuple(self.read(name) for name in names)

    def read(self, name: str) -> ModelVersion:
        """Read the highest version of the model `name`.

        Raises:
            InvalidWeightFile: there is none, it leaves the folder through a symlink, or it is of
                another model.
        """
        folder = self._folder_of(name)
        versions: dict[int, Path] = {}
        for path in _listed(folder, "*.safetensors"):
            stem = path.stem
            if stem.isascii() and stem.isdigit() and not stem.startswith("0"):
                versions[int(stem)] = path
            elif path not in self._ignored:
                self._ignored.add(path)
                _log.warning("%s: ignored, its name is not a positive integer", path)
        if not versions:
            raise InvalidWeightFile(
                f"{folder}: holds no VERSION.safetensors with VERSION a positive integer"
            )
        version, path = max(versions.items())
        # Not Path.resolve: before Python 3.13 it raises RuntimeError on a loop of links.
        if not Path(os.path.realpath(path)).is_relative_to(self._path.resolve()):
            raise InvalidWeightFile(f"{path}: leads out of {self._path} through a symlink")
        weights = WeightFile.read(path)
        if weights.model.name != name:
            raise InvalidWeightFile(
                f"{path}: metadata model is {weights.model.name!r}, expected {name!r} as its folder"
            )
        return ModelVersion(name, str(version), path, weights, weights.digest())

    def _folder_of(self, name: str) -> Path:
        folder = self._path / name
        if not folder.is_dir():
            raise InvalidWeightFile(
                f"{folder}: no such folder; the models in {self._path} are "
                f"{', '.join(self._names()) or 'none'}"
            )
        return folder

    def _names(self) -> list[str]:
        return sorted({path.parent.name for path in _listed(self._path, "*/*.safetensors")})


def _listed(folder: Path, pattern: str) -> list[Path]:
    """The files in `folder` that match `pattern`, sorted; it may be removed at any moment."""
    try:
        return sorted(folder.glob(pattern))
    except OSError as exc:
        raise InvalidWeightFile(f"{folder}: cannot be listed ({exc.strerror})") from exc
