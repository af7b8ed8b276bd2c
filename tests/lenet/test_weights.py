"""The weight files that this repository ships, on this machine's backends and the real digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from lenet.context import ExecutionContext, open_backend
from lenet.weightfile import WeightFile

FILES = sorted(Path(__file__).parents[2].glob("weights/*/*.safetensors"))


def name(path):
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_shipped_file_is_canonical_and_proves_itself_when_it_is_read(path):
    weights = WeightFile.read(path)
    assert weights.to_bytes() == path.read_bytes()
    assert weights.model.name == path.parent.name
    with ExecutionContext(open_backend("cpu"), weights, 10) as context:
        context.warm_up()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_shipped_file_is_as_accurate_as_it_says_when_it_sees_all_test_images(path, mnist):
    images, labels = mnist
    weights = WeightFile.read(path)
    plan = open_backend("cpu").plan(weights, 500)
    right = sum(
        int((plan.run(images[start : start + 500]).argmax(1) == labels[start : start + 500]).sum())
        for start in range(0, len(images), 500)
    )
    assert len(images) == 10_000
    assert right / len(images) == weights.training.accuracy
