"""The folder of a run: its settings, a line for each epoch, and what came of it.

settings.json    the recipe, the command, the network, the dataset, versions, the time
metrics.jsonl    a line for each epoch: loss, accuracies, learning rate, seconds
summary.json     the result on the test images, and the time by phase
report.html      the same as pictures, see `trainer.report`
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from lenet import distribution_version
from lenet.files import naming
from trainer.errors import InvalidRun, UnwritableFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS, METRICS, SUMMARY, REPORT = (
    "settings.json",
    "metrics.jsonl",
    "summary.json",
    "report.html",
)
CALIBRATION_BINS = 10
WORST = 50
"""Mistakes that are kept: those of the highest confidence."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of a network on the test images.

    `confusion[i][j]` counts images of class i that are taken for j. `calibration`: for each tenth
    of confidence [mean confidence, accuracy, images], empty ones left out. `calibration_error`: the
    mean difference of the two, weighted by images. `worst`: [image, true class, predicted class,
    confidence] of mistakes, the most confident first. `worst_files`: the pictures of these, where
    images were made of pictures.
    """

    accuracy: float
    loss: float
    calibration_error: float
    precision: list[float]
    recall: list[float]
    confusion: list[list[int]]
    calibration: list[tuple[float, float, int]]
    worst: list[tuple[int, int, int, float]]
    worst_files: list[str]


def evaluate(
    logits: NDArray[Any], labels: NDArray[np.uint8], files: NDArray[np.str_] | None = None
) -> Evaluation:
    """The evaluation of logits (n, classes) by the true labels (n,); `files` are the pictures.

    Source of the calibration error: Guo et al. 2017, "On Calibration of Modern Neural Networks".
    """
    count, classes = logits.shape
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    predicted = logits.argmax(axis=1)
    confidence = np.exp(shifted[np.arange(count), predicted] - log_sum)
    right = predicted == labels
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    hits = confusion.diagonal()
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    calibration = [
        (float(confidence[own].mean()), float(right[own].mean()), int(own.sum()))
        for own in (bins == one for one in range(CALIBRATION_BINS))
        if own.any()
    ]
    wrong = np.flatnonzero(~right)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")][:WORST]
    return Evaluation(
        accuracy=float(right.mean()),
        loss=float((log_sum - shifted[np.arange(count), labels]).mean()),
        calibration_error=sum(abs(a - c) * n for c, a, n in calibration) / count,
        precision=(hits / np.maximum(confusion.sum(axis=0), 1)).tolist(),
        recall=(hits / np.maximum(confusion.sum(axis=1), 1)).tolist(),
        confusion=confusion.tolist(),
        calibration=calibration,
        worst=[(int(i), int(labels[i]), int(predicted[i]), float(confidence[i])) for i in wrong],
        worst_files=[] if files is None else files[wrong].tolist(),
    )


class Phases:
    """Seconds by phase, in the order in which they first began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to that of `name`."""
        self.seconds.setdefault(name, 0.0)
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began_s


class RunFolder:
    """A new folder below `root`, named after the time and the network."""

    def __init__(self, root: Path, model: str) -> None:
        """Raises: UnwritableFolder."""
        now = datetime.now(UTC)
        self.started = now.isoformat(timespec="seconds")
        name = f"{now:%Y%m%dT%H%M%SZ}-{model}"
        for number in range(1, 1000):
            self.path = root / (name if number == 1 else f"{name}-{number}")
            try:
                self.path.mkdir(parents=True)
            except FileExistsError as exc:
                if root.is_dir():
                    continue  # another run of this second
                raise UnwritableFolder(f"--runs is {root}, which is a file: name a folder") from exc
            except OSError as exc:
                raise UnwritableFolder(
                    f"--runs is {root}: {self.path} cannot be created ({exc.strerror}); name a "
                    "folder that you can write"
                ) from exc
            return
        raise UnwritableFolder(f"--runs is {root}: it has a thousand runs of this second")

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write `settings`, with time and versions."""
        versions = {"lenet-serve": distribution_version(), "python": platform.python_version()}
        versions |= {"numpy": version("numpy")}
        self._write(SETTINGS, {"started": self.started, **settings, "versions": versions})

    def add_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Append a line of metrics."""
        path = self.path / METRICS
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def write_summary(self, evaluation: Evaluation, **more: Any) -> None:
        """Write the result."""
        self._write(SUMMARY, {**asdict(evaluation), **more})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=1, default=str) + "\n"
        with naming(self.path / name):
            (self.path / name).write_text(text, encoding="utf-8")


class _Settings(TypedDict):
    recipe: dict[str, Any]
    dataset_sha256: str
    device: str


class _Epoch(TypedDict):
    loss: float
    accuracy: float
    validation_accuracy: float


class _Summary(TypedDict):
    accuracy: float
    loss: float
    calibration_error: float
    parameters: int
    phases: dict[str, float]
    labels: list[str]
    recall: list[float]


_REQUIRED: dict[str, TypeAdapter[Any]] = {
    SETTINGS: TypeAdapter(_Settings),
    METRICS: TypeAdapter(Annotated[list[_Epoch], Field(min_length=1)]),
    SUMMARY: TypeAdapter(_Summary),
}
"""What `compare` needs of each file, whichever version wrote it."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The run in a folder."""

    path: Path
    settings: dict[str, Any]
    epochs: list[dict[str, Any]]
    summary: dict[str, Any]


def read_run(path: Path) -> FinishedRun:
    """The run in a folder.

    Raises:
        InvalidRun: it is none, or did not end with a result.
        OSError: a file in it cannot be read.
    """
    if not path.is_dir():
        raise InvalidRun(f"{path}: no such folder; expected that of a run, as RUNS/TIME-MODEL")
    found: dict[str, Any] = {}
    try:
        for name in (SETTINGS, SUMMARY, METRICS):
            text = (path / name).read_text(encoding="utf-8")
            if name == METRICS:
                found[name] = [json.loads(line) for line in text.splitlines()]
            else:
                found[name] = json.loads(text)
            _REQUIRED[name].validate_python(found[name])
    except FileNotFoundError as exc:
        name = Path(exc.filename).name
        problem = (
            "it is not the folder of a run"
            if name == SETTINGS
            else "the run was interrupted, or has not ended yet"
        )
        raise InvalidRun(f"{path}: has no {name}: {problem}") from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise InvalidRun(
            f"{path / name}: {where}{first['msg']}; expected the file that fit wrote"
        ) from exc
    except ValueError as exc:
        raise InvalidRun(f"{path / name}: not JSON ({exc}), expected what fit wrote") from exc
    return FinishedRun(path, found[SETTINGS], found[METRICS], found[SUMMARY])
