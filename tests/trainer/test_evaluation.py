"""`python -m trainer evaluate`, with a network whose answers are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lenet.model import IDENTITY, DenseBlock, Model
from lenet.weightfile import WeightFile
from trainer.commands import run
from trainer.datasets import load, read
from trainer.evaluation import wilson
from trainer.mnist import Digits

WEIGHTS = Path(__file__).parents[2] / "weights"
CARD = (WEIGHTS / "README.md").read_text()
NAMES = tuple("abcdefghij")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def templates(random_weights, tmp_path):
    """Write a network that is right about all of `synthetic_digits`; its classes are a to j."""

    def write(sha256="0" * 64):
        weight = np.zeros((10, 28, 28), np.float32)
        for label in range(10):
            weight[label, 3 + 2 * label : 5 + 2 * label, 6:22] = 1
        file = random_weights(Model("bars", (DenseBlock(10, activation=IDENTITY),)))
        tensors = {"dense1.weight": weight.reshape(10, -1), "dense1.bias": np.zeros(10, np.float32)}
        training = replace(file.training, labels=NAMES, dataset_sha256=sha256)
        path = tmp_path / "bars.safetensors"
        replace(file, tensors=tensors, training=training).write(path)
        return path

    return write


def evaluated(path, data, tmp_path, *more):
    """What the command writes as JSON, of a run on the CPU."""
    file = tmp_path / "found.json"
    line = ["evaluate", path, "--data", data, "--device", "cpu", "--json", file, *more]
    assert run([str(word) for word in line], {}) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_that_of_the_literature(right, count, low, high):
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I."""
    assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.process
@pytest.mark.parametrize(
    "name", [f"{path.parent.name}/{path.stem}" for path in sorted(WEIGHTS.glob("*/*.safetensors"))]
)
def test_a_committed_file_has_the_numbers_of_its_card(name, mnist_folder, tmp_path, capsys):
    (row,) = (line for line in CARD.splitlines() if line.startswith(f"| `{name}` |"))
    expected = row.split(" | ")[2].replace(",", "")
    path = WEIGHTS / f"{name}.safetensors"
    found = evaluated(path, mnist_folder, tmp_path)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{path} on {mnist_folder}: 10000 test images, by cpu in fp32"
    assert second.startswith(f"accuracy {expected}, 95 % interval ")
    assert found["accuracy"] == WeightFile.read(path).training.accuracy


def write_pictures(folder, digits, names):
    for number, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
        (place := folder / names[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")


def arrays(folder, digits):
    np.savez(folder / "x.npz", images=digits.images, labels=digits.labels)
    return folder / "x.npz"


def test_classes_are_matched_by_name_and_some_may_be_missing(templates, digits, tmp_path):
    some = digits(60, 1)
    some = Digits(some.images[some.labels < 8], some.labels[some.labels < 8])
    assert evaluated(templates(), arrays(tmp_path, some), tmp_path)["wrong"] == 0
    reverse = tmp_path / "reverse.txt"
    reverse.write_text("\n".join(reversed(NAMES)))
    turned = Digits(some.images, 9 - some.labels)
    found = evaluated(templates(), arrays(tmp_path, turned), tmp_path, "--labels", reverse)
    assert (found["wrong"], found["labels"]) == (0, list(NAMES))
    assert [sum(row) for row in found["confusion"]] == np.bincount(
        some.labels, minlength=10
    ).tolist()


def test_images_that_lie_otherwise_than_those_of_training_are_said(
    templates, digits, tmp_path, capsys
):
    path, data = templates(), arrays(tmp_path, digits(60, 1))
    weights = WeightFile.read(path)
    turned = replace(weights.training, command="python -m trainer fit --transposed")
    replace(weights, training=turned).write(tmp_path / "turned.safetensors")
    for file, more, said in (
        (path, (), ""),
        (path, ("--transposed",), ""),
        (tmp_path / "turned.safetensors", ("--transposed",), ""),
        (tmp_path / "turned.safetensors", (), "the file was trained with --transposed: images"),
    ):
        evaluated(file, data, tmp_path, *more)
        error = capsys.readouterr().err
        assert error.startswith(said)
        assert bool(error) == bool(said)


def test_pictures_are_matched_by_the_names_of_their_folders(templates, digits, tmp_path):
    some = digits(60, 1)
    for label, count in ((2, 3), (7, 4)):  # c and h
        few = some.images[some.labels == label][:count]
        write_pictures(tmp_path / "pictures", Digits(few, np.full(count, label, np.uint8)), NAMES)
    found = evaluated(templates(), tmp_path / "pictures", tmp_path)
    assert [sum(row) for row in found["confusion"]] == [0, 0, 3, 0, 0, 0, 0, 4, 0, 0]


@pytest.mark.process  # draws figures
def test_a_mistake_is_named_by_its_picture(templates, digits, tmp_path, capsys):
    some, folder = digits(60, 1), tmp_path / "pictures"
    for part, label, count in (("train", 2, 1), ("test", 2, 2), ("test", 7, 3)):
        few = some.images[some.labels == label][:count]
        write_pictures(folder / part, Digits(few, np.full(count, label, np.uint8)), NAMES)
    page = tmp_path / "report.html"
    # A picture of a bar is scaled to 20 pixels, and no longer where the network looks for it.
    found = evaluated(templates(), folder, tmp_path, "--part", "all", "--out", page)
    assert sorted(found["worst_files"]) == sorted(map(str, folder.glob("*/*/*.png")))
    said, shown = capsys.readouterr().out, page.read_text()
    for file, (_, true, *_) in zip(found["worst_files"], found["worst"], strict=True):
        assert Path(file).parent.name == NAMES[true]
        assert f"  {file}: {NAMES[true]} is taken for " in said
        assert f"<br>{file}</figcaption>" in shown


def test_of_data_without_test_images_those_that_fit_set_aside_are_taken(
    templates, digits, tmp_path, capsys
):
    data = arrays(tmp_path, digits(100, 1))
    assert evaluated(templates(), data, tmp_path)["images"] == 100
    trained_on_it = templates(read(data, NAMES).sha256)
    assert evaluated(trained_on_it, data, tmp_path)["images"] == len(load(data, NAMES).test) == 20
    assert ": 20 images that fit set aside for testing, by cpu" in capsys.readouterr().out
    assert evaluated(trained_on_it, data, tmp_path, "--part", "all")["images"] == 100
    line = ["evaluate", str(trained_on_it), "--data", str(data), "--part", "validation"]
    assert run(line, {}) == 3
    assert f"{data}: has no part validation, expected one of train" in capsys.readouterr().err


@pytest.mark.process  # draws figures
def test_mistakes_are_in_the_text_the_json_and_the_page(templates, digits, tmp_path, capsys):
    some = digits(40, 1)
    wrong = np.flatnonzero(some.labels == 3)[:2]
    some.labels[wrong] = 5
    page = tmp_path / "report.html"
    found = evaluated(templates(), arrays(tmp_path, some), tmp_path, "--out", page)
    assert (found["images"], found["wrong"], found["accuracy"]) == (40, 2, 0.95)
    assert found["confusion"][5][3] == 2
    assert sorted(mistake[:3] for mistake in found["worst"]) == [[n, 5, 3] for n in wrong.tolist()]
    assert found["interval"] == pytest.approx(wilson(38, 40))
    said = capsys.readouterr().out
    low, high = found["interval"]
    assert f"accuracy 95.00% (2 of 40 wrong), 95 % interval {low:.2%} to {high:.2%}\n" in said
    assert f"expected calibration error {found['calibration_error']:.4f}\n" in said
    assert f"\n  image {wrong[0]}: f is taken for d, with " in said
    shown = page.read_text()
    assert shown.count("<svg") == 2
    assert shown.count("f, taken for d with ") == 2
    assert "95.00%, 2 of 40 wrong" in shown


def test_a_file_that_cannot_be_written_is_named_with_its_flag(templates, digits, tmp_path, capsys):
    line = ["evaluate", templates(), "--data", arrays(tmp_path, digits(20, 1)), "--json", tmp_path]
    assert run([str(word) for word in line], {}) == 6
    assert capsys.readouterr().err.startswith(f"--json is {tmp_path}: it cannot be written (")


def test_a_class_that_the_file_lacks_is_refused_by_name(templates, digits, tmp_path, capsys):
    path, some = templates(), digits(20, 1)
    write_pictures(tmp_path / "pictures", some, [*NAMES[:9], "zeta"])
    assert run(["evaluate", str(path), "--data", str(tmp_path / "pictures")], {}) == 3
    assert "has a folder zeta, expected one for each class: a, b, c" in capsys.readouterr().err
    (tmp_path / "labels.txt").write_text("a\nzeta\n")
    line = ["evaluate", path, "--data", arrays(tmp_path, some), "--labels", tmp_path / "labels.txt"]
    assert run([str(word) for word in line], {}) == 3
    assert (
        f"names the class zeta, which {path} lacks; expected some of a, b"
        in capsys.readouterr().err
    )
