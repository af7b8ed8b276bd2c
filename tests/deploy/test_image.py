"""What the images hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.image.left_out import remove

FOLDER = Path(__file__).parents[2] / "deploy/image"
MOST_MB = 220
KEPT = ("numpy/core.py", "nvidia/cudnn/lib/libcudnn.so.9", "nvidia/cublas/lib/libcublas.so.12")
LEFT_OUT = (
    "numpy/tests/a.py",
    "numpy/linalg/tests/a.py",
    "nvidia/cudnn/lib/libcudnn_adv.so.9",
    "nvidia/cu13/lib/libcufft.so.12",
)
INSTALLED = {*KEPT, *LEFT_OUT}


@pytest.fixture
def packages(tmp_path):
    for name in INSTALLED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_left_out_is_removed_and_nothing_else(packages):
    remove(packages)
    assert files(packages) == set(KEPT)


def test_what_is_left_out_is_hidden_while_a_command_runs_and_there_again(packages):
    show = "import pathlib, sys; print(*pathlib.Path(sys.argv[1]).rglob('*.so*')); sys.exit(3)"
    command = [sys.executable, "-c", show, packages]
    done = subprocess.run(
        [sys.executable, FOLDER / "left_out.py", "try", "--root", packages, *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    names = {Path(name).name for name in done.stdout.splitlines()[0].split()}
    shown = {"libcudnn.so.9", "libcublas.so.12"}
    assert names == shown | {"libcudnn_adv.so.9.left-out", "libcufft.so.12.left-out"}
    assert files(packages) == INSTALLED


@pytest.mark.long
def test_the_image_of_the_service_holds_at_most_220_mb_beyond_its_base():
    image = os.environ.get("LENET_TEST_IMAGE", "lenet-serve:service")
    if shutil.which("docker") is None:
        pytest.skip("the docker command is not installed")
    python = ("docker", "run", "--rm", "--entrypoint", "python", image)
    code = (FOLDER / "sizes.py").read_text()
    done = subprocess.run([*python, "-c", code, image], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{image} does not run: make docker-image builds it")
    total_mb = int(done.stdout.splitlines()[0].rpartition(": ")[2].removesuffix(" MB"))
    assert 100 < total_mb <= MOST_MB, done.stdout
