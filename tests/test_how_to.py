"""The worked examples of docs/how-to.

A patch that no longer applies is renewed in a clone: `git apply --3way`, resolve, `make reference`,
`git add -A`, `git diff --cached --binary --full-index`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOW_TO = ROOT / "docs" / "how-to"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
REFERENCE = "tests/website/test_reference.py"


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
    in_copy(root, "git", "apply", str(HOW_TO / "add-a-form.patch"))
    tests = ["tests/service/forms/test_body.py", "tests/service/decode/test_pool.py"]
    tests += ["tests/fuzz/test_corpus.py", REFERENCE]
    kinds = ("-k", "idx or each_kind or named or multipart or generated_page")
    assert " passed" in in_copy(root, *PYTEST, *tests, *kinds)


def test_the_page_shows_the_code_of_its_patch():
    shown = (HOW_TO / "add-a-form.md").read_text().split("```python\n")[1].split("```")[0]
    patch = (HOW_TO / "add-a-form.patch").read_text()
    added = [line[1:] for line in patch.splitlines() if line.startswith("+")]
    assert shown.splitlines()
    assert all(line in added for line in shown.splitlines())


def test_the_page_counts_the_files_of_its_patch():
    patch = (HOW_TO / "add-a-form.patch").read_text()
    paths = re.findall(r"^diff --git a/(\S+) ", patch, re.MULTILINE)
    inputs = [path for path in paths if path.startswith("tests/fuzz/corpus/")]
    groups = (
        [path for path in paths if path.startswith("service/")],
        [path for path in paths if path.endswith(".md")],
        [path for path in paths if path.startswith("tests/") and path not in inputs],
        inputs,
    )
    code, documents, tests, given = map(len, groups)
    assert (
        f"{len(paths)} files, of which {code} are code, {documents} are documents, "
        f"{tests} are tests and {given} are inputs"
    ) in (HOW_TO / "add-a-form.md").read_text()


@pytest.mark.parametrize("name", ["add-a-form", "add-a-layer"])
def test_a_patch_has_a_line_for_the_changelog(name):
    assert "diff --git a/CHANGELOG.md " in (HOW_TO / f"{name}.patch").read_text()


@pytest.mark.process
def test_the_new_activation_passes_its_tests_when_its_patch_is_applied(tmp_path):
    root = copy(tmp_path / "copy")
    in_copy(root, "git", "apply", str(HOW_TO / "add-a-layer.patch"))
    tests = ("test_reference.py", "test_backend.py")
    paths = [f"tests/lenet/{name}" for name in tests] + ["tests/trainer/ops_cpu"]
    paths += ["tests/test_cuda_sources.py", REFERENCE]
    kinds = ("-k", "leaky or every_activation or generated_page", "-m", "")
    assert " passed" in in_copy(root, *PYTEST, *paths, *kinds)
