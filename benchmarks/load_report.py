"""The report of a load test: its numbers, a table, a figure and targets."""

from __future__ import annotations

import argparse
import textwrap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.command import save_picture
from benchmarks.load import WRONG_LABEL, Load, Results, Stage
from benchmarks.timing import percentile

PERCENTILES = {f"p{percent:g}": percent for percent in (50.0, 90.0, 99.0, 99.9)}
COLUMNS = (*PERCENTILES, "max")

_LATE_MS = 10.0
"""An open loop that sends so late measures itself."""

_BUSY = 0.9
"""An event loop that uses or waits for a core so much of the time limits the rate itself."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of a stage or of a whole test, as written to JSON.

    `load`: what was sent, for people; `offered`: the same as a number, the mean requests per second
    of an open loop, or connections of a closed one. `requests_per_s`: good answers while the stage
    ran. `accuracy`: the share of true labels, 0 to 1, None without an answer. `client_busy` and
    `client_starved`: the shares of time in which the event loop of the busiest client process ran
    on a core and waited for one; of several stages, in the worst. `client_cores`: the cores that
    all client processes used together.
    """

    load: str
    offered: float
    interrupted: bool
    elapsed_s: float
    requests: int
    requests_per_s: float
    images_per_s: float
    errors: dict[str, int]
    wrong_labels: int
    accuracy: float | None
    latency_ms: dict[str, float]
    server_ms: dict[str, dict[str, float]]
    sent_late_ms: dict[str, float]
    client_busy: float
    client_starved: float
    client_cores: float

    @property
    def client_limited(self) -> bool:
        """Whether the client could not have sent or received much more."""
        return self.client_busy + self.client_starved >= _BUSY

    @property
    def sent_late(self) -> bool:
        """Whether the client's delays distort the latencies of an open loop."""
        return self.sent_late_ms.get("p99", 0.0) > _LATE_MS


def summarise(results: Results, load: str = "", offered: float = 0.0) -> Summary:
    """The numbers of `results`."""
    answered = len(results.latencies_s)
    elapsed_s = results.elapsed_s or float("inf")
    errors = sum(results.errors.values())
    well_formed = answered + results.errors[WRONG_LABEL]
    rate = results.received / elapsed_s
    return Summary(
        load=load,
        offered=offered,
        interrupted=results.interrupted,
        elapsed_s=results.elapsed_s,
        requests=answered + errors,
        requests_per_s=rate,
        images_per_s=rate * results.images / well_formed if well_formed else 0.0,
        errors=dict(results.errors.most_common()),
        wrong_labels=results.wrong_labels,
        accuracy=1 - results.mistakes / results.images if results.images else None,
        latency_ms=_distribution(results.latencies_s, 1e3),
        server_ms={stage: _distribution(ms) for stage, ms in results.server_ms.items()},
        sent_late_ms=_distribution(results.lateness_s, 1e3),
        client_busy=results.busy,
        client_starved=results.starved,
        client_cores=results.cpu_s / elapsed_s,
    )


def summarise_stages(load: Load, stages: Sequence[Results]) -> tuple[Summary, list[Summary]]:
    """The numbers of the whole test, and of each stage that was begun."""
    pairs = [pair for pair in zip(load.stages, stages, strict=True) if pair[1].elapsed_s]
    summaries = [
        summarise(results, _name(load, stage), (stage.start + stage.end) / 2)
        for stage, results in pairs
    ]
    # A stage that was not begun may hold the mark of an interruption.
    total = summarise(
        Results.merge(stages, sum(results.elapsed_s for results in stages)),
        "all" if len(summaries) != 1 else summaries[0].load,
        sum(one.offered * one.elapsed_s for one in summaries)
        / (sum(one.elapsed_s for one in summaries) or 1.0),
    )
    return total, summaries


def _name(load: Load, stage: Stage) -> str:
    level = _level(stage.start)
    if stage.end != stage.start:
        level += f"-{_level(stage.end)}"
    if load.mode == "open":
        return f"{level}/s"
    return f"{level} connection{'s' * (level != '1')}"


def _level(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _distribution(values: array[float], scale: float = 1.0) -> dict[str, float]:
    if not values:
        return {}
    found = {"mean": float(np.mean(values))}
    found |= {name: percentile(values, percent) for name, percent in PERCENTILES.items()}
    found["max"] = max(values)
    return {name: value * scale for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class ErrorLimit:
    """How many requests may fail: a number, or a share of all in percent."""

    value: float
    percent: bool

    def __str__(self) -> str:
        return f"{self.value:g}{' %' if self.percent else ''}"

    def allows(self, errors: int, requests: int) -> bool:
        """Whether so many errors are within the limit."""
        return errors <= (self.value * requests / 100 if self.percent else self.value)


def error_limit(text: str) -> ErrorLimit:
    """A limit from its notation on the command line: 10 or 0.1%."""
    number, percent, rest = text.partition("%")
    if not rest and (value := float(number)) >= 0 and (percent or value.is_integer()):
        return ErrorLimit(value, bool(percent))
    raise argparse.ArgumentTypeError(f"{text!r}, expected a count such as 10, or 0.1%")


def duration_ms(text: str) -> float:
    """Milliseconds from a duration with its unit: 800us, 5ms or 0.5s."""
    for unit, factor in (("us", 1e-3), ("ms", 1.0), ("s", 1e3)):
        if text.endswith(unit):
            value = float(text.removesuffix(unit)) * factor
            if 0 < value < float("inf"):
                return value
    raise argparse.ArgumentTypeError(f"{text!r}, expected a duration such as 800us, 5ms or 0.5s")


@dataclass(frozen=True, slots=True)
class Check:
    """A target or the rule about labels, and whether the test met it."""

    text: str
    met: bool


def check(total: Summary, limits_ms: dict[str, float], errors: ErrorLimit) -> list[Check]:
    """Compare a test with its targets; `limits_ms` by the names in `COLUMNS`.

    Wrong labels are errors that no limit allows.
    """
    wrong = total.errors.get(WRONG_LABEL, 0)
    failed = sum(total.errors.values()) - wrong
    checks = [
        Check(f"wrong labels: {total.wrong_labels:,}, allowed none", not total.wrong_labels),
        Check(
            f"errors: {failed:,} of {total.requests:,}, allowed {errors}",
            errors.allows(failed, total.requests),
        ),
    ]
    if not total.latency_ms:
        checks.append(Check("good answers: none", met=False))
    for name, limit_ms in limits_ms.items():
        found_ms = total.latency_ms.get(name)
        if found_ms is not None:
            text = f"{name}: {found_ms:,.2f} ms, allowed {limit_ms:,.2f} ms"
            checks.append(Check(text, found_ms <= limit_ms))
    return checks


def table(total: Summary, stages: Sequence[Summary], title: str) -> str:
    """A line per stage, the service's part, and what else a reader must know, under `title`."""
    lines = [title, ""]
    heads = ["requests/s", "errors", *COLUMNS, "client"]
    widths = (11, 8, *[9] * len(COLUMNS), 8)

    def row(name: str, cells: Sequence[str]) -> str:
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
        return f"{name:<21}{''.join(padded)}".rstrip()

    lines.append(row("latency in ms", heads))
    for one in (*stages, total) if len(stages) > 1 else (total,):
        numbers = [f"{one.requests_per_s:,.1f}", f"{sum(one.errors.values()):,}"]
        busy = f"{one.client_busy + one.client_starved:.0%}"
        lines.append(row(one.load, [*numbers, *_cells(one.latency_ms), busy]))
    for stage, distribution in total.server_ms.items():
        lines.append(row(f"  service: {stage}", ["", "", *_cells(distribution)]))
    lines.append("")
    accuracy = "-" if total.accuracy is None else f"{total.accuracy:.3%}"
    lines.append(
        f"{total.requests:,} requests in {total.elapsed_s:.1f} s, {total.images_per_s:,.1f} "
        f"images/s, accuracy {accuracy}"
    )
    lines += [f"error: {count:,} x {kind}" for kind, count in total.errors.items()]
    lines.append(
        f"The client used {total.client_cores:.2f} cores; its busiest event loop ran "
        f"{total.client_busy:.0%} of the time and waited for a core {total.client_starved:.0%}."
    )
    if total.sent_late_ms:
        late = ", ".join(f"{name} {total.sent_late_ms[name]:.2f}" for name in ("p50", "p99"))
        lines.append(f"Sent after the due time, in ms: {late}")
    warnings = []
    if late := [one.load for one in stages if one.sent_late]:
        warnings.append(
            f"The client sent too late{_where(late, stages)}, which adds to the latencies: lower "
            "the rate or raise --processes."
        )
    if limited := [one.load for one in stages if one.client_limited]:
        warnings.append(
            f"The client is the limit{_where(limited, stages)}, not the service: use --processes N "
            "if cores are free, more --images per request, or wrk, which `python -m "
            "benchmarks.http` runs."
        )
    lines += [line for warning in warnings for line in textwrap.wrap(warning, 100)]
    if total.interrupted:
        lines.append("Interrupted: these are the results so far.")
    return "\n".join(lines)


def _where(names: Sequence[str], stages: Sequence[Summary]) -> str:
    if len(stages) == 1:
        return ""
    return f" at {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"


def _cells(distribution: dict[str, float]) -> list[str]:
    return [f"{distribution[name]:,.2f}" if distribution else "-" for name in COLUMNS]


def draw(stages: Sequence[Summary], mode: str, title: str, path: Path) -> None:
    """Draw the latency of each stage over its load.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", dpi=120)
    axes = figure.subplots()
    shown = sorted((one for one in stages if one.latency_ms), key=lambda one: one.offered)
    colors = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#999999")
    for name, color in zip(COLUMNS, colors, strict=True):
        points = [(one.offered, one.latency_ms[name]) for one in shown]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=name)
    if limited := [(one.offered, one.latency_ms["p50"]) for one in shown if one.client_limited]:
        axes.plot(*zip(*limited, strict=True), "kx", label="p50, the client is the limit")
    unit = "requests per second" if mode == "open" else "connections, closed loop"
    axes.set(xlabel=f"offered load ({unit})", ylabel="latency (ms)", yscale="log", xlim=(0, None))
    axes.set_title(title, fontsize="small")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(color="#DDDDDD", linewidth=0.6, which="both")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, path)
