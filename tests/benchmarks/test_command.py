"""The commands without the libraries that serving does not need, and what they share."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

WITHOUT = """
import sys
for name in ("httpx", "tqdm", "cupy", "cudnn", "torch", "matplotlib"):
    sys.modules[name] = None
import importlib
for name in ("http", "workers", "costly_bodies", "reload"):
    importlib.import_module(f"benchmarks.{name}")
for name, *arguments in (["load_test"], ["engine", "--only", "buckets"], ["multi_gpu", "--trace"]):
    assert importlib.import_module(f"benchmarks.{name}").main(arguments) == 2, name
"""


def test_importing_needs_no_library_and_a_missing_one_is_one_line_with_its_remedy():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    load_test, engine, multi_gpu = done.stderr.splitlines()
    assert "needs httpx, which is not installed: make dev" in load_test
    assert "[cuda13]" in engine
    assert "needs torch, which is not installed: .venv/bin/python -m pip install torch" in multi_gpu
