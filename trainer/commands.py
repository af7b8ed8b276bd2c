"""The commands of `python -m trainer`; `trainer.__main__` documents them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from lenet.command_line import parse, unknown_variables
from lenet.cpu import CpuBackend
from lenet.errors import BackendUnavailable, DeviceError, InvalidModel, InvalidSettings, LeNetError
from lenet.weightfile import Training, WeightFile
from trainer.checkpoint import Checkpoint, Epoch
from trainer.devices import check, choose, on_devices, unavailable
from trainer.download import obtain
from trainer.errors import (
    DatasetUnavailable,
    DeviceUnavailable,
    ExportRefused,
    InvalidCheckpoint,
    InvalidDataset,
    InvalidImport,
    TrainerError,
    TrainingDiverged,
    UnwritableFolder,
)
from trainer.export import Exported, export_onnx, export_weights
from trainer.importing import (
    EPSILONS,
    converted,
    layout_of,
    mapped,
    matched,
    read_mapping,
    read_tensors,
    table,
)
from trainer.inspect import content, measure, outline
from trainer.loop import train
from trainer.mnist import DIGITS, Digits, label_names, load
from trainer.network import Network, initial_tensors
from trainer.ops import Tensor, TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.settings import Export, Fit, Import, Inspect
from trainer.start import check_frozen, origin, read_described, read_model, taken

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
    UnwritableFolder: 6,
    DeviceError: 7,
    LeNetError: 6,
    OSError: 6,
}


_FILE_FLAGS = {"import": "--file", "export": "--weights", "inspect": "--weights"}
"""The flag that a command's first word stands for."""


def fit(settings: Fit) -> None:
    """Train, export, report.

    Raises:
        KeyboardInterrupt: its message says whether the run can be resumed.
    """
    names = label_names(settings.labels)
    model = read_model(settings.model, len(names))
    check_frozen(settings.freeze, model)
    found: dict[str, Tensor] = {}
    if settings.from_ is not None:
        found, table = taken(WeightFile.read(settings.from_), model)
        print(f"{settings.from_}:\n{table}")
    # The weight file records the resolved settings, not `auto`.
    settings = settings.resolved(choose(settings.device, print))
    check(settings, settings.gpus)
    folder = settings.out / model.name
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before minutes of training
    except OSError as exc:
        raise UnwritableFolder(
            f"--out is {settings.out}: {folder} cannot be created ({exc.strerror}); name a folder "
            "that you can write"
        ) from exc
    dataset = obtain(settings.data, print, len(names), transposed=settings.transposed)
    training, validation = dataset.hold_out(settings.validation_images)
    checkpoint = Checkpoint(settings.checkpoints, settings, dataset.sha256, origin(model, found))
    print(f"{settings.command()}\n{len(training)} training, {len(validation)} validation images")

    def work(ops: TrainingOps, rank: int) -> tuple[dict[str, Tensor], list[Epoch], float]:
        tensors = initial_tensors(model, np.random.default_rng(settings.seed)) | found
        network = Network(model, tensors, ops, settings.dropout, frozen=len(settings.freeze))
        epochs, seconds = train(
            network,
            settings,
            training,
            validation,
            checkpoint,
            target=settings.target,
            capture=not settings.profile,
            leader=rank == 0,
        )
        if ops.memory_bytes:
            print(f"GPU {rank}: {ops.memory_bytes / 1e6:.0f} MB of memory")
        return network.tensors, epochs, seconds

    try:
        tensors, epochs, seconds = on_devices(settings, settings.gpus, work)
    except KeyboardInterrupt as exc:
        if checkpoint.path.exists():
            outcome = "interrupted; the same command resumes after the last completed epoch"
        else:
            outcome = "interrupted before the first epoch was completed; nothing was kept"
        raise KeyboardInterrupt(outcome) from exc
    provenance = Training(
        dataset_sha256=dataset.sha256,
        seed=settings.seed,
        command=settings.command(),
        epochs=len(epochs),
        accuracy=None,
        labels=names,
    )
    # The export is verified in float32 on the CPU, wherever the network was trained.
    network = Network(model, tensors, CpuOps())
    exported = export_weights(network, dataset.test, provenance, folder, CpuBackend())
    checkpoint.discard()
    parameters = sum(tensor.size for tensor in exported.weights.tensors.values())
    print(
        f"{exported.path}: {parameters} parameters, "
        f"validation accuracy {epochs[-1].validation_accuracy:.2%}, "
        f"{_accuracy(exported, dataset.test)}, trained in {seconds:.2f} s, "
        f"sha256 {exported.weights.digest()}"
    )


def export(settings: Export) -> None:
    """Write the ONNX model."""
    export_onnx(WeightFile.read(settings.weights), settings.out, CpuBackend())
    print(f"{settings.out}: written, its logits agree with the trainer's")


def import_(settings: Import) -> None:
    """Read, print what becomes what, write."""
    names = label_names(settings.labels)
    source = read_described(settings.model, len(names))
    tensors = read_tensors(settings.file)
    layout = layout_of(tensors) if settings.layout == "auto" else settings.layout
    if settings.mapping is None:
        found = matched(tensors, source, layout)
    else:
        found = mapped(tensors, source, layout, read_mapping(settings.mapping))
    print(
        f"{settings.file}, in the layout of {layout}:\n{table(tensors, found, layout)}", flush=True
    )
    scaling = (settings.input_mean, settings.input_deviation)
    epsilon = settings.epsilon or EPSILONS[layout]
    folded = converted(tensors, found, source, layout, epsilon, *scaling)
    dataset = None
    if settings.data is not None:
        dataset = load(settings.data, len(names), transposed=settings.transposed)
    provenance = Training(
        dataset_sha256="" if dataset is None else dataset.sha256,
        seed=0,
        command=settings.command(layout),
        epochs=0,
        accuracy=None,
        labels=names,
    )
    model = source.model.folded
    network = Network(model, folded, CpuOps())
    test = None if dataset is None else dataset.test
    exported = export_weights(network, test, provenance, settings.out / model.name, CpuBackend())
    print(f"{exported.path}: {_accuracy(exported, test)}, sha256 {exported.weights.digest()}")


def _accuracy(exported: Exported, test: Digits | None) -> str:
    accuracy = exported.weights.training.accuracy
    if test is None or accuracy is None:
        return "accuracy not measured: --data FOLDER has none"
    return f"test accuracy {accuracy:.2%} ({exported.errors} of {len(test)} wrong)"


def inspect(settings: Inspect) -> None:
    """Print the table."""
    if settings.weights is not None:
        print(content(WeightFile.read(settings.weights)))
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
    if rest and not rest[0].startswith("-") and command in _FILE_FLAGS:
        rest.insert(0, _FILE_FLAGS[command])
    for sentence in unknown_variables((Fit, Export, Import, Inspect), environment):
        print(sentence, file=sys.stderr)
    program = f"python -m trainer {command}"
    try:
        match command:
            case "fit":
                fit(parse(Fit, rest, program))
            case "export":
                export(parse(Export, rest, program))
            case "import":
                import_(parse(Import, rest, program))
            case "inspect":
                inspect(parse(Inspect, rest, program))
            case _:
                raise InvalidSettings(
                    f"the command is {command}, expected fit, import, export or inspect"
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
