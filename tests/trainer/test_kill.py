"""A run that is killed at any moment and started again ends with the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.service_process import PATIENCE_S
from tests.trainer.terminated import check_moments
from trainer.__main__ import main
from trainer.mnist import Dataset

# Trains in processes that are killed.
pytestmark = [pytest.mark.process, pytest.mark.usefixtures("unmeasured")]

ROOT = Path(__file__).parents[2]

# Checkpoints after every epoch, as if each took ten seconds.
PROGRAM = """
import sys
from trainer import loop
from trainer.__main__ import main
loop.CHECKPOINT_S = 0.0
sys.exit(main())
"""


# What a process does when SIGTERM arrives, and at which of its calls.
MOMENTS = {
    "prepares the training": ("trainer.ops_cpu.CpuOps.start", 1),
    "takes a step": ("trainer.ops_cpu.CpuOps.sgd_step", 25),
    "validates an epoch": ("trainer.loop.accuracy", 4),
    "writes a checkpoint": ("lenet.files.os.fsync", 3),
    "verifies the result": ("trainer.commands.export_weights", 1),
}


def test_a_run_terminated_at_any_of_five_moments_ends_with_the_same_bytes(
    digits, write_idx, tmp_path, monkeypatch, capsys
):
    data = write_idx(Dataset(digits(300, 0), digits(60, 1), ""))
    monkeypatch.setattr("trainer.loop.CHECKPOINT_S", 0.0)
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        monkeypatch.setenv(variable, "1")  # `main` sets them

    def fit(name):
        line = ["--device", "cpu", "--model", "mlp", "--epochs", "8", "--batch", "20"]
        line += ["--rate", "0.1", "--schedule", "step", "--patience", "3", "--dropout", "0.3"]
        line += ["--validation-images", "100", "--data", str(data)]
        for part in ("out", "checkpoints", "runs"):
            line += [f"--{part}", str(tmp_path / name / part)]
        out = tmp_path / name / "out"
        code = main(["fit", *line])
        (content,) = [path.read_bytes() for path in out.rglob("*.safetensors")] or [None]
        if name == "whole":
            assert "the best of " in capsys.readouterr().out
        return code, content

    check_moments(MOMENTS, fit, monkeypatch, capsys)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_again_and_again_ends_with_the_same_bytes(kills, digits, write_idx, tmp_path):
    epochs = 5 * kills
    data = write_idx(Dataset(digits(700, 0), digits(60, 1), ""))

    def start(name):
        line = ["--device", "cpu", "--epochs", epochs, "--batch", "50", "--dropout", "0.3"]
        line += ["--elastic", "1", "--rate", "0.02", "--validation-images", "100", "--data", data]
        line += ["--out", tmp_path / name, "--checkpoints", tmp_path / f"{name}-checkpoints"]
        line += ["--runs", tmp_path / "runs"]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "fit", *map(str, line)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
        )

    whole = start("whole")
    _, errors = whole.communicate(timeout=10 * PATIENCE_S)
    assert whole.returncode == 0, errors
    random_ = random.Random(kills)
    for _ in range(kills):
        before = len(list((tmp_path / "runs").iterdir()))
        run = start("killed")
        while len(list((tmp_path / "runs").iterdir())) == before:  # the training begins
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.01)
        time.sleep(random_.uniform(0, 1))
        assert run.poll() is None, "it was done before it was killed"
        number = random_.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        run.send_signal(number)
        _, errors = run.communicate(timeout=PATIENCE_S)
        assert run.returncode in (130, -number), errors
        assert number == signal.SIGKILL or run.returncode == 130
        assert b"Traceback" not in errors
        assert not list((tmp_path / "killed").rglob("*.safetensors"))
    last = start("killed")
    _, errors = last.communicate(timeout=10 * PATIENCE_S)
    assert last.returncode == 0, errors
    (path,) = (tmp_path / "killed").rglob("*.safetensors")
    (expected,) = (tmp_path / "whole").rglob("*.safetensors")
    assert path.read_bytes() == expected.read_bytes()
    assert list((tmp_path / "killed-checkpoints").iterdir()) == []
