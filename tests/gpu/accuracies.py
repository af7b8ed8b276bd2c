"""The validation accuracy that `fit` prints last, beside that of its weight file.

    python -m tests.gpu.accuracies --data FOLDER --epochs 1 2 5 20 --processes 8

trains the networks in each precision with the default rate (`--device cpu --precisions fp32`: on
the CPU), and prints a line of JSON for each with
the rate that held. It ends with 1 if one differs by more than 0.1 points, or is not trained.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

from lenet import reference
from lenet.model import ARCHITECTURES
from lenet.weightfile import WeightFile
from trainer.commands import run
from trainer.mnist import Digits, load
from trainer.settings import Precision

MOST = 0.1
"""Points: of 5,000 images five may lie so near a border that the precision decides."""


def of_file(path: Path, digits: Digits) -> float:
    """The accuracy of a weight file in float32 on NumPy, in percent."""
    weights = WeightFile.read(path)
    logits = [
        reference.logits(weights.model, weights.tensors, digits.images[start : start + 500])
        for start in range(0, len(digits), 500)
    ]
    return 100 * float((np.concatenate(logits).argmax(axis=1) == digits.labels).mean())


def accuracies(
    model: str, precision: str, data: Path, epochs: int, device: str = "cuda"
) -> dict[str, Any]:
    """Train `model`; what is printed last and what the file does on the held-out images, in %."""
    settings = {"model": model, "precision": precision, "epochs": epochs}
    line = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        for part in ("out", "checkpoints", "runs"):
            line += [f"--{part}", f"{folder}/{part}"]
        with (
            contextlib.redirect_stdout(io.StringIO()) as output,
            contextlib.redirect_stderr(io.StringIO()) as errors,
        ):
            code = run(["fit", "--device", device, "--data", str(data), *line], {})
        if code:
            return {**settings, "code": code, "error": errors.getvalue()}
        (path,) = Path(folder, "out").rglob("*.safetensors")
        file = of_file(path, load(data).hold_out(5_000)[1])
        training = WeightFile.read(path).training
    *_, printed = re.findall(r"epoch \d+ of .* validation ([\d.]+)%", output.getvalue())
    assert training.accuracy is not None
    (rate,) = re.findall(r"--rate (\S+)", training.command)
    test = round(100 * training.accuracy, 2)
    return {
        **settings,
        "rate": rate,
        "printed": float(printed),
        "file": round(file, 2),
        "test": test,
    }


def agrees(found: dict[str, Any]) -> bool:
    """Whether the file is as good as was printed."""
    return "file" in found and abs(found["printed"] - found["file"]) <= MOST


def main() -> int:
    """Train all and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, nargs="+", default=[0])
    parser.add_argument("--models", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--precisions", nargs="+", default=get_args(Precision))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    settings = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    wrong = 0
    with ProcessPoolExecutor(settings.processes, mp_context=spawn) as pool:
        cases = product(settings.models, settings.precisions, settings.epochs)
        jobs = [
            pool.submit(accuracies, model, precision, settings.data, epochs, settings.device)
            for model, precision, epochs in cases
        ]
        for job in jobs:
            wrong += not agrees(found := job.result())
            print(json.dumps(found), flush=True)  # noqa: T201 - a command
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
