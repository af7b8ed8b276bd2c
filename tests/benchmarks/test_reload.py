from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import reload as module
from benchmarks.reload import main, renamed
from lenet.context import ExecutionContext
from lenet.cpu import CpuBackend


@pytest.fixture
def arguments(tmp_path, random_weights, tiny):
    path = tmp_path / "1.safetensors"
    random_weights(tiny).write(path)
    return [f"--weights={path}", "--duration=1", "--reloads=4", "--images=70"]


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_the_second_version_proves_itself_and_answers_otherwise(random_weights, name):
    weights = random_weights(name)
    images = weights.golden.images
    with ExecutionContext(CpuBackend(), weights, 10) as context:
        context.warm_up()
        before = context.run(images).probabilities
        context.replace_weights(renamed(weights))
        assert (context.run(images).probabilities != before).any(axis=1).all()


def test_both_versions_answer_when_they_are_reloaded_in_turns(arguments, tmp_path):
    assert main([*arguments, f"--json={tmp_path / 'told.json'}"]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    for rows in ("1 at a time", "70 at a time"):
        assert told["without reloads"][rows]["answers"]["1"] > 0
        assert told["without reloads"][rows]["answers"]["2"] == 0
        assert sum(told["with reloads"][rows]["answers"].values()) > 0
        assert told["with reloads"][rows]["p100_ms"] >= told["with reloads"][rows]["p50_ms"] > 0


def test_nothing_is_measured_when_answers_are_wrong(arguments, monkeypatch, capsys):
    class Wrong(CpuBackend):
        def plan(self, weights, batch):
            plan = super().plan(weights, batch)
            run = plan.run

            class Plan:
                def run(self, images):
                    result = run(images)
                    result.probabilities += np.float32(1e-6)
                    return result

            return Plan()

    monkeypatch.setattr(module, "CpuBackend", Wrong)
    assert main(arguments) == 1
    assert "an answer is not what version '1' says" in capsys.readouterr().err


def test_a_missing_file_is_told(tmp_path, capsys):
    assert main([f"--weights={tmp_path / 'none'}"]) == 2
    assert "none: cannot be read" in capsys.readouterr().err
