"""`python -m trainer fit` on the GPU and real digits, from the command line to the weight file."""

from __future__ import annotations

import re

import pytest

from lenet.weightfile import WeightFile
from trainer import loop
from trainer.__main__ import main


@pytest.fixture
def fit(mnist_folder, tmp_path):
    """Run it with more arguments; (exit code, the bytes of the weight file it wrote, if any)."""
    runs = []

    def run(*arguments, checkpoints="checkpoints"):
        out = tmp_path / f"out{len(runs)}"
        runs.append(out)
        given = ("--data", mnist_folder, "--out", out, "--checkpoints", tmp_path / checkpoints)
        code = main(["fit", "--device", "cuda", *arguments, *map(str, given)])
        files = list(out.rglob("*.safetensors"))
        return code, files[0].read_bytes() if files else None

    return run


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
def test_the_same_seed_gives_the_same_bytes(fit, precision):
    arguments = ("--epochs", "1", "--precision", precision, "--dropout", "0.2", "--elastic", "1")
    code, first = fit(*arguments)
    assert code == 0
    assert fit(*arguments) == (0, first)
    assert fit(*arguments, "--seed", "2")[1] != first


def test_one_epoch_is_as_good_as_it_should_be_and_served_so(fit, tmp_path):
    code, content = fit("--epochs", "1")
    path = tmp_path / "one.safetensors"
    path.write_bytes(content)
    assert code == 0
    assert WeightFile.read(path).training.accuracy > 0.985


def test_an_interrupted_float32_run_ends_with_the_same_bytes(fit, monkeypatch):
    arguments = ("--epochs", "3", "--precision", "fp32")
    _, wanted = fit(*arguments, checkpoints="whole")
    evaluate, calls = loop.accuracy, []

    def interrupted(network, digits):
        calls.append(1)
        if len(calls) == 3:  # before the first epoch, after it, after the second
            raise KeyboardInterrupt
        return evaluate(network, digits)

    monkeypatch.setattr(loop, "accuracy", interrupted)
    assert fit(*arguments) == (130, None)
    assert fit(*arguments) == (0, wanted)


def test_a_run_without_a_graph_computes_the_same(fit):
    _, recorded = fit("--epochs", "1")
    assert fit("--epochs", "1", "--profile") == (0, recorded)


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_a_run_that_diverges_names_the_step_and_where_it_began(fit, precision, capsys):
    arguments = ("--model", "lenet-classic", "--rate", "90", "--epochs", "1")
    assert fit(*arguments, "--precision", precision) == (4, None)
    said = capsys.readouterr().err
    assert re.search(r"the loss is (nan|inf) at step \d+ of 214, expected a finite number", said)
    assert re.search(r"first in (conv|dense)\d\S*('s (output|gradient))? at step \d+", said)
