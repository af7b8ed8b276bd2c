import numpy as np
import orjson
import pytest

from benchmarks.digits import (
    PreparedRequest,
    Verdict,
    encode,
    error_kind,
    judge,
    judge_binary,
    judge_tensors,
    own_labels,
    prepare_requests,
    read_digits,
)
from service.forms.body import Limits, decode
from trainer.errors import DatasetUnavailable

REQUEST = PreparedRequest(b"", "", own_labels=(1, 2, 3), true_labels=(1, 2, 4))


@pytest.mark.parametrize("form", ["json", "raw", "npy"])
@pytest.mark.parametrize("count", [1, 5])
def test_the_service_decodes_a_body_to_the_same_pixels(form, count, digits):
    kind, body = encode(digits.images[:count], form)
    decoded = decode(body, kind, limits=Limits(max_images=count))
    assert np.array_equal(decoded, digits.images[:count])


@pytest.mark.parametrize("form", ["json", "png"])
@pytest.mark.parametrize("images", [1, 5, 30])
def test_requests_send_every_digit_and_know_its_labels(form, images, digits, weights):
    requests = prepare_requests(digits, weights, form, images)
    true = [label for request in requests for label in request.true_labels]
    assert len(true) == len(requests) * images
    assert true[:12] == digits.labels.tolist()
    for request in requests:
        seen = decode(request.body, request.content_type, limits=Limits(max_images=images))
        assert request.own_labels == tuple(own_labels(weights, seen))


def test_a_folder_without_digits_is_named(tmp_path, weights):
    with pytest.raises(DatasetUnavailable, match=str(tmp_path)):
        read_digits(tmp_path, weights)


@pytest.mark.parametrize(
    ("labels", "verdict"),
    [
        ([1, 2, 3], Verdict(mistakes=1)),
        ([2, 1, 3], Verdict(wrong_labels=2, mistakes=3)),
        ([1, 2, 4], Verdict(wrong_labels=1)),
    ],
)
def test_an_answer_is_compared_with_both_labels_of_each_image(say, labels, verdict):
    assert judge(say(labels), REQUEST) == verdict


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"probabilities": [1.0]}, "count of probabilities"),
        ({"probabilities": [0.01, 0.91, *[0.02] * 8]}, "sum of probabilities"),
        ({"probabilities": [0.01, 0.91, None, *[0.01] * 7]}, "not the documented JSON"),
        ({"label": 5}, "label is not the most probable"),
        ({"label": 11}, "not the documented JSON"),
        ({"label": True}, "label is not the most probable"),
        ({"confidence": 0.5}, "confidence is not the label's probability"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_error(say, fields, kind):
    document = orjson.loads(say([1, 2, 3]))
    document["predictions"][0].update(fields)
    assert judge(orjson.dumps(document), REQUEST).error == f"bad answer: {kind}"


@pytest.mark.parametrize(
    ("labels", "probabilities", "verdict"),
    [
        ([1, 2, 4], None, Verdict(wrong_labels=1)),
        ([1, 2, 3], np.full((2, 10), 0.1), Verdict("bad answer: count of predictions")),
        ([1, 2, 3], np.full((3, 10), 0.2), Verdict("bad answer: sum of probabilities")),
        ([1, 2, 3], np.eye(10)[:3], Verdict("bad answer: label is not the most probable")),
        ([1, 2, 3], np.full((3, 10), np.nan), Verdict("bad answer: sum of probabilities")),
    ],
)
def test_tensors_are_checked_like_json(labels, probabilities, verdict):
    labels = np.array(labels)
    probabilities = np.eye(10)[labels] if probabilities is None else probabilities
    assert judge_tensors(labels, probabilities, REQUEST) == verdict


def test_a_binary_answer_is_float32_rows():
    rows = np.eye(10, dtype="<f4")[[1, 2, 4]].tobytes()
    assert judge_binary(rows, REQUEST) == Verdict(wrong_labels=1)
    assert judge_binary(rows[:-4], REQUEST) == Verdict("bad answer: count of bytes")
    assert judge_binary(rows[:80], REQUEST) == Verdict("bad answer: count of bytes")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"predictions":7}', b"\xff"])
def test_a_body_without_predictions_is_an_error(content):
    assert judge(content, REQUEST).error == "bad answer: not the documented JSON"


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b'{"error": {"code": "overloaded"}}', "429 overloaded"), (b"<html>", "429"), (b"[]", "429")],
)
def test_an_error_is_named_by_status_and_code(content, kind):
    assert error_kind(429, content) == kind
