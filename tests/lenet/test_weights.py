"""The weight files that this repository ships; their accuracy is the trainer's to test."""

from __future__ import annotations

from pathlib import Path

import pytest

from lenet.context import ExecutionContext, Target, open_backend
from lenet.weightfile import WeightFile

FILES = sorted(Path(__file__).parents[2].glob("weights/*/*.safetensors"))


def name(path):
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_shipped_file_is_canonical_and_agrees_with_its_golden_logits(path):
    weights = WeightFile.read(path)
    assert weights.to_bytes() == path.read_bytes()
    assert weights.model.name == path.parent.name
    with ExecutionContext(open_backend(Target("cpu")), weights, 10) as context:
        context.warm_up()
