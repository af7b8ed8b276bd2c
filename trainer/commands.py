"""The commands of `python -m trainer`; `trainer.__main__` documents them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from lenet.command_line import parse, unknown_variables
from lenet.context import Target
from lenet.cpu import CpuBackend
from lenet.errors import BackendUnavailable, DeviceError, InvalidModel, InvalidSettings, LeNetError
from lenet.files import write_atomically
from lenet.model import Model
from lenet.weightfile import Training, WeightFile
from trainer.calibration import cooled, limit_reached, temperature
from trainer.checkpoint import Checkpoint, Epoch, best_epoch
from trainer.datasets import class_names, load, summary
from trainer.devices import check, check_classes, choose, number_of, on_devices, unavailable
from trainer.download import obtain
from trainer.errors import (
    DatasetUnavailable,
    DeviceUnavailable,
    ExportRefused,
    InvalidCheckpoint,
    InvalidDataset,
    InvalidImport,
    InvalidRun,
    TrainerError,
    TrainingDiverged,
    UnwritableFolder,
)
from trainer.evaluation import images_of, measured, text
from trainer.export import Exported, check_classes_of_last, export_onnx, export_weights
from trainer.importing import (
    EPSILONS,
    converted,
    layout_of,
    mapped,
    matched,
    read_mapping,
    table,
    without_prefix,
)
from trainer.inspect import SERVED, content, measure, outline, serving
from trainer.loop import train
from trainer.mnist import DIGITS, Digits, label_names
from trainer.network import Network, initial_tensors
from trainer.ops import Tensor, TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.report import compared, comparison, evaluation, report
from trainer.runs import REPORT, Phases, RunFolder, evaluate, read_run
from trainer.search import search as search_recipes
from trainer.settings import Compare, Evaluate, Export, Fit, Import, Inspect, Recipe, Search
from trainer.start import (
    MOMENT_IMAGES,
    check_frozen,
    origin,
    read_described,
    read_model,
    taken,
    with_moments,
)
from trainer.tensor_files import read_tensors

_RATES = 5
"""Rates that a run without --rate tries: each is half of the one before it, which diverged."""

_SYNONYMS = {"rate": "--lr"}

_EXIT_CODES: dict[type[Exception], int] = {
    InvalidSettings: 2,
    InvalidModel: 2,
    DeviceUnavailable: 2,
    BackendUnavailable: 2,
    DatasetUnavailable: 3,
    InvalidDataset: 3,
    TrainingDiverged: 4,
    ExportRefused: 5,
    InvalidCheckpoint: 6,
    InvalidImport: 6,
    InvalidRun: 6,
    UnwritableFolder: 6,
    DeviceError: 7,
    LeNetError: 6,
    OSError: 6,
}


def fit(settings: Fit) -> None:
    """Train, export, report.

    Raises:
        KeyboardInterrupt: its message says whether the run can be resumed.
    """
    start = None if settings.from_ is None else WeightFile.read(settings.from_)
    before = None if start is None else start.training.labels
    names = class_names(settings.data, settings.labels, before)
    model = read_model(settings.model, len(names))
    check_frozen(settings.freeze, model)
    phases = Phases()
    with phases("reading"):
        dataset = obtain(settings.data, print, names, transposed=settings.transposed)
    found: dict[str, Tensor] = {}
    if start is not None:
        found, lines = taken(start, model)
        print(f"{settings.from_}:\n{lines}")
    # The weight file records the resolved settings, not `auto`.
    given = "rate" in settings.model_fields_set
    settings = settings.resolved(choose(settings.device, print), len(dataset.train))
    check(settings, settings.gpus)
    check_classes(settings.device, len(names), print)
    folder = settings.out / model.name
    with _writing(settings.out):
        folder.mkdir(parents=True, exist_ok=True)  # before minutes of training
    check_classes_of_last(folder, names)
    training, validation = dataset.hold_out(settings.validation_images)
    settings = settings.model_copy(update={"validation_images": len(validation)})
    images = summary(dataset, training, validation)
    first = initial_tensors(model, np.random.default_rng(settings.seed)) | found
    if found:
        some = training.images[:: max(1, len(training) // MOMENT_IMAGES)]
        first = with_moments(model, first, found, some, len(settings.freeze))
    attempts: list[Checkpoint] = []
    rates = [settings.rate] if given else [settings.rate / 2**n for n in range(_RATES)]
    for rate in rates:
        settings = settings.model_copy(update={"rate": rate})
        checkpoint = Checkpoint(
            settings.checkpoints, settings, dataset.sha256, validation, origin(model, found)
        )
        attempts.append(checkpoint)
        print("\n".join((settings.command(), *images)))
        resumed = " since it was resumed" if checkpoint.path.exists() else ""
        run = RunFolder(settings.runs, model.name)
        run.write_settings(
            {
                "command": settings.command(),
                "recipe": settings.model_dump(mode="json", include=set(Recipe.model_fields)),
                "model": json.loads(model.to_json()),
                "data": str(settings.data),
                "dataset_sha256": dataset.sha256,
                "training_images": len(training),
                "validation_images": len(validation),
                "images": images,
                "device": settings.device if settings.gpus == 1 else f"{settings.gpus} x cuda",
            }
        )
        try:
            tensors, epochs, seconds = _trained(
                settings, model, first, training, validation, checkpoint, run, phases
            )
            break
        except TrainingDiverged as exc:
            if rate == rates[-1]:
                raise
            print(f"{exc}\nno --rate is set: it begins again with {rate / 2:g}", file=sys.stderr)
    written = len(epochs) if settings.patience is None else best_epoch(epochs)
    best = "" if settings.patience is None else f" after epoch {written}, the best of {len(epochs)}"
    provenance = Training(
        dataset_sha256=dataset.sha256,
        seed=settings.seed,
        command=settings.command(),
        epochs=written,
        accuracy=None,
        labels=names,
    )
    # The export is verified in float32 on the CPU, wherever the network was trained.
    network, divisor = Network(model, tensors, CpuOps()), 1.0
    if settings.smoothing:
        with phases("calibration"):
            divisor = temperature(network.logits(validation.images), validation.labels)
            network = Network(model, cooled(model, tensors, divisor), CpuOps())
        if (limit := limit_reached(divisor)) is not None:
            print(
                f"the calibration ended at its limit, a temperature of {limit:g}: the result's "
                "probabilities and its accuracy differ; hold out more images "
                "(--validation-images), or train for longer",
                file=sys.stderr,
            )
    with phases("test and export"):
        exported = export_weights(network, dataset.test, provenance, folder, CpuBackend())
    for checkpoint in attempts:
        checkpoint.discard()
    assert exported.logits is not None, "bug: exported without a test"
    parameters = sum(tensor.size for tensor in exported.weights.tensors.values())
    run.write_summary(
        evaluate(exported.logits, dataset.test.labels, dataset.test.files),
        labels=names,
        parameters=parameters,
        temperature=divisor,
        weights=str(exported.path),
        sha256=exported.weights.digest(),
        phases={name: round(taken_s, 3) for name, taken_s in phases.seconds.items()},
    )
    _write_page(
        run.path / REPORT,
        lambda: report(read_run(run.path), exported.weights, dataset.test.images, training),
    )
    print(
        f"{_written(exported)}: {parameters} parameters, "
        f"validation accuracy {epochs[written - 1].validation_accuracy:.2%}{best}, "
        f"{_accuracy(exported, dataset.test)}, trained in {seconds:.2f} s{resumed}, "
        f"sha256 {exported.weights.digest()}\n{_serve(settings.out)}"
    )


def _trained(
    settings: Fit,
    model: Model,
    first: Mapping[str, Tensor],
    training: Digits,
    validation: Digits,
    checkpoint: Checkpoint,
    run: RunFolder,
    phases: Phases,
) -> tuple[dict[str, Tensor], list[Epoch], float]:
    """The trained tensors, the results of the epochs, and the seconds that `train` counts.

    Raises:
        KeyboardInterrupt: its message says whether the run can be resumed.
        UnwritableFolder: the disk is full; the message says that the run can be resumed.
        TrainingDiverged, DeviceError: as `train` and `on_devices`.
    """

    def work(ops: TrainingOps, rank: int) -> tuple[dict[str, Tensor], list[Epoch], float]:
        network = Network(model, first, ops, settings.dropout, frozen=len(settings.freeze))
        epochs, seconds = train(
            network,
            settings,
            training,
            validation,
            checkpoint,
            target=settings.target,
            patience=settings.patience,
            capture=not settings.profile,
            leader=rank == 0,
            phases=phases if rank == 0 else None,
            record=run.add_epoch if rank == 0 else lambda _: None,
        )
        if ops.memory_bytes:
            print(f"GPU {rank}: {ops.memory_bytes / 1e6:.0f} MB of memory")
        return network.tensors, epochs, seconds

    try:
        return on_devices(settings, settings.gpus, work)
    except KeyboardInterrupt as exc:
        if checkpoint.path.exists():
            outcome = "interrupted; the same command resumes after the last completed epoch"
        else:
            outcome = "interrupted before the first epoch was completed; nothing was kept"
        raise KeyboardInterrupt(outcome) from exc
    except OSError as exc:
        if exc.filename is None or not checkpoint.path.exists():
            raise
        raise UnwritableFolder(
            f"{exc.filename}: {exc.strerror}; once it can be written, the same command resumes "
            f"from {checkpoint.path}"
        ) from exc


@contextmanager
def _writing(out: Path, flag: str = "--out") -> Iterator[None]:
    """Raises: UnwritableFolder: the block cannot write `out`, which `flag` names."""
    try:
        yield
    except OSError as exc:
        raise UnwritableFolder(
            f"{flag} is {out}: it cannot be written ({exc.strerror}); name a place that you can "
            "write"
        ) from exc


def _write_page(path: Path, page: Callable[[], str]) -> None:
    """Write a page with pictures, or say why not."""
    try:
        text = page()
    except ImportError as exc:
        print(f"{path} is not written: {exc}; python -m pip install matplotlib", file=sys.stderr)
        return
    write_atomically(path, text.encode())
    print(f"{path}: written")


def compare(settings: Compare) -> None:
    """Print the table, and write the page."""
    runs = read_run(settings.run), read_run(settings.other)
    rows = [("", *(run.path.name for run in runs)), *compared(*runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join((first.ljust(widths[0]), *cells)))
    if settings.out is not None:
        with _writing(settings.out):
            _write_page(settings.out, lambda: comparison(*runs))


def search(settings: Search) -> None:
    """Try recipes.

    Raises:
        KeyboardInterrupt: its message says how to go on.
    """
    names = class_names(settings.data, settings.labels)
    model = read_model(settings.model, len(names))
    dataset = obtain(settings.data, print, names, transposed=settings.transposed)
    settings = settings.resolved(choose(settings.device, print), len(dataset.train))
    check(settings, 1)
    check_classes(settings.device, len(names), print)
    held_out = len(dataset.hold_out(settings.validation_images)[1])
    settings = settings.model_copy(update={"validation_images": held_out})
    try:
        search_recipes(settings, model, dataset, partial(print, flush=True))
    except ImportError as exc:
        raise InvalidSettings(f"{exc}: search needs it; python -m pip install optuna") from exc
    except (KeyboardInterrupt, OSError) as exc:
        # Optuna cannot give up its lock where the interrupt came within it.
        if KeyboardInterrupt not in (type(exc), type(exc.__context__)):
            raise
        raise KeyboardInterrupt("interrupted; the same command goes on with the search") from exc


def export(settings: Export) -> None:
    """Write the ONNX model."""
    weights = WeightFile.read(settings.weights)
    with _writing(settings.out):
        export_onnx(weights, settings.out, CpuBackend())
    print(f"{settings.out}: written, its logits agree with the trainer's")


def import_(settings: Import) -> None:
    """Read, print what becomes what, write."""
    if settings.data is None:
        names = label_names(settings.labels)
    else:
        names = class_names(settings.data, settings.labels)
    source = read_described(settings.model, len(names))
    dataset = None
    if settings.data is not None:
        dataset = load(settings.data, names, transposed=settings.transposed)
    tensors = read_tensors(settings.file)
    layout = layout_of(tensors) if settings.layout == "auto" else settings.layout
    if settings.mapping is None:
        tensors, prefix = without_prefix(tensors)
        if prefix:
            print(f"{settings.file}: {prefix} is taken off the names, which all begin with it")
        found = matched(tensors, source, layout)
    else:
        found = mapped(tensors, source, layout, read_mapping(settings.mapping))
    print(
        f"{settings.file}, in the layout of {layout}:\n{table(tensors, found, source, layout)}",
        flush=True,
    )
    scaling = (settings.input_mean, settings.input_deviation)
    epsilon = settings.epsilon or EPSILONS[layout]
    folded = converted(tensors, found, source, layout, epsilon, *scaling)
    provenance = Training(
        dataset_sha256="" if dataset is None else dataset.sha256,
        seed=None,
        command=settings.command(layout),
        epochs=None,
        accuracy=None,
        labels=names,
    )
    model = source.model.folded
    network = Network(model, folded, CpuOps())
    test = None if dataset is None else dataset.test
    folder = settings.out / model.name
    with _writing(settings.out):
        exported = export_weights(network, test, provenance, folder, CpuBackend())
    print(
        f"{_written(exported)}: {_accuracy(exported, test)}, sha256 {exported.weights.digest()}\n"
        f"{_serve(settings.out)}"
    )


def _written(exported: Exported) -> str:
    return str(exported.path) if exported.new else f"{exported.path}, which was there already"


def _serve(folder: Path) -> str:
    """How to serve the weight files of `folder`."""
    setting = shlex.join(("--weights", str(folder)))
    return f"serve it: lenet-serve {setting}, in a checkout: make serve ARGS={shlex.quote(setting)}"


def _accuracy(exported: Exported, test: Digits | None) -> str:
    accuracy = exported.weights.training.accuracy
    if test is None or accuracy is None:
        return "accuracy not measured; --data FOLDER measures it"
    return f"test accuracy {accuracy:.2%} ({exported.errors} of {len(test)} wrong)"


def evaluate_file(settings: Evaluate) -> None:
    """Measure, print, write."""
    weights = WeightFile.read(settings.weights)
    digits, which = images_of(settings, weights, print)
    device: Literal["cpu", "cuda"] = "cuda" if unavailable(settings.device) is None else "cpu"
    target = Target(device, number_of(settings.device), SERVED[settings.precision])
    found = measured(settings, weights, digits, which, target)
    print("\n".join(text(found)))
    was_transposed = "--transposed" in shlex.split(weights.training.command)
    if was_transposed and digits.files is None and not settings.transposed:
        print(
            "the file was trained with --transposed: images that are stored as those were need it "
            "here, too",
            file=sys.stderr,
        )
    if settings.json_ is not None:
        with _writing(settings.json_, "--json"):
            settings.json_.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if settings.out is not None:
        with _writing(settings.out):
            _write_page(settings.out, lambda: evaluation(found, digits.images))


def inspect(settings: Inspect) -> None:
    """Print the table."""
    if settings.weights is not None:
        weights = WeightFile.read(settings.weights)
        print(content(weights))
        if (reason := unavailable(settings.device)) is not None:
            print(f"served on the CPU by ONNX Runtime; who computes on a GPU needs one: {reason}")
            return
        precision = SERVED[settings.precision]
        print(f"served on GPU 0 in {precision}, with --convolutions {settings.convolutions}, by:")
        print(serving(weights, precision, settings.convolutions))
        return
    model, reason = read_model(settings.model, len(DIGITS)), unavailable(settings.device)
    print(f"{model.name}, {settings.precision}, one step of {settings.batch} images")
    if reason is None:
        print(measure(model, settings.batch, settings.precision))
    else:
        print(outline(model, settings.batch, settings.precision))
        print(f"engines, workspaces and times need a GPU: {reason}")


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one command and return the exit code."""
    command, rest = "fit", list(arguments)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
    kinds = (Fit, Search, Evaluate, Compare, Export, Import, Inspect)
    for sentence in unknown_variables(kinds, environment):
        print(sentence, file=sys.stderr)
    program = f"python -m trainer {command}"
    try:
        match command:
            case "fit":
                fit(parse(Fit, rest, program, synonyms=_SYNONYMS))
            case "evaluate":
                evaluate_file(parse(Evaluate, rest, program, words={"weights": "FILE"}))
            case "compare":
                compare(parse(Compare, rest, program, words={"run": "RUN", "other": "OTHER"}))
            case "export":
                export(parse(Export, rest, program, words={"weights": "FILE"}))
            case "import":
                import_(parse(Import, rest, program, words={"file": "FILE"}))
            case "inspect":
                inspect(parse(Inspect, rest, program, words={"weights": "[FILE]"}))
            case "search":
                search(parse(Search, rest, program, synonyms=_SYNONYMS))
            case _:
                raise InvalidSettings(
                    f"the command is {command}, expected fit, search, evaluate, compare, "
                    "import, export or inspect"
                )
    except KeyboardInterrupt as exc:
        print(str(exc) or "interrupted", file=sys.stderr)
        return 130
    except (TrainerError, LeNetError, OSError) as exc:
        print(_sentence(exc), file=sys.stderr)
        return next(code for kind, code in _EXIT_CODES.items() if isinstance(exc, kind))
    return 0


def _sentence(error: Exception) -> str:
    """The message; an OSError's without its number."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
