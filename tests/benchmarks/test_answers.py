import orjson
import pytest

from benchmarks.answers import Verdict, judge, refusal, server_timing
from benchmarks.digits import PreparedRequest

REQUEST = PreparedRequest(b"", "", own_labels=(1, 2, 3), true_labels=(1, 2, 4))


def test_a_right_answer_is_right_even_where_the_model_is_not(say):
    assert judge(say([1, 2, 3]), REQUEST) == Verdict(mistakes=1)


def test_labels_are_compared_in_their_order(say):
    assert judge(say([2, 1, 3]), REQUEST) == Verdict(wrong_labels=2, mistakes=3)


def test_a_true_label_that_the_model_does_not_give_is_wrong(say):
    assert judge(say([1, 2, 4]), REQUEST) == Verdict(wrong_labels=1, mistakes=0)


def changed(content, **fields):
    document = orjson.loads(content)
    document["predictions"][0].update(fields)
    return orjson.dumps(document)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"probabilities": [1.0]}, "count of probabilities"),
        ({"probabilities": [0.01, 0.91, *[0.02] * 8]}, "sum of probabilities"),
        ({"probabilities": [0.01, 0.91, None, *[0.01] * 7]}, "not the promised JSON"),
        ({"label": 5}, "label is not the most probable"),
        ({"label": 11}, "not the promised JSON"),
        ({"label": True}, "label is not the most probable"),
        ({"confidence": 0.5}, "confidence is not the label's probability"),
        ({"confidence": None}, "confidence is not the label's probability"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_error(say, fields, kind):
    assert judge(changed(say([1, 2, 3]), **fields), REQUEST).error == f"bad answer: {kind}"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"predictions":7}', b"\xff"])
def test_a_body_that_is_no_prediction_is_an_error(content):
    assert judge(content, REQUEST).error == "bad answer: not the promised JSON"


def test_too_few_or_too_many_predictions_are_an_error(say):
    for labels in ([], [1, 2], [1, 2, 3, 4]):
        assert judge(say(labels), REQUEST).error == "bad answer: count of predictions"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"error": {"code": "overloaded"}}', "429 overloaded"),
        (b"<html>", "429"),
        (b"[]", "429"),
        (b'{"error": null}', "429"),
    ],
)
def test_a_refusal_is_named_by_status_and_code(content, kind):
    assert refusal(429, content) == kind


@pytest.mark.parametrize(
    ("header", "stages"),
    [
        ("", {}),
        ("queue;dur=0.5, compute;dur=2", {"queue": 0.5, "compute": 2.0}),
        ('cache;desc="hit", total;desc=all;dur=3.25', {"total": 3.25}),
        ("queue;dur=soon", {}),
    ],
)
def test_server_timing_is_read_as_milliseconds_by_stage(header, stages):
    assert server_timing(header) == stages
