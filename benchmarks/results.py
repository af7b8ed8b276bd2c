"""What a load test saw, what that amounts to, and the table that says so.

Latencies are those of good answers alone: a refusal is quick, and would make a service that
refuses look fast. It refuses to average percentiles: processes hand over every single latency.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.answers import Verdict

PERCENTILES = (50.0, 90.0, 99.0, 99.9)

_BEHIND_MS = 10.0
"""An open loop that sends this much too late measures itself."""


def _seconds() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Results:
    """Of one process, or of several after `merge`.

    `stages_ms` are durations in milliseconds, by stage, as the server tells them;
    `own_mistakes` are those that the local model makes on the images that were answered;
    `lateness_s` is how long after the intended time an open loop came to send.
    """

    images: int = 0
    wrong_labels: int = 0
    mistakes: int = 0
    own_mistakes: int = 0
    interrupted: bool = False
    requests_per_s: float = 0.0
    images_per_s: float = 0.0
    elapsed_s: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    latencies_s: array[float] = field(default_factory=_seconds)
    lateness_s: array[float] = field(default_factory=_seconds)
    stages_ms: dict[str, array[float]] = field(default_factory=dict)

    def answered(
        self,
        latency_s: float,
        verdict: Verdict,
        own: Sequence[int],
        true: Sequence[int],
        stages_ms: dict[str, float],
    ) -> None:
        """A well-formed answer arrived, for images that are `true` and look like `own`."""
        self.latencies_s.append(latency_s)
        self.images += len(true)
        self.wrong_labels += verdict.wrong_labels
        self.mistakes += verdict.mistakes
        self.own_mistakes += sum(mine != right for mine, right in zip(own, true, strict=True))
        for stage, duration_ms in stages_ms.items():
            self.stages_ms.setdefault(stage, _seconds()).append(duration_ms)

    def failed(self, kind: str) -> None:
        """A request got no good answer; `kind` is from a closed set."""
        self.errors[kind] += 1

    def finish(self, elapsed_s: float, *, interrupted: bool) -> None:
        """The last answer came `elapsed_s` after the first request could be sent."""
        self.interrupted = interrupted
        self.elapsed_s = elapsed_s
        self.requests_per_s = len(self.latencies_s) / elapsed_s
        self.images_per_s = self.images / elapsed_s

    @classmethod
    def merge(cls, parts: Iterable[Results]) -> Results:
        """The sum of what several processes saw at the same time; rates add up."""
        total = cls()
        for part in parts:
            total.images += part.images
            total.wrong_labels += part.wrong_labels
            total.mistakes += part.mistakes
            total.own_mistakes += part.own_mistakes
            total.interrupted |= part.interrupted
            total.requests_per_s += part.requests_per_s
            total.images_per_s += part.images_per_s
            total.elapsed_s = max(total.elapsed_s, part.elapsed_s)
            total.errors.update(part.errors)
            total.latencies_s.extend(part.latencies_s)
            total.lateness_s.extend(part.lateness_s)
            for stage, durations in part.stages_ms.items():
                total.stages_ms.setdefault(stage, _seconds()).extend(durations)
        return total


@dataclass(frozen=True, slots=True)
class Summary:
    """What is printed and written as JSON; all durations in milliseconds but `elapsed_s`.

    `accuracy` is the share of labels that are true, 0 to 1, and like the durations None where
    there was no answer; `passed` means answers, no error and no wrong label.
    """

    passed: bool
    interrupted: bool
    elapsed_s: float
    requests: int
    images: int
    requests_per_s: float
    images_per_s: float
    errors: dict[str, int]
    wrong_labels: int
    accuracy: float | None
    mistakes: int
    own_mistakes: int
    latency_ms: dict[str, float]
    server_ms: dict[str, float]
    sent_late_ms: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(results: Results) -> Summary:
    """The numbers of a finished load test."""
    errors = sum(results.errors.values())
    answered = len(results.latencies_s)
    good = answered > 0 and not errors and not results.wrong_labels
    return Summary(
        passed=good and results.mistakes == results.own_mistakes and not results.interrupted,
        interrupted=results.interrupted,
        elapsed_s=results.elapsed_s,
        requests=answered + errors,
        images=results.images,
        requests_per_s=results.requests_per_s,
        images_per_s=results.images_per_s,
        errors=dict(results.errors.most_common()),
        wrong_labels=results.wrong_labels,
        accuracy=1 - results.mistakes / results.images if results.images else None,
        mistakes=results.mistakes,
        own_mistakes=results.own_mistakes,
        latency_ms=_distribution_ms(results.latencies_s),
        server_ms={
            stage: float(np.median(durations)) for stage, durations in results.stages_ms.items()
        },
        sent_late_ms=_distribution_ms(results.lateness_s),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` per cent of them do not exceed."""
    # Rounded, because 99.9 per cent of 2,000 is 1998.0000000000002 in floating point.
    rank = max(1, math.ceil(round(len(values) * percent / 100, 6)))
    return float(np.partition(values, rank - 1)[rank - 1])


def _distribution_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not len(seconds):
        return {}
    values = {"mean": float(np.mean(seconds))}
    values |= {f"p{percent:g}": percentile(seconds, percent) for percent in PERCENTILES}
    values["max"] = max(seconds)
    return {name: value * 1e3 for name, value in values.items()}


def table(summary: Summary, title: str) -> str:
    """One screen of text under `title`."""
    accuracy = "-" if summary.accuracy is None else f"{summary.accuracy:.3%}"
    left = [
        f"requests      {summary.requests:>11,}",
        f"errors        {sum(summary.errors.values()):>11,}",
        f"requests/s    {summary.requests_per_s:>11,.1f}",
        f"images/s      {summary.images_per_s:>11,.1f}",
        f"wrong labels  {summary.wrong_labels:>11,}",
        f"accuracy      {accuracy:>11}",
    ]
    latency = summary.latency_ms or dict.fromkeys(["no good answer"], 0.0)
    right = [f"{name:<6}{value:>10,.2f}" for name, value in latency.items()]
    lines = [title, "", f"{'':<34}latency in ms, of good answers"]
    for index in range(max(len(left), len(right))):
        cells = [column[index] if index < len(column) else "" for column in (left, right)]
        lines.append(f"{cells[0]:<34}{cells[1]}".rstrip())
    lines.append("")
    lines.append(
        f"Against the true labels {summary.mistakes:,} of {summary.images:,} images are wrong; "
        f"the model itself gets {summary.own_mistakes:,} wrong."
    )
    if summary.server_ms:
        stages = ", ".join(f"{name} {value:.3f}" for name, value in summary.server_ms.items())
        lines.append(f"Server-Timing, medians in ms: {stages}")
    if summary.sent_late_ms:
        late = ", ".join(f"{name} {summary.sent_late_ms[name]:.2f}" for name in ("p50", "p99"))
        lines.append(f"Sent later than intended, in ms: {late}")
        if summary.sent_late_ms["p99"] > _BEHIND_MS:
            lines.append(
                "The generator fell behind: the latencies are partly its own. Lower --rate or "
                "raise --processes."
            )
    lines += [f"error: {count:,} x {kind}" for kind, count in summary.errors.items()]
    if summary.interrupted:
        lines.append("Interrupted: this is what there was so far.")
    return "\n".join(lines)
