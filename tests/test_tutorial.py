"""Documents whose outputs come from a GPU quote files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_each_line_of_output_stands_in_a_linked_file_when_a_page_shows_that_of_a_gpu():
    page = (DOCS / "tutorial" / "first-gpu-session.md").read_text()
    names = re.findall(r"\]\(\.\./benchmarks/([a-z-]+\.(?:txt|log))\)", page)
    recorded = {
        line.rstrip()
        for name in names
        for line in (DOCS / "benchmarks" / name).read_text().splitlines()
    }
    shown = "".join(re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)).splitlines()
    assert shown
    assert [line for line in shown if line.rstrip() not in recorded] == []
