"""The snippets of docs/coming-from.md, against the running service."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs_check import commands, difference
from tests.service_process import PATIENCE_S, PROJECT, committed

DOCUMENT = (PROJECT / "docs" / "coming-from.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
SHELL = [command for command in commands(DOCUMENT) if not command.skip]

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(*line, text)` runs `text` with a program and returns what it prints."""
    with committed(tmp_path_factory.mktemp("service"), "--models", "lenet") as service:

        def run_(*line):
            *program, text = line
            for port, here in (("8000", service.port), ("8001", service.grpc_port)):
                text = text.replace(f":{port}", f":{here}")
            options = {"cwd": PROJECT, "capture_output": True, "text": True}
            done = subprocess.run([*program, text], check=False, timeout=PATIENCE_S, **options)
            assert done.returncode == 0, done.stderr
            return done.stdout

        yield run_


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_a_client_in_python_reads_a_seven(run, code):
    for package in re.findall(r"^import (tritonclient|requests)", code, re.MULTILINE):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert run(sys.executable, "-c", code) == "7\n"


@pytest.mark.parametrize("command", SHELL, ids=lambda command: str(command.line))
def test_a_command_is_answered(run, command):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    said = run("bash", "-ec", command.text.replace("curl -s", "curl -s --fail-with-body"))
    if command.answer:
        assert difference(said, command.answer) == ""


def test_every_section_but_the_numbers_has_a_snippet():
    for section in DOCUMENT.split("\n## ")[1:]:
        title = section.splitlines()[0]
        assert "```" in section or title == "Numbers"
