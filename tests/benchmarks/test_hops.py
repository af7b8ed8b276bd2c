"""benchmarks.hops on the committed weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("unmeasured")  # coverage has a profile function of its own
def test_both_kinds_of_request_are_counted():
    command = [sys.executable, "-m", "benchmarks.hops"]
    lines = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["POST /predict", "ModelInfer"]
    for line in lines:
        calls, functions, files = map(int, re.findall(r"(\d+) (?:calls|functions|files)", line))
        assert calls >= functions > files > 5
