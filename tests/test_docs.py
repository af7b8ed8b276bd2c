"""What documents promise about themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", sorted((DOCS / "notes").glob("*.md")), ids=lambda path: path.stem)
def test_a_design_note_has_at_most_forty_lines(path):
    assert len(path.read_text().splitlines()) <= 40
