"""The command line: `python -m trainer` trains `lenet` with the default recipe.

    python -m trainer                                      the same as fit
    python -m trainer fit --model mlp --data FOLDER ...    train, prove, write weights/MODEL/VERSION
    python -m trainer export --weights FILE --out FILE     a weight file as ONNX
    python -m trainer inspect --precision tf32 --batch 512 each call of a training step: its shape,
                                                           time and share of what the GPU can do;
                                                           without a GPU all but the times
    python -m trainer fit --help                           every setting and its default

Exit codes:
    0    done
    2    the command line or the environment holds something that cannot be
    3    the digits are not there, cannot be downloaded or are broken
    4    the training diverged: the message says at which step and in which layer first
    5    the result was refused: what would be served is not what was trained
    6    a file cannot be read or written
    7    the GPU failed, or has too little memory
    130  interrupted; the same command resumes after the last whole epoch

An error is one sentence on the standard error, never a traceback.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    if importlib.util.find_spec("tqdm") is None:
        sys.exit("training needs more than serving: make train, or pip install '.[train]'")
    # The order in which a BLAS sums depends on its number of threads, and it reads that number
    # once, when NumPy is loaded. With one thread the result does not depend on the machine's
    # cores. A second thread saves little: a step of lenet takes 23 ms instead of 30 on two cores
    # of an AMD EPYC (2026-11-20), and several times as long when another program wants a core.
    for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        os.environ[_variable] = "1"

import numpy as np
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from lenet.cpu import CpuBackend
from lenet.cuda.engine_cache import PlanCache, default_cache
from lenet.errors import BackendUnavailable, DeviceError, InvalidModel, LeNetError
from lenet.model import named
from lenet.weightfile import Training, WeightFile
from trainer.calls import step_calls
from trainer.checkpoint import Checkpoint, Epoch
from trainer.devices import check, choose, on_devices, unavailable
from trainer.download import obtain
from trainer.errors import (
    DatasetUnavailable,
    DeviceUnavailable,
    ExportRefused,
    InvalidCheckpoint,
    InvalidDataset,
    TrainerError,
    TrainingDiverged,
)
from trainer.exporter import export_onnx, export_weights
from trainer.inspection import measure, outline, report
from trainer.loop import train
from trainer.mnist import CLASSES
from trainer.network import Network, initial_tensors
from trainer.ops import Tensor, TrainingOps
from trainer.ops_cpu import CpuOps
from trainer.settings import Export, Fit, Inspect

_EXIT_CODES: dict[type[Exception], int] = {
    ValidationError: 2,
    SettingsError: 2,
    InvalidModel: 2,
    DeviceUnavailable: 2,
    BackendUnavailable: 2,
    DatasetUnavailable: 3,
    InvalidDataset: 3,
    TrainingDiverged: 4,
    ExportRefused: 5,
    InvalidCheckpoint: 6,
    DeviceError: 7,
    LeNetError: 6,
    OSError: 6,
}


def fit(settings: Fit) -> None:
    """Train, export, report."""
    model = named(settings.model)
    device = choose(settings.device, print)
    # What runs, not what was asked for, is what the weight file tells.
    settings = settings.resolved(device)
    check(settings, settings.gpus)
    folder = settings.out / model.name
    folder.mkdir(parents=True, exist_ok=True)  # now, not after minutes of training
    dataset = obtain(settings.data, print)
    training, validation = dataset.hold_out(settings.validation_images)
    checkpoint = Checkpoint(settings.checkpoints, settings, dataset.sha256)
    print(f"{settings.command()}\n{len(training)} training, {len(validation)} validation images")

    def work(ops: TrainingOps, rank: int) -> tuple[dict[str, Tensor], list[Epoch], float]:
        tensors = initial_tensors(model, np.random.default_rng(settings.seed))
        network = Network(model, tensors, ops, settings.dropout)
        epochs, seconds = train(
            network,
            settings,
            training,
            validation,
            checkpoint,
            target=settings.target,
            record=not settings.profile,
            leader=rank == 0,
        )
        if ops.memory_bytes:
            print(f"GPU {rank}: {ops.memory_bytes / 1e6:.0f} MB of memory")
        return network.tensors, epochs, seconds

    tensors, epochs, seconds = on_devices(settings, settings.gpus, work)
    pedigree = Training(
        dataset_sha256=dataset.sha256,
        seed=settings.seed,
        command=settings.command(),
        epochs=len(epochs),
        accuracy=0.0,
        labels=tuple(str(digit) for digit in range(CLASSES)),
    )
    # The proof is in float32 on the CPU, wherever and however the network was trained.
    network = Network(model, tensors, CpuOps())
    exported = export_weights(network, dataset.test, pedigree, folder, CpuBackend())
    checkpoint.discard()
    parameters = sum(tensor.size for tensor in exported.weights.tensors.values())
    print(
        f"{exported.path}: {parameters} parameters, "
        f"validation accuracy {epochs[-1].validation_accuracy:.2%}, "
        f"test accuracy {exported.weights.training.accuracy:.2%} "
        f"({exported.errors} of {len(dataset.test)} wrong), trained in {seconds:.2f} s, "
        f"sha256 {exported.weights.digest()}"
    )


def export(settings: Export) -> None:
    """Write the ONNX model."""
    export_onnx(WeightFile.read(settings.weights), settings.out, CpuBackend())
    print(f"{settings.out}: written, its logits agree with the trainer's")


def inspect(settings: Inspect) -> None:
    """Print the table."""
    calls = step_calls(named(settings.model), settings.batch, settings.precision)
    reason = unavailable(settings.device)
    print(f"{settings.model}, {settings.precision}, one step of {settings.batch} images")
    if reason is not None:
        print(f"{outline(calls)}\nplans, workspaces and times need a GPU: {reason}")
        return
    cache = PlanCache(default_cache())
    times, step_us = measure(named(settings.model), settings.batch, settings.precision, cache)
    print(report(calls, times, step_us))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    command, rest = "fit", list(arguments)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
    elif rest and rest[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        match command:
            case "fit":
                fit(CliApp.run(Fit, cli_args=rest))
            case "export":
                export(CliApp.run(Export, cli_args=rest))
            case "inspect":
                inspect(CliApp.run(Inspect, cli_args=rest))
            case _:
                expected = "expected fit, export or inspect"
                print(f"the command is {command!r}, {expected}", file=sys.stderr)
                return 2
    except KeyboardInterrupt:
        print("interrupted; the same command resumes after the last whole epoch", file=sys.stderr)
        return 130
    except (ValidationError, SettingsError, TrainerError, LeNetError, OSError) as exc:
        print(_sentence(exc), file=sys.stderr)
        return next(code for kind, code in _EXIT_CODES.items() if isinstance(exc, kind))
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, SettingsError):
        return f"{error}; --help lists every setting"
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    flag = "--" + "-".join(str(part) for part in first["loc"]).replace("_", "-")
    if first["type"] == "missing":
        return f"{flag} is missing; --help lists every setting"
    return f"{flag} is {first['input']!r}, expected otherwise: {first['msg']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
