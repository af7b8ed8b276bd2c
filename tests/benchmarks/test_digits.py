import gzip
import struct

import numpy as np
import pytest

from benchmarks.digits import encode, own_labels, prepare_requests, read_digits
from lenet import reference
from service.images import Limits, decode
from trainer.errors import DatasetUnavailable


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("form", ["json", "raw", "npy"])
@pytest.mark.parametrize("count", [1, 5])
def test_the_service_decodes_a_body_to_the_same_pixels(form, count, digits):
    kind, body = encode(digits.images[:count], form)
    decoded = decode(body, kind, limits=Limits(max_images=count))
    assert np.array_equal(decoded, digits.images[:count])


def test_json_is_compact(digits):
    _, body = encode(digits.images[:1], "json")
    assert body.startswith(b'{"images":[[')
    assert b" " not in body


def test_own_labels_are_those_of_the_reference(digits, weights):
    logits = reference.logits(weights.model, weights.tensors, digits.images)
    assert np.array_equal(own_labels(weights, digits.images), logits.argmax(axis=1))


@pytest.mark.parametrize("form", ["json", "raw", "npy", "png"])
@pytest.mark.parametrize("images", [1, 5, 30])
def test_requests_send_every_digit_and_know_what_must_come_back(form, images, digits, weights):
    requests = prepare_requests(digits, weights, form, images)
    true = [label for request in requests for label in request.true_labels]
    assert len(true) == len(requests) * images
    assert true[:12] == digits.labels.tolist()
    for request in requests:
        seen = decode(request.body, request.content_type, limits=Limits(max_images=images))
        assert request.own_labels == tuple(own_labels(weights, seen))


def test_without_a_folder_the_golden_images_are_the_digits(weights):
    digits = read_digits(None, weights)
    assert np.array_equal(digits.images, weights.golden.images)
    assert np.array_equal(digits.labels, weights.golden.labels)


def test_the_digits_of_a_folder_are_its_test_images(tmp_path, digits, weights):
    for part, count in (("train", 3), ("t10k", 12)):
        packed = gzip.compress(idx(digits.images[:count]))
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(packed)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(digits.labels[:count]))
    found = read_digits(tmp_path, weights)
    assert np.array_equal(found.images, digits.images)
    assert np.array_equal(found.labels, digits.labels)
    assert str(tmp_path) in found.source


def test_a_folder_without_digits_is_named(tmp_path, weights):
    with pytest.raises(DatasetUnavailable, match=r"t10k-images-idx3-ubyte.* not in "):
        read_digits(tmp_path, weights)
