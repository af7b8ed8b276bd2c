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
import contextlib, importlib, io
COMMANDS = {
    "load_test": [],
    "http": None,
    "workers": None,
    "costly_bodies": None,
    "reload": None,
    "engine": ["--only", "buckets"],
    "training": [],
    "multi_gpu": ["--trace"],
    "baselines.torch_training": [],
}
for name, arguments in COMMANDS.items():
    main = importlib.import_module(f"benchmarks.{name}").main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["--help"])
        except SystemExit as exc:
            assert exc.code == 0, name
        assert "--json" in out.getvalue(), name
        if arguments is not None:
            assert main(arguments) == 2, name
    print(name, err.getvalue().count("\\n"), err.getvalue())
"""


def test_help_needs_no_library_and_a_missing_one_is_one_line_with_its_remedy():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name, remedy in (
        ("load_test", "needs httpx, which is not installed: make dev"),
        ("engine", "[cuda13]"),
        ("training", "[cuda13]"),
        ("multi_gpu", "needs torch, which is not installed: .venv/bin/python -m pip install torch"),
        ("baselines.torch_training", "needs torch"),
    ):
        (line,) = (line for line in lines if line.startswith(f"{name} 1 "))
        assert remedy in line
