import gzip
import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import InvalidDataset
from trainer.mnist import DIGITS, FILES, Dataset, Digits, divided, label_names, load, read_idx


def test_the_digest_is_over_the_uncompressed_files_in_order(tiny, write_idx):
    folder = write_idx(tiny)
    content = b"".join((folder / file.name).read_bytes() for file in FILES)
    assert load(folder).sha256 == hashlib.sha256(content).hexdigest()
    packed = write_idx(tiny, packed=True)
    for file in FILES:
        (packed / file.name).unlink()
    assert load(packed).sha256 == hashlib.sha256(content).hexdigest()


def test_the_last_training_images_of_mnist_are_held_out(tiny, monkeypatch):
    monkeypatch.setattr("trainer.mnist._SHA256", tiny.sha256)
    training, validation = tiny.hold_out(100)
    assert (len(training), len(validation)) == (300, 100)
    np.testing.assert_array_equal(validation.images, tiny.train.images[300:])
    np.testing.assert_array_equal(training.labels, tiny.train.labels[:300])


@pytest.mark.parametrize(("images", "held_out"), [(400, 40), (60, 10)])
def test_a_tenth_is_held_out_but_at_least_one_of_each_class(digits, monkeypatch, images, held_out):
    dataset = Dataset(digits(images, 0), digits(60, 1), "")
    assert len(dataset.hold_out()[1]) == held_out
    assert set(dataset.hold_out()[1].labels) == set(range(10))
    monkeypatch.setattr("trainer.mnist.MOST_HELD_OUT", 30)
    assert len(dataset.hold_out()[1]) == min(held_out, 30)


def test_data_that_is_divided_already_is_held_out_as_it_is(tiny, digits):
    own = Dataset(tiny.train, tiny.test, "", validation=digits(20, 3))
    for count in (0, 20):
        assert own.hold_out(count) == (own.train, own.validation)
    with pytest.raises(InvalidDataset, match="the data has 20 validation images of its own, and"):
        own.hold_out(21)


def test_mnist_is_recognised(mnist_folder):
    dataset = load(mnist_folder)
    np.testing.assert_array_equal(dataset.hold_out(5_000)[1].images, dataset.train.images[-5_000:])


def sorted_images(part):
    return sorted(image.tobytes() for image in part.images)


def test_images_are_divided_alike_in_any_order_and_the_same_share_of_each_class(digits):
    drawn = digits(400, 0)
    order = np.random.default_rng(0).permutation(400)
    rest, held = divided(drawn, 100, DIGITS, "here")
    again = divided(Digits(drawn.images[order], drawn.labels[order]), 100, DIGITS, "here")
    for part, other, each in ((rest, again[0], 30), (held, again[1], 10)):
        assert np.bincount(part.labels).tolist() == [each] * 10
        assert sorted_images(part) == sorted_images(other)
    assert sorted_images(rest) + sorted_images(held) != sorted_images(drawn)
    assert sorted(sorted_images(rest) + sorted_images(held)) == sorted_images(drawn)
    fewer = sorted_images(divided(drawn, 50, DIGITS, "here")[1])
    assert set(fewer) < set(sorted_images(held))


def test_equal_images_are_on_one_side_and_each_class_on_both(digits):
    drawn = digits(200, 0)
    twice = np.repeat(np.arange(200), 2)
    rest, held = divided(Digits(drawn.images[twice], drawn.labels[twice]), 41, DIGITS, "here")
    assert len(held) == 42
    assert not set(sorted_images(rest)) & set(sorted_images(held))
    few = Digits(drawn.images, np.where(np.arange(200) < 197, 0, 1).astype(np.uint8))
    for part in divided(few, 10, DIGITS, "here"):
        assert set(part.labels) == {0, 1}


@pytest.mark.parametrize(
    ("labels", "count", "message"),
    [
        ([0, 0, 0, 1, 1], 1, "here: got 1 images to hold out, expected at least one of each of 2"),
        ([0, 0, 0, 0, 1], 2, "here: of the class b it has one image, expected at least 3"),
        ([0, 0, 1, 1, 2], 3, "of the class c it has one image, expected"),
        ([0, 0, 1, 1, 1], 5, "no image of the class a would be left to train on"),
    ],
)
def test_too_few_images_cannot_be_divided(digits, labels, count, message):
    with pytest.raises(InvalidDataset, match=message):
        divided(Digits(digits(5, 0).images, np.array(labels, np.uint8)), count, "abc", "here")


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
        (
            gzip.compress(bytes(100), mtime=0)[:-9],
            "cannot be read (Compressed file ended before the end-of-stream marker was reached); "
            "delete it to have MNIST's downloaded again",
        ),
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
