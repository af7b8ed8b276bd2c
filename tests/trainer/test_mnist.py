import gzip
import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import InvalidDataset
from trainer.mnist import FILES, Dataset, Digits, label_names, load, read_idx


def test_the_digest_is_over_the_uncompressed_files_in_order(tiny, write_idx):
    folder = write_idx(tiny)
    content = b"".join((folder / file.name).read_bytes() for file in FILES)
    assert load(folder).sha256 == hashlib.sha256(content).hexdigest()
    packed = write_idx(tiny, packed=True)
    for file in FILES:
        (packed / file.name).unlink()
    assert load(packed).sha256 == hashlib.sha256(content).hexdigest()


def test_the_last_training_images_are_held_out(tiny):
    training, validation = tiny.hold_out(100)
    assert (len(training), len(validation)) == (300, 100)
    np.testing.assert_array_equal(validation.images, tiny.train.images[300:])
    np.testing.assert_array_equal(training.labels, tiny.train.labels[:300])
    assert not tiny.is_held_out_by_class(100)


def test_of_images_sorted_by_class_the_last_of_each_class_are_held_out(digits):
    drawn = digits(400, 0)
    order = np.argsort(drawn.labels, kind="stable")
    dataset = Dataset(Digits(drawn.images[order], drawn.labels[order]), digits(60, 1), "")
    assert dataset.is_held_out_by_class(100)
    training, validation = dataset.hold_out(100)
    for part, each in ((training, 30), (validation, 10)):
        assert np.bincount(part.labels).tolist() == [each] * 10
        assert (np.diff(part.labels.astype(int)) >= 0).all()  # in their order
    first = np.flatnonzero(dataset.train.labels == 3)
    np.testing.assert_array_equal(training.images[90:120], dataset.train.images[first[:30]])
    np.testing.assert_array_equal(validation.images[30:40], dataset.train.images[first[30:]])


def test_the_first_image_of_each_class_is_held_out_last(digits):
    labels = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 2], np.uint8)
    dataset = Dataset(Digits(digits(10, 0).images, labels), digits(60, 1), "")
    training, validation = dataset.hold_out(7)
    assert training.labels.tolist() == [0, 1, 2]
    assert validation.labels.tolist() == [1] * 7
    assert len(dataset.hold_out(9)[0]) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts at byte 0 with nothing"),
        (b"\x00\x00\x0d\x01" + bytes(8), "starts at byte 0 with 00 00 0d 01"),
        (b"\x00\x00\x08\x03\x00\x00", "ends at byte 6, within its header"),
        (struct.pack(">HBBI", 0, 8, 1, 3) + b"ab", "has 10 bytes uncompressed, expected 11"),
        (
            struct.pack(">HBBIII", 0, 8, 3, *[2**32 - 1] * 3),
            "expected 79228162458924105385300197391",
        ),
        (struct.pack(">HBBI", 0, 8, 1, 0), "bytes 4 to 7 say (0,), expected sizes above 0"),
        (gzip.compress(bytes(100), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(InvalidDataset) as caught:
        read_idx(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


@given(content=st.binary(max_size=60))
def test_any_bytes_are_either_an_array_or_refused(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    try:
        array, _ = read_idx(path)
    except InvalidDataset:
        return
    assert array.dtype == np.uint8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda images, labels: (images[:, :27], labels),
            r"bytes 4 to 15 say that the images are \(400, 27, 28\), expected \(n, 28, 28\)",
        ),
        (
            lambda images, labels: (images, labels[:-1]),
            r"bytes 4 to 7 say that the labels are \(399,\), expected one for each of the 400 im",
        ),
        (
            lambda images, labels: (images, np.where(np.arange(400) == 7, 14, labels)),
            "byte 15 is the label 14, expected 0 to 9; --labels FILE names more classes",
        ),
        (
            lambda images, labels: (images, np.where(labels == 6, 5, labels)),
            "no label is 6, expected each of 0 to 9; --labels FILE names fewer classes",
        ),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tiny, write_idx, change, message):
    train = Digits(*change(tiny.train.images, tiny.train.labels))
    folder = write_idx(Dataset(train, tiny.test, tiny.sha256))
    with pytest.raises(InvalidDataset, match=message):
        load(folder)


def test_two_datasets_in_one_folder_are_refused(tiny, write_idx):
    folder = write_idx(tiny)
    for prefix in ("a-", "b-"):
        (folder / f"{prefix}{FILES[0].name}").write_bytes((folder / FILES[0].name).read_bytes())
    (folder / FILES[0].name).unlink()
    with pytest.raises(InvalidDataset, match="a-train-images-idx3-ubyte and b-train-images-idx3"):
        load(folder)


def test_images_stored_by_columns_are_transposed(tiny, write_idx):
    folder = write_idx(tiny)
    expected = load(folder).test.images.transpose(0, 2, 1)
    np.testing.assert_array_equal(load(folder, transposed=True).test.images, expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one", "has 1 lines, expected 2 to 256"),
        (b"\n".join(b"%d" % n for n in range(257)), "has 257 lines"),
        (b"one\n\ntwo\n", "line 2 is ''"),
        (b"one\ntwo\none\n", "line 3 is 'one', as is line 1"),
        (b"one\n\xff\n", "byte 4 is not UTF-8"),
    ],
)
def test_label_names_are_refused_with_their_line(tmp_path, content, message):
    path = tmp_path / "labels.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidDataset) as caught:
        label_names(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
