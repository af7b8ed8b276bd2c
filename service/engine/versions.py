"""The weights folder: finds and reads the weight files to serve.

A model is a folder in it and a version a file there, MODEL/VERSION.safetensors with VERSION a
positive integer. Of each model the highest versions are served, as many as asked for, or those that
the settings name. A folder without such folders may be that of one model: VERSION.safetensors, or
one file of any name, which is version 1. The model is then called as the metadata of its file say.
Beside the versions `labels.json` may name some of those that are served: `{"canary": 3}`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import PositiveInt, StringConstraints, TypeAdapter, ValidationError

from lenet.errors import InvalidWeightFile
from lenet.weightfile import WeightFile

if TYPE_CHECKING:
    from service.observe.metrics import ModelKey

_log = logging.getLogger(__name__)

DEFAULT_MODEL = "lenet"
"""Answers requests that name no model, if it is loaded and the settings name no other."""

_LABELS = "labels.json"
# A file, and no symlinks: a ConfigMap and an object store hold none.
_MAX_LABELS_BYTES = 64 * 1024
_Label = Annotated[str, StringConstraints(pattern="^[A-Za-z][A-Za-z0-9_-]*$")]
_LABEL_FILE = TypeAdapter(dict[_Label, PositiveInt])


@dataclass(frozen=True, slots=True, eq=False)
class ModelVersion:
    """A weight file that was read at `read_at`, seconds since the epoch.

    `sha256` in hex is over its bytes.
    """

    name: str
    version: str
    path: Path
    weights: WeightFile
    sha256: str
    read_at: float = field(default_factory=time.time)
    key: ModelKey = field(init=False)
    """Name and version: the labels of the metrics."""
    labels: tuple[str, ...] = field(init=False)
    """The names of its classes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.name, self.version))
        object.__setattr__(self, "labels", self.weights.training.labels)


class Listed(NamedTuple):
    """A version of a model that is in the weights folder, or loaded."""

    name: str
    version: str
    loaded: bool


class WeightsFolder:
    """Reads models from `path`; warns once of each file whose name is no version.

    Of a model the `latest` highest versions are read, all for 0.
    """

    def __init__(self, path: Path, latest: int = 1) -> None:
        self._path = path
        self._only = ""
        """The model whose files `path` itself holds, "" if it holds folders of models."""
        self._latest = latest
        self._pinned: dict[str, set[int]] = {}
        self._left_out: dict[str, set[str]] = {}
        self.labels: dict[str, dict[str, str]] = {}
        """Versions by their label, by model, at the last reading."""
        self._ignored: set[Path] = set()

    def read_all(
        self,
        wanted: Sequence[str] = (),
        default_model: str = "",
        unloaded: Container[str] = (),
        alias: str = "",
    ) -> tuple[ModelVersion, ...]:
        """Read the models `wanted`, or every model there is; the default model comes first.

        Of a model that is wanted as `NAME:VERSION`, also several times, these versions are read,
        from now on. Without `default_model` that is `DEFAULT_MODEL`, or the only model. What is
        `unloaded` is not read now; its files may be missing or broken. `alias` is to be a second
        name of the default model.

        Raises:
            InvalidWeightFile: the folder or a model is missing or must not be served, or `alias` is
                another model.
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
        self._only = self._find_only()
        names = []
        for one in wanted or self._names():
            name, _, version = one.partition(":")
            names.append(name)
            if version:
                self._pinned.setdefault(name, set()).add(int(version))
        names = list(dict.fromkeys(names))
        if not names:
            files = _listed(self._path, "*.safetensors")
            found = f"{files[0].name} and {files[1].name}, but no" if files else "no"
            hint = ", or call a file there 1.safetensors" if files else ""
            raise InvalidWeightFile(
                f"{self._path}: holds {found} MODEL/VERSION.safetensors; set --weights to the "
                f"folder that does{hint}"
            )
        for name in names:
            if name not in unloaded:
                self._folder_of(name)
        default = default_model or (names[0] if len(names) == 1 else DEFAULT_MODEL)
        if default not in names:
            raise InvalidWeightFile(
                f"{self._path}: the default model {default!r} is not among the models "
                f"{', '.join(names)}; set --default-model to one of them"
            )
        if alias != default and alias in {*names, *self._names()}:
            raise InvalidWeightFile(
                f"{self._path}: --model-alias is {alias!r}, which is a model of its own there; "
                f"expected another name, or --default-model {alias}"
            )
        names.sort(key=lambda name: name != default)
        return tuple(
            version for name in names if name not in unloaded for version in self.read(name)
        )

    def read(self, name: str) -> tuple[ModelVersion, ...]:
        """Read the versions of the model `name` that are to be served, the highest first.

        Raises:
            InvalidWeightFile: there is none, one leaves the folder through a symlink or is of
                another model, or a label names none of them.
        """
        folder, files = self._folder_of(name), self._files(name)
        if not files:
            raise InvalidWeightFile(
                f"{folder}: holds no VERSION.safetensors with VERSION a positive integer"
            )
        wanted = sorted(files, reverse=True)
        if pinned := self._pinned.get(name):
            if missing := sorted(pinned - files.keys()):
                raise InvalidWeightFile(
                    f"{folder}: holds no version {missing[0]}, expected one of "
                    f"{', '.join(map(str, sorted(files)))}"
                )
            wanted = sorted(pinned, reverse=True)
        elif self._latest:
            wanted = wanted[: self._latest]
        self._left_out[name] = set(map(str, files.keys() - wanted))
        self.labels[name] = self._read_labels(folder / _LABELS, wanted)
        return tuple(self._read(name, version, files[version]) for version in wanted)

    def flag_for(self, name: str, version: str) -> str:
        """The flag that loads a version which was left out at the last reading; "" for others."""
        if version not in self._left_out.get(name, ()):
            return ""
        return f"--models with {name}:{version}" if name in self._pinned else "--versions all"

    def index(self) -> tuple[ModelKey, ...]:
        """Name and version of every file, the highest version of a model first.

        Raises:
            InvalidWeightFile: the folder cannot be listed.
        """
        return tuple(
            (name, str(version))
            for name in self._names()
            for version in sorted(self._files(name), reverse=True)
        )

    def _files(self, name: str) -> dict[int, Path]:
        folder = self._path if name == self._only else self._path / name
        versions: dict[int, Path] = {}
        paths = _listed(folder, "*.safetensors")
        if name == self._only and len(paths) == 1 and not _is_version(paths[0].stem):
            return {1: paths[0]}
        for path in paths:
            stem = path.stem
            if _is_version(stem):
                versions[int(stem)] = path
            elif path not in self._ignored:
                self._ignored.add(path)
                _log.warning("%s: ignored, its name is not a positive integer", path)
        return versions

    def _check_place(self, path: Path) -> None:
        # Not Path.resolve: before Python 3.13 it raises RuntimeError on a loop of links.
        if not Path(os.path.realpath(path)).is_relative_to(self._path.resolve()):
            raise InvalidWeightFile(
                f"{path}: leads out of {self._path} through a symlink: copy the file"
            )

    def _read_labels(self, path: Path, served: Sequence[int]) -> dict[str, str]:
        if not os.path.lexists(path):
            return {}
        self._check_place(path)
        if not path.is_file():
            raise InvalidWeightFile(f"{path}: expected a file")
        try:
            with path.open("rb") as file:
                found = _LABEL_FILE.validate_json(file.read(_MAX_LABELS_BYTES), strict=True)
        except OSError as exc:
            raise InvalidWeightFile(f"{path}: cannot be read ({exc.strerror})") from exc
        except ValidationError as exc:
            raise InvalidWeightFile(
                f'{path}: expected an object of versions by label, as {{"canary": 3}}; a label '
                "has letters, digits, - and _ and begins with a letter"
            ) from exc
        for label, version in found.items():
            if version not in served:
                raise InvalidWeightFile(
                    f"{path}: label {label!r} names version {version}, expected one that is "
                    f"served: {', '.join(map(str, served))}; --versions says how many are"
                )
        return {label: str(version) for label, version in found.items()}

    def _read(self, name: str, version: int, path: Path) -> ModelVersion:
        self._check_place(path)
        weights = WeightFile.read(path)
        if weights.model.name != name:
            place = "the files beside it" if name == self._only else "its folder"
            raise InvalidWeightFile(
                f"{path}: metadata model is {weights.model.name!r}, expected {name!r} as {place}"
            )
        return ModelVersion(name, str(version), path, weights, weights.digest())

    def _folder_of(self, name: str) -> Path:
        folder = self._path if name == self._only else self._path / name
        if not folder.is_dir():
            raise InvalidWeightFile(
                f"{folder}: no such folder; the models in {self._path} are "
                f"{', '.join(self._names()) or 'none'}"
            )
        return folder

    def _names(self) -> list[str]:
        if self._only:
            return [self._only]
        return sorted({path.parent.name for path in _listed(self._path, "*/*.safetensors")})

    def _find_only(self) -> str:
        """The name of the only model, read from its first file; "" if there are model folders."""
        files = _listed(self._path, "*.safetensors")
        is_one_model = len(files) == 1 or any(_is_version(path.stem) for path in files)
        if not is_one_model or _listed(self._path, "*/*.safetensors"):
            return ""
        path = next((path for path in files if _is_version(path.stem)), files[0])
        name = WeightFile.read(path).model.name
        if not name or set(name) & set("/@: "):
            raise InvalidWeightFile(
                f"{path}: metadata model is {name!r}, expected a name without /, @, : or space"
            )
        return name


def _is_version(stem: str) -> bool:
    return stem.isascii() and stem.isdigit() and not stem.startswith("0")


def _listed(folder: Path, pattern: str) -> list[Path]:
    """The files in `folder` that match `pattern`, sorted; it may be removed at any moment."""
    try:
        return sorted(folder.glob(pattern))
    except OSError as exc:
        raise InvalidWeightFile(f"{folder}: cannot be listed ({exc.strerror})") from exc
