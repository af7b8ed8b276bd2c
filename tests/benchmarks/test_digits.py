import orjson
import pytest

from benchmarks.digits import (
    PreparedRequest,
    Verdict,
    judge,
    own_labels,
    prepare_requests,
)
from service.forms.body import decode
from service.forms.reader import Limits

REQUEST = PreparedRequest(b"", "", own_labels=(1, 2, 3), true_labels=(1, 2, 4))


@pytest.mark.parametrize(("form", "images"), [("json", 30), ("png", 5)])
def test_requests_send_every_digit_and_know_its_labels(form, images, digits, weights):
    requests = prepare_requests(digits, weights, form, images)
    true = [label for request in requests for label in request.true_labels]
    assert len(true) == len(requests) * images
    assert true[:12] == digits.labels.tolist()
    for request in requests:
        seen = decode(request.body, request.content_type, limits=Limits(max_images=images))
        assert request.own_labels == tuple(own_labels(weights, seen))


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
        ({"probabilities": [0.01, 0.91, *[0.02] * 8]}, "sum of probabilities"),
        ({"label": 5}, "label is not the most probable"),
        ({"confidence": 0.5}, "confidence is not the label's probability"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_error(say, fields, kind):
    document = orjson.loads(say([1, 2, 3]))
    document["predictions"][0].update(fields)
    assert judge(orjson.dumps(document), REQUEST).error == f"bad answer: {kind}"
