"""Is an answer of POST /predict well formed, and is it the right one?

It refuses to believe a status of 200: another caller's rows come with the same status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks.digits import PreparedRequest

_SUM_TOLERANCE = 1e-3
"""How far probabilities may sum from 1: ten float32 numbers rounded to a device's precision."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error` is "" for a well-formed answer; else it names the kind, from a closed set.

    `wrong_labels` differ from the local model's, `mistakes` from the true ones.
    """

    error: str = ""
    wrong_labels: int = 0
    mistakes: int = 0


def judge(content: bytes, request: PreparedRequest) -> Verdict:
    """What the body of an answer with status 200 is worth."""
    try:
        predictions = orjson.loads(content)["predictions"]
        if len(predictions) != len(request.own_labels):
            return Verdict("bad answer: count of predictions")
        labels = [_label(prediction) for prediction in predictions]
    except _BadAnswer as exc:
        return Verdict(f"bad answer: {exc}")
    except (ValueError, KeyError, TypeError, IndexError):
        return Verdict("bad answer: not the promised JSON")
    return Verdict(
        wrong_labels=_differences(labels, request.own_labels),
        mistakes=_differences(labels, request.true_labels),
    )


def refusal(status: int, content: bytes) -> str:
    """The kind of an answer that is no prediction: status and the service's own code for it."""
    try:
        return f"{status} {orjson.loads(content)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)


def server_timing(header: str) -> dict[str, float]:
    """Milliseconds by stage of a Server-Timing header; entries without a duration are left out."""
    stages = {}
    for entry in header.split(","):
        name, *parameters = entry.split(";")
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "dur":
                try:
                    stages[name.strip()] = float(value)
                except ValueError:
                    continue
    return stages


class _BadAnswer(Exception):
    """What of it is bad."""


def _label(prediction: dict[str, Any]) -> int:
    label, probabilities = prediction["label"], prediction["probabilities"]
    if len(probabilities) != 10:
        raise _BadAnswer("count of probabilities")
    if not abs(sum(probabilities) - 1) <= _SUM_TOLERANCE:
        raise _BadAnswer("sum of probabilities")
    largest = max(probabilities)
    if type(label) is not int or probabilities[label] != largest:
        raise _BadAnswer("label is not the most probable")
    if prediction["confidence"] != largest:
        raise _BadAnswer("confidence is not the label's probability")
    return label


def _differences(labels: Sequence[int], expected: Sequence[int]) -> int:
    return sum(label != right for label, right in zip(labels, expected, strict=True))
