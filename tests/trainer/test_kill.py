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
