"""Searches for a better recipe, by the mistakes on the held-out training images alone.

Optuna's tree-structured Parzen estimator suggests a value for each of the settings to vary; a trial
is that recipe with several seeds. On a GPU three seeds are trained at the same time. Between groups
of seeds a trial ends early if it is worse than half of the trials before it. The first trial is the
recipe as it was given. Test images are never looked at.

Trials are kept in a journal. The same command goes on where an earlier one ended, and several of
them at a time share one search: on a GPU under MPS they fill the gaps that one run leaves.
Source: Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization".
"""

from __future__ import annotations

import hashlib
import shlex
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lenet.errors import InvalidSettings
from lenet.model import Model
from trainer.checkpoint import Checkpoint
from trainer.devices import side_by_side
from trainer.errors import TrainingDiverged, UnwritableFolder
from trainer.loop import train
from trainer.mnist import Dataset, Digits
from trainer.network import Network, initial_tensors
from trainer.ops import TrainingOps
from trainer.settings import MNIST_FOLDER, Recipe, Search

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.trial import FrozenTrial

_RANGES: dict[str, tuple[float, float]] = {
    "rate": (0.01, 2.0),
    "momentum": (0.8, 0.97),
    "weight_decay": (1e-5, 2e-3),
    "dropout": (0.0, 0.6),
    "smoothing": (0.0, 0.2),
    "rotation": (0.0, 25.0),
    "scale": (0.0, 0.25),
    "shear": (0.0, 20.0),
    "shift": (0.0, 4.0),
    "elastic": (0.0, 4.0),
}
_LOGARITHMIC = ("rate", "weight_decay")
_CHOICES: dict[str, tuple[str | int, ...]] = {
    "schedule": ("one-cycle", "step"),
    "batch": (64, 128, 256, 512, 1024),
}
_SHOWN = 10

SIDE_BY_SIDE = {"cpu": 1, "cuda": 3}
"""Seeds that are trained at the same time."""


def search(settings: Search, model: Model, dataset: Dataset, report: Callable[[str], None]) -> None:
    """Run trials until the search has `settings.trials`; report each, and the best.

    Raises:
        ImportError: optuna is not installed.
        InvalidSettings: a setting cannot be varied, or not from the recipe's value on, or the
            journal is not one.
        UnwritableFolder: the journal cannot be written.
        DeviceError, DeviceUnavailable: as `side_by_side`.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    _check(settings)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    described = f"{settings.command()} on {dataset.sha256} as {model.to_json()}"
    try:
        settings.journal.parent.mkdir(parents=True, exist_ok=True)
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(settings.journal))),
            study_name=hashlib.sha256(described.encode()).hexdigest()[:16],
            sampler=optuna.samplers.TPESampler(),
            pruner=optuna.pruners.MedianPruner(),
            load_if_exists=True,
        )
    except OSError as exc:
        raise UnwritableFolder(
            f"--journal is {settings.journal}: it cannot be written ({exc.strerror})"
        ) from exc
    except (AttributeError, LookupError, TypeError, ValueError) as exc:  # Optuna checks no line
        raise InvalidSettings(
            f"--journal is {settings.journal}: it is damaged or another file "
            f"({type(exc).__name__}: {exc}), expected what search wrote, or a new file"
        ) from exc
    ended = TrialState.COMPLETE, TrialState.PRUNED
    if not study.get_trials(states=(*ended, TrialState.RUNNING, TrialState.WAITING)):
        study.enqueue_trial({name: getattr(settings, name) for name in settings.over})

    def announce(_study: object, trial: FrozenTrial) -> None:
        number = len(study.get_trials(deepcopy=False, states=ended))
        report(f"trial {number} of {settings.trials}: {_line(trial)}")

    parts = dataset.hold_out(settings.validation_images)
    held_out = f"{settings.validation_images} held-out images"
    report(f"{settings.command()}\nmistakes on {held_out}, mean and seeds:")
    if len(study.get_trials(states=ended)) < settings.trials:
        study.optimize(
            lambda trial: _trial_mistakes(trial, settings, model, *parts),
            callbacks=[announce, optuna.study.MaxTrialsCallback(settings.trials, ended)],
        )
    done = study.get_trials(states=(TrialState.COMPLETE,))
    report("the best:")
    best = sorted(done, key=lambda trial: trial.value or 0.0)
    for trial in best[:_SHOWN]:
        report(_line(trial))
    if best:
        report(f"train it: {_command(settings.model_copy(update=best[0].params))}")


def _command(settings: Search) -> str:
    """The command that trains the recipe of `settings` on its dataset, from any folder.

    The default of --data stays as it is: MNIST is downloaded to no other folder.
    """
    words = shlex.split(Recipe.command(settings))
    if settings.model.endswith(".json"):
        words[words.index("--model") + 1] = str(Path(settings.model).absolute())
    data = settings.data if settings.data == MNIST_FOLDER else settings.data.absolute()
    words += ["--data", str(data)]
    if settings.labels is not None:
        words += ["--labels", str(settings.labels.absolute())]
    return shlex.join(words)


def _check(settings: Search) -> None:
    if not settings.over:
        raise InvalidSettings(f"--over names none of {','.join((*_RANGES, *_CHOICES))}")
    for name in settings.over:
        if settings.over.count(name) > 1:
            raise InvalidSettings(f"--over names {name} more than once, expected each setting once")
        value: Any = getattr(settings, name, None)
        flag = f"--{name.replace('_', '-')}"
        if name in _RANGES:
            low, high = _RANGES[name]
            if not low <= value <= high:
                raise InvalidSettings(
                    f"{flag} is {value}, expected {low:g} to {high:g}, the range of the search, "
                    "or --over without it"
                )
        elif name in _CHOICES:
            if value not in _CHOICES[name]:
                raise InvalidSettings(
                    f"{flag} is {value}, expected one of {', '.join(map(str, _CHOICES[name]))}, "
                    "the choices of the search, or --over without it"
                )
        else:
            raise InvalidSettings(
                f"--over names {name}, expected some of {','.join((*_RANGES, *_CHOICES))}"
            )


def _line(trial: FrozenTrial) -> str:
    if not (mistakes := trial.user_attrs.get("mistakes")):
        return f"diverged                  {_shown(trial)}"
    spread = f" (sd {statistics.stdev(mistakes):.1f})" if len(mistakes) > 1 else ""
    cut = ", given up" if trial.state.name == "PRUNED" else ""
    return f"{statistics.fmean(mistakes):6.1f}{spread}, n {len(mistakes)}{cut}: {_shown(trial)}"


def _shown(trial: FrozenTrial) -> str:
    values = trial.params.items()
    return " ".join(f"--{name.replace('_', '-')} {_rounded(value)}" for name, value in values)


def _rounded(value: object) -> object:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _trial_mistakes(
    trial: Trial, settings: Search, model: Model, training: Digits, validation: Digits
) -> float:
    """The mean number of mistakes over the seeds."""
    import optuna

    chosen: dict[str, object] = {}
    for name in settings.over:
        if name in _CHOICES:
            chosen[name] = trial.suggest_categorical(name, _CHOICES[name])
        else:
            low, high = _RANGES[name]
            chosen[name] = trial.suggest_float(name, low, high, log=name in _LOGARITHMIC)
    recipe = settings.model_copy(update=chosen)
    seeds = range(settings.seed, settings.seed + settings.seeds)
    group = SIDE_BY_SIDE[recipe.device.partition(":")[0]]
    found: list[int] = []
    while len(found) < len(seeds):
        try:
            some = seeds[len(found) : len(found) + group]
            found += mistakes(recipe, some, model, training, validation)
        except TrainingDiverged as exc:
            raise optuna.TrialPruned from exc
        trial.set_user_attr("mistakes", found)
        trial.report(statistics.fmean(found), len(found) - 1)
        if len(found) < len(seeds) and trial.should_prune():
            raise optuna.TrialPruned
    return statistics.fmean(found)


def mistakes(
    recipe: Recipe, seeds: Sequence[int], model: Model, training: Digits, validation: Digits
) -> list[int]:
    """The mistakes on `validation` of `recipe` with each of `seeds`, trained at the same time.

    Raises:
        TrainingDiverged: with one of the seeds; the others were stopped.
        DeviceError, DeviceUnavailable: as `side_by_side`.
    """

    def work(ops: TrainingOps, number: int) -> int:
        seeded = recipe.model_copy(update={"seed": seeds[number]})
        tensors = initial_tensors(model, np.random.default_rng(seeded.seed))
        network = Network(model, tensors, ops, seeded.dropout)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = Checkpoint(Path(folder), seeded, "", validation)
            epochs, _ = train(network, seeded, training, validation, checkpoint, leader=False)
        return round((1 - epochs[-1].validation_accuracy) * len(validation))

    return side_by_side(recipe, len(seeds), work)
