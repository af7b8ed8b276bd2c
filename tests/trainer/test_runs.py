"""The folder of a run, its report, and two runs side by side."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from trainer import commands
from trainer.commands import run
from trainer.runs import read_run

pytestmark = pytest.mark.process  # trains and draws figures


@pytest.fixture
def fit(tiny, write_idx, tmp_path):
    """Train something small; returns the folder of the run."""

    def fit(*more):
        before = set((tmp_path / "runs").glob("*"))
        line = ["--device", "cpu", "--model", "mlp", "--epochs", "2", "--batch", "20"]
        line += ["--rate", "0.02", "--validation-images", "100", "--data", str(write_idx(tiny))]
        for name in ("out", "checkpoints", "runs"):
            line += [f"--{name}", str(tmp_path / name)]
        assert run(["fit", *line, *map(str, more)], {}) == 0
        (folder,) = set((tmp_path / "runs").glob("*")) - before
        return folder

    return fit


def test_a_run_leaves_its_settings_metrics_and_a_page_of_its_own(fit, tiny, tmp_path, capsys):
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(f"<{name}>" for name in "abcdefghij"))
    folder = fit("--labels", labels)
    found = read_run(folder)
    assert found.settings["recipe"]["model"] == "mlp"
    assert found.settings["command"].startswith("python -m trainer fit --model mlp")
    assert [epoch["epoch"] for epoch in found.epochs] == [1, 2]
    assert all(epoch.keys() >= {"loss", "accuracy", "rate", "seconds"} for epoch in found.epochs)
    assert found.summary["labels"][0] == "<a>"
    assert set(found.summary["phases"]) >= {"reading", "set-up", "steps", "test and export"}
    printed = capsys.readouterr().out
    assert f"test accuracy {found.summary['accuracy']:.2%}" in printed
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "; 300 training, 100 validation, 60 test images." in page
    shown = re.search(r"<img alt='' src='data:image/png;base64,([^']+)'><figcaption>100 tr", page)
    with Image.open(io.BytesIO(base64.b64decode(shown[1]))) as picture:
        tiles = 255 - np.asarray(picture).reshape(5, 28, 20, 28).swapaxes(1, 2).reshape(-1, 28, 28)
    given = {
        image.tobytes(): label
        for image, label in zip(tiny.train.images, tiny.train.labels, strict=True)
    }
    labels = [given[tile.tobytes()] for tile in tiles]  # each is a training image
    assert labels == sorted(labels)
    assert set(labels) == set(range(10))
    assert "&lt;a&gt;" in page
    assert "<a>" not in page
    # Nothing is loaded from anywhere: links are within the page, or names of XML.
    assert not re.findall(r"(?:src|href)=.(?!#|data:)", page)
    assert "<script" not in page
    assert "url(" not in re.sub(r"url\(#\w+\)", "", page)


def test_two_runs_are_laid_side_by_side(fit, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands, "report", lambda *_: "")  # not read here
    one, other = fit(), fit("--seed", "2", "--epochs", "3")
    capsys.readouterr()
    page = tmp_path / "compare.html"
    assert run(["compare", str(one), str(other), "--out", str(page)], {}) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [one.name, other.name]
    assert ["--seed", "1", "2"] in lines
    assert ["epochs", "2", "3"] in lines
    assert not [line for line in lines if line[0] == "--rate"]
    assert page.read_text().count("<svg") == 1


def test_a_run_of_one_epoch_has_its_numbers_instead_of_curves(fit, tmp_path):
    one, other = fit("--epochs", "1"), fit("--epochs", "1", "--seed", "2")
    loss = read_run(one).epochs[0]["loss"]
    page = (one / "report.html").read_text()
    assert page.count("<svg") == 4
    assert f"<td>training loss</td><td>{loss:.4f} nats</td></tr>" in page
    both = tmp_path / "compare.html"
    assert run(["compare", str(one), str(other), "--out", str(both)], {}) == 0
    assert "<svg" not in both.read_text()
    assert f"<td>training loss</td><td>{loss:.4f} nats</td><td>" in both.read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    def refusal(folder):
        assert run(["compare", str(folder), str(tmp_path)], {}) == 6
        return capsys.readouterr().err

    assert refusal("nowhere").startswith("nowhere: no such folder; expected that of a run, as ")
    assert refusal(tmp_path) == (
        f"{tmp_path}: has no settings.json: it is not the folder of a run\n"
    )
    (tmp_path / "settings.json").write_text(RUN["settings.json"])
    assert refusal(tmp_path) == (
        f"{tmp_path}: has no summary.json: the run was interrupted, or has not ended yet\n"
    )


RUN = {
    "settings.json": json.dumps({"recipe": {}, "dataset_sha256": "", "device": "cpu"}),
    "metrics.jsonl": json.dumps({"loss": 1.0, "accuracy": 0.5, "validation_accuracy": 0.5}),
    "summary.json": json.dumps(
        {
            "accuracy": 0.5,
            "loss": 1.0,
            "calibration_error": 0.1,
            "parameters": 10,
            "phases": {},
            "labels": ["a", "b"],
            "recall": [0.5, 0.5],
        }
    ),
}


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("settings.json", "{", "not JSON (Expecting property name"),
        ("settings.json", "[]", "Input should be a valid dictionary; expected the file that fit"),
        ("settings.json", '{"device": "cpu"}', "recipe: Field required; expected the file that"),
        ("summary.json", "{}", "accuracy: Field required"),
        ("metrics.jsonl", "", "List should have at least 1 item"),
        ("metrics.jsonl", '{"loss": 1}', "0: accuracy: Field required"),
        ("metrics.jsonl", "\xff", "not JSON ('utf-8' codec can't decode"),
    ],
)
def test_a_damaged_run_is_refused_by_the_name_of_its_file(name, content, problem, tmp_path, capsys):
    def compare():
        return run(["compare", str(tmp_path), str(tmp_path)], {})

    for file, text in RUN.items():
        (tmp_path / file).write_text(text)
    assert compare() == 0
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert compare() == 6
    assert capsys.readouterr().err.startswith(f"{tmp_path / name}: {problem}")
