"""The results of `benchmarks.workers`: what was measured, rows for its JSON file, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.digits import BINARY
from benchmarks.wrk import WrkResult

LIMIT = 0.95
"""Above this busy share of its threads, wrk may be the limit of what is measured."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request, and the number of connections per worker that send it.

    `several`: it is measured with any number of workers, else only with one. `floor`: it is sent to
    the bare uvicorn.
    """

    name: str
    images: int
    connections: int
    accept: str = BINARY
    several: bool = False
    floor: bool = False


@dataclass(slots=True)
class Measured:
    """The rounds of a case on all its connections, or the reason why it failed."""

    case: Case
    connections: int
    rounds: list[WrkResult] = field(default_factory=list)
    error: str = ""


def rows(workers: int, mps: bool, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row for JSON per case: what was sent, and the median, min and max of each number.

    `p50_us` and `p99_us` are of the requests that were sent, `wrk_p99_us` is as wrk prints it. If
    `wrk_busy`, the busy share of wrk's threads, was above `LIMIT` in a round, the row is
    `limited_by_wrk`. `p50_over_floor` is the ratio to the bare uvicorn in the same turn. A case
    that failed has `error` instead of numbers.
    """
    floors = {(one.case.images, one.connections): one for one in measured if one.case.floor}
    found = []
    for one in measured:
        case = one.case
        row: dict[str, Any] = {
            "workers": workers,
            "mps": mps,
            "case": case.name,
            "images": case.images,
            "connections": one.connections,
            "accept": case.accept,
        }
        found.append(row)
        if one.error:
            row["error"] = one.error
            continue
        rounds = one.rounds
        row["requests_per_s"] = spread([r.requests_per_s for r in rounds])
        row["images_per_s"] = spread([r.requests_per_s * case.images for r in rounds])
        row["p50_us"] = spread([r.sent_p50_ms * 1e3 for r in rounds])
        row["p99_us"] = spread([r.sent_p99_ms * 1e3 for r in rounds])
        row["p99_over_p50"] = spread([r.sent_p99_ms / r.sent_p50_ms for r in rounds], digits=2)
        row["wrk_p99_us"] = spread([r.p99_ms * 1e3 for r in rounds])
        floor = floors.get((case.images, one.connections))
        if floor is not None and floor is not one and not floor.error:
            pairs = zip(rounds, floor.rounds, strict=True)
            ratios = [ours.sent_p50_ms / bare.sent_p50_ms for ours, bare in pairs]
            row["p50_over_floor"] = spread(ratios, digits=2)
        row["wrk_busy"] = spread([r.busy for r in rounds], digits=2)
        row["limited_by_wrk"] = max(r.busy for r in rounds) > LIMIT
    return found


def spread(values: Sequence[float], digits: int = 1) -> dict[str, float]:
    """Median, min and max."""
    numbers = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in numbers.items()}


_COLUMNS = (
    *("workers", "MPS", "case", "connections", "requests/s (min..max)", "images/s"),
    *("p50 us", "p99 us (min..max)", "p99/p50", "p99 of wrk", "wrk busy"),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the medians; below it ratios to the floor, failures and explanations."""
    cells = [list(_COLUMNS)]
    notes = []
    for row in rows:
        line = [
            str(row["workers"]),
            "yes" if row["mps"] else "no",
            f"`{row['case']}`",
            str(row["connections"]),
        ]
        name = f"{row['case']}, workers {row['workers']}"
        if "error" in row:
            line += ["failed", *["-"] * 6]
            notes.append(f"{name}, failed: {row['error']}")
        else:
            line += [
                _median(row["requests_per_s"], with_range=True),
                _median(row["images_per_s"]),
                _median(row["p50_us"]),
                _median(row["p99_us"], with_range=True),
                f"{row['p99_over_p50']['median']:.2f}",
                _median(row["wrk_p99_us"]),
                f"{row['wrk_busy']['median']:.0%}{' (*)' if row['limited_by_wrk'] else ''}",
            ]
        if "p50_over_floor" in row:
            ratio = row["p50_over_floor"]
            notes.append(
                f"{name}: p50 is {ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f}) "
                "times that of the bare uvicorn"
            )
        cells.append(line)
    notes.append(
        "p50 and p99 are of the requests that were sent; p99 of wrk includes the latencies that it "
        "adds behind slow answers"
    )
    if any(row.get("limited_by_wrk") for row in rows):
        notes.append(
            f"(*) limited by the load generator: wrk's threads were more than {LIMIT:.0%} busy"
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    return "\n".join([*lines, "", *notes])


def _median(found: dict[str, float], *, with_range: bool = False) -> str:
    text = f"{found['median']:,.0f}"
    return f"{text} ({found['min']:,.0f}..{found['max']:,.0f})" if with_range else text
