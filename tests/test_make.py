"""The Makefile in a folder of its own, with stand-ins for Python and Docker."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VENV_WORKS = 'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"'
VENV_FAILS = f"{VENV_WORKS}; exit 1"  # Debian without python3-venv: the folder is there, pip is not
VENV_INTERRUPTED = f"{VENV_WORKS}; kill -INT 0; sleep 10"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")


@pytest.fixture
def project(tmp_path):
    """A folder with the Makefile and what it installs from, and a folder for executables."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def executable(project, name, script):
    path = project / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def python(project, venv):
    """A Python that does `venv` for -m venv, and repeats what else it is called with."""
    executable(project, "python3", f'case "$2" in venv) {venv};; *) echo "python $*";; esac')


def make(project, target, *folders):
    """`make target` with the project's executables, and those of `folders`, on PATH."""
    return subprocess.run(
        [shutil.which("make"), target],
        cwd=project,
        env={"PATH": os.pathsep.join((str(project / "bin"), *folders))},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # kill -INT 0 reaches make and its children, as Ctrl-C does
        # A shell's background job inherits that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("venv", [VENV_FAILS, VENV_INTERRUPTED], ids=["failed", "interrupted"])
def test_make_serve_works_after_creating_the_environment_did_not(project, venv):
    python(project, venv)
    for _ in range(2):
        failed = make(project, "serve", os.defpath)
        assert failed.returncode != 0
        assert "installing" not in failed.stdout
        assert ("apt install python3-venv" in failed.stderr) == (venv == VENV_FAILS)
    python(project, VENV_WORKS)
    assert "python -m service" in make(project, "serve", os.defpath).stdout


def test_make_serve_names_the_expected_versions_when_python_is_missing(project):
    failed = make(project, "serve")
    assert failed.returncode != 0
    assert "python3 was not found: install Python 3.11 to 3.14" in failed.stderr


IMPOSSIBLE = """ERROR: Cannot install lenet-serve because of conflicting dependencies.

Additionally, some packages in these conflicts have no matching distributions available for you:
    numpy
"""
NOT_FOUND = "ERROR: No matching distribution found for onnxruntime==1.31.1"


@pytest.mark.parametrize(
    ("said", "named"), [(IMPOSSIBLE, "numpy"), (NOT_FOUND, "onnxruntime==1.31.1")]
)
def test_make_serve_names_the_dependency_when_python_is_too_new_for_it(project, said, named):
    (project / "said").write_text(said)
    pip, version = '"-m pip"*) cat said; exit 1', "-V) echo Python 3.15"
    cases = f'case "$*" in "-m venv"*) {VENV_WORKS};; {pip};; {version};; esac'
    executable(project, "python3", cases)
    failed = make(project, "serve", os.defpath)
    assert failed.returncode != 0
    assert f"pip found no wheel of {named} for Python 3.15. Python 3.11 to 3.14" in failed.stderr
    python(project, VENV_WORKS)  # another one makes the environment anew
    assert "creating .venv with python3" in make(project, "serve", os.defpath).stdout


SHOWS_ITS_CALL = 'echo "$(basename "$0") $* $DOCKER_BUILDKIT $COMPOSE_DOCKER_CLI_BUILD"'


@pytest.mark.parametrize(
    ("scripts", "shown"),
    [
        ({"docker": SHOWS_ITS_CALL, "docker-compose": "exit 9"}, "docker compose up --build"),
        ({"docker": "exit 1", "docker-compose": SHOWS_ITS_CALL}, "docker-compose up --build"),
    ],
    ids=["Compose 2", "Compose 1"],
)
def test_make_docker_up_builds_with_buildkit_when_compose_is_old_or_new(project, scripts, shown):
    (project / "bin" / "basename").symlink_to(shutil.which("basename"))
    for name, script in scripts.items():
        executable(project, name, script)
    up = make(project, "docker-up")
    assert up.returncode == 0, up.stderr
    assert f"{shown} --detach 1 1\n" in up.stdout


def test_make_docker_up_says_what_to_install_when_there_is_no_compose(project):
    executable(project, "docker", "exit 1")
    failed = make(project, "docker-up")
    assert failed.returncode != 0
    assert "apt install docker.io docker-compose" in failed.stderr
