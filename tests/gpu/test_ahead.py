"""Kernels that were compiled ahead of time, in processes of their own with an empty CuPy cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cupy
import numpy as np
import pytest

from lenet.context import Target, buckets, compile_ahead
from lenet.cuda import programs
from lenet.cuda.device import Handle
from lenet.cuda.kernels import FOLDER, Kernels
from lenet.cuda.programs import Program
from lenet.weightfile import WeightFile

ROOT = Path(__file__).parents[2]
LARGEST = 1024
MODELS = ("lenet/2", "lenet-6-16/1", "mlp/1")

RUN = """
import sys
from pathlib import Path
import numpy as np
from lenet.context import buckets
from lenet.cuda import programs
from lenet.cuda.backend import CudaBackend
from lenet.weightfile import WeightFile

folder, out, largest, precision, *names = sys.argv[1:]
programs.COMPILED = Path(folder)
images = np.random.default_rng(0).integers(0, 256, (int(largest), 28, 28), np.uint8)
logits = {}
for name in names:
    with CudaBackend(precision=precision) as backend:
        file = WeightFile.read(Path("weights") / f"{name}.safetensors")
        plans = backend.plans(file, buckets(int(largest)))
        logits |= {f"{name}-{rows}": plan.logits(images[:rows]) for rows, plan in plans.items()}
np.savez(out, **logits)
"""


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_what_was_compiled_ahead_is_not_compiled_again_and_computes_the_same(
    precision, tmp_path, monkeypatch
):
    def run(name):
        """The logits, how many files CuPy compiled, and the log of a process."""
        cache = tmp_path / f"{name}-cache"
        line = [sys.executable, "-c", RUN, programs.COMPILED, tmp_path / f"{name}.npz", LARGEST]
        done = subprocess.run(
            [*map(str, line), precision, *MODELS],
            env=os.environ | {"CUPY_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return np.load(tmp_path / f"{name}.npz"), len(list(cache.rglob("*.cubin"))), done.stderr

    monkeypatch.setattr(programs, "COMPILED", tmp_path / "compiled")
    expected, compiled, _ = run("before")
    assert compiled > len(MODELS)

    files = [WeightFile.read(ROOT / "weights" / f"{name}.safetensors") for name in MODELS]
    capability = int(cupy.cuda.Device().compute_capability)
    target = Target("cuda", precision=precision)
    count, failed = compile_ahead(files, target, LARGEST, [capability])
    assert (count >= compiled, failed) == (True, 0)
    found, compiled, log = run("after")
    assert compiled == 0
    assert "compiled again" not in log
    assert len(found.files) == len(MODELS) * len(buckets(LARGEST))
    for name in found.files:
        np.testing.assert_array_equal(found[name], expected[name], name)

    damaged = next(programs.COMPILED.rglob("dense_softmax-*.cubin"))
    damaged.write_bytes(damaged.read_bytes()[:1000])
    found, compiled, log = run("damaged")
    assert compiled == 1
    assert f"{damaged} is compiled again: it is damaged" in log
    assert all(np.array_equal(found[name], expected[name]) for name in found.files)


def test_what_the_driver_cannot_load_is_compiled_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(programs, "COMPILED", tmp_path)
    with Handle() as handle:
        # Its digest is right, but it is no machine code.
        macros = {"SCALAR": "float", "SCALE": 0.5}  # of no other test, whose module would be taken
        Program.of(FOLDER / "unpack.cu", macros).write(handle.capability, b"nothing")
        pixels = cupy.asarray(np.full((1, 28, 28), 3, np.uint8))
        values = cupy.empty((1, 28, 28), np.float32)
        kernel = Kernels(handle).get(FOLDER / "unpack.cu", "unpack", macros)
        kernel((1,), (49,), (pixels, values, np.int32(1)))
        assert (values.get() == 1.5).all()
    assert "it cannot be loaded" in caplog.text
