"""What documents promise about themselves."""

from __future__ import annotations

import json
import re
import statistics
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


def test_the_record_is_what_was_measured():
    page = (DOCS / "record.md").read_text()
    found = json.loads((DOCS / "benchmarks" / "training.json").read_text())
    fast, networks = found["time_to_99"], found["architectures_cuda"]
    rows = [(fast["mean_s"], fast["accuracies"], "99.0")]
    for name, reached in (("lenet-6-16", "99.5"), ("lenet", "99.6")):
        run = networks[f"{name}, 20 epochs"]
        rows.append((run["seconds"]["mean"], run["test_accuracy"]["values"], reached))
    for seconds, accuracies, reached in rows:
        mean = statistics.mean(accuracies)
        assert mean >= float(reached)
        time = f"{seconds:.{3 if seconds < 1 else 2}f}"
        shown = f"{mean:.2f} % ({min(accuracies):.2f})"
        assert f"| {reached} % | {time} | {shown} | {len(accuracies)} |" in page
    engine = json.loads((DOCS / "benchmarks" / "engine.json").read_text())
    (largest,) = [
        one for one in engine["buckets"] if (one["rows"], one["precision"]) == (8192, "fp16")
    ]
    assert f"| {largest['images_per_s'] / 1e6:.1f} million |" in page
    (contexts,) = [one for one in engine["pool_all"] if (one["contexts"], one["rows"]) == (4, 8192)]
    assert f"| {contexts['images_per_s'] / 1e6:.1f} million |" in page
