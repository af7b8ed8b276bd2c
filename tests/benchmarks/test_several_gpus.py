"""What the comparison of one GPU with several writes and ends with; the steps are given."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import several_gpus
from benchmarks.several_gpus import Outcome, main


def outcome(last):
    return Outcome(np.array([2.0, last], np.float32), 100.0, {"w": np.ones(3, np.float32)})


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """`measured(0.5, 0.6)`: exit code and JSON when one GPU ends with the one loss, two with the
    other."""

    def run(alone, both):
        monkeypatch.setattr(
            several_gpus,
            "steps",
            lambda recipe, gpus, *_: [outcome(alone if gpus == 1 else both)] * gpus,
        )
        path = tmp_path / "two-gpus.json"
        return main(["--precisions", "fp32", "--json", str(path)]), json.loads(path.read_text())

    return run


def test_what_was_measured_is_written_when_the_losses_agree(measured):
    code, written = measured(0.5, 0.50001)
    assert code == 0
    assert written["gpus"] == 2
    assert written["fp32"]["relative_difference"] == pytest.approx(2e-5, rel=0.02)
    assert written["fp32"]["relative_difference_of_mean"] == pytest.approx(4e-6, rel=0.1)
    assert written["fp32"]["same_weights_on_every_rank"]


def test_it_ends_with_1_when_the_losses_differ(measured):
    code, written = measured(0.5, 0.501)
    assert code == 1
    assert written["fp32"]["relative_difference"] == pytest.approx(2e-3, rel=0.02)
