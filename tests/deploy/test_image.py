"""What the images hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.image.left_out import remove
from tests.service_process import PROJECT

FOLDER = PROJECT / "deploy/image"
MOST_MB = 220
KEPT = {"numpy/core.py", "nvidia/cudnn/lib/libcudnn.so.9", "nvidia/cublas/lib/libcublas.so.12"}
LEFT_OUT = {"numpy/tests/a.py", "numpy/linalg/tests/a.py"}
LEFT_OUT |= {"nvidia/cudnn/lib/libcudnn_adv.so.9", "nvidia/cu13/lib/libcufft.so.12"}


def test_what_is_left_out_is_hidden_while_a_command_runs_and_then_removed(tmp_path):
    def files():
        paths = (path for path in tmp_path.rglob("*") if path.is_file())
        return {str(path.relative_to(tmp_path)) for path in paths}

    for name in KEPT | LEFT_OUT:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    show = "import pathlib, sys; print(*pathlib.Path(sys.argv[1]).rglob('*.so*')); sys.exit(3)"
    line = [sys.executable, FOLDER / "left_out.py", "try", "--root", tmp_path]
    line += [sys.executable, "-c", show, tmp_path]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert {Path(name).name for name in done.stdout.splitlines()[0].split()} == {
        *("libcudnn.so.9", "libcublas.so.12"),
        *("libcudnn_adv.so.9.left-out", "libcufft.so.12.left-out"),
    }
    assert files() == KEPT | LEFT_OUT
    remove(tmp_path)
    assert files() == KEPT


@pytest.mark.long
def test_the_image_of_the_service_holds_at_most_220_mb_beyond_its_base():
    image = os.environ.get("LENET_TEST_IMAGE", "lenet-serve:service")
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not installed")
    line = ["docker", "run", "--rm", "--entrypoint", "python", image]
    line += ["-c", (FOLDER / "sizes.py").read_text(), image]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{image} does not run: make docker-image builds it")
    total_mb = int(done.stdout.splitlines()[0].rpartition(": ")[2].removesuffix(" MB"))
    assert 100 < total_mb <= MOST_MB, done.stdout
