import gzip
import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trainer.datasets import class_names, load, read, summary
from trainer.errors import DatasetUnavailable, InvalidDataset
from trainer.mnist import DIGITS, Dataset, Digits


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_pictures(folder, part, names=DIGITS):
    for number, (image, label) in enumerate(zip(part.images, part.labels, strict=True)):
        (place := folder / names[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).resize((56, 56)).save(place / f"{number}.png")


def write_csv(path, part, header=True):
    rows = np.column_stack((part.labels, part.images.reshape(-1, 784)))
    lines = [",".join(map(str, row)) for row in rows.tolist()]
    if header:
        lines.insert(0, "label," + ",".join(f"pixel{n}" for n in range(784)))
    content = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def equal(one, other):
    np.testing.assert_array_equal(one.images, other.images)
    np.testing.assert_array_equal(one.labels, other.labels)


def keras(folder, tiny):
    x, y = tiny.train.images, tiny.train.labels
    path = folder / "mnist.npz"
    np.savez(path, x_train=x, y_train=y, x_test=tiny.test.images, y_test=tiny.test.labels)
    return path


def columns(folder, tiny):
    x = tiny.train.images.reshape(-1, 784).astype(np.int64)
    arrays = {"x_train": x, "y_train": tiny.train.labels[:, np.newaxis]}
    np.savez(
        folder / "x.npz",
        **arrays,
        x_test=tiny.test.images[..., np.newaxis],
        y_test=tiny.test.labels,
    )
    return folder / "x.npz"


def tables(folder, tiny):
    write_csv(folder / "train.csv.gz", tiny.train)
    write_csv(folder / "test.csv", tiny.test, header=False)
    return folder


def of_each_kind(folder, tiny):
    np.savez(folder / "train.npz", images=tiny.train.images, labels=tiny.train.labels)
    write_csv(folder / "test.csv", tiny.test)
    return folder


@pytest.mark.parametrize("form", [keras, columns, tables, of_each_kind])
def test_files_of_every_form_hold_the_same_images(tmp_path, tiny, form):
    found = load(path := form(tmp_path, tiny))
    equal(found.train, tiny.train)
    equal(found.test, tiny.test)
    assert found.names == class_names(path, None) == DIGITS
    turned = read(path, transposed=True).parts["test"].images
    np.testing.assert_array_equal(turned, tiny.test.images.transpose(0, 2, 1))


def test_the_digest_is_over_what_is_trained_on(tmp_path, tiny):
    first = load(keras(tmp_path, tiny))
    (tmp_path / "tables").mkdir()
    assert load(tables(tmp_path / "tables", tiny)).sha256 == first.sha256
    tiny.train.labels[7] = (tiny.train.labels[7] + 1) % 10
    assert load(keras(tmp_path, tiny)).sha256 != first.sha256


def test_without_test_images_a_fifth_of_each_class_is_for_testing(tmp_path, tiny):
    np.savez(tmp_path / "all.npz", images=tiny.train.images, labels=tiny.train.labels)
    found = load(tmp_path / "all.npz")
    assert np.bincount(found.train.labels).tolist() == [32] * 10
    assert np.bincount(found.test.labels).tolist() == [8] * 10
    equal(read(tmp_path / "all.npz").parts["train"], tiny.train)


def test_a_weight_file_has_ten_images_to_be_verified_by_however_few_there_are(tmp_path, digits):
    some = digits(200, 0)
    some = Digits(some.images[some.labels < 2], some.labels[some.labels < 2])
    names = ("0", "1")
    np.savez(tmp_path / "few.npz", images=some.images, labels=some.labels)
    found = load(tmp_path / "few.npz", names)
    assert (len(some), len(found.test)) == (40, 10)
    few = {"x_train": some.images, "y_train": some.labels}
    few |= {"x_test": some.images[:9], "y_test": some.labels[:9]}
    np.savez(tmp_path / "few.npz", **few)
    with pytest.raises(InvalidDataset, match=r"few.npz: has 9 test images, expected at least 10"):
        load(tmp_path / "few.npz", names)


def test_pictures_get_the_names_of_their_folders(tmp_path, digits):
    names = [f"{'abcdefghij'[9 - n]}-{n}" for n in range(10)]
    write_pictures(tmp_path / "own", digits(60, 0), names)
    found = load(tmp_path / "own")
    assert found.names == class_names(tmp_path / "own", None) == tuple(reversed(names))
    assert len(found.train) == 48
    assert np.bincount(found.test.labels).min() >= 1
    (tmp_path / "names.txt").write_text("\n".join(names))
    ordered = load(tmp_path / "own", class_names(tmp_path / "own", tmp_path / "names.txt"))
    assert ordered.names == tuple(names)
    for dataset, order in ((found, found.names), (ordered, names)):
        labels = np.concatenate((dataset.train.labels, dataset.test.labels))
        drawn = [names[label] for label in digits(60, 0).labels]
        assert sorted(order[label] for label in labels) == sorted(drawn)


def test_training_that_starts_from_a_file_keeps_its_classes(tmp_path, digits, tiny):
    before = ("2", "0", "1")
    for name in before:
        (tmp_path / "own" / name).mkdir(parents=True)
    assert class_names(tmp_path / "own", None, before) == before
    assert class_names(keras(tmp_path, tiny), None, before) == before
    assert class_names(tmp_path / "own", None, ("0", "1", "new")) == ("0", "1", "2")
    with pytest.raises(InvalidDataset, match=r"own: has no folder 7, expected pictures of each cl"):
        class_names(tmp_path / "own", None, (*before, "7"))
    (tmp_path / "two.txt").write_text("0\n1\n2\n")
    assert class_names(tmp_path / "own", tmp_path / "two.txt", (*before, "7")) == ("0", "1", "2")


def test_the_parts_of_pictures_are_folders(tmp_path, digits):
    own, parts = tmp_path / "own", {}
    for seed, name in enumerate(("train", "val", "test")):
        parts[name] = digits(40 - 10 * seed, seed)
        write_pictures(own / name, parts[name])
    found = load(own)
    training, validation = found.hold_out()
    for part, name in ((training, "train"), (validation, "val"), (found.test, "test")):
        assert np.bincount(part.labels).tolist() == np.bincount(parts[name].labels).tolist()


def test_images_to_ask_about_may_lack_classes(tmp_path, digits):
    drawn = digits(60, 0)
    few = Digits(drawn.images[drawn.labels == 7], drawn.labels[drawn.labels == 7])
    write_pictures(tmp_path / "own", few)
    found = read(tmp_path / "own", DIGITS, complete=False)
    assert found.parts["train"].labels.tolist() == [7] * 6
    write_csv(tmp_path / "own.csv", few)
    equal(read(tmp_path / "own.csv", DIGITS, complete=False).all(), few)
    with pytest.raises(InvalidDataset, match="own: has no folder 0, expected one for each class: "):
        read(tmp_path / "own", DIGITS)
    with pytest.raises(InvalidDataset, match="own: has a folder 7, expected one for each class: a"):
        read(tmp_path / "own", ("a", "b"), complete=False)


ROW = "1," + ",".join(["0"] * 784)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"pixel0,pixel1\n0,0\n", "its first column is 'pixel0', expected label, then"),
        ("x.csv", b"1,2,3\n", "line 1 has 3 columns, expected 785: the label, then 784 pixels"),
        ("x.csv", f"{ROW}\n{ROW}0,0\n".encode(), "the number of columns changed from 785 to 786"),
        ("x.csv", f"{ROW}\n{ROW}9".replace(",09", ",256").encode(), "'256' to uint8 at row 1"),
        (
            "x.csv",
            f"{ROW}\n{ROW}.5".encode(),
            "'0.5' to uint8 at row 1, column 785; expected wh",
        ),
        ("x.csv", b"", "its first column is ''"),
        ("x.csv.gz", b"\x1f\x8b\x08", r"cannot be read \([^;]*\)$"),
        ("x.npz", b"PK\x03\x04", "is not a valid npz file"),
        ("x.npz", {"a": np.zeros(3)}, "has a, expected x_train, y_train, x_test and y_test, or im"),
        ("x.npz", {"images": np.zeros((3, 9, 9))}, r"has images, expected x_train"),
        ("x.npz", {"images": np.zeros((3, 9, 9), np.uint8)}, r"images has shape \(3, 9, 9\)"),
        ("x.npz", {"images": np.zeros((2, 784))}, "images is float64, expected whole numbers 0 to"),
        ("x.npz", {"images": np.full((2, 784), 256)}, "images has values 256 to 256, expected 0"),
        ("x.npz", {"labels": np.zeros(3, int)}, r"labels is int64 of shape \(3,\), expected whole"),
        ("x.npz", {"labels": np.array([0, 300])}, "labels has values 0 to 300, expected 0 to 255"),
        ("x.npz", {"labels": np.array([0, 10])}, "image 1 has the label 10, expected 0 to 9; --la"),
        ("x.npz", {}, "no image has the label 1, expected each of 0 to 9; --labels FILE names few"),
        ("x.npz", {"labels": np.array([None, 1])}, "labels has dtype object, expected numbers"),
    ],
)
def test_broken_files_are_one_sentence_that_begins_with_the_file(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        alone = "a" in content or "has images," in message
        both = {"images": np.zeros((2, 784), np.uint8), "labels": np.zeros(2, np.uint8)}
        np.savez(path, **(content if alone else both | content))
    with pytest.raises(InvalidDataset, match=f"^{re.escape(str(path))}: .*{message}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train/a", "train/b", "test/a"], "own/test: has no folder b, expected one for each clas"),
        (["train/a", "train/b", "test/a", "test/c"], "own/test: has a folder c, expected one for"),
        (["train/a", "train/b", "seven/a"], "own: has the folder seven beside train, expected"),
        (["validation/a", "val/b", "train/a"], "own: val and validation are both validation, exp"),
        (["a"], "own: has the folder a alone, expected 2 to 256, a folder with pictures for each"),
        (["train"], "own/train: has no folder, expected 2 to 256"),
        (["test/a", "test/b"], "own: has no part train, expected the images to train on"),
        (["a", "b\n"], r"own: has a folder 'b\\n', expected a name of 1 to"),
    ],
)
def test_folders_that_do_not_fit_together_are_refused(tmp_path, digits, folders, message):
    for name in folders:
        (place := tmp_path / "own" / name).mkdir(parents=True)
        Image.fromarray(digits(1, 0).images[0]).save(place / "1.png")
    with pytest.raises(InvalidDataset, match=message):
        read(tmp_path / "own")


def test_a_class_with_one_picture_is_refused(tmp_path, digits):
    for name, count in {"a": 6, "b": 1}.items():
        write_pictures(
            tmp_path / "own", Digits(digits(count, 0).images, np.zeros(count, int)), [name]
        )
    with pytest.raises(
        InvalidDataset, match="own: of the class b it has one image, expected at le"
    ):
        load(tmp_path / "own")


def test_what_is_no_dataset_is_refused_with_the_forms(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"")
    for path, problem in {
        tmp_path: "has none of the forms of a dataset",
        tmp_path / "notes.txt": "is a file",
        tmp_path / "away": "no such folder",
    }.items():
        with pytest.raises(DatasetUnavailable, match=f"{problem}; expected a folder with pictures"):
            read(path)


def test_the_summary_says_what_there_is_and_what_may_be_wrong(tmp_path, digits):
    for seed, (part, count) in enumerate({"train": 60, "validation": 30, "test": 20}.items()):
        write_pictures(tmp_path / "own" / part, digits(count, seed))
    drawn = tmp_path / "own/train/4"
    first = sorted(drawn.iterdir())[0]
    (tmp_path / "own/test/4/again.png").write_bytes(first.read_bytes())
    (tmp_path / "own/train/5/again.png").write_bytes(first.read_bytes())
    (large := Image.open(first)).resize((300, 200)).save(drawn / "large.png")
    large.close()
    dataset = load(tmp_path / "own")
    assert summary(dataset, *dataset.hold_out()) == [
        "113 images of 10 classes: 0 11, 1 11, 2 11, 3 11, 4 13, 5 12, 6 11, 7 11, 8 11, 9 11",
        "made of pictures of 3136 to 60000 pixels",
        "62 training, 30 validation, 21 test images",
        "1 of the test images are training images too",
        "1 images are there under two classes",
        "3 validation images of 0, expected at least 10 of each class: the validation accuracy and "
        "the calibration are rough",
    ]


def test_the_summary_of_a_good_dataset_is_short(digits):
    many = [f"class {number}" for number in range(47)]
    parts = []
    for seed, count in enumerate((2000, 800, 800)):
        labels = (np.arange(count) % 47).astype(np.uint8)
        parts.append(Digits(digits(count, seed).images, labels))
    training, validation, test = parts
    dataset = Dataset(training, test, "", tuple(many), validation)
    assert summary(dataset, training, validation) == [
        "3600 images of 47 classes: from 76 of class 26 to 79 of class 0",
        "2000 training, 800 validation, 800 test images",
    ]


def samples():
    arrays = {"images": np.zeros((10, 28, 28), np.uint8), "labels": np.arange(10)}
    file = io.BytesIO()
    np.savez(file, **arrays)
    rows = [",".join(map(str, [label] + [0] * 784)) for label in range(10)]
    return {"x.npz": file.getvalue(), "x.csv": "\n".join(rows).encode()}


@given(data=st.data(), name=st.sampled_from(["x.npz", "x.csv"]))
def test_a_damaged_file_is_read_or_refused_in_one_sentence(data, name, tmp_path_factory):
    content = bytearray(samples()[name])
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the changes near the ends, where the directory and the headers are.
        near = data.draw(st.integers(0, 200)) * data.draw(st.sampled_from([-1, 1]))
        at = data.draw(st.sampled_from([near, data.draw(st.integers(0, len(content)))]))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    (path := tmp_path_factory.getbasetemp() / name).write_bytes(content)
    try:
        found, message = read(path), ""
    except InvalidDataset as exc:
        found, message = None, str(exc)
    if found is None:
        assert message.startswith(f"{path}: ")
        assert "\n" not in message
    else:
        assert found.parts["train"].images.shape[1:] == (28, 28)
