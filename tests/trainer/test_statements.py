"""What a training run prints and writes, found again from its file, its images and a clock."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest

from lenet import reference
from lenet.weightfile import WeightFile
from trainer import commands
from trainer.commands import run
from trainer.loop import train
from trainer.mnist import Dataset
from trainer.network import Network
from trainer.ops_cpu import CpuOps

STEP_S, EVALUATION_S = 0.25, 1.0
PLAIN = [word for name in ("rotation", "scale", "shear", "shift", "elastic", "weight-decay")
         for word in (f"--{name}", "0")]  # fmt: skip


class Trained:
    """A run: its lines, its files, and the float64 probabilities of a weight file."""

    def __init__(self, folder, lines):
        (of_run,), (path,) = folder.glob("runs/*"), folder.glob("out/mlp/*.safetensors")
        self.path, self.lines, self.weights = path, lines, WeightFile.read(path)
        self.summary = json.loads((of_run / "summary.json").read_text())
        self.epochs = [*map(json.loads, (of_run / "metrics.jsonl").read_text().splitlines())]
        self.page = re.sub(r"</t[dh]>", " ", (of_run / "report.html").read_text())

    def probabilities(self, digits):
        exact = {name: value.astype(np.float64) for name, value in self.weights.tensors.items()}
        return reference.softmax(reference.logits(self.weights.model, exact, digits.images))

    def accuracy(self, digits):
        return np.mean(self.probabilities(digits).argmax(axis=1) == digits.labels)


@pytest.fixture
def dataset(digits):
    """Digits of which every seventh has a wrong label: no accuracy is 0 or 1."""
    found = Dataset(digits(500, 0), digits(60, 1), "")
    for part in (found.train, found.test):
        part.labels[::7] = (part.labels[::7] + 1) % 10
    return found


@pytest.fixture
def fit(dataset, write_idx, tmp_path, monkeypatch, capsys):
    """`fit(name, *more)` trains in a folder of its own, on a clock that only steps and evaluations
    of the network move."""
    step = create_autospec(CpuOps.sgd_step, side_effect=CpuOps.sgd_step)
    logits = create_autospec(Network.logits, side_effect=Network.logits)

    def now_s():
        return 100 + STEP_S * step.call_count + EVALUATION_S * logits.call_count

    monkeypatch.setattr(CpuOps, "sgd_step", step)
    monkeypatch.setattr(Network, "logits", logits)
    monkeypatch.setattr(commands, "train", partial(train, clock=now_s))
    monkeypatch.setattr("trainer.runs.time", SimpleNamespace(monotonic=now_s))

    def fit(name, *more):
        folder = tmp_path / name
        line = ["--device", "cpu", "--model", "mlp", "--batch", "20", "--rate", "0.02"]
        line += ["--validation-images", "100", "--data", str(write_idx(dataset)), *more]
        line += [word for part in ("out", "checkpoints", "runs")
                 for word in (f"--{part}", str(folder / part))]  # fmt: skip
        assert run(["fit", *line], {}) == 0
        return Trained(folder, capsys.readouterr().out.splitlines())

    return fit


@pytest.mark.states(
    "training",
    "last line: seconds from the first step to the last; lines of epochs: seconds left; "
    "metrics.jsonl: seconds; summary.json: seconds of each phase",
    found="a clock outside that moves 0.25 s with each step and 1 s with each evaluation",
)
@pytest.mark.states(
    "training",
    {
        "last line: validation accuracy, test accuracy, wrong of images": (
            "the written file on the same images, by the float64 reference"
        ),
        "last line: parameters, sha256": "the architecture, by hand; the digest of its bytes",
        "report.html: test accuracy and loss, validation accuracy, epochs, parameters": (
            "the same reference; epochs counted in metrics.jsonl"
        ),
    },
)
@pytest.mark.process
def test_a_run_says_what_its_file_does_on_the_same_images(fit, dataset):
    trained = fit("one", "--epochs", "3")
    test, (_, validation) = dataset.test, dataset.hold_out(100)
    probabilities = trained.probabilities(test)
    accuracy, validated = trained.accuracy(test), trained.accuracy(validation)
    assert 0.5 < accuracy < 1 > validated > 0.5
    # 20 steps of 0.25 s an epoch, and an evaluation of 1 s between two of them.
    assert [epoch["seconds"] for epoch in trained.epochs] == [5, 11, 17]
    count = 784 * 500 + 500 + 500 * 10 + 10
    digest = hashlib.sha256(trained.path.read_bytes()).hexdigest()
    said = (
        f"{trained.path}: {count} parameters, validation accuracy {100 * validated:.2f}%, "
        f"test accuracy {100 * accuracy:.2f}% ({60 - round(60 * accuracy)} of 60 wrong), "
        f"trained in 17.00 s, sha256 {digest}"
    )
    assert said in trained.lines
    left = [re.findall(r"(\d+) s left$", line) for line in trained.lines if "epoch " in line]
    assert left == [["10"], ["6"], []]  # 5.5, rounded up
    phases = trained.summary["phases"]
    assert (phases["steps"], phases["validation"]) == (3 * 5, 3 * EVALUATION_S)
    assert (phases["set-up"], phases["calibration"]) == (EVALUATION_S, EVALUATION_S)
    assert phases["reading"] == phases["checkpoints"] == 0
    assert trained.weights.training.accuracy == trained.summary["accuracy"] == accuracy
    loss = -np.log(probabilities[np.arange(60), test.labels]).mean()
    assert trained.summary["loss"] == pytest.approx(loss, rel=1e-5)  # float32 logits
    texts = [f"test accuracy {100 * accuracy:.2f}% ", f"test loss {loss:.4f} nats "]
    texts += [f"validation accuracy {100 * validated:.2f}% ", f"parameters {count:,} "]
    for text in (*texts, f"epochs {len(trained.epochs)} "):
        assert text in re.sub(r"<td>|<tr>", "", trained.page), text


@pytest.mark.states(
    "training",
    "last line and report.html with --patience: validation accuracy of the best epoch",
    found="the written file on the same images, by the float64 reference",
)
@pytest.mark.process
def test_a_run_with_patience_says_what_the_file_of_its_best_epoch_does(fit, dataset):
    trained = fit("patient", "--epochs", "8", "--patience", "2", "--schedule", "step")
    by_epoch = [epoch["validation_accuracy"] for epoch in trained.epochs]
    best = trained.weights.training.epochs
    validated = trained.accuracy(dataset.hold_out(100)[1])
    assert validated == by_epoch[best - 1] == max(by_epoch) > by_epoch[-1]
    assert len(by_epoch) == best + 2 < 8
    said = f"{100 * validated:.2f}% after epoch {best}, the best of {len(by_epoch)}, "
    assert any(f"validation accuracy {said}" in line for line in trained.lines)
    page = re.sub(r"<td>|<tr>", "", trained.page)
    assert f"validation accuracy {100 * validated:.2f}% " in page
    assert f"weights of epoch {best} " in page


@pytest.mark.states(
    "training",
    "lines of epochs and metrics.jsonl: loss, accuracy, validation accuracy",
    found="a run whose weights do not move, from a written file: that file on the training images, "
    "by the float64 reference, with a tenth of each target spread over the classes",
)
@pytest.mark.states(
    "training",
    "report.html: confusion, precision and recall, calibration, mistakes; temperature",
    found="the written files' probabilities, counted class by class",
)
@pytest.mark.process
def test_the_lines_of_epochs_say_what_the_network_did_on_the_training_images(fit, dataset):
    start = fit("start", "--epochs", "1")
    trained = fit("same", "--epochs", "2", "--rate", "1e-12", "--from", str(start.path), *PLAIN)
    training, validation = dataset.hold_out(100)
    log_p = np.log(start.probabilities(training))
    loss = -(0.9 * log_p[np.arange(400), training.labels] + 0.1 * log_p.mean(axis=1)).mean()
    accuracy, validated = start.accuracy(training), start.accuracy(validation)
    assert 0.3 < accuracy < 1
    lines = [line for line in trained.lines if line.startswith("epoch ")]
    said = f"loss {loss:.4f}, accuracy {accuracy:.2%}, validation {validated:.2%}"
    assert lines == [f"epoch 1 of 2: {said}, 5 s left", f"epoch 2 of 2: {said}"]
    for number, epoch in enumerate(trained.epochs, 1):
        assert epoch["epoch"] == number
        assert epoch["loss"] == pytest.approx(loss, rel=1e-5)  # float32 products
        assert (epoch["accuracy"], epoch["validation_accuracy"]) == (accuracy, validated)
    summary, test = trained.summary, dataset.test
    before, found = (np.log(one.probabilities(test)) for one in (start, trained))
    spread = [log_p.max(axis=1) - log_p.min(axis=1) for log_p in (before, found)]
    np.testing.assert_allclose(spread[0] / spread[1], summary["temperature"], rtol=1e-4)
    predicted, confidence = found.argmax(axis=1), np.exp(found.max(axis=1))
    is_right, confusion = predicted == test.labels, np.zeros((10, 10), int)
    np.add.at(confusion, (test.labels, predicted), 1)
    right, images, answers = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    assert summary["confusion"] == confusion.tolist()
    assert summary["recall"] == (right / images).tolist()
    assert summary["precision"] == (right / np.maximum(1, answers)).tolist()
    tenths = [(10 * confidence).astype(int) == tenth for tenth in range(10)]
    gaps = [abs((is_right - confidence)[tenth].sum()) for tenth in tenths]
    sizes = [np.count_nonzero(tenth) for tenth in tenths]
    assert [images for *_, images in summary["calibration"]] == [size for size in sizes if size]
    assert summary["calibration_error"] == pytest.approx(sum(gaps) / len(test), rel=1e-4)
    wrong = list(zip(test.labels[~is_right], predicted[~is_right], strict=True))
    assert len(summary["worst"]) == len(wrong) == trained.page.count(", taken for ")
    assert {tuple(one[1:3]) for one in summary["worst"]} == set(wrong)
