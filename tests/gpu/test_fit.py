"""`python -m trainer fit` on the GPU and real digits, from the command line to the weight file."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from lenet.model import ARCHITECTURES, named
from lenet.weightfile import WeightFile
from tests.gpu.accuracies import MOST, accuracies, agrees, of_file
from tests.trainer.terminated import check_moments
from trainer import loop
from trainer.__main__ import main
from trainer.checkpoint import Checkpoint
from trainer.devices import on_devices, side_by_side
from trainer.mnist import load
from trainer.network import Network, initial_tensors
from trainer.runs import METRICS
from trainer.settings import Recipe


@pytest.fixture
def fit(mnist_folder, tmp_path):
    """Run it with more arguments; (exit code, the bytes of the weight file it wrote, if any)."""
    runs = []

    def run(*arguments, checkpoints="checkpoints"):
        out = tmp_path / f"out{len(runs)}"
        runs.append(out)
        given = ("--data", mnist_folder, "--out", out, "--checkpoints", tmp_path / checkpoints)
        given += ("--runs", tmp_path / "runs")
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


def test_a_network_of_ones_own_is_trained_from_a_file_and_keeps_what_is_frozen(fit, tmp_path):
    block = {"type": "conv", "channels": 16, "kernel": [3, 3], "stride": [2, 2], "batch_norm": True}
    blocks = [block, {"type": "dense", "units": 60}, {"type": "dense", "units": 10}]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "blocks": blocks}))
    code, content = fit("--epochs", "1", "--model", str(path))
    assert code == 0
    start = tmp_path / "one.safetensors"
    start.write_bytes(content)
    first = WeightFile.read(start)
    assert first.training.accuracy > 0.95
    more = ("--from", str(start), "--freeze", "conv1")
    code, content = fit("--epochs", "1", "--model", str(path), *more)
    assert code == 0
    (tmp_path / "two.safetensors").write_bytes(content)
    second = WeightFile.read(tmp_path / "two.safetensors")
    # Folding rounds gamma = sqrt(1 + epsilon) of the batch norm that changes nothing.
    np.testing.assert_allclose(
        second.tensors["conv1.weight"], first.tensors["conv1.weight"], rtol=1e-6
    )
    assert second.training.accuracy > 0.95


MOMENTS = {
    "captures a step": ("trainer.ops_cuda.ops.CudaOps.capture", 1),
    "takes the steps of its second epoch": ("trainer.ops_cuda.ops.CudaOps.losses", 2),
    "validates an epoch": ("trainer.loop.accuracy", 3),
    "writes a checkpoint": ("trainer.checkpoint.Checkpoint.save", 2),
    "verifies the result": ("trainer.commands.export_weights", 1),
}


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_a_run_terminated_at_any_of_five_moments_ends_with_the_same_bytes(
    fit, precision, monkeypatch, capsys
):
    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)

    def run(name):
        arguments = ("--epochs", "3", "--dropout", "0.2", "--precision", precision)
        return fit(*arguments, checkpoints=name)

    check_moments(MOMENTS, run, monkeypatch, capsys)


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


@pytest.mark.states(
    "training",
    "on a GPU: validation accuracy of the last line, in each precision",
    found="the written file on the validation images, by the reference on NumPy",
)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_a_short_run_is_trained_and_the_accuracy_printed_last_is_that_of_its_file(
    model, precision, mnist_folder
):
    found = accuracies(model, precision, mnist_folder, epochs=2)
    assert agrees(found), found
    assert found["file"] > 97


def test_a_target_that_the_network_reaches_ends_the_run(fit, mnist_folder, tmp_path):
    code, content = fit("--epochs", "12", "--target", "99")
    path = tmp_path / "reached.safetensors"
    path.write_bytes(content)
    (metrics,) = (tmp_path / "runs").rglob(METRICS)
    epochs = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert code == 0
    assert len(epochs) == WeightFile.read(path).training.epochs < 12
    assert epochs[-1]["validation_accuracy"] >= 0.99
    _, validation = load(mnist_folder).hold_out(5_000)
    assert of_file(path, validation) >= 99 - MOST


@pytest.mark.parametrize("precision", ["fp32", "tf32", "mixed"])
def test_seeds_side_by_side_train_the_same_bytes_as_one_after_another(
    precision, mnist_folder, tmp_path
):
    training, validation = load(mnist_folder).hold_out(5_000)
    model = named("lenet")
    recipe = Recipe(epochs=2, precision=precision, dropout=0.2).resolved("cuda")

    def work(ops, seed):
        seeded = recipe.model_copy(update={"seed": seed})
        tensors = initial_tensors(model, np.random.default_rng(seed))
        network = Network(model, tensors, ops, seeded.dropout)
        checkpoint = Checkpoint(tmp_path, seeded, "", validation)
        loop.train(network, seeded, training, validation, checkpoint, leader=False)
        return {name: tensor.tobytes() for name, tensor in network.tensors.items()}

    expected = [
        on_devices(recipe, 1, lambda ops, _, seed=seed: work(ops, seed)) for seed in range(3)
    ]
    assert side_by_side(recipe, 3, work) == expected


def test_a_search_counts_the_mistakes_that_the_files_of_its_recipes_make(
    fit, mnist_folder, tmp_path
):
    optuna = pytest.importorskip("optuna")
    journal = tmp_path / "search.log"
    given = ("--data", str(mnist_folder), "--journal", str(journal), "--over", "rate,smoothing")
    few = ("--epochs", "2", "--trials", "3", "--seeds", "1")
    assert main(["search", "--device", "cuda", *given, *few]) == 0
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    storage = optuna.storages.JournalStorage(backend)
    (study,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).trials
    _, validation = load(mnist_folder).hold_out(5_000)
    counted = [trial for trial in trials if trial.value is not None]
    assert counted
    for trial in counted:
        words = [str(word) for name, value in trial.params.items() for word in (f"--{name}", value)]
        code, content = fit("--epochs", "2", *words)
        assert code == 0
        path = tmp_path / f"{trial.number}.safetensors"
        path.write_bytes(content)
        mistakes = (1 - of_file(path, validation) / 100) * len(validation)
        assert trial.value == pytest.approx(mistakes, abs=MOST / 100 * len(validation))
