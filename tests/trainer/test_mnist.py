import gzip
import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import mnist
from trainer.errors import DatasetUnavailable, InvalidDataset
from trainer.mnist import FILES, Dataset, Digits, load, read_idx


@pytest.mark.parametrize("packed", [True, False])
def test_a_dataset_is_read_back_as_it_was_written(tiny, write_idx, packed):
    folder = write_idx(tiny, packed)
    found = load(folder)
    for part in ("train", "test"):
        for field in ("images", "labels"):
            written = getattr(getattr(tiny, part), field)
            np.testing.assert_array_equal(getattr(getattr(found, part), field), written)
    assert len(found.train) == 400


def test_the_digest_is_over_the_uncompressed_files_in_order(tiny, write_idx):
    folder = write_idx(tiny)
    content = b"".join((folder / file.name).read_bytes() for file in FILES)
    assert load(folder).sha256 == hashlib.sha256(content).hexdigest()
    packed = write_idx(tiny, packed=True)
    for file in FILES:
        (packed / file.name).unlink()
    assert load(packed).sha256 == hashlib.sha256(content).hexdigest()


def test_names_with_a_dot_are_found(tiny, write_idx):
    folder = write_idx(tiny)
    for file in FILES:
        (folder / file.name).rename(folder / file.name.replace("-idx", ".idx"))
    assert len(load(folder).test) == 60


def test_the_real_files_are_mnist(mnist_folder):
    found = load(mnist_folder)
    assert (len(found.train), len(found.test)) == (60_000, 10_000)
    for file in FILES:
        _, content = read_idx(file.find(mnist_folder))
        assert hashlib.sha256(content).hexdigest() == file.sha256


def test_missing_files_are_named_with_what_to_do(tiny, write_idx):
    folder = write_idx(tiny)
    (folder / FILES[1].name).unlink()
    with pytest.raises(DatasetUnavailable) as caught:
        load(folder)
    message = str(caught.value)
    assert "train-labels-idx1-ubyte not in" in message
    assert "train-images" not in message
    assert "--data FOLDER" in message


def test_the_last_training_images_are_held_out(tiny):
    training, validation = tiny.hold_out(100)
    assert (len(training), len(validation)) == (300, 100)
    np.testing.assert_array_equal(validation.images, tiny.train.images[300:])
    np.testing.assert_array_equal(training.labels, tiny.train.labels[:300])


def test_holding_out_everything_is_refused(tiny):
    with pytest.raises(InvalidDataset, match="has 400 images, expected more than the 400"):
        tiny.hold_out(400)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x00\x00\x0d\x01" + bytes(8), "starts with 00 00 0d 01"),
        (b"\x01\x00\x08\x01" + bytes(8), "not an IDX file"),
        (b"\x00\x00\x08\x03\x00\x00", "ends within its header"),
        (struct.pack(">HBBI", 0, 8, 1, 3) + b"ab", "has 10 bytes uncompressed, expected 11"),
        (struct.pack(">HBBI", 0, 8, 1, 3) + b"abcd", "has 12 bytes uncompressed, expected 11"),
        (
            struct.pack(">HBBIII", 0, 8, 3, *[2**32 - 1] * 3),
            "expected 79228162458924105385300197391",
        ),
        (struct.pack(">HBBI", 0, 8, 1, 0), "header says (0,), expected sizes above 0"),
        (struct.pack(">HBB255I", 0, 8, 255, *[1] * 255) + b"a", "has 255 dimensions"),
        (gzip.compress(bytes(100), mtime=0)[:-9], "cannot be read"),
        (b"\x1f\x8b" + bytes(20), "cannot be read"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(InvalidDataset) as caught:
        read_idx(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(5000)))
    with pytest.raises(InvalidDataset, match="more than the expected 1000 bytes"):
        read_idx(path)


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
        (lambda images, labels: (images[:, :27], labels), r"images are \(400, 27, 28\)"),
        (lambda images, labels: (images[:0], labels[:0]), r"header says \(0, 28, 28\)"),
        (lambda images, labels: (images, labels[:-1]), r"labels are \(399,\)"),
        (lambda images, labels: (images, labels + 5), "label is 14"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tiny, write_idx, change, message):
    train = Digits(*change(tiny.train.images, tiny.train.labels))
    folder = write_idx(Dataset(train, tiny.test, tiny.sha256))
    with pytest.raises(InvalidDataset, match=message):
        load(folder)
