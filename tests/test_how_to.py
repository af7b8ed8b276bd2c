"""The worked examples of docs/how-to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to"


def copy(folder: Path) -> Path:
    """A clone of HEAD in `folder`."""
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return folder


def in_copy(root: Path, *line: str) -> str:
    """What a command prints in a clone, whose modules it imports."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(
        line, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.process
def test_the_new_form_passes_its_tests_when_its_patch_is_applied(tmp_path):
    root = copy(tmp_path / "copy")
    in_copy(root, "git", "apply", "--3way", str(HOW_TO / "add-a-form.patch"))
    tests = ("tests/service/images/test_images.py", "tests/service/images/test_decoders.py")
    kinds = ("-k", "idx or each_kind or named")
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in in_copy(root, *pytest_, *tests, "tests/fuzz/test_corpus.py", *kinds)


def test_the_page_shows_the_code_of_its_patch():
    shown = (HOW_TO / "add-a-form.md").read_text().split("```python\n")[1].split("```")[0]
    patch = (HOW_TO / "add-a-form.patch").read_text()
    added = [line[1:] for line in patch.splitlines() if line.startswith("+")]
    assert shown.splitlines()
    assert all(line in added for line in shown.splitlines())


@pytest.mark.process
def test_the_new_activation_passes_its_tests_when_its_patch_is_applied(tmp_path):
    root = copy(tmp_path / "copy")
    in_copy(root, "git", "apply", "--3way", str(HOW_TO / "add-a-layer.patch"))
    tests = ("test_reference.py", "test_backend.py")
    paths = [f"tests/lenet/{name}" for name in tests] + ["tests/trainer/ops_cpu"]
    paths.append("tests/test_cuda_sources.py")
    kinds = ("-k", "leaky or every_activation", "-m", "")
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in in_copy(root, *pytest_, *paths, *kinds)
